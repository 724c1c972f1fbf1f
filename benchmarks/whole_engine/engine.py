"""Builds the engine that is measured, runs requests through it, and tells when each token came."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from deepseek_engine.engine import Engine
from deepseek_engine.gpu_version import gpu_runner
from deepseek_engine.memory_budget import DEFAULT_GPU_SHARE, cache_bytes, memory_bytes
from deepseek_engine.models import load_config, load_model
from deepseek_engine.models.config import DeepseekConfig
from deepseek_engine.models.decoder import Decoder
from deepseek_engine.models.mixture_of_experts import MixtureOfExperts
from deepseek_engine.request import EngineOutput, EngineRequest
from deepseek_engine.runners.torch import TorchRunner
from deepseek_engine.settings import EngineSettings
from deepseek_engine.text.tokenizer import Tokenizer
from piccard_contract.sampling import SamplingParams
from torch import Tensor

SAMPLED: dict[str, Any] = {"temperature": 0.6}


@dataclass
class Built:
    """An engine and its parts; `seconds` is what each part took to make."""

    engine: Engine
    runner: Any
    model: Any
    settings: EngineSettings
    seconds: dict[str, float] = field(default_factory=dict)


def build_engine(
    folder: Path,
    device: torch.device,
    settings: EngineSettings,
    memory: float | str | None = None,
    *,
    batch_invariant: bool = False,
) -> Built:
    """The engine over a checkpoint, warm.

    Args:
        memory: weights and cache together, a share of the device or an amount such as 80GiB, as in version.yaml.
    """
    seconds: dict[str, float] = {}
    on_gpu = device.type == "cuda"
    with timed(seconds, "weights", device):
        before = _allocated(device)
        model = load(folder, device, batch_invariant)
        weights = _allocated(device) - before
    with timed(seconds, "runner", device):
        total = torch.cuda.get_device_properties(device).total_memory if on_gpu else 2**32
        if on_gpu:
            runner: Any = gpu_runner(model, settings, memory_bytes(memory or DEFAULT_GPU_SHARE, total))
        else:
            settings = replace(settings, cache_bytes=cache_bytes(memory, on_gpu=False, total=total, weights=weights))
            runner = TorchRunner(model, settings, device)
        engine = Engine(runner, Tokenizer.from_folder(folder), settings)
    return Built(engine, runner, model, settings, seconds)


def load(folder: Path, device: torch.device, batch_invariant: bool = False) -> Any:
    """The checkpoint's model, as runner torch has it there."""
    if device.type != "cuda":
        return load_model(folder, dtype=torch.bfloat16, device=str(device))
    from deepseek_engine.gpu.decoder import load_gpu_model

    config = load_config(folder)
    if not isinstance(config, DeepseekConfig):
        raise ValueError(f"{folder} holds a {config.architecture}, which no device kernels run; make it again")
    return load_gpu_model(folder, config, dtype=torch.bfloat16, device=str(device), batch_invariant=batch_invariant)


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


@contextlib.contextmanager
def timed(seconds: dict[str, float], name: str, device: torch.device) -> Iterator[None]:
    """Adds the time of the block, device work included, under `name`."""
    begin = time.perf_counter()
    yield
    synchronize(device)
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - begin


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Prompts:
    """Random prompts, none of them ever the same as another."""

    def __init__(self, vocabulary: int, seed: int = 0) -> None:
        self._vocabulary = vocabulary
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self, count: int, length: int) -> list[list[int]]:
        return torch.randint(0, self._vocabulary, (count, length), generator=self._generator).tolist()


