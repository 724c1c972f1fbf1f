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
    # Many streams, prompts in large pieces and a long queue: the most tokens a second, at the price of gaps.
    "throughput": EngineSettings(
        max_num_seqs=256,
        max_num_waiting=4096,
        max_queue_seconds=300.0,
        max_num_batched_tokens=8192,
        prefill_chunk=2048,
        prefill_gap=None,
        block_size=64,
    ),
}


def profile(name: str, **changes: Any) -> EngineSettings:
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
    return replace(PROFILES[name], **changes)
