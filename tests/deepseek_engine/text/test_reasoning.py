import pytest
from deepseek_engine.text import ReasoningParser
from hypothesis import given
from hypothesis import strategies as st

PIECES = st.lists(st.sampled_from(["<think>", "</think>", "<", "/", "think", ">", "\n", " ", "a", "度", "</thin"]))


def split(parser: ReasoningParser, pieces: list[str]) -> tuple[str, str]:
    deltas = [*(parser.push(piece) for piece in pieces), parser.flush()]
    return "".join(delta.reasoning for delta in deltas), "".join(delta.answer for delta in deltas)


def expected(text: str, in_reasoning: bool) -> tuple[str, str]:
    """The split of a whole text."""
    body = text.lstrip()
    if not in_reasoning and not body.startswith("<think>"):
        return "", text
    thought = text if in_reasoning else body.removeprefix("<think>")
    reasoning, _, answer = thought.partition("</think>")
    return reasoning.strip("\n"), answer.lstrip("\n")


@given(pieces=PIECES, in_reasoning=st.booleans())
def test_any_cut_gives_the_split_of_the_whole(pieces: list[str], in_reasoning: bool) -> None:
    assert split(ReasoningParser(in_reasoning), pieces) == expected("".join(pieces), in_reasoning)


@given(text=PIECES.map("".join), in_reasoning=st.booleans())
def test_letter_by_letter_gives_the_split_of_the_whole(text: str, in_reasoning: bool) -> None:
    assert split(ReasoningParser(in_reasoning), list(text)) == expected(text, in_reasoning)


@given(pieces=PIECES, data=st.data())
def test_a_resumed_stream_goes_on_in_its_part(pieces: list[str], data: st.DataObject) -> None:
    seam = data.draw(st.integers(0, len(pieces)))
    first = ReasoningParser()
    told = [first.push(piece) for piece in pieces[:seam]]
    reasoning, answer = split(ReasoningParser(seen="".join(pieces[:seam])), pieces[seam:])
    before = "".join(delta.reasoning for delta in told), "".join(delta.answer for delta in told)
    assert (before[0] + reasoning, before[1] + answer) == expected("".join(pieces), False)


@pytest.mark.parametrize(
    ("in_reasoning", "pieces", "parts"),
    [
        (False, ["<think>\nLet me", " see\n</think>", "\n\n42"], ("Let me see", "42")),
        (True, ["Let me see\n</th", "ink>\n\n42"], ("Let me see", "42")),
        (True, ["Let me see"], ("Let me see", "")),
        (True, ["</think>\n\n42"], ("", "42")),
        (False, ["plain ", "<think> in code </think>"], ("", "plain <think> in code </think>")),
        (False, ["\n plain"], ("", "\n plain")),
        (False, ["<thi", "s>"], ("", "<this>")),
        (False, ["<thi"], ("", "<thi")),
        (True, ["a</thin"], ("a</thin", "")),
    ],
    ids=str,
)
def test_examples(in_reasoning: bool, pieces: list[str], parts: tuple[str, str]) -> None:
    assert split(ReasoningParser(in_reasoning), pieces) == parts


def test_no_letter_of_a_tag_is_told_early() -> None:
    parser = ReasoningParser(in_reasoning=True)
    assert parser.push("so\n</thi") == ("so", "")
    assert parser.push("nk>") == ("", "")
    assert parser.push("yes") == ("", "yes")


@pytest.mark.parametrize(
    ("prompt", "opens"),
    [
        ("<｜User｜>hi<｜Assistant｜><think>\n", True),
        ("<｜User｜>hi<｜Assistant｜>", False),
        ("<｜User｜>hi<｜Assistant｜></think>", False),
        ("<｜User｜>what is <think>?<｜Assistant｜>", False),
    ],
)
def test_prompt_opens_reasoning(prompt: str, opens: bool) -> None:
    assert ReasoningParser.prompt_opens_reasoning(prompt) is opens
