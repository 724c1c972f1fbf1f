"""The seam between engine and model."""

from typing import Any, Protocol

from deepseek_engine.departures import Interrupt
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
        steps_in_flight: steps that may be started and not collected yet, 1 or 2. With 2 the next step is started before
            the tokens of the last one are on the host, so that the device never waits for it; its rows name those
            tokens by `LAST_SAMPLED`.
    """

    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    num_blocks: int
    block_size: int
    cache_format: str
    steps_in_flight: int

    def execute(self, plan: StepPlan, interrupt: Interrupt | None = None) -> Any:
        """Start a step; returns a handle for `collect`. Sequences in plan.finished are dropped first.

        Steps run in the order of their start, each on the cache as the one before has left it. A step under way may
        hold rows of a sequence that has ended since: a later plan names it as finished, and may give its blocks to
        others. A row that goes on after one that failed may bring anything, but must not fail the step.

        Whatever it raises fails all rows of the plan; the runner can go on with another plan then.

        Args:
            interrupt: once set, the step is wanted no longer. A runner that computes here looks at it now and then,
                and raises StepGivenUpError: the rows may come again in another plan, with the same tokens. One whose
                steps are under way elsewhere need not look.
        """
        ...

    def collect(self, handle: Any) -> StepResult:
        """Wait for a step and bring what it sampled to the host. Steps are collected in the order of their start.

        Whatever it raises fails all rows of the step, and those of the next step that go on after them.
        """
        ...
