"""Tell that memory ran out, whoever says it."""

MESSAGES = (  # of RuntimeErrors, parts of them
    "can't allocate memory",  # PyTorch on CPUs
    "CUDA error: out of memory",  # CUDA itself, as where other programs have filled the GPU
    "Error [CUDA]: out of memory",  # Triton
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """True for an allocation that failed: Python's, NumPy's, or PyTorch's on any device."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in MESSAGES)


def out_of_memory_behind(error: BaseException | None) -> BaseException | None:
    """The allocation that failed before an error, if one did: what cleans up after it may fail in turn."""
    while error is not None and not is_out_of_memory(error):
        error = error.__cause__ or error.__context__
    return error
