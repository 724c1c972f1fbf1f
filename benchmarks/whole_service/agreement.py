"""Whether greedy text that was served is what the CPU's model would have written, teacher-forced."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from deepseek_engine.models import load_model
from paged_sequences import chunked_logits
from torch import Tensor

from whole_service.clients import Served


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A position at which the CPU's first choice is another than the served token.

    Attributes:
        margin: between the two tokens' logits of the float64 model.
    """

    answer: int
    position: int
    served: int
    expected: int
    margin: float


@dataclass(frozen=True, slots=True)
class Agreement:
    """Of all served tokens.

    Attributes:
        float32_agreeing: positions at which the float32 model's first choice was served.
        error: the largest distance of a logit of torch's own bfloat16 model on the CPU from the float64 one's.
        disagreements: with the float64 model.
    """

    positions: int
    float32_agreeing: int
    error: float
    disagreements: list[Disagreement]

    @property
    def share(self) -> float:
        return 1.0 - len(self.disagreements) / self.positions

    @property
    def explained(self) -> bool:
        """Whether every margin is under the error."""
        return all(found.margin <= self.error for found in self.disagreements)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "share": self.share, "explained": self.explained}


def agreement(checkpoint: Path, answers: Sequence[Served]) -> Agreement:
    """Compare answers with the CPU's model in float32 and float64, which read what was served."""
    exact = _logits(checkpoint, answers, torch.float64)
    single = _logits(checkpoint, answers, torch.float32)
    error = max(
        float((coarse - fine).abs().max())
        for coarse, fine in zip(_logits(checkpoint, answers, torch.bfloat16), exact, strict=True)
    )
    served = [torch.tensor(answer.output) for answer in answers]
    return Agreement(
        positions=sum(len(answer.output) for answer in answers),
        float32_agreeing=sum(int((logits.argmax(-1) == ids).sum()) for logits, ids in zip(single, served, strict=True)),
        error=error,
        disagreements=[
            found
            for place, (logits, ids) in enumerate(zip(exact, served, strict=True))
            for found in _disagreements(place, logits, ids)
        ],
    )


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two greedy answers to one prompt part.

    Attributes:
        tokens: of the one and the other.
        margin: between the logits that the float64 model gives them.
    """

    answer: int
    position: int
    tokens: tuple[int, int]
    margin: float


def differences(checkpoint: Path, ours: Sequence[Served], theirs: Sequence[Served]) -> list[Difference]:
    """The first difference of each pair of answers that are not the same; what follows it answers another text."""
    parted = []
    for place, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        pairs = enumerate(zip(one.output, other.output, strict=True))
        first = next((position for position, (a, b) in pairs if a != b), None)
        if first is not None:
            parted.append((place, first, Served(one.prompt, one.output[: first + 1]), other.output[first]))
    exact = _logits(checkpoint, [served for _, _, served, _ in parted], torch.float64)
    return [
        Difference(
            place,
            first,
            (served.output[-1], other),
            abs(float(logits[-1, served.output[-1]] - logits[-1, other])),
        )
        for (place, first, served, other), logits in zip(parted, exact, strict=True)
    ]


def _logits(checkpoint: Path, answers: Sequence[Served], dtype: torch.dtype) -> list[Tensor]:
    """Of each answer [output tokens, vocabulary]: row n chose the n-th token."""
    model = load_model(checkpoint, dtype=dtype)
    with torch.inference_mode():
        return [
            chunked_logits(model, ids := [*answer.prompt, *answer.output], len(ids))[len(answer.prompt) - 1 : -1]
            for answer in answers
        ]


def _disagreements(place: int, logits: Tensor, served: Tensor) -> list[Disagreement]:
    best = logits.argmax(-1)
    return [
        Disagreement(
            place,
            position,
            int(served[position]),
            int(best[position]),
            float(logits[position, best[position]] - logits[position, served[position]]),
        )
        for position in (best != served).nonzero().flatten().tolist()
    ]
