"""Served text against the CPU's model: its own text agrees, another token is found."""

import pytest
import torch
from deepseek_engine.models import load_model
from paged_sequences import chunked_logits
from piccard.installation import demo_checkpoint
from whole_service.agreement import Served, agreement

PROMPT = [0, 75, 301, 42]


@pytest.fixture(scope="module")
def greedy() -> list[int]:
    model = load_model(demo_checkpoint(), dtype=torch.float64)
    ids = list(PROMPT)
    for _ in range(6):
        ids.append(int(chunked_logits(model, ids, len(ids))[-1].argmax()))
    return ids[len(PROMPT) :]


def test_greedy_text_agrees(greedy: list[int]) -> None:
    found = agreement(demo_checkpoint(), [Served(PROMPT, greedy)])
    assert (found.positions, found.share, found.disagreements) == (6, 1.0, [])
    assert found.error > 0.0
    assert found.explained


def test_another_token_is_found(greedy: list[int]) -> None:
    wrong = [*greedy[:-1], (greedy[-1] + 1) % 2048]
    found = agreement(demo_checkpoint(), [Served(PROMPT, greedy), Served(PROMPT, wrong)])
    (only,) = found.disagreements
    assert (only.answer, only.position, only.served, only.expected) == (1, 5, wrong[-1], greedy[-1])
    assert only.margin > found.error
    assert not found.explained
    assert found.share == pytest.approx(11 / 12)
