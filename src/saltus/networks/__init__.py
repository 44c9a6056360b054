"""Answer Forwards with real networks, and remember what they have read."""
