"""Log-probabilities of tokens that were known before a step."""

from collections.abc import Callable

import torch
from torch import Tensor

from deepseek_engine import sampling
from deepseek_engine.sampling import LogprobTensors
from deepseek_engine.step_plan import NewSequence, RowLogprobs, StepRow

# Rows of logits that are held at once; at a vocabulary of 129,280 each takes half a MiB.
_ROWS = 128


def prompt_logprobs(
    logits_of: Callable[[Tensor], Tensor], vocab_size: int, sequence: NewSequence, row: StepRow, hidden: Tensor
) -> list[LogprobTensors]:
    """Of the row's wanted positions, a few at a time because of the vocabulary's size.

    Args:
        logits_of: the model's head.
        hidden: [N, hidden] with the row's first token at 0.
    """
    wanted = row.prompt_logprobs or range(0)
    known = sequence.prompt_ids + sequence.output_ids
    count = min(sequence.params.prompt_logprobs or 0, vocab_size)
    parts = []
    for first in range(wanted.start, wanted.stop, _ROWS):
        stop = min(first + _ROWS, wanted.stop)
        logits = logits_of(hidden[first - 1 - row.start : stop - 1 - row.start])
        targets = torch.tensor(known[first:stop], dtype=torch.int64, device=hidden.device)
        parts.append(sampling.gather_logprobs(logits, targets, count))
    return parts


def to_host(parts: list[LogprobTensors]) -> RowLogprobs:
    """The positions of all parts, one after the other; waits for the device."""
    return RowLogprobs(
        [ids for part in parts for ids in part.token_ids.tolist()],
        [values for part in parts for values in part.logprobs.tolist()],
        [rank for part in parts for rank in part.ranks.tolist()],
    )
