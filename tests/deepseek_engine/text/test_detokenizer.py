import pytest
from deepseek_engine.text import Detokenizer, Tokenizer
from hypothesis import given
from hypothesis import strategies as st

KINDS = ["byte_level", "llama", "metaspace"]


def stream(tokenizer: Tokenizer, ids: list[int], **options) -> list[str]:
    detokenizer = Detokenizer(tokenizer, **options)
    return [*(detokenizer.push([token_id]) for token_id in ids), detokenizer.flush()]


@st.composite
def v3_ids(draw: st.DrawFn) -> list[int]:
    """Ids from all over V3's vocabulary: single bytes, common tokens, special ones, and some that no token has."""
    kinds = st.one_of(st.integers(3, 300), st.integers(0, 127999), st.integers(127995, 128820), st.integers(0, 2))
    return draw(st.lists(kinds, max_size=40))


@given(ids=v3_ids(), skip=st.booleans())
def test_v3_stream_is_decode_of_all(v3: Tokenizer, ids: list[int], skip: bool) -> None:
    assert "".join(stream(v3, ids, skip_special_tokens=skip)) == v3.decode(ids, skip_special_tokens=skip)


@given(data=st.data(), skip=st.booleans())
def test_byte_level_stream_is_decode_of_all(small: dict[str, Tokenizer], data: st.DataObject, skip: bool) -> None:
    tokenizer = small["byte_level"]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=60))
    assert "".join(stream(tokenizer, ids, skip_special_tokens=skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(), skip=st.booleans())
def test_text_of_every_kind_is_streamed(small: dict[str, Tokenizer], kind: str, text: str, skip: bool) -> None:
    tokenizer = small[kind]
    ids = tokenizer.encode(text)
    assert "".join(stream(tokenizer, ids, skip_special_tokens=skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(data=st.data(), skip=st.booleans())
def test_metaspace_tokens_in_any_order_are_decode_of_all(
    small: dict[str, Tokenizer], data: st.DataObject, skip: bool
) -> None:
    tokenizer = small["metaspace"]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    assert "".join(stream(tokenizer, ids, skip_special_tokens=skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(data=st.data(), skip=st.booleans())
def test_llama_tokens_without_broken_bytes_are_decode_of_all(
    small: dict[str, Tokenizer], data: st.DataObject, skip: bool
) -> None:
    tokenizer = small["llama"]
    ascii_or_words = st.integers(3, 3 + 0x7F) | st.integers(3 + 256, tokenizer.vocab_size - 1) | st.integers(0, 2)
    ids = data.draw(st.lists(ascii_or_words, max_size=40))
    assert "".join(stream(tokenizer, ids, skip_special_tokens=skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(data=st.data())
def test_cuts_do_not_change_the_text(v3: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(v3_ids())
    cut = data.draw(st.integers(0, len(ids)))
    detokenizer = Detokenizer(v3)
    assert detokenizer.push(ids[:cut]) + detokenizer.push(ids[cut:]) + detokenizer.flush() == v3.decode(ids)


@given(data=st.data())
def test_a_prefix_gives_the_rest_of_the_text(v3: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(v3_ids())
    cut = data.draw(st.integers(0, len(ids)))
    before = Detokenizer(v3).push(ids[:cut])
    resumed = Detokenizer(v3, prefix_ids=ids[:cut])
    assert before + resumed.push(ids[cut:]) + resumed.flush() == v3.decode(ids)


@pytest.mark.parametrize("kind", ["byte_level", "llama"])
def test_a_split_character_is_held_back_until_whole(small: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = small[kind]
    before = tokenizer.encode("fox", add_special_tokens=False)
    ids = tokenizer.encode("fox\U0001f680", add_special_tokens=False)
    held = len(ids) - len(before) - 1
    assert held > 0
    pieces = stream(tokenizer, ids)
    assert "".join(pieces[: len(before)]) == "fox"
    assert pieces[len(before) :] == [*[""] * held, "\U0001f680", ""]


@pytest.mark.parametrize(("kind", "replacement"), [("byte_level", "\ufffd"), ("llama", "\ufffd" * 3)])
def test_an_unfinished_character_ends_as_the_library_writes_it(
    small: dict[str, Tokenizer], kind: str, replacement: str
) -> None:
    tokenizer = small[kind]
    ids = tokenizer.encode("a\U0001f680", add_special_tokens=False)[:-1]
    assert stream(tokenizer, ids)[-1] == replacement
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


def test_half_a_character_in_the_prefix_is_completed(v3: Tokenizer) -> None:
    ids = v3.encode("𓀀")
    assert len(ids) > 1
    resumed = Detokenizer(v3, prefix_ids=ids[:-1])
    assert resumed.push(ids[-1:]) == "𓀀"


def test_the_leading_space_is_dropped_only_at_the_start(small: dict[str, Tokenizer]) -> None:
    tokenizer = small["llama"]
    ids = tokenizer.encode("the the", add_special_tokens=False)
    assert "".join(stream(tokenizer, ids)) == "the the"
    assert "".join(stream(tokenizer, ids, prefix_ids=[3 + ord("x")])) == " the the"
    assert "".join(stream(tokenizer, [tokenizer.bos_token_id, *ids])) == "the the"
