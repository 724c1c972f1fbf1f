"""Whatever was raised, as an error of the closed list."""

import re

from piccard_contract.errors import ErrorCode, RequestError

# As torch, its libraries and Triton's launcher begin what CUDA tells. The rest of the line is CUDA's own sentence, or a
# library's name for a status, and holds nothing of a request; torch's advice follows in lines of its own.
_CUDA_ERROR = re.compile(r"(?:CUDA (?:driver )?error(?: \([^)]*\))?|Triton Error \[CUDA\]): *(?P<cause>[^\n]+)")
_LONGEST_CAUSE = 120
# What a launch or a call is refused for, and leaves the context as it was (CUDA Runtime API, cudaError). Every error
# that is not named here is taken for one that CUDA repeats until the process ends.
_REFUSALS = frozenset(
    {
        "invalid argument",
        "invalid configuration argument",
        "invalid device function",
        "no kernel image is available for execution on the device",
        "operation not supported",
        "too many resources requested for launch",
        "CUBLAS_STATUS_INVALID_VALUE",
        "CUBLAS_STATUS_NOT_SUPPORTED",
    }
)
_NO_MEMORY = ("out of memory", "ALLOC_FAILED")


def failure_of(error: BaseException) -> RequestError:
    """The error that a client is told.

    Texts of unforeseen exceptions stay in the log: they may hold parts of other requests or of the machine.
    """
    if isinstance(error, RequestError):
        return error
    if is_out_of_memory(error):
        return RequestError(ErrorCode.OUT_OF_MEMORY, "the version ran out of memory; send a shorter request, or later")
    if breaks_the_device(error):
        return RequestError(
            ErrorCode.INTERNAL,
            f"the version's GPU failed (CUDA: {device_cause(error)}) and its process ends; send the request again",
        )
    return RequestError(ErrorCode.INTERNAL, "the version failed inside; the server's log has the details")


def device_cause(error: BaseException) -> str | None:
    """What CUDA said, in its own words; None where the error is not of a device. torch's AcceleratorError is one."""
    found = _CUDA_ERROR.search(str(error)) if isinstance(error, RuntimeError) else None
    return None if found is None else found["cause"].partition(" when calling ")[0].strip(" .")[:_LONGEST_CAUSE]


def breaks_the_device(error: BaseException) -> bool:
    """Whether no later step can succeed either: after an error of a kernel, CUDA refuses everything in this process."""
    if is_out_of_memory(error):
        return False
    cause = device_cause(error)
    return cause is not None and cause not in _REFUSALS


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, told without importing torch."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    # A library that could not get its workspace says "CUDA error: ..._ALLOC_FAILED", and gets it another time.
    cause = device_cause(error)
    if cause is not None and any(text in cause for text in _NO_MEMORY):
        return True
    # torch tells a failed allocation on the CPU by its text alone.
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
