"""Named settings, so that one checkpoint can be served in more than one way."""

from dataclasses import replace
from typing import Any

from deepseek_engine.settings import EngineSettings

PROFILES: dict[str, EngineSettings] = {
    # Streams stay even while prompts arrive, and neither waits long for the other.
    "balanced": EngineSettings(),
    # Few streams at once, small chunks and a short queue: the shortest gaps, at the price of prompts that take longer.
    "latency": EngineSettings(
        max_num_seqs=16,
        max_num_waiting=128,
        max_queue_seconds=30.0,
        max_num_batched_tokens=512,
        prefill_chunk=64,
        prefill_gap=1.5,
        block_size=16,
    ),
    # Many streams, prompts in large pieces and a long queue: the most tokens a second, at the price of gaps. Larger
    # steps are slower a token on a CPU, whose caches do not hold what they compute.
    "throughput": EngineSettings(
        max_num_seqs=256,
        max_num_waiting=4096,
        max_queue_seconds=300.0,
        max_num_batched_tokens=2048,
        prefill_chunk=2048,
        prefill_gap=None,
        block_size=32,
    ),
}


GPU_CHANGES: dict[str, dict[str, Any]] = {
    # A chunk and 128 decodes still run from a graph.
    "balanced": {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "prefill_chunk": 384, "block_size": 64},
    "latency": {"max_num_seqs": 32, "max_num_batched_tokens": 4096, "prefill_chunk": 256, "block_size": 64},
    "throughput": {"max_num_batched_tokens": 16384, "prefill_chunk": 8192, "block_size": 64},
}
"""What is otherwise on a GPU, where a step of few tokens reads nearly as much memory as one of many."""


def profile(name: str, *, on_gpu: bool = False, **changes: Any) -> EngineSettings:
    """The settings called `name`, with `changes` to single fields.

    Raises:
        ValueError: no such profile or field, or the fields contradict each other.
    """
    if name not in PROFILES:
        raise ValueError(f"there is no profile {name!r}; use one of {', '.join(sorted(PROFILES))}")
    unknown = sorted(set(changes) - set(EngineSettings.__dataclass_fields__))
    if unknown:
        known = ", ".join(EngineSettings.__dataclass_fields__)
        raise ValueError(f"engine settings have no {', '.join(unknown)}; they are {known}")
    return replace(PROFILES[name], **{**(GPU_CHANGES[name] if on_gpu else {}), **changes})
