"""What crosses the seam between scheduler and model runner, as plain data that could be pickled to another rank."""

from dataclasses import dataclass, field

from piccard_contract.sampling import SamplingParams

# Stands for "the token that this sequence sampled last step", which may still be on the device.
LAST_SAMPLED = -1


@dataclass(slots=True)
class NewSequence:
    """A sequence that the runner sees for the first time.

    Attributes:
        sequence_id: unique for the life of the engine.
        params: the request's sampling parameters.
        prompt_ids: the prompt.
        output_ids: tokens already generated elsewhere; they count as output (penalties, min_tokens, random numbers).
        choice: which of the request's n choices; part of the random counter.
        eos_ids: end-of-sequence ids, masked until min_tokens.
        seed: the 64-bit key of its random numbers: the request's, or one drawn when it was added.
    """

    sequence_id: int
    params: SamplingParams
    prompt_ids: list[int]
    output_ids: list[int]
    choice: int
    eos_ids: tuple[int, ...]
    seed: int


@dataclass(slots=True)
class StepRow:
    """One sequence's share of a step.

    Attributes:
        sequence_id: whose tokens these are.
        token_ids: the new tokens to run; a single last entry may be `LAST_SAMPLED`.
        start: position of the first of them, which is how many tokens are in the cache already.
        block_table: the sequence's cache blocks; covers start + len(token_ids) tokens. Read during `execute` only.
        sample: whether a token is sampled after the last of token_ids; false for chunks that do not reach the end.
        prompt_logprobs: positions of known tokens whose log-probabilities are wanted; position p is predicted by the
            hidden state at p - 1, so start < p <= start + len(token_ids). None where none are.
        token_mask: bits of the tokens that may be sampled, least significant first, ceil(vocabulary / 8) bytes.
    """

    sequence_id: int
    token_ids: list[int]
    start: int
    block_table: list[int]
    sample: bool
    prompt_logprobs: range | None = None
    token_mask: bytes | None = None


@dataclass(slots=True)
class StepPlan:
    """One step: what to run, and which sequences come and go before it.

    Attributes:
        rows: the batch; a sequence stands in one row at most.
        new: sequences that appear in rows for the first time.
        finished: sequences whose state the runner may drop.
    """

    rows: list[StepRow]
    new: list[NewSequence] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens that the step runs."""
        return sum(len(row.token_ids) for row in self.rows)


@dataclass(slots=True)
class RowLogprobs:
    """Log-probabilities of consecutive positions of one sequence: log-softmax of the raw logits.

    Attributes:
        token_ids: for each position the chosen token, then the most likely ones in order.
        logprobs: the same shape.
        ranks: for each position how many tokens are at least as likely as the chosen one (1 is the most likely).
    """

    token_ids: list[list[int]]
    logprobs: list[list[float]]
    ranks: list[int]


@dataclass(slots=True)
class StepResult:
    """What a step produced, by row.

    Attributes:
        token_ids: sampled tokens, empty where nothing was sampled or the row failed; more than one with speculation.
        logprobs: of the sampled tokens, for rows that asked.
        prompt_logprobs: of `StepRow.prompt_logprobs`, for rows that asked.
        errors: cause of failure of a row; the others are not touched by it.
    """

    token_ids: list[list[int]]
    logprobs: dict[int, RowLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, RowLogprobs] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
