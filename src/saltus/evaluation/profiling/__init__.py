"""Where the time of a call and of a step goes."""
