"""Served text against the CPU's model: its own text agrees, another token is found."""

import pytest
import torch
from deepseek_engine.models import load_model
from deepseek_engine.text.tokenizer import Tokenizer
from paged_sequences import chunked_logits
from piccard.installation import demo_checkpoint
from whole_service.agreement import agreement, differences
from whole_service.clients import PROMPTS, Record, Served, served

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


def test_answers_that_part_do_so_where_they_first_differ(greedy: list[int]) -> None:
    wrong = (greedy[3] + 1) % 2048
    other = [*greedy[:3], wrong, wrong, wrong]
    pairs = [(Served(PROMPT, greedy), Served(PROMPT, text)) for text in (greedy, other)]
    (only,) = differences(demo_checkpoint(), [one for one, _ in pairs], [two for _, two in pairs])
    assert (only.answer, only.position, only.tokens) == (1, 3, (greedy[3], wrong))
    logits = chunked_logits(load_model(demo_checkpoint(), dtype=torch.float64), [*PROMPT, *greedy], 10)
    assert only.margin == pytest.approx(float(logits[6, greedy[3]] - logits[6, wrong]), abs=1e-9)


def test_a_server_that_counts_other_prompts_is_found() -> None:
    tokenizer = Tokenizer.from_folder(demo_checkpoint())
    lengths = 2 * [len(tokenizer.encode(text)) for text in PROMPTS]
    records = [Record(0.0, token_ids=[place], num_input_tokens=length) for place, length in enumerate(lengths)]
    assert [each.output for each in served(demo_checkpoint(), records)] == [[place] for place in range(len(lengths))]
    records[3].num_input_tokens += 1
    with pytest.raises(RuntimeError, match="the server counted others"):
        served(demo_checkpoint(), records)
