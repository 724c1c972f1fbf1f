"""transformers' models of the small random checkpoints, loaded once a session."""

from collections.abc import Callable
from pathlib import Path

import pytest
from random_checkpoints import load_oracle, oracle_logits
from torch import Tensor


@pytest.fixture(scope="session")
def expected_logits(checkpoint_folder: Callable[[str], Path]) -> Callable[[str, list[int]], Tensor]:
    """What transformers gives for a family and its token ids: float32 [tokens, vocab]."""
    oracles: dict[str, object] = {}
    known: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def logits(family: str, token_ids: list[int]) -> Tensor:
        if family not in oracles:
            oracles[family] = load_oracle(checkpoint_folder(family))
        key = (family, tuple(token_ids))
        if key not in known:
            known[key] = oracle_logits(oracles[family], token_ids)
        return known[key]

    return logits