class Streams:
    """Requests under way in an engine, and when their tokens came.

    Attributes:
        times: by request, the time of each token, `time.perf_counter`.
        finished: requests that have ended.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.times: dict[str, list[float]] = {}
        self.finished: set[str] = set()

    def __enter__(self) -> "Streams":
        return self

    def __exit__(self, *_: object) -> None:
        """End whatever still runs, so that the next measurement begins with an idle engine."""
        for name in set(self.times) - self.finished:
            self._engine.abort(name)
        while self._engine.has_work():
            self._engine.step()

    def add(self, prompts: Iterable[list[int]], tokens: int, prefix: str = "", **sampling: Any) -> list[str]:
        """Queue prompts for `tokens` new tokens each; returns their names."""
        params = SamplingParams(**{**SAMPLED, **sampling}, max_tokens=tokens, ignore_eos=True, detokenize=False)
        names = []
        for prompt in prompts:
            names.append(f"{prefix}{len(self.times)}")
            self.times[names[-1]] = []
            self._engine.add(EngineRequest(names[-1], prompt, params))
        return names

    def step(self) -> list[EngineOutput]:
        """One step. Raises RuntimeError where a request fails."""
        outputs = self._engine.step()
        now = time.perf_counter()
        for output in outputs:
            self.times[output.request_id].extend([now] * len(output.token_ids))
            if output.finish_reason is not None:
                self.finished.add(output.request_id)
                if output.error is not None:
                    raise RuntimeError(f"request {output.request_id} failed: {output.error.message}")
        return outputs

    def until(self, tokens: int, names: Iterable[str] | None = None) -> float:
        """Step until each of the streams has that many tokens; returns the time."""
        waited = list(self.times if names is None else names)
        # One look a step in most steps: this is within what is timed.
        while waited:
            if len(self.times[waited[-1]]) >= tokens:
                waited.pop()
                continue
            if not self._engine.has_work():
                raise RuntimeError(f"the engine ran out of work before every stream had {tokens} tokens")
            self.step()
        return time.perf_counter()


@dataclass(frozen=True, slots=True)
class Decoding:
    """Seconds of a decoding step, one entry a window, and the context at the middle of all windows."""

    steps: list[float]
    context: float


def decode(
    engine: Engine,
    prompts: list[list[int]],
    *,
    lead: int,
    window: int,
    windows: int,
    then: Callable[[Streams], None] | None = None,
    **sampling: Any,
) -> Decoding:
    """(time of N2 - time of N1 new tokens) / (N2 - N1) in consecutive windows while all prompts decode together.

    Args:
        lead: new tokens of each stream before the first window.
        then: called with the streams still running, after the last window.
    """
    steps = []
    last = lead + window * windows
    with Streams(engine) as streams:
        # More than is waited for: no stream may end, and so make a step smaller, before the last window has.
        streams.add(prompts, 2 * last + 64, **sampling)
        begin = streams.until(lead)
        for place in range(windows):
            end = streams.until(lead + window * (place + 1))
            steps.append((end - begin) / window)
            begin = end
        if then is not None:
            then(streams)
    return Decoding(steps, len(prompts[0]) + (lead + last) / 2)


def first_tokens(engine: Engine, prompts: list[list[int]], device: torch.device) -> float:
    """Seconds until each of the prompts, queued at once into an idle engine, has its first token."""
    with Streams(engine) as streams:
        synchronize(device)
        begin = time.perf_counter()
        streams.add(prompts, 1)
        return streams.until(1) - begin


@contextlib.contextmanager
def watched_experts(built: Built, watch: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Calls `watch` with a layer's index and the experts int [T, top_k] that its tokens chose, in eager steps."""
    runner, model = built.runner, built.model
    if not hasattr(model, "observe_experts"):
        with _watched_gates(model, watch):
            yield
        return
    model.observe_experts(watch)
    runner.eager = True
    try:
        yield
    finally:
        runner.eager = False
        model.observe_experts(None)


@contextlib.contextmanager
def _watched_gates(model: Decoder, watch: Callable[[int, Tensor], None]) -> Iterator[None]:
    """For a model without a hook of its own: its gates tell."""
    layers = {id(layer.mlp): index for index, layer in enumerate(model.layers)}
    route = MixtureOfExperts.route

    def told(self: MixtureOfExperts, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, experts = route(self, x)
        watch(layers[id(self)], experts)
        return weights, experts

    setattr(MixtureOfExperts, "route", told)  # noqa: B010
    try:
        yield
    finally:
        setattr(MixtureOfExperts, "route", route)  # noqa: B010
