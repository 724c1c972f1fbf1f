"""Runs a model over a paged cache in chunks, as an engine does, with blocks in shuffled order."""

import random

import torch
from deepseek_engine.batch import Batch
from deepseek_engine.models import Model
from torch import Tensor


class PagedSequences:
    """Several sequences in one cache; each call of `step` feeds some of them their next tokens."""

    def __init__(
        self, model: Model, lengths: list[int], *, block_size: int = 16, seed: int = 0, poison: float | None = None
    ) -> None:
        """lengths: the most tokens that each sequence will hold; poison: what unwritten slots are filled with."""
        self.model = model
        self.block_size = block_size
        sizes = [-(-length // block_size) for length in lengths]
        blocks = list(range(sum(sizes) + 1))
        random.Random(seed).shuffle(blocks)
        self.tables = [[blocks.pop() for _ in range(size)] for size in sizes]
        self.filled = [0] * len(lengths)
        self.cache = model.cache_spec().allocate(sum(sizes) + 1, block_size)
        if poison is not None:
            for plane in self.cache.values():
                plane.fill_(poison)

    def step(self, chunks: dict[int, list[int]]) -> dict[int, Tensor]:
        """Sequence to new tokens in, sequence to logits [new tokens, vocab] out."""
        # A model may write its next logits to the same memory.
        logits = self.model.logits(self.model.forward(self.batch(chunks), self.cache)).clone()
        for sequence, token_ids in chunks.items():
            self.filled[sequence] += len(token_ids)
        parts = logits.split([len(token_ids) for token_ids in chunks.values()])
        return dict(zip(chunks, parts, strict=True))

    def batch(self, chunks: dict[int, list[int]]) -> Batch:
        positions, slots, starts = [], [], [0]
        for sequence, token_ids in chunks.items():
            for position in range(self.filled[sequence], self.filled[sequence] + len(token_ids)):
                positions.append(position)
                block = self.tables[sequence][position // self.block_size]
                slots.append(block * self.block_size + position % self.block_size)
            starts.append(starts[-1] + len(token_ids))
        widest = max(len(self.tables[sequence]) for sequence in chunks)
        return Batch(
            token_ids=torch.tensor([token for token_ids in chunks.values() for token in token_ids]),
            positions=torch.tensor(positions),
            slots=torch.tensor(slots),
            query_starts=starts,
            context_lengths=[self.filled[sequence] + len(token_ids) for sequence, token_ids in chunks.items()],
            block_tables=torch.tensor(
                [self.tables[sequence] + [0] * (widest - len(self.tables[sequence])) for sequence in chunks]
            ),
            block_size=self.block_size,
        )


def chunked_logits(model: Model, token_ids: list[int], chunk: int, *, block_size: int = 16, seed: int = 0) -> Tensor:
    """float32 [tokens, vocab]: one sequence alone, `chunk` tokens a step."""
    sequences = PagedSequences(model, [len(token_ids)], block_size=block_size, seed=seed)
    steps = [token_ids[start : start + chunk] for start in range(0, len(token_ids), chunk)]
    return torch.cat([sequences.step({0: step})[0] for step in steps])
