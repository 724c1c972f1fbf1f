"""Which references a model's steps run is seen on its first steps alone, and timed where there is a GPU."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from deepseek_engine.gpu.fusions import Obstacle
from deepseek_engine.kernels import rope
from deepseek_engine.kernels.dispatch import Dispatch
from deepseek_engine.kernels.rms_norm import rms_norm
from deepseek_engine.kernels.swiglu import swiglu
from deepseek_engine.runners import reference_watch
from deepseek_engine.runners.reference_watch import WATCHED_STEPS, ReferenceWatch
from piccard_contract.operators import REFERENCE
from toy_model import ToyConfig

CPU = torch.device("cpu")


class Steps:
    """A model's forward that calls two references, one of them twice and one by way of another."""

    def __init__(self) -> None:
        self.calls = 0
        self.hooks: list[Any] = []

    def __call__(self, batch: Any, cache: Any) -> torch.Tensor:
        self.calls += 1
        self.hooks.append(sys.getprofile())
        x = torch.ones(2, 4, dtype=torch.float16)
        for _ in range(2):
            x = rms_norm(x, torch.ones(4, dtype=torch.float16), 1e-6)
        # In a half type it calls itself.
        rope.rotate_pairs_(x.unsqueeze(1), torch.ones(2, 1, 2, dtype=torch.complex64))
        return x


class Event:
    """As torch.cuda.Event, on a clock that each record moves by a millisecond."""

    clock = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: str) -> None:
        assert stream == "the stream of cuda:0"
        Event.clock += 1
        self.at = Event.clock

    def elapsed_time(self, end: "Event") -> float:
        return float(end.at - self.at)


def watch_on(dispatch: Dispatch, device: torch.device = CPU) -> ReferenceWatch:
    return ReferenceWatch(ToyConfig(), device, torch.float32, dispatch)  # type: ignore[arg-type]


def test_the_first_steps_tell_what_serves_and_later_ones_run_bare() -> None:
    dispatch, steps = Dispatch(), Steps()
    watch = watch_on(dispatch)
    for _ in range(WATCHED_STEPS + 2):
        assert watch.forward(steps, None, None).shape == (2, 4)  # type: ignore[arg-type]
    assert dispatch.served.keys() == {("rms_norm", REFERENCE), ("rope", REFERENCE)}
    for served in dispatch.served.values():
        assert (served.choices, served.fallback, served.seconds) == (WATCHED_STEPS, False, None)
        assert "the device is a CPU" in served.reason
    # It counts no fallback, and runs no step twice.
    assert not dispatch.fallbacks
    assert steps.calls == WATCHED_STEPS + 2
    assert all(hook is not None for hook in steps.hooks[:WATCHED_STEPS])
    assert steps.hooks[WATCHED_STEPS:] == [sys.getprofile()] * 2


def test_on_a_gpu_references_are_timed_warm_and_counted_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
    obstacle = Obstacle("model", "it has no device kernels")
    monkeypatch.setattr(reference_watch, "capability_of", lambda device: 90)
    monkeypatch.setattr(reference_watch, "kernel_obstacle", lambda *_: obstacle)
    dispatch, steps = Dispatch(), Steps()
    watch = watch_on(dispatch, torch.device("cuda", 0))
    for _ in range(WATCHED_STEPS + 2):
        watch.forward(steps, None, None)  # type: ignore[arg-type]
    assert steps.calls == 2 * WATCHED_STEPS + 2
    # Two calls of a millisecond each, and one.
    assert dispatch.served["rms_norm", REFERENCE].seconds == pytest.approx(0.002)
    assert dispatch.served["rope", REFERENCE].seconds == pytest.approx(0.001)
    assert all(served.fallback for served in dispatch.served.values())
    assert dispatch.fallbacks == {("rms_norm", "model"): WATCHED_STEPS + 2, ("rope", "model"): WATCHED_STEPS + 2}


def test_a_step_that_fails_leaves_no_hook() -> None:
    def fail(batch: Any, cache: Any) -> torch.Tensor:
        return swiglu(torch.ones(()))

    before = sys.getprofile()
    with pytest.raises(RuntimeError, match="chunk"):
        watch_on(Dispatch()).forward(fail, None, None)  # type: ignore[arg-type]
    assert sys.getprofile() is before


@pytest.mark.parametrize("family", ["v2", "v3", "llama", "qwen3"])
def test_every_operator_of_a_model_is_seen(family: str, checkpoint_folder: Any) -> None:
    from deepseek_engine.models import load_model
    from deepseek_engine.runners.torch import TorchRunner
    from deepseek_engine.settings import EngineSettings
    from deepseek_engine.step_plan import NewSequence, StepPlan, StepRow
    from piccard_contract.sampling import SamplingParams

    folder: Path = checkpoint_folder(family)
    runner = TorchRunner(load_model(folder, dtype=torch.float32), EngineSettings(num_blocks=8))
    dispatch = Dispatch()
    runner._references = ReferenceWatch(runner._model.config, CPU, torch.float32, dispatch)
    new = [NewSequence(0, SamplingParams(temperature=0), [5, 6, 7], [], 0, (), 0)]
    runner.collect(runner.execute(StepPlan([StepRow(0, [5, 6, 7], 0, [0], True)], new=new)))
    attention = {"paged_attention"} if family in ("llama", "qwen3") else {"mla_attention", "moe_experts", "moe_gate"}
    # A family that was forgotten in the table of references would miss here.
    assert {operator for operator, _ in dispatch.served} >= attention | {"linear", "rms_norm", "rope", "swiglu"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_card_a_fallback_has_the_time_it_took() -> None:
    device, dispatch = torch.device("cuda", torch.cuda.current_device()), Dispatch()
    x, weight = torch.ones(4096, 8192, device=device), torch.ones(8192, device=device)

    def forward(batch: Any, cache: Any) -> torch.Tensor:
        return swiglu(torch.cat([rms_norm(x, weight, 1e-6)] * 2, dim=-1))

    watch = watch_on(dispatch, device)
    for _ in range(WATCHED_STEPS):
        watch.forward(forward, None, None)  # type: ignore[arg-type]
    assert dispatch.served.keys() == {("rms_norm", REFERENCE), ("swiglu", REFERENCE)}
    # The least that reading x once takes, 128 MiB at less than 100 TB/s; a clock that stands still shows nothing.
    assert all(served.seconds is not None and 1e-6 < served.seconds < 1.0 for served in dispatch.served.values())
    assert sum(dispatch.fallbacks.values()) == 2 * WATCHED_STEPS
