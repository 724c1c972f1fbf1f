"""Whatever was raised, as an error of the closed list."""

from piccard_contract.errors import ErrorCode, RequestError


def failure_of(error: BaseException) -> RequestError:
    """The error that a client is told.

    Texts of unforeseen exceptions stay in the log: they may hold parts of other requests or of the machine.
    """
    if isinstance(error, RequestError):
        return error
    if is_out_of_memory(error):
        return RequestError(ErrorCode.OUT_OF_MEMORY, "the version ran out of memory; send a shorter request, or later")
    return RequestError(ErrorCode.INTERNAL, "the version failed inside; the server's log has the details")


def breaks_the_device(error: BaseException) -> bool:
    """Whether no later step can succeed either: after an error of a kernel, CUDA refuses everything in this process."""
    if not isinstance(error, RuntimeError) or is_out_of_memory(error):
        return False
    # A library that could not get its workspace says "CUDA error: ..._ALLOC_FAILED", and gets it another time.
    return "CUDA error" in str(error) and "ALLOC_FAILED" not in str(error)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, told without importing torch."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    # torch tells a failed allocation on the CPU by its text alone.
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
