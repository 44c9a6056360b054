"""What a conversation is to a model, and what of its text are calls of tools and reasoning."""
