"""Text in, text out: requests, templates, streaming, prefix cache."""
