"""A model whose next token depends on every token before it, through the paged cache and by exact arithmetic.

Real models round differently with every chunk size; this one gives the same logits bit for bit however its tokens are
cut into steps, so a difference is the engine's.
"""

from dataclasses import dataclass
from typing import Any

import torch
from deepseek_engine.batch import Batch
from deepseek_engine.cache_spec import Cache, CachePlane, CacheSpec
from deepseek_engine.engine import Engine
from deepseek_engine.request import EngineOutput, EngineRequest
from deepseek_engine.runners.torch import TorchRunner
from deepseek_engine.settings import EngineSettings
from piccard_contract.sampling import SamplingParams
from torch import Tensor
from toy_tokenizer import EOS, toy_tokenizer

_STATES = 8191


@dataclass(frozen=True)
class ToyConfig:
    """What the runner reads of a model's config."""

    vocab_size: int = 260
    max_position_embeddings: int = 4096
    eos_token_ids: tuple[int, ...] = (EOS,)


class ToyModel:
    """Hashes the context into one of 8,191 states, each with random logits of its own.

    Args:
        poison: a token that puts NaN into the cache.
        explosive: a token that makes a step raise.
        peak: standard deviation of the logits; large ones make the text hardly random.
    """

    def __init__(
        self,
        config: ToyConfig | None = None,
        *,
        poison: int | None = None,
        explosive: int | None = None,
        peak: float = 2.0,
    ) -> None:
        self.config = config or ToyConfig()
        self.poison = poison
        self.explosive = explosive
        generator = torch.Generator().manual_seed(11)
        self._table = torch.randn(_STATES, self.config.vocab_size, generator=generator) * peak
        self.steps: list[list[int]] = []

    def cache_spec(self) -> CacheSpec:
        return CacheSpec((CachePlane("tokens", 1, 1, torch.float32),))

    def forward(self, batch: Batch, cache: Cache) -> Tensor:
        counts = [stop - start for start, stop in zip(batch.query_starts, batch.query_starts[1:], strict=False)]
        self.steps.append(counts)
        if self.explosive is not None and bool((batch.token_ids == self.explosive).any()):
            raise RuntimeError("the toy exploded")
        values = (batch.token_ids + 1).to(torch.float32)
        if self.poison is not None:
            values[batch.token_ids == self.poison] = float("nan")
        cache["tokens"][0, batch.slots, 0] = values
        states = []
        for row, context in enumerate(batch.context_lengths):
            places = torch.arange(context)
            slots = batch.block_tables[row, places // batch.block_size] * batch.block_size + places % batch.block_size
            kept = cache["tokens"][0, slots, 0].to(torch.float64)
            hashes = (kept * (places * 37 + 11)).cumsum(0)[context - counts[row] :]
            states.append(hashes.remainder(_STATES))
        return torch.cat(states).unsqueeze(-1)

    def logits(self, hidden: Tensor) -> Tensor:
        state = hidden.squeeze(-1)
        logits = self._table[state.nan_to_num(0.0).to(torch.int64)]
        return logits.masked_fill(state.isnan().unsqueeze(-1), float("nan"))


def toy_engine(
    model: ToyModel | None = None,
    *,
    runner: type[TorchRunner] = TorchRunner,
    steps_in_flight: int | None = None,
    **settings: Any,
) -> Engine:
    """An engine over a toy model; steps do not depend on the clock."""
    chosen = EngineSettings(**{"num_blocks": 64, "prefill_gap": None, "max_model_len": 512, **settings})
    made = runner(model or ToyModel(), chosen)
    if steps_in_flight is not None:
        made.steps_in_flight = steps_in_flight
    return Engine(made, toy_tokenizer(), chosen)


def toy_request(
    identity: str, prompt: list[int], *, output_ids: list[int] | None = None, **changes: Any
) -> EngineRequest:
    """A request with `changes` to its sampling parameters, or to its priority and salt.

    It draws the same tokens at every run: a request without a seed ends at once now and then.
    """
    changes.setdefault("seed", 1)
    own = {name: changes.pop(name) for name in ("priority", "salt") if name in changes}
    return EngineRequest(identity, prompt, SamplingParams(**changes), output_ids=output_ids or [], **own)


@dataclass
class Transcript:
    """All outputs of one choice put together."""

    token_ids: list[int]
    text: str
    outputs: list[EngineOutput]

    @property
    def last(self) -> EngineOutput:
        return self.outputs[-1]

    @property
    def logprobs(self) -> list[Any]:
        return [entry for output in self.outputs for entry in output.logprobs or []]


def run(engine: Engine, *requests: EngineRequest, steps: int = 5000) -> dict[tuple[str, int], Transcript]:
    """Add the requests, step until all is told, and put the outputs together by request and choice."""
    for request in requests:
        engine.add(request)
    return collect(drain(engine, steps))


def drain(engine: Engine, steps: int = 5000) -> list[EngineOutput]:
    """Step until there is no work; fails where that takes more than `steps`."""
    outputs: list[EngineOutput] = []
    for _ in range(steps):
        if not engine.has_work():
            return outputs
        outputs.extend(engine.step())
    raise AssertionError(f"the engine still has work after {steps} steps: {engine.stats()}")


def collect(outputs: list[EngineOutput]) -> dict[tuple[str, int], Transcript]:
    """Outputs by request and choice, joined."""
    transcripts: dict[tuple[str, int], Transcript] = {}
    for output in outputs:
        entry = transcripts.setdefault((output.request_id, output.choice), Transcript([], "", []))
        entry.token_ids.extend(output.token_ids)
        entry.text += output.text
        entry.outputs.append(output)
    return transcripts


def generate(
    prompt: list[int], *, engine: Engine | None = None, output_ids: list[int] | None = None, **params: Any
) -> Transcript:
    """One choice alone on a fresh toy engine, or on the one given."""
    return run(engine or toy_engine(), toy_request("r", prompt, output_ids=output_ids, **params))["r", 0]
