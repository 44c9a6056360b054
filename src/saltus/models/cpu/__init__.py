"""Target networks on CPU: attention and decoder layers by our kernels, and KV caches."""
