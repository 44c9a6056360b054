"""Kernels and operations that round each row of a call alike, whatever else is in it."""
