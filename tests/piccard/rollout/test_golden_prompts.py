"""Golden prompts of a service: its own file, and those that are built in."""

import json
from pathlib import Path

import pytest
from piccard.errors import OperationError
from piccard.rollout.golden_prompts import BUILT_IN, GoldenPrompt, golden_prompts
from piccard_canary.rollout.golden import LEAST_PROMPTS
from piccard_contract.home import Service

TEXT = {"text": "a b", "continuation": " c"}
CHAT = {"messages": [{"role": "user", "content": "a b"}], "continuation": "c"}


@pytest.fixture
def service(tmp_path: Path) -> Service:
    made = Service(tmp_path)
    made.golden_prompts.parent.mkdir(parents=True)
    return made


def test_without_a_file_those_that_are_built_in_serve(service: Service) -> None:
    assert golden_prompts(service) == BUILT_IN
    assert len(BUILT_IN) >= LEAST_PROMPTS
    assert len({str(prompt.whole) for prompt in BUILT_IN}) == len(BUILT_IN)


def test_a_service_has_its_own(service: Service) -> None:
    lines = [json.dumps(TEXT, ensure_ascii=False), json.dumps(CHAT), ""] * 4
    service.golden_prompts.write_text("\n".join(lines), encoding="utf-8")
    found = golden_prompts(service)
    assert len(found) == 8
    assert (found[0].before, found[0].whole) == ("a b", "a b c")
    assert found[1].before == CHAT["messages"]
    assert found[1].whole == [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("text", "line 9: it is not JSON"),
        ('{"text": "a"}', "line 9: continuation: Field required"),
        ('{"text": "a", "continuation": ""}', "line 9: continuation: String should have at least 1 character"),
        ('{"continuation": "a"}', "line 9: give one of text and messages"),
        (json.dumps(TEXT | CHAT), "line 9: give one of text and messages"),
        ('{"text": "a", "continuation": "b", "answer": "c"}', "line 9: unknown key 'answer'"),
        ('{"messages": [], "continuation": "b"}', "line 9: messages: List should have at least 1 item"),
        (
            json.dumps({"text": "a", "continuation": "b" * 8193}),
            "line 9: continuation: String should have at most 8192",
        ),
        (
            json.dumps({"messages": [{"role": "user", "content": "b" * 8193}], "continuation": "b"}),
            "line 9: messages have at most 8192 characters",
        ),
        ('{"text": "a ", "continuation": "b"}', "line 9: text ends in a blank; let the continuation begin with it"),
        ("[" * 5000, "line 9: it is not JSON"),
        ('"text"', "line 9: Input should be a valid dictionary"),
    ],
)
def test_a_line_that_is_none_is_told(service: Service, line: str, told: str) -> None:
    service.golden_prompts.write_text("\n".join([*[json.dumps(TEXT)] * 8, line]), encoding="utf-8")
    with pytest.raises(OperationError, match=r"golden\.jsonl, " + told):
        golden_prompts(service)


@pytest.mark.parametrize(("count", "told"), [(0, "holds 0"), (7, "holds 7"), (257, "holds 257")])
def test_too_few_and_too_many_are_told(service: Service, count: int, told: str) -> None:
    service.golden_prompts.write_text("\n".join([json.dumps(TEXT)] * count))
    with pytest.raises(OperationError, match=told + " golden prompts; 8 to 256 are needed"):
        golden_prompts(service)


def test_a_file_that_cannot_be_read_is_told(service: Service) -> None:
    service.golden_prompts.write_bytes(b"\xff\xfe")
    with pytest.raises(OperationError, match=r"golden\.jsonl cannot be read"):
        golden_prompts(service)
    service.golden_prompts.unlink()
    service.golden_prompts.mkdir()
    with pytest.raises(OperationError, match=r"golden\.jsonl cannot be read"):
        golden_prompts(service)


def test_a_prompt_is_text_or_chat() -> None:
    assert GoldenPrompt.model_validate(TEXT).messages is None
    assert GoldenPrompt.model_validate(CHAT).text is None
