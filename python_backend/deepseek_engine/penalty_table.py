"""Which tokens have occurred, for the sequences whose penalties ask for it."""

import torch
from torch import Tensor


class PenaltyTable:
    """A row of counts for each penalised sequence, in two tensors that grow, so that a batch is gathered in one step.

    Args:
        capacity: rows to begin with.

    Attributes:
        output_counts: [capacity, V] int32.
        prompt_seen: [capacity, V] bool.
        generation: rises when the two have grown, and so are other tensors than before.
    """

    def __init__(self, vocab_size: int, device: torch.device, capacity: int = 0) -> None:
        self.output_counts = torch.zeros(capacity, vocab_size, dtype=torch.int32, device=device)
        self.prompt_seen = torch.zeros(capacity, vocab_size, dtype=torch.bool, device=device)
        self.generation = 0
        self._free: list[int] = list(range(capacity - 1, -1, -1))

    def add(self, prompt_ids: list[int], output_ids: list[int]) -> int:
        """Count the tokens of a sequence in a row of its own; returns the row."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        device = self.prompt_seen.device
        self.prompt_seen[row, torch.tensor(prompt_ids, dtype=torch.int64, device=device)] = True
        outputs = torch.tensor(output_ids, dtype=torch.int64, device=device)
        self.output_counts[row] = torch.bincount(outputs, minlength=self.output_counts.shape[1]).to(torch.int32)
        return row

    def remove(self, row: int) -> None:
        """Give a row back."""
        self.output_counts[row] = 0
        self.prompt_seen[row] = False
        self._free.append(row)

    def count(self, rows: Tensor, token_ids: Tensor) -> None:
        """Count one more token in each of `rows` [N], which are distinct; token_ids [N]."""
        self.output_counts[rows, token_ids] += 1

    def _grow(self) -> None:
        self.generation += 1
        capacity = len(self.output_counts)
        more = max(4, capacity)
        self.output_counts = torch.cat(
            (self.output_counts, self.output_counts.new_zeros(more, self.output_counts.shape[1]))
        )
        self.prompt_seen = torch.cat((self.prompt_seen, self.prompt_seen.new_zeros(more, self.prompt_seen.shape[1])))
        self._free.extend(range(capacity + more - 1, capacity - 1, -1))
