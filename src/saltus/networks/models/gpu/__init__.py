"""Kernels in Triton for decoders on a GPU, whose rows round alike in every call, and the decoder that calls them."""
