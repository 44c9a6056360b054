"""Compile the kernels, if they are not compiled yet."""

from saltus.kernels.native import load_kernels

load_kernels()
