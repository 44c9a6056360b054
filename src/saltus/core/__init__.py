"""Say what a text is, where its randomness comes from, what is asked of a network, and what decides a token."""
