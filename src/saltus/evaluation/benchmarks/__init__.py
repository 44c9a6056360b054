"""Benchmarks: suites of prompts, systems under test, recorded calls, graded answers."""
