"""What a lost GPU, memory that ran out and a plain failure tell a client."""

import pytest
import torch
from deepseek_engine.failures import breaks_the_device, device_cause, failure_of, is_out_of_memory
from piccard_contract.errors import ErrorCode

ADVICE = """
Search for `cudaErrorIllegalAddress' in https://docs.nvidia.com/cuda/ for more information.
CUDA kernel errors might be asynchronously reported at some other API call."""
ILLEGAL = "an illegal memory access was encountered"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (f"CUDA error: {ILLEGAL}{ADVICE}", ILLEGAL),
        (f"Triton Error [CUDA]: {ILLEGAL}", ILLEGAL),
        ("CUDA error: unspecified launch failure", "unspecified launch failure"),
        ("CUDA error: device-side assert triggered\nmore", "device-side assert triggered"),
        ("CUDA driver error: device not ready.", "device not ready"),
        ("CUDA error (launch.h:12): misaligned address", "misaligned address"),
        (
            "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( handle, opa)`",
            "CUBLAS_STATUS_EXECUTION_FAILED",
        ),
    ],
)
@pytest.mark.parametrize("kind", [RuntimeError, torch.AcceleratorError])
def test_a_lost_device_is_known_and_told_in_cudas_words(kind: type[RuntimeError], text: str, cause: str) -> None:
    error = kind(text)
    assert breaks_the_device(error)
    assert device_cause(error) == cause
    told = failure_of(error)
    assert told.code is ErrorCode.INTERNAL
    assert f"CUDA: {cause})" in told.message
    assert "Search for" not in told.message


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: invalid configuration argument",
        "Triton Error [CUDA]: no kernel image is available for execution on the device",
        "CUDA error: too many resources requested for launch\nmore",
        "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmul(handle)`",
    ],
)
def test_what_a_call_is_refused_for_fails_its_step_alone(text: str) -> None:
    assert not breaks_the_device(torch.AcceleratorError(text))
    assert not is_out_of_memory(torch.AcceleratorError(text))


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        torch.AcceleratorError(f"CUDA error: out of memory{ADVICE}"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"),
    ],
)
def test_memory_that_ran_out_is_had_another_time(error: BaseException) -> None:
    assert is_out_of_memory(error)
    assert not breaks_the_device(error)
    assert failure_of(error).code is ErrorCode.OUT_OF_MEMORY


@pytest.mark.parametrize(
    "error",
    [RuntimeError("a secret"), ValueError(f"CUDA error: {ILLEGAL}"), KeyError("a secret"), RuntimeError("CUDA")],
)
def test_anything_else_stays_in_the_log(error: BaseException) -> None:
    assert not breaks_the_device(error)
    assert device_cause(error) is None
    assert failure_of(error).message == "the version failed inside; the server's log has the details"
