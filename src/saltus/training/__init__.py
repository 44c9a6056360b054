"""Teach networks to draft: the uniforms of a text, windows packed in one forward, losses, and a loop that resumes."""
