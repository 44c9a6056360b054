"""Training of linear heads."""
