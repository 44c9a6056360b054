"""The keys and values of one text."""
