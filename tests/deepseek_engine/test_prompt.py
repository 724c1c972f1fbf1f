from typing import Any, cast

import pytest
import tokenizers
from deepseek_engine.prompt import PromptReader
from deepseek_engine.scripted import WordTokenizer
from deepseek_engine.text.longest_token import longest_token
from deepseek_engine.text.tokenizer import Tokenizer
from hypothesis import given
from hypothesis import strategies as st
from piccard.installation import demo_checkpoint
from piccard_contract.errors import ErrorCode, RequestError
from piccard_contract.request import GenerateRequest, RequestExtensions
from piccard_contract.sampling import SamplingParams
from toy_tokenizer import toy_tokenizer

WORDS = WordTokenizer()
DEMO = Tokenizer.from_folder(demo_checkpoint())


def read(*, vocab_size: int = WORDS.vocab_size, **request: Any) -> Any:
    request.setdefault("sampling", SamplingParams(max_tokens=4))
    return PromptReader(cast(Tokenizer, WORDS), vocab_size, 10).read(GenerateRequest(id="a", **request))


def refusal(**request: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        read(**request)
    return caught.value


def test_a_text_is_encoded_and_kept() -> None:
    prompt = read(text="one two")
    assert (prompt.ids, prompt.text) == (WORDS.encode("one two"), "one two")


def test_a_chat_is_rendered_with_the_templates_settings() -> None:
    messages = [{"role": "user", "content": "hi"}]
    prompt = read(messages=messages)
    assert prompt.text == "user: hi\nassistant:"
    assert prompt.ids == WORDS.encode(prompt.text)
    assert read(messages=messages, extensions=RequestExtensions(add_generation_prompt=False)).text == "user: hi\n"


def test_ids_are_taken_as_they_are() -> None:
    prompt = read(input_ids=[5, 6])
    assert (prompt.ids, prompt.text) == ([5, 6], None)


def test_the_numbers_are_told_when_prompt_and_max_tokens_are_too_many() -> None:
    error = refusal(text="a b c d e f g")
    assert error.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
    assert "7 tokens" in error.message
    assert "max_tokens 4" in error.message
    assert "context of 10" in error.message
    assert "lower max_tokens to 3" in error.message


def test_a_prompt_that_fills_the_context_is_to_be_shortened() -> None:
    error = refusal(text=" ".join("abcdefghijkl"), sampling=SamplingParams(max_tokens=None))
    assert error.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
    assert "shorten the prompt by 3 tokens" in error.message


def test_min_tokens_have_to_fit_where_max_tokens_are_none() -> None:
    assert len(read(text="a b c", sampling=SamplingParams(max_tokens=None, min_tokens=7)).ids) == 3
    error = refusal(text="a b c", sampling=SamplingParams(max_tokens=None, min_tokens=8))
    assert error.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
    assert "the 7 tokens that the context leaves" in error.message


def test_a_prompt_that_just_fits_passes() -> None:
    assert len(read(text="a b c d e f").ids) == 6


@pytest.mark.parametrize(
    "given",
    [
        {"input_ids": [1, 300]},
        {"input_ids": [1], "output_ids": [300]},
        {"input_ids": [1], "sampling": SamplingParams(max_tokens=2, logit_bias={300: 1.0})},
        {"input_ids": [1], "sampling": SamplingParams(max_tokens=2, stop_token_ids=[300])},
    ],
)
def test_ids_beyond_the_vocabulary_are_refused(given: dict[str, Any]) -> None:
    error = refusal(vocab_size=300, **given)
    assert error.code is ErrorCode.INVALID_TOKEN
    assert "300" in error.message


def test_an_empty_list_of_ids_is_missing_input() -> None:
    assert refusal(input_ids=[]).code is ErrorCode.MISSING_INPUT


def test_a_text_far_too_long_is_refused_without_encoding_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WORDS, "encode", lambda *_, **__: pytest.fail("it was encoded"))
    for prompt in ({"text": "x" * 2**20}, {"messages": [{"role": "user", "content": "x" * 2**20}]}):
        error = refusal(**prompt)
        assert error.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
        assert "tokens at least" in error.message
        assert "shorten it" in error.message


def test_ids_far_too_many_are_refused_without_looking_at_them() -> None:
    # The last is in no vocabulary, which is not worth looking for.
    assert refusal(input_ids=[5] * 2**20 + [-1]).code is ErrorCode.CONTEXT_LENGTH_EXCEEDED


@given(text=st.text(max_size=200))
def test_no_text_has_fewer_tokens_than_are_told_beforehand(text: str) -> None:
    for tokenizer in (WORDS, toy_tokenizer(), DEMO):
        assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))


def test_how_much_a_token_covers_is_known_of_byte_level_tokenizers_alone() -> None:
    assert toy_tokenizer().fewest_tokens("x" * 500) == 100
    assert DEMO.fewest_tokens("x" * 320) == 10
    core = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "<unk>": 1}, [], unk_token="<unk>", fuse_unk=True))
    assert longest_token(core) is None
    core = tokenizers.Tokenizer.from_file(str(demo_checkpoint() / "tokenizer.json"))
    core.normalizer = tokenizers.normalizers.Strip()
    assert longest_token(core) is None
