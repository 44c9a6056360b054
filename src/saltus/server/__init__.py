"""Serve a model over HTTP: one engine in a thread of its own, and an app with OpenAI's routes."""
