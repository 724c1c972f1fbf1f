import pytest
from deepseek_engine.scripted.word_tokenizer import END_OF_TEXT, VOCAB_SIZE, WordTokenizer
from deepseek_engine.text.detokenizer import Detokenizer
from hypothesis import given
from hypothesis import strategies as st
from piccard_contract.errors import ErrorCode, RequestError

WORDS = WordTokenizer()


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_decode_is_the_inverse_of_encode(text: str) -> None:
    ids = WORDS.encode(text)
    assert WORDS.decode(ids) == text
    assert WORDS.check_ids(ids) == ids


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])), st.integers(1, 5))
def test_ids_stream_through_the_detokenizer(text: str, size: int) -> None:
    ids = WORDS.encode(text)
    detokenizer = Detokenizer(WORDS)  # type: ignore[arg-type]
    parts = [detokenizer.push(ids[start : start + size]) for start in range(0, len(ids), size)]
    assert "".join(parts) + detokenizer.flush() == text


@given(st.integers(0, VOCAB_SIZE - 1))
def test_every_id_of_the_vocabulary_decodes(token_id: int) -> None:
    assert isinstance(WORDS.decode([token_id]), str)


def test_a_short_word_is_one_token_with_the_space_before_it() -> None:
    assert [WORDS.token_text(token_id) for token_id in WORDS.encode("to be, or")] == ["to", " be,", " or"]


def test_an_id_that_no_text_has_reads_as_its_number() -> None:
    assert WORDS.decode([200_000]) == " #200000"


def test_the_end_of_text_is_special() -> None:
    assert WORDS.decode([END_OF_TEXT]) == ""
    assert WORDS.decode([END_OF_TEXT], skip_special_tokens=False) == "</s>"


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE])
def test_ids_beyond_the_vocabulary_are_refused(token_id: int) -> None:
    with pytest.raises(RequestError) as refusal:
        WORDS.check_ids([1, token_id])
    assert refusal.value.code is ErrorCode.INVALID_TOKEN


def test_a_chat_is_rendered() -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert WORDS.chat_template.render(messages) == "user: hi\nassistant:"
    assert WORDS.chat_template.render(messages, add_generation_prompt=False) == "user: hi\n"
