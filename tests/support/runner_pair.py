"""The runner of device kernels beside the one of references, over one checkpoint and with the same plans."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from deepseek_engine.gpu.decoder import GpuDecoder, load_gpu_model
from deepseek_engine.gpu.device_model import DeviceModel
from deepseek_engine.models import load_config
from deepseek_engine.models.config import DeepseekConfig, LlamaConfig
from deepseek_engine.models.decoder import Decoder
from deepseek_engine.models.registry import build_model
from deepseek_engine.models.weights import Checkpoint
from deepseek_engine.runners.cuda import CudaRunner
from deepseek_engine.runners.torch import TorchRunner
from deepseek_engine.settings import EngineSettings
from deepseek_engine.step_plan import NewSequence, RowLogprobs, StepPlan, StepResult, StepRow
from device_kernels import DEVICE
from piccard_contract.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0)
EOS = (1,)
TOLERANCE = 1e-4
"""Of log-probabilities in float32."""


def config_of(folder: Path, layers: int) -> DeepseekConfig | LlamaConfig:
    """The checkpoint's, with its first layers alone: a program of a kernel takes milliseconds in the interpreter."""
    config = load_config(folder)
    assert isinstance(config, DeepseekConfig | LlamaConfig)
    return replace(config, num_hidden_layers=layers)


def device_model(folder: Path, layers: int, dtype: torch.dtype = torch.float32, **options: Any) -> GpuDecoder:
    """The checkpoint's first layers with device kernels; `options` are `load_gpu_model`'s."""
    return load_gpu_model(folder, config_of(folder, layers), dtype=dtype, device=str(DEVICE), **options)


def reference_model(folder: Path, layers: int) -> Decoder:
    """The checkpoint's first layers with the references, in float32 on the CPU."""
    return build_model(config_of(folder, layers), Checkpoint(folder, dtype=torch.float32, device="cpu"))


def device_runner(model: DeviceModel, settings: EngineSettings, **sizes: int) -> CudaRunner:
    """A runner whose cache holds NaN where no step has written."""
    runner = CudaRunner(model, settings, **sizes)
    for plane in runner._cache.values():
        plane.fill_(float("nan"))
    return runner


def new(
    identity: int, prompt: list[int], params: SamplingParams = GREEDY, output: tuple[int, ...] = (), **changes: Any
) -> NewSequence:
    """A sequence of its own seed; `changes` are fields of it."""
    fields = {"choice": 0, "eos_ids": EOS, "seed": 100 + identity, **changes}
    return NewSequence(identity, params, list(prompt), list(output), **fields)


def row(identity: int, tokens: list[int], start: int, table: list[int], **changes: Any) -> StepRow:
    """A row that samples, unless `changes` say otherwise."""
    return StepRow(identity, list(tokens), start, table, **{"sample": True, **changes})


class RunnerPair:
    """Runs each plan on both runners and holds their results against one another.

    Args:
        folder: a random checkpoint.
        layers: how many of its layers are run.
        graph_tokens, expanded_tokens: of the device runner, small, so that every kind of step is short.
        model: for the device runner, of as many layers; the device kernels' by default.
        settings: changes to small ones.
    """

    def __init__(
        self,
        folder: Path,
        layers: int,
        *,
        graph_tokens: int = 8,
        expanded_tokens: int = 4096,
        model: DeviceModel | None = None,
        **settings: Any,
    ) -> None:
        chosen = EngineSettings(**{"num_blocks": 32, "max_num_seqs": 4, "max_num_batched_tokens": 64, **settings})
        self.device_model = model or device_model(folder, layers)
        self.reference_model = reference_model(folder, layers)
        sizes = {"graph_tokens": graph_tokens, "expanded_tokens": expanded_tokens}
        self.device = device_runner(self.device_model, chosen, **sizes)
        self.reference = TorchRunner(self.reference_model, chosen)

    def poison(self, token: int) -> None:
        """Make the token's embedding NaN."""
        for model in (self.device_model, self.reference_model):
            model.embedding = model.embedding.clone()
            model.embedding[token] = float("nan")

    def start(self, *rows: StepRow, **plan: Any) -> tuple[Any, Any]:
        """Start a step on both; returns what `finish` takes."""
        return self.device.execute(StepPlan(list(rows), **plan)), self.reference.execute(StepPlan(list(rows), **plan))

    def finish(self, handles: tuple[Any, Any]) -> StepResult:
        """Collect a step of both; the reference's result, which is the device's too."""
        found, expected = self.device.collect(handles[0]), self.reference.collect(handles[1])
        agree(found, expected)
        return expected

    def step(self, *rows: StepRow, **plan: Any) -> StepResult:
        """Start a step and collect it."""
        return self.finish(self.start(*rows, **plan))


def agree(found: StepResult, expected: StepResult) -> None:
    """Two results tell the same, their log-probabilities to within TOLERANCE."""
    assert found.token_ids == expected.token_ids
    assert found.errors.keys() == expected.errors.keys()
    assert all(expected.errors[place].startswith(cause) for place, cause in found.errors.items())
    for one, other in ((found.logprobs, expected.logprobs), (found.prompt_logprobs, expected.prompt_logprobs)):
        assert one.keys() == other.keys()
        for place in one:
            _agree(one[place], other[place])


def _agree(found: RowLogprobs, expected: RowLogprobs) -> None:
    assert found.token_ids == expected.token_ids
    assert found.ranks == expected.ranks
    torch.testing.assert_close(
        torch.tensor(found.logprobs), torch.tensor(expected.logprobs), rtol=0.0, atol=TOLERANCE, equal_nan=False
    )
