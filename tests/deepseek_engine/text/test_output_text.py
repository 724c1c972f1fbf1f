import pytest
from deepseek_engine.text import OutputText, Tokenizer
from hypothesis import given
from hypothesis import strategies as st

KINDS = ["byte_level", "llama", "metaspace"]
TEXTS = st.text(st.sampled_from("the a<>x\n度é\U0001f680"), max_size=16)


@st.composite
def choices(draw: st.DrawFn, tokenizer: Tokenizer) -> tuple[list[int], dict]:
    """Ids of one choice, ordinary or arbitrary, and the options of its request."""
    ids = tokenizer.encode(draw(TEXTS), add_special_tokens=False)
    ids += draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12))
    options = {
        "stops": draw(st.lists(st.text(st.sampled_from("the a<\n度\U0001f680"), min_size=1, max_size=4), max_size=3)),
        "include_stop_str_in_output": draw(st.booleans()),
        "skip_special_tokens": draw(st.booleans()),
        "min_tokens": draw(st.integers(0, 8)),
    }
    return ids, options


def finish(output: OutputText, ids: list[int]) -> str:
    return "".join([output.push([token_id])[0] for token_id in ids]) + output.flush()


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_a_resumed_stream_is_the_unbroken_one(small: dict[str, Tokenizer], kind: str, data: st.DataObject) -> None:
    tokenizer = small[kind]
    ids, options = data.draw(choices(tokenizer))
    seam = data.draw(st.integers(0, len(ids)))
    unbroken = OutputText(tokenizer, **options)
    whole = finish(unbroken, ids)

    broken = OutputText(tokenizer, **options)
    sent = "".join([broken.push([token_id])[0] for token_id in ids[:seam]])
    resumed = OutputText(tokenizer, **options, output_ids=ids[:seam])
    assert resumed.num_chars == len(sent)
    assert sent + finish(resumed, ids[seam:]) == whole
    assert (resumed.stop, resumed.num_tokens, resumed.num_chars) == (unbroken.stop, unbroken.num_tokens, len(whole))


@given(data=st.data())
def test_a_v3_stream_resumes_at_every_token(v3: Tokenizer, data: st.DataObject) -> None:
    ids = v3.encode(data.draw(st.text(max_size=12)))
    ids += data.draw(st.lists(st.integers(0, 128814), max_size=8))
    whole = finish(OutputText(v3, ["ab", "\n\n"]), ids)
    for seam in range(len(ids) + 1):
        sent = OutputText(v3, ["ab", "\n\n"]).push(ids[:seam])[0]
        assert sent + finish(OutputText(v3, ["ab", "\n\n"], output_ids=ids[:seam]), ids[seam:]) == whole


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_cuts_do_not_change_what_is_released(small: dict[str, Tokenizer], kind: str, data: st.DataObject) -> None:
    tokenizer = small[kind]
    ids, options = data.draw(choices(tokenizer))
    one, other = OutputText(tokenizer, **options), OutputText(tokenizer, **options)
    at_once = other.push(ids)[0]
    assert "".join([one.push([token_id])[0] for token_id in ids]) == at_once
    assert (one.stop, one.num_tokens) == (other.stop, other.num_tokens)


@given(text=TEXTS)
def test_without_stop_strings_it_is_decode(v3: Tokenizer, text: str) -> None:
    ids = v3.encode(text)
    assert finish(OutputText(v3), ids) == text


def test_half_a_stop_string_before_the_seam_is_sent_after_it(v3: Tokenizer) -> None:
    before, after = v3.encode("It ends.\n\n"), v3.encode("Us two.")
    first = OutputText(v3, ["\n\nUser:"])
    assert first.push(before) == ("It ends.", None)
    resumed = OutputText(v3, ["\n\nUser:"], output_ids=before)
    assert resumed.push(after) == ("\n\nUs two.", None)


def test_a_stop_string_across_the_seam_ends_the_text(v3: Tokenizer) -> None:
    resumed = OutputText(v3, ["\n\nUser:"], output_ids=v3.encode("It ends.\n\n"))
    assert resumed.push(v3.encode("User: and on")) == ("", "\n\nUser:")
    assert resumed.flush() == ""


def test_num_tokens_tells_which_token_completed_the_stop_string(v3: Tokenizer) -> None:
    ids = [v3.encode("a")[0], v3.encode(".")[0], v3.encode("b")[0]]
    output = OutputText(v3, ["."])
    assert output.push(ids) == ("a", ".")
    assert output.num_tokens == 2


def test_stop_strings_wait_for_min_tokens(v3: Tokenizer) -> None:
    dot, letter = v3.encode(".")[0], v3.encode("a")[0]
    output = OutputText(v3, ["."], min_tokens=2)
    assert output.push([dot, dot, letter]) == ("..a", None)
    assert output.push([dot, letter]) == ("", ".")


def test_the_end_releases_what_was_held(v3: Tokenizer) -> None:
    output = OutputText(v3, ["<end>", "\ufffd!"])
    assert output.push(v3.encode("a<en"))[0] == "a"
    half = v3.encode("𓀀")[:1]
    output.push(half)
    assert output.flush() == "<en\ufffd"
    assert output.stop is None
