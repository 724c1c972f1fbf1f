"""The seam between engine and model."""

from typing import Any, Protocol

from deepseek_engine.step_plan import StepPlan, StepResult


class ModelRunner(Protocol):
    """Executes step plans. It owns the weights, the cache and each sequence's sampling state.

    Attributes:
        vocab_size: size of the model's vocabulary.
        max_position_embeddings: positions that the model knows.
        eos_token_ids: end-of-sequence ids of the checkpoint.
        num_blocks: blocks of the cache.
        block_size: tokens a block.
        cache_format: names the planes and types of the cache; prefixes are shared within one format only.
    """

    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    num_blocks: int
    block_size: int
    cache_format: str

    def execute(self, plan: StepPlan) -> Any:
        """Start a step; returns a handle for `collect`. Sequences in plan.finished are dropped first.

        Whatever it raises fails all rows of the plan; the runner can go on with another plan then.
        """
        ...

    def collect(self, handle: Any) -> StepResult:
        """Wait for a step and bring what it sampled to the host. Steps are collected in the order of their start."""
        ...
