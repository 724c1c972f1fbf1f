"""Compares every CUDA operator with float64 on a GPU, eagerly and as a replayed CUDA graph, and prints a table.

    on_a_gpu.py models FOLDER                      writes the models that `check` runs, which needs the onnx package
    on_a_gpu.py check LIBRARY FOLDER [SEEDS]       runs them, which needs onnxruntime-gpu and torch, but not onnx

They are apart so that the machine with the GPU needs neither onnx nor a compiler.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from cuda_cases import SMALL_CASES, V2_LITE, WIDE_CASES, CudaCase, Numbers, attention_case, sorted_choices
from torch import Tensor

CUDA = "CUDAExecutionProvider"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_NUMBERS = {
    torch.float32: 1,
    torch.uint8: 2,
    torch.int32: 6,
    torch.int64: 7,
    torch.float16: 10,
    torch.bfloat16: 16,
    torch.float8_e4m3fn: 17,
}
_OUTPUT_TYPES = {"logits": torch.float32, "weights": torch.float32, "experts": torch.int32, "plan": torch.int32}
REPLAYS = 200


def cases() -> Iterator[tuple[str, CudaCase]]:
    """Every case with the name of its model."""
    for name, dtype in DTYPES.items():
        # DeepSeek's sizes in its own type: float64 takes its time.
        for index, make in enumerate((*SMALL_CASES, *WIDE_CASES) if dtype == torch.bfloat16 else SMALL_CASES):
            case = make(Numbers(dtype, index))
            yield f"{name}-{index:02}-{case.name}", case


def write_models(folder: Path) -> None:
    from deepseek_ops.operators import BY_NAME
    from one_node import one_node_model

    folder.mkdir(parents=True, exist_ok=True)
    for name, case in cases():
        # Weights are fed: a model with them would be as large as they are.
        model = one_node_model(
            BY_NAME[case.operator].on(CUDA), case.inputs, case.attributes, set(), "ranks", list(case.expected), {}
        )
        (folder / f"{name}.onnx").write_bytes(model.SerializeToString())
    (folder / "planned.onnx").write_bytes(_planned_model())


def _planned_model() -> bytes:
    """The schedule, and attention that reads it: what a layer of a captured step does."""
    import onnx
    from deepseek_ops.operators import BY_NAME
    from deepseek_ops.registry import DOMAIN
    from one_node import one_node_model
    from onnx import helper

    case = _planned_case()
    inputs = {**case.inputs, "plan": torch.zeros(1, dtype=torch.int32)}
    model = one_node_model(
        BY_NAME[case.operator].on(CUDA), inputs, case.attributes, set(), "ranks", list(case.expected), {}
    )
    graph = model.graph
    kept = [each for each in graph.input if each.name != "plan"]
    del graph.input[:]
    graph.input.extend(kept)
    names = ("num_heads", "qk_rope_head_dim")
    schedule = helper.make_node(
        "DeepSeekMLASchedule",
        ["cache", "context_lengths", "host_batch"],
        ["plan"],
        name="schedule",
        domain=DOMAIN,
        **{name: case.attributes[name] for name in names},
    )
    nodes: list[onnx.NodeProto] = [schedule, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
    return bytes(model.SerializeToString())


def _planned_case() -> CudaCase:
    make = attention_case(V2_LITE, [(1, 900), (1, 4000), (1, 64), (1, 1)], padded=4)
    return make(Numbers(torch.bfloat16, 99))


class Bound:
    """A session on the GPU with all its tensors bound to memory that stays."""

    def __init__(self, library: Path, model: Path, case: CudaCase, *, graph: bool = False) -> None:
        import onnxruntime

        self._device = torch.device("cuda", 0)
        self.stream = torch.cuda.current_stream()
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        options.register_custom_ops_library(str(library))
        chosen = {"user_compute_stream": str(self.stream.cuda_stream), "enable_cuda_graph": str(int(graph))}
        self.session = onnxruntime.InferenceSession(str(model), options, providers=[(CUDA, chosen)])
        if self.session.get_providers()[0] != CUDA:
            raise RuntimeError("this onnxruntime has no CUDA provider: install onnxruntime-gpu")
        self.inputs = case.on(self._device)
        self.outputs = {name: self._output(case, name) for name in case.expected}
        self.binding = self.session.io_binding()
        wanted = {each.name for each in self.session.get_inputs()}
        for name, tensor in self.inputs.items():
            if name in wanted:
                self._bind(self.binding.bind_input, name, tensor)
        for name, tensor in self.outputs.items():
            self._bind(self.binding.bind_output, name, tensor)

    def _output(self, case: CudaCase, name: str) -> Tensor:
        if name.endswith("cache_out"):
            return self.inputs[name.removesuffix("_out")]
        dtype = _OUTPUT_TYPES.get(name, case.dtype)
        poison = float("nan") if dtype.is_floating_point else 77
        return torch.full(tuple(case.expected[name].shape), poison, dtype=dtype, device=self._device)

    def _bind(self, bind: Any, name: str, tensor: Tensor) -> None:
        bind(name, tensor.device.type, 0, _NUMBERS[tensor.dtype], tuple(tensor.shape), tensor.data_ptr())

    def run(self) -> dict[str, Tensor]:
        self.session.run_with_iobinding(self.binding)
        torch.cuda.synchronize()
        return self.outputs

    def seconds(self) -> float:
        """A run's, one after the other."""
        import onnxruntime

        options = onnxruntime.RunOptions()
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(REPLAYS):
            self.session.run_with_iobinding(self.binding, options)
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / REPLAYS


