"""Saltus inside other libraries."""
