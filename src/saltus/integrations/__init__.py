"""Saltus inside other libraries, and other servers as sources of texts."""
