"""Jacobi Forcing: the drafter, and its training."""
