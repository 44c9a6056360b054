"""Benchmarks, profiling, the sandbox for graded programs, and reports."""
