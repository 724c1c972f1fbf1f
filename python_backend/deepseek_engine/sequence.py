"""One choice of one request, as the scheduler sees it."""

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Optional

from piccard_contract.sampling import SamplingParams


class SequenceStatus(Enum):
    """Where a sequence stands."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens, cache blocks and progress of one choice.

    Attributes:
        id: rises with arrival and is never used twice.
        token_ids: prompt and output so far.
        num_prompt: tokens of the prompt.
        num_resumed: output tokens that were generated elsewhere.
        max_output: output tokens at most, the resumed ones included.
        priority: lower is more important.
        rank: place in the queue, lower first (`queue_policy.queue_rank`).
        arrived: when it came, in seconds of the engine's clock.
        parent: the request's first choice, whose prompt blocks this one shares.
        block_table: cache blocks, enough for the tokens of the steps under way.
        num_computed: tokens in the cache for certain: their step was collected and did not fail.
        num_under_way: tokens that come into the cache by steps that are not collected yet. A preempted sequence keeps
            the number until they are, though its blocks are gone.
        num_pending: tokens that those steps sample.
        num_cached: tokens that the first admission found in the cache.
        block_keys: keys of its full blocks, as far as they were needed.
        num_published: full blocks that others may share.
        logprobs_from, logprobs_to: positions of known tokens whose log-probabilities are still wanted.
    """

    id: int
    request_id: str
    choice: int
    params: SamplingParams
    token_ids: list[int]
    num_prompt: int
    max_output: int
    seed: int
    priority: int = 0
    rank: float = 0.0
    arrived: float = 0.0
    salt: str = ""
    num_resumed: int = 0
    parent: Optional["Sequence"] = None
    status: SequenceStatus = SequenceStatus.WAITING
    started: bool = False
    block_table: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_under_way: int = 0
    num_pending: int = 0
    num_cached: int = 0
    block_keys: list[bytes] = field(default_factory=list)
    num_published: int = 0
    logprobs_from: int = 0
    logprobs_to: int = 0

    @property
    def order(self) -> tuple[float, int]:
        """Sorts by rank, then by arrival."""
        return self.rank, self.id

    @property
    def num_remaining(self) -> int:
        """Tokens, pending ones included, that no step has run or is running; 1 while decoding."""
        return len(self.token_ids) + self.num_pending - self.num_computed - self.num_under_way

    @property
    def ends_under_way(self) -> bool:
        """Whether the pending tokens are the last that it may have."""
        return self.num_pending > 0 and self.num_output + self.num_pending >= self.max_output

    @property
    def num_output(self) -> int:
        """Output tokens so far, the resumed ones included."""
        return len(self.token_ids) - self.num_prompt

    @property
    def reusable(self) -> int:
        """Tokens that may come from the cache: the last one is computed for its logits, and so is every position whose
        next token's log-probability is wanted."""
        last = len(self.token_ids) - 1
        return min(last, self.logprobs_from - 1) if self.logprobs_from < self.logprobs_to else last
