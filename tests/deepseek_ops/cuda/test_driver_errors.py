"""What goes wrong at the driver becomes an error that names operator, node, kernel and row, and no crash."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cuda_cases import SMALL, CudaCase, Numbers, attention_case, gate_case, norm_case, product_case
from deepseek_ops.registry import CPU, CUDA
from fake_cuda import FakeCuda
from one_node import OneNode

HEAD = "com.deepseek.DeepSeekRMSNorm, node 'the_node': "


def make_node(library: Path, case: CudaCase) -> OneNode:
    return OneNode(
        library,
        case.operator,
        case.inputs,
        case.attributes,
        constant=case.constant,
        outputs=list(case.expected),
        provider=CUDA,
        runs_on=CPU,
    )


def norm(width: int, dtype: torch.dtype = torch.bfloat16) -> CudaCase:
    return norm_case(3, width, residual=False, sums=False)(Numbers(dtype, 0))


def test_a_failing_launch_fails_the_run_and_the_next_one_goes_on(named_library: Path, cuda: FakeCuda) -> None:
    case = norm(64)
    node = make_node(named_library, case)
    node.run(case.inputs)
    kernel = f"{HEAD}kernel rms_norm, row width1024: "
    told = r"cuLaunchKernelEx gives CUDA_ERROR_OUT_OF_MEMORY \(as the test asked\)"
    with cuda.failing("cuLaunchKernelEx"), pytest.raises(Exception, match=kernel + told):
        node.run(case.inputs)
    node.run(case.inputs)
    assert len(cuda.launches) == 2


@pytest.mark.parametrize("call", ["cuModuleLoadData", "cuModuleGetFunction"])
def test_a_kernel_that_cannot_be_loaded_fails_the_run_and_is_tried_again(
    named_library: Path, cuda: FakeCuda, call: str
) -> None:
    # A row that no other test runs.
    case = norm({"cuModuleLoadData": 16000, "cuModuleGetFunction": 8000}[call])
    node = make_node(named_library, case)
    with (
        cuda.failing(call),
        pytest.raises(Exception, match=f"kernel rms_norm, row width[0-9]+: {call} gives CUDA_ERROR"),
    ):
        node.run(case.inputs)
    node.run(case.inputs)
    loads = cuda.loads
    node.run(case.inputs)
    assert cuda.loads == loads


def test_nothing_is_loaded_while_a_graph_is_captured(named_library: Path, cuda: FakeCuda) -> None:
    case = norm(3000, torch.float16)
    node = make_node(named_library, case)
    with cuda.device(capturing=True):
        with pytest.raises(Exception, match="a graph is being captured: run these shapes once before the capture"):
            node.run(case.inputs)
        assert not cuda.launches
    node.run(case.inputs)
    loads = cuda.loads
    with cuda.device(capturing=True):
        node.run(case.inputs)
    assert (cuda.loads, len(cuda.launches)) == (loads, 2)


def test_a_thread_without_a_context_is_told(named_library: Path, cuda: FakeCuda) -> None:
    case = norm(64)
    node = make_node(named_library, case)
    with cuda.device(context=False), pytest.raises(Exception, match=f"{HEAD}no CUDA context is current on this thread"):
        node.run(case.inputs)


def test_a_product_that_fails_is_told(named_library: Path, cuda: FakeCuda) -> None:
    case = product_case(5, 64, 24)(Numbers(torch.bfloat16, 0))
    node = make_node(named_library, case)
    with cuda.failing("cublasGemmEx", 13), pytest.raises(Exception, match="cublasGemmEx gives the cuBLAS status 13"):
        node.run(case.inputs)
    node.run(case.inputs)


def test_a_width_that_breaks_what_the_kernel_declares_is_told(named_library: Path, cuda: FakeCuda) -> None:
    case = norm(68)
    node = make_node(named_library, case)
    told = r"argument \w+ is declared a multiple of 8 and is 68: pad the rows or align the buffer"
    with pytest.raises(Exception, match=told):
        node.run(case.inputs)


def test_a_shape_without_a_row_is_told(named_library: Path, cuda: FakeCuda) -> None:
    case = norm(20000)
    with pytest.raises(Exception, match="kernel rms_norm has no row for sm_90, rows 3, width 20000: declare one"):
        make_node(named_library, case).run(case.inputs)
    gate = gate_case("demo", 2, 64)(Numbers(torch.bfloat16, 0))
    gate.attributes["num_experts_per_tok"] = 3
    gate.expected = {name: value[:, :4] for name, value in gate.expected.items()}
    with pytest.raises(Exception, match=r"kernel gate_choose has no row .*top_k 3"):
        make_node(named_library, gate).run(gate.inputs)


def test_inputs_that_cuda_needs_or_does_not_take_fail_the_session(named_library: Path, cuda: FakeCuda) -> None:
    case = attention_case(SMALL, [(1, 5)], page=16)(Numbers(torch.bfloat16, 0))
    case.inputs["cache"] = case.inputs["cache"].half()
    with pytest.raises(Exception, match="inputs q and cache are of types bfloat16 and float16"):
        make_node(named_library, case)
    case = norm(64)
    case.inputs["x"] = case.inputs["x"].float()
    with pytest.raises(Exception, match="input x is of type float; constraint T takes float16, bfloat16"):
        # A kernel that refuses an anchor makes its outputs of the first type that there is.
        OneNode(named_library, case.operator, case.inputs, provider=CUDA, runs_on=CPU, output_types={"y": 10})


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("PICCARD_CUDA_DRIVER", "/nonexistent/libcuda.so", "the CUDA driver cannot be used: .*nonexistent"),
        ("PICCARD_CUDA_DRIVER", "libm.so.6", "libm.so.6 lacks cuInit: install a newer NVIDIA driver"),
        ("PICCARD_CUBLAS", "/nonexistent/libcublas.so", "cuBLAS cannot be used, which products of several rows need"),
        ("PICCARD_CUBLAS", "libm.so.6", "libm.so.6 lacks cublasCreate_v2"),
    ],
)
def test_a_driver_that_is_missing_or_another_library_is_told(
    named_library: Path, driver: Path, variable: str, value: str, told: str
) -> None:
    """In a process of its own: it is opened once."""
    program = f"""
import os, re, sys
sys.path[:0] = {[str(Path(__file__).parents[2] / "support")]!r}
import torch
from cuda_cases import Numbers, product_case
from deepseek_ops.registry import CPU, CUDA
from one_node import OneNode
os.environ.update(PICCARD_CUDA_DRIVER={str(driver)!r}, PICCARD_CUBLAS={str(driver)!r})
os.environ[{variable!r}] = {value!r}
case = product_case(5, 64, 24)(Numbers(torch.bfloat16, 0))
node = OneNode({str(named_library)!r}, case.operator, case.inputs, provider=CUDA, runs_on=CPU)
for _ in range(2):
    try:
        node.run(case.inputs)
    except Exception as error:
        assert re.search({told!r}, str(error)), error
    else:
        raise AssertionError("it ran")
print("told")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "told\n"
