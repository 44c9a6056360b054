"""Target networks on CUDA: calls of fixed shapes, KV pages, and kernels in Triton."""
