"""What networks on CPU compute: kernels in C, products that round alike in every call, and packed weights."""
