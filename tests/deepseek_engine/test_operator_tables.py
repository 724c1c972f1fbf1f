"""What a runner's version tells of its operators, for runners with device kernels and without."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from deepseek_engine.gpu.fusions import GRAPH, INPUTS, NORM, SAMPLE
from deepseek_engine.gpu.step_graphs import StepGraphs
from deepseek_engine.kernels.dispatch import Choice, Dispatch
from deepseek_engine.models import ModelConfig, load_config
from deepseek_engine.operator_tables import watch_operators
from deepseek_engine.runners.onnx_operators import ExportedOperators
from piccard_contract.operators import ONNX_RUNTIME, REFERENCE, OperatorsReport

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@dataclass
class Graphs:
    """As StepGraphs."""

    captures: int = 40
    replays: int = 0
    ungraphed: Counter[str] = field(default_factory=Counter)


@dataclass
class OnKernels:
    """A runner of the device kernels."""

    graphs: Graphs = field(default_factory=Graphs)
    eager: bool = False


@pytest.fixture
def config(checkpoint_folder: Any) -> ModelConfig:
    folder: Path = checkpoint_folder("v2_lite")
    return load_config(folder)


def told(config: ModelConfig, runner: Any, device: torch.device, dispatch: Dispatch | None = None, **how: Any):
    settings = {"dtype": torch.bfloat16, "dispatch": dispatch or Dispatch(), **how}
    return watch_operators(config, runner, device=device, **settings)


def report(*arguments: Any, **how: Any) -> OperatorsReport:
    return told(*arguments, **how).report(1, "cuda:0", "torch")


def applying(found: OperatorsReport) -> set[str]:
    return {fusion.name for fusion in found.fusions if fusion.applies}


def test_on_device_kernels_everything_applies_and_graphs_are_counted(config: ModelConfig) -> None:
    runner = OnKernels()
    watch = told(config, runner, GPU)
    runner.graphs.replays += 3
    runner.graphs.ungraphed["longer"] += 1
    found = watch.report(1, "cuda:0", "torch")
    assert {fusion.cause for fusion in found.fusions} == {"", "side effects", "memory space"}
    assert (found.graphs, found.replays, found.captures, found.ungraphed) == (True, 3, 0, {"longer": 1})
    assert found.fused_share == watch.fused_share > 0.5
    assert found.precision == "bfloat16"


@pytest.mark.parametrize(
    ("runner", "named"),
    [(OnKernels(Graphs(captures=0)), "no graph was captured"), (OnKernels(eager=True), "as was asked for")],
)
def test_without_graphs_only_that_fusion_is_missing(config: ModelConfig, runner: OnKernels, named: str) -> None:
    found = report(config, runner, GPU)
    (missing,) = [fusion for fusion in found.fusions if named in fusion.reason]
    assert (missing.name, missing.applies) == (GRAPH, False)


@pytest.mark.parametrize(
    ("capability", "dtype", "cause"),
    [((9, 0), torch.float32, "dtype"), ((7, 5), torch.bfloat16, "device"), ((9, 0), torch.bfloat16, "runner")],
)
def test_references_on_a_gpu_say_what_keeps_them_off_the_kernels(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype, cause: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    dispatch = Dispatch()
    served = dispatch.record(Choice("rms_norm", None, "why"), REFERENCE, fallback=True)
    served.seconds = 0.000812
    dispatch.fall_back("rms_norm", cause, "why")
    watch = told(config, object(), GPU, dispatch, dtype=dtype)
    found = watch.report(1, "cuda:0", "torch")
    assert {fusion.cause for fusion in found.fusions} == {cause, ""}
    assert applying(found) == {INPUTS}
    assert (found.operators[0].microseconds, found.operators[0].fallback) == (812.0, True)
    assert found.fallbacks == {"rms_norm": 1}
    assert watch.figures().fallback_seconds == {"rms_norm": 0.000812}
    assert not found.graphs


def test_an_export_on_device_kernels_tells_its_nodes_beside_what_samples(config: ModelConfig) -> None:
    norms = 2 * config.num_hidden_layers
    fused = {"residual addition": norms, "norm": norms}
    exported = ExportedOperators({"DeepSeekRMSNorm": norms + 1}, fused, "CUDAExecutionProvider")
    found = report(config, OnKernels(), GPU, exported=exported)
    assert applying(found) == {NORM, SAMPLE, GRAPH}
    assert found.fused_operators == 2 * norms + 6
    (use,) = found.operators
    assert (use.operator, use.implementation) == ("DeepSeekRMSNorm", ONNX_RUNTIME)
    assert use.reason == f"{norms + 1} of the export's nodes, on CUDAExecutionProvider"


def test_an_export_on_a_cpu_samples_operator_by_operator(config: ModelConfig) -> None:
    fused = {"gate product": 1, "up product": 1}
    found = report(config, object(), CPU, exported=ExportedOperators({}, fused, "CPUExecutionProvider"))
    assert applying(found) == {INPUTS}
    told = {fusion.name: (fusion.cause, fusion.operators) for fusion in found.fusions}
    assert told[SAMPLE][0] == told[GRAPH][0] == "device"
    assert told[NORM][0] == "runner"
    assert found.fused_operators == told[INPUTS][1] == 2


def test_runs_that_no_graph_is_for_count_once_graphs_are_there() -> None:
    graphs: StepGraphs[int] = StepGraphs(CPU)
    graphs.define("one", lambda: 1)
    assert graphs.run("one") == 1
    assert not graphs.ungraphed
    graphs.captures = 1
    assert graphs.run("one") == 1
    graphs.go_without("longer")
    assert graphs.ungraphed == {"no graph of the size": 1, "longer": 1}
    assert graphs.replays == 0
