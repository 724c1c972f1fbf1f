import pytest
from deepseek_engine.text import StopStrings
from hypothesis import given
from hypothesis import strategies as st

# Few letters, so that stop strings overlap each other and themselves.
LETTERS = st.text("ab<", max_size=12)
STOPS = st.lists(st.text("ab<", min_size=1, max_size=4), max_size=4)


def expected(text: str, stops: list[str], include: bool, start: int = 0) -> tuple[str, str | None]:
    """The text up to the stop string that is complete first after `start`, by trying every end."""
    for end in range(start + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def run(strings: StopStrings, pieces: list[str]) -> tuple[str, str | None]:
    released = [strings.push(piece)[0] for piece in pieces]
    return "".join(released) + strings.flush(), strings.stop


@given(pieces=st.lists(LETTERS, max_size=6), stops=STOPS, include=st.booleans())
def test_the_stop_string_complete_first_ends_the_text(pieces: list[str], stops: list[str], include: bool) -> None:
    assert run(StopStrings(stops, include), pieces) == expected("".join(pieces), stops, include)


@given(pieces=st.lists(LETTERS, max_size=6), stops=STOPS)
def test_nothing_leaks_and_nothing_is_held_without_need(pieces: list[str], stops: list[str]) -> None:
    strings, pushed, released = StopStrings(stops), "", ""
    for piece in pieces:
        pushed += piece
        text, stop = strings.push(piece)
        released += text
        if stop is not None:
            return
        beginnings = [pushed[i:] for i in range(len(pushed)) if any(s.startswith(pushed[i:]) for s in stops)]
        assert pushed == released + max(beginnings, key=len, default="")


@given(seen=LETTERS, pieces=st.lists(LETTERS, max_size=4), stops=STOPS, include=st.booleans())
def test_a_stop_string_across_the_seam_is_found_and_nothing_sent_again(
    seen: str, pieces: list[str], stops: list[str], include: bool
) -> None:
    text, stop = expected(seen + "".join(pieces), stops, include, start=len(seen))
    assert run(StopStrings(stops, include, seen=seen), pieces) == (text[len(seen) :], stop)


@given(early=LETTERS, late=LETTERS, stops=STOPS, include=st.booleans())
def test_text_that_may_not_match_still_begins_stop_strings(
    early: str, late: str, stops: list[str], include: bool
) -> None:
    strings = StopStrings(stops, include)
    begun, stop = strings.push(early, match=False)
    assert stop is None
    rest, stop = run(strings, [late])
    text, expected_stop = expected(early + late, stops, include, start=len(early))
    assert stop == expected_stop
    assert (begun + rest) == text or (len(text) < len(begun) and rest == "")


@pytest.mark.parametrize(
    ("stops", "pieces", "released", "stop"),
    [
        (["\n\nUser:"], ["Hi", "\n", "\nUse", "r: no"], ["Hi", "", "", ""], "\n\nUser:"),
        (["\n\nUser:"], ["Hi\n", "\nUs", " all"], ["Hi", "", "\n\nUs all"], None),
        (["abcd", "bc"], ["ab", "cd"], ["", "a"], "bc"),
        (["bc", "abc"], ["abc"], [""], "abc"),
        (["aab"], ["aaaab"], ["aa"], "aab"),
        (["。"], ["停。了"], ["停"], "。"),
    ],
    ids=["across pushes", "false alarm", "first complete", "longest of one end", "self-overlap", "one letter"],
)
def test_examples(stops: list[str], pieces: list[str], released: list[str], stop: str | None) -> None:
    strings = StopStrings(stops)
    assert [strings.push(piece)[0] for piece in pieces] == released
    assert strings.stop == stop


def test_after_a_match_nothing_more_is_released() -> None:
    strings = StopStrings(["."], include_stop_str_in_output=True)
    assert strings.push("a.b") == ("a.", ".")
    assert strings.push("c") == ("", ".")
    assert strings.flush() == ""


def test_choices_do_not_share_state() -> None:
    one, other = StopStrings(["xy"]), StopStrings(["xy"])
    assert one.push("x") == ("", None)
    assert other.push("y") == ("y", None)
