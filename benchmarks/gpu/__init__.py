"""Check and measure the CUDA path in stages of a few minutes; `python benchmarks/gpu --help` says how."""