def _ordered(case: CudaCase, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return sorted_choices(outputs, case.attributes["num_experts_per_tok"]) if "experts" in outputs else outputs


def check(library: Path, folder: Path) -> int:
    """Prints a row a case; returns how many are wrong."""
    import onnxruntime

    torch.cuda.set_device(0)
    # CUDA's libraries are those of torch's wheels.
    onnxruntime.preload_dlls()
    wrong = 0
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {library.name}")
    print(f"{'case':64} {'eager':>9} {'graph':>9} {'bound':>9} {'us a replay':>12}")
    for name, case in cases():
        if not (folder / f"{name}.onnx").is_file():
            continue
        try:
            right, told = _checked(library, folder / f"{name}.onnx", case)
        except Exception as error:
            right, told = False, f"FAILED {str(error)[:300]}"
        wrong += not right
        print(f"{name:64} {told}", flush=True)
    wrong += not _check_replay_with_other_inputs(library, folder)
    print(f"{wrong} wrong")
    return wrong


def _checked(library: Path, model: Path, case: CudaCase) -> tuple[bool, str]:
    """Whether it is as it should be, and its row of the table."""
    eager = max(case.errors(_ordered(case, Bound(library, model, case).run())).values())
    graph = Bound(library, model, case, graph=True)
    if not case.captured:
        try:
            graph.run()
        except Exception as error:
            right = eager <= case.tolerance() and "cannot be captured" in str(error)
            return right, f"{eager:9.1e} {'refused':>9} {case.tolerance():9.1e}{'' if right else f'  WRONG {error}'}"
        return False, "WRONG: it was captured"
    graph.run()
    for output in graph.outputs.values():
        if output.is_floating_point() and all(output is not each for each in graph.inputs.values()):
            output.fill_(float("nan"))
    replayed = max(case.errors(_ordered(case, graph.run())).values())
    right = max(eager, replayed) <= case.tolerance()
    told = f"{eager:9.1e} {replayed:9.1e} {case.tolerance():9.1e} {graph.seconds() * 1e6:12.1f}"
    return right, told + ("" if right else "  WRONG")


def _check_replay_with_other_inputs(library: Path, folder: Path) -> bool:
    """A captured step with a schedule, replayed over other lengths and blocks, is what a run of its own gives."""
    case = _planned_case()
    other = attention_case(V2_LITE, [(1, 70), (1, 1), (1, 2000), (1, 333)], padded=4)(Numbers(torch.bfloat16, 98))
    try:
        graph = Bound(library, folder / "planned.onnx", case, graph=True)
        first = max(case.errors(graph.run()).values())
        blocks, width = other.inputs["cache"].shape[0], other.inputs["block_tables"].shape[1]
        graph.inputs["cache"][:blocks].copy_(other.inputs["cache"])
        for name, tensor in other.inputs.items():
            if name == "block_tables":
                graph.inputs[name][: tensor.shape[0], :width].copy_(tensor)
            elif name not in ("cache", "host_batch", "rotations"):
                graph.inputs[name].copy_(tensor)
        outputs = {**graph.run()}
        outputs["cache_out"] = outputs["cache_out"][:blocks]
        second = max(other.errors(outputs).values())
    except Exception as error:
        print(f"{'planned, replayed over other inputs':64} FAILED {str(error)[:300]}")
        return False
    right = max(first, second) <= case.tolerance()
    told = f"{first:9.1e} {second:9.1e} {case.tolerance():9.1e} {graph.seconds() * 1e6:12.1f}"
    print(f"{'planned, replayed over other inputs':64} {told}{'' if right else '  WRONG'}")
    return right


if __name__ == "__main__":
    if sys.argv[1] == "models":
        write_models(Path(sys.argv[2]))
    else:
        raise SystemExit(min(check(Path(sys.argv[2]), Path(sys.argv[3])), 1))
