"""Drafters that several methods share."""
