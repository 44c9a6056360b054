"""Jacobi Forcing: training on the iterates of Jacobi decoding."""
