"""The library in the runtime: sessions come and go, threads share them, and the processor decides on the loops."""

import ctypes
import gc
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import onnxruntime
import psutil
import pytest
import torch
from deepseek_ops.build import SOURCES
from one_node import OneNode
from operator_cases import make_case

SUPPORT = Path(__file__).resolve().parents[1] / "support"


def test_two_hundred_sessions_leak_nothing(library: Path) -> None:
    case = make_case("DeepSeekMLAPagedAttention", 5)

    def live(count: int) -> None:
        for _ in range(count):
            OneNode(library, case.name, case.inputs, case.attributes, outputs=case.outputs).run(case.inputs)
            with pytest.raises(Exception, match="num_heads is 0"):
                OneNode(library, case.name, case.inputs, {**case.attributes, "num_heads": 0}, outputs=case.outputs)
        gc.collect()

    process = psutil.Process()
    live(60)
    files, threads, before = process.num_fds(), process.num_threads(), process.memory_info().rss
    live(200)
    assert process.num_fds() == files
    assert process.num_threads() == threads
    # A leaked session is some 100 KB: 200 of them would be 20 MB.
    assert process.memory_info().rss - before < 6 * 2**20


def test_threads_share_a_session(library: Path) -> None:
    case = make_case("DeepSeekMoE", 7, torch.float32)
    node = OneNode(library, case.name, case.inputs, case.attributes, threads=2)
    expected = node.run(case.inputs)["y"]
    wrong: list[int] = []

    def run(thread: int) -> None:
        for _ in range(20):
            if not torch.equal(node.run(case.inputs)["y"], expected):
                wrong.append(thread)

    threads = [threading.Thread(target=run, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_results_do_not_depend_on_the_threads(library: Path) -> None:
    names = ("DeepSeekMatMul", "DeepSeekMatMulInt4", "DeepSeekMLAPagedAttention", "DeepSeekMoE", "DeepSeekMoEInt4")
    for name in names:
        for seed in range(4):
            cases = [make_case(name, seed) for _ in range(2)]
            nodes = [
                OneNode(library, name, case.inputs, case.attributes, threads=threads)
                for case, threads in zip(cases, (1, 3), strict=True)
            ]
            first, second = (node.run(case.inputs)["y"] for node, case in zip(nodes, cases, strict=True))
            assert torch.equal(first, second)


@pytest.mark.parametrize("isa", ["generic", "avx2"])
def test_a_lower_instruction_set_agrees(library: Path, isa: str) -> None:
    """The same comparison with the reference, in a process that is told to use less than the processor has."""
    path = os.pathsep.join((str(SUPPORT), *sys.path))
    environment = {**os.environ, "PICCARD_OPS_ISA": isa, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SUPPORT / "operator_check.py"), str(library), "4"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    flags = Path("/proc/cpuinfo").read_text()
    assert done.stdout.strip() == (isa if isa == "generic" or "avx2" in flags else "generic")


class TestSlots:
    """The slots of shared/ort_abi.h against the installed runtime; the others are called by every operator's run."""

    def test_those_of_tensors_and_statuses_do_what_their_names_say(self) -> None:
        slots = {name: int(slot) for name, slot in re.findall(r"SLOT\((\w+), (\d+),", _header())}
        runtime = ctypes.CDLL(str(_runtime_library()))
        runtime.OrtGetApiBase.restype = ctypes.POINTER(ctypes.c_void_p)
        get_api = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint32)(runtime.OrtGetApiBase()[0])
        api = get_api(int(re.findall(r"kApiVersion = (\d+)", _header())[0]))

        def call(name: str, result: object, *arguments: object) -> object:
            return ctypes.CFUNCTYPE(result, *(type(each) for each in arguments))(api[slots[name]])(*arguments)  # type: ignore[arg-type]

        pointer, number = ctypes.c_void_p, ctypes.c_size_t
        status = pointer(call("CreateStatus", pointer, ctypes.c_int(1), ctypes.c_char_p(b"a sentence")))  # type: ignore[arg-type]
        assert call("GetErrorMessage", ctypes.c_char_p, status) == b"a sentence"
        call("ReleaseStatus", None, status)
        info = pointer()
        assert call("CreateTensorTypeAndShapeInfo", pointer, pointer(ctypes.addressof(info))) is None
        assert call("SetTensorElementType", pointer, info, ctypes.c_int(16)) is None
        sizes = (ctypes.c_int64 * 3)(4, 5, -1)
        assert call("SetDimensions", pointer, info, pointer(ctypes.addressof(sizes)), number(3)) is None
        names = (ctypes.c_char_p * 3)(b"", b"", b"rows")
        assert call("SetSymbolicDimensions", pointer, info, pointer(ctypes.addressof(names)), number(3)) is None
        kind, rank, found = ctypes.c_int(), number(), (ctypes.c_int64 * 3)()
        found_names = (ctypes.c_char_p * 3)()
        assert call("GetTensorElementType", pointer, info, pointer(ctypes.addressof(kind))) is None
        assert call("GetDimensionsCount", pointer, info, pointer(ctypes.addressof(rank))) is None
        assert call("GetDimensions", pointer, info, pointer(ctypes.addressof(found)), number(3)) is None
        assert call("GetSymbolicDimensions", pointer, info, pointer(ctypes.addressof(found_names)), number(3)) is None
        assert (kind.value, rank.value, list(found)) == (16, 3, [4, 5, -1])
        assert list(found_names) == [b"", b"", b"rows"]
        call("ReleaseTensorTypeAndShapeInfo", None, info)

    def test_no_slot_is_named_twice(self) -> None:
        slots = [int(slot) for slot in re.findall(r"SLOT\(\w+, (\d+),", _header())]
        assert slots == sorted(set(slots))


def _header() -> str:
    return (SOURCES / "shared" / "ort_abi.h").read_text(encoding="utf-8")


def _runtime_library() -> Path:
    return next((Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so.*"))
