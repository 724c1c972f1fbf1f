"""What one engine step hands to a model."""

from dataclasses import dataclass

from torch import Tensor

from deepseek_engine.departures import Interrupt


@dataclass(slots=True)
class Batch:
    """The tokens of one step, rows flattened.

    A row is one sequence's new tokens: a whole prompt, a chunk of it, or the one token sampled last. Nothing here says
    which; models decide by the number of tokens alone.
    """

    token_ids: Tensor
    """int64 [T]."""
    positions: Tensor
    """int64 [T], counted from 0 in each sequence."""
    slots: Tensor
    """int64 [T]: the cache slot that each token is written to, block * block_size + offset."""
    query_starts: list[int]
    """R + 1 host integers: row r owns the tokens query_starts[r]:query_starts[r + 1]. No row is empty."""
    context_lengths: list[int]
    """R host integers: tokens in the cache once this step's are written."""
    block_tables: Tensor
    """int64 [R, max_blocks], padded with 0."""
    block_size: int
    """Tokens a block."""
    interrupt: Interrupt | None = None
    """Ends the step early; None where nothing does."""

    @property
    def num_rows(self) -> int:
        return len(self.context_lengths)

    @property
    def num_tokens(self) -> int:
        return self.query_starts[-1]

    def check(self) -> None:
        """To be called now and then within a long step. Raises StepGivenUpError where it is wanted no longer."""
        if self.interrupt is not None:
            self.interrupt.check()
