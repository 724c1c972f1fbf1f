import hashlib
import json
from pathlib import Path

import pytest
from deepseek_engine.text import Tokenizer, TokenizerError
from hypothesis import given
from hypothesis import strategies as st
from piccard_contract.errors import ErrorCode, RequestError

BOS = "<｜begin▁of▁sentence｜>"


def test_v3_ids(v3: Tokenizer) -> None:
    assert v3.encode("hello world") == [33310, 2058]
    assert v3.decode([33310, 2058]) == "hello world"
    assert (v3.bos_token_id, v3.eos_token_id, v3.eos_token_ids) == (0, 1, (1,))
    assert v3.vocab_size == 128815


@pytest.mark.parametrize(
    ("text", "token_id"),
    [(BOS, 0), ("<think>", 128798), ("</think>", 128799), ("<｜fim▁hole｜>", 128800), ("<｜User｜>", 128803)],
)
def test_v3_special_tokens_in_text_are_one_id(v3: Tokenizer, text: str, token_id: int) -> None:
    assert v3.encode(text) == [token_id]
    assert v3.token_text(token_id) == text


def test_role_tokens_are_kept_and_special_ones_skipped(v3: Tokenizer) -> None:
    ids = [0, 128803, 33310, 128798, 1]
    assert v3.decode(ids) == "<｜User｜>hello<think>"
    assert v3.decode(ids, skip_special_tokens=False) == f"{BOS}<｜User｜>hello<think><｜end▁of▁sentence｜>"


@given(text=st.text())
def test_text_survives_a_round_trip(v3: Tokenizer, text: str) -> None:
    assert v3.decode(v3.encode(text), skip_special_tokens=False) == text


def test_bos_is_added_once(make) -> None:
    tokenizer = make(tokenizer_config={"bos_token": "<bos>", "eos_token": "<eos>", "add_bos_token": True})
    bos = tokenizer.bos_token_id
    ids = tokenizer.encode("the dog")
    assert ids.count(bos) == 1
    assert ids[0] == bos
    assert tokenizer.encode("<bos>the dog") == ids
    assert tokenizer.encode("the dog", add_special_tokens=False) == ids[1:]
    assert tokenizer.encode("") == [bos]


@pytest.mark.parametrize(
    ("config", "adds"),
    [
        ({"bos_token": "<bos>", "add_bos_token": False}, False),
        ({"bos_token": "<bos>", "add_bos_token": True}, True),
        ({"bos_token": None, "add_bos_token": True}, False),
        ({"bos_token": "<bos>", "tokenizer_class": "LlamaTokenizerFast"}, True),
        ({"bos_token": "<bos>", "tokenizer_class": "PreTrainedTokenizerFast"}, False),
        ({"bos_token": {"__type": "AddedToken", "content": "<bos>"}, "add_bos_token": True}, True),
    ],
    ids=str,
)
def test_add_bos_token_is_honoured(make, config: dict, adds: bool) -> None:
    tokenizer = make(tokenizer_config=config)
    assert tokenizer.add_bos_token is adds
    assert (tokenizer.encode("dog")[:1] == tokenizer.encode("<bos>", add_special_tokens=False)) is adds


def test_a_post_processor_that_adds_bos_decides_where_the_config_is_silent(tmp_path: Path, make) -> None:
    make()
    path = tmp_path / "checkpoint" / "tokenizer.json"
    core = json.loads(path.read_text(encoding="utf-8"))
    core["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<bos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<bos>": {"id": "<bos>", "ids": [0], "tokens": ["<bos>"]}},
    }
    path.write_text(json.dumps(core), encoding="utf-8")
    path.with_name("tokenizer_config.json").write_text('{"bos_token": "<bos>"}', encoding="utf-8")
    tokenizer = Tokenizer.from_folder(path.parent)
    assert tokenizer.encode("dog").count(0) == 1
    assert tokenizer.encode("<bos>dog") == tokenizer.encode("dog")


@pytest.mark.parametrize(
    ("files", "eos", "every_eos"),
    [
        ({"tokenizer_config": {"eos_token": "<eos>"}}, 1, (1,)),
        ({"config": {"eos_token_id": 7}}, 7, (7,)),
        ({"config": {"eos_token_id": 7}, "generation_config": {"eos_token_id": [8, 9]}}, 8, (8, 9)),
        ({"tokenizer_config": {"eos_token": "<eos>"}, "generation_config": {"eos_token_id": [9, 1]}}, 1, (1, 9)),
        ({"special_tokens_map": {"eos_token": "<eos>"}, "config": {"eos_token_id": None}}, 1, (1,)),
        ({}, None, ()),
    ],
    ids=str,
)
def test_eos_ids_are_gathered(make, files: dict, eos: int | None, every_eos: tuple[int, ...]) -> None:
    tokenizer = make(**files)
    assert tokenizer.eos_token_id == eos
    assert tokenizer.eos_token_ids == every_eos


def test_named_special_tokens_are_skipped_even_if_tokenizer_json_calls_them_ordinary(make) -> None:
    plain = make()
    ids = plain.encode("<think>dog")
    assert plain.decode(ids) == "<think>dog"
    marked = make(tokenizer_config={"additional_special_tokens": ["<think>"]})
    assert marked.encode("<think>dog") == ids
    assert marked.decode(ids) == "dog"
    assert marked.vocab_size == plain.vocab_size


def test_truncation_and_padding_left_in_the_file_are_ignored(tmp_path: Path, make) -> None:
    plain = make()
    path = tmp_path / "checkpoint" / "tokenizer.json"
    text = "the quick brown fox"
    core = json.loads(path.read_text(encoding="utf-8"))
    core["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(core), encoding="utf-8")
    ids = Tokenizer.from_folder(path.parent).encode(text)
    assert len(ids) > 2
    assert ids == plain.encode(text)


def test_hashes(v3: Tokenizer, v3_folder: Path, make) -> None:
    assert v3.hash() == hashlib.sha256((v3_folder / "tokenizer.json").read_bytes()).hexdigest()
    one = make(tokenizer_config={"chat_template": "{{ messages }}", "bos_token": "<bos>"})
    same = make(tokenizer_config={"chat_template": "{{ messages }}", "bos_token": "<bos>"})
    other = make(tokenizer_config={"chat_template": "{{ messages }}!", "bos_token": "<bos>"})
    another_bos = make(tokenizer_config={"chat_template": "{{ messages }}", "bos_token": "<eos>"})
    assert one.hash() == same.hash() == other.hash()
    assert one.template_hash() == same.template_hash()
    assert len({one.template_hash(), other.template_hash(), another_bos.template_hash()}) == 3


def test_token_text_keeps_what_decoding_alone_would_strip(small: dict[str, Tokenizer]) -> None:
    tokenizer = small["llama"]
    (the,) = [i for i in range(tokenizer.vocab_size) if tokenizer.token_text(i) == " the"]
    assert tokenizer.decode([the]) == "the"
    assert tokenizer.token_text(3 + 0xE4) == "\ufffd"


def test_ids_of_a_client_are_checked(v3: Tokenizer) -> None:
    assert v3.check_ids([0, 128814]) == [0, 128814]
    assert v3.check_ids([129279], vocab_size=129280) == [129279]


@pytest.mark.parametrize(
    ("ids", "code"),
    [
        ([5, 128815], ErrorCode.INVALID_TOKEN),
        ([-1], ErrorCode.INVALID_TOKEN),
        ([True], ErrorCode.INVALID_VALUE),
        ([1.0], ErrorCode.INVALID_VALUE),
        (["1"], ErrorCode.INVALID_VALUE),
    ],
    ids=str,
)
def test_bad_ids_are_named(v3: Tokenizer, ids: list, code: ErrorCode) -> None:
    with pytest.raises(RequestError) as caught:
        v3.check_ids(ids)
    assert caught.value.code == code
    assert repr(ids[-1]) in caught.value.message
    assert "send" in caught.value.message


def test_a_lone_surrogate_is_an_encoding_error(v3: Tokenizer) -> None:
    with pytest.raises(RequestError, match="surrogate") as caught:
        v3.encode("a\ud800b")
    assert caught.value.code == ErrorCode.INVALID_ENCODING


@pytest.mark.parametrize(
    ("files", "hint"),
    [
        ({"tokenizer_config": []}, "not a JSON object"),
        ({"tokenizer_config": {"bos_token": "<missing>"}}, "<missing>"),
        ({"tokenizer_config": {"bos_token": 3}}, "bos_token is 3"),
        ({"tokenizer_config": {"add_bos_token": "yes"}}, "true or false"),
        ({"tokenizer_config": {"additional_special_tokens": "x"}}, "list of tokens"),
        ({"tokenizer_config": {"chat_template": {"default": "x"}}}, "chat_template"),
        ({"tokenizer_config": {"chat_template": [{"name": "default"}]}}, "chat_template"),
        ({"tokenizer_config": {"chat_template": "{% if %}"}}, "line 1"),
        ({"generation_config": {"eos_token_id": "1"}}, "eos_token_id"),
        ({"generation_config": {"eos_token_id": [1, -1]}}, "eos_token_id"),
    ],
    ids=str,
)
def test_bad_files_are_named(make, files: dict, hint: str) -> None:
    with pytest.raises(TokenizerError, match=hint):
        make(**files)


def test_missing_and_damaged_tokenizer_json_are_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="No such file"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "mod')
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is not a tokenizer"):
        Tokenizer.from_folder(tmp_path)


def test_a_decoder_that_cannot_be_streamed_is_refused(tmp_path: Path, make) -> None:
    make()
    path = tmp_path / "checkpoint" / "tokenizer.json"
    core = json.loads(path.read_text(encoding="utf-8"))
    core["decoder"] = {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True}
    path.write_text(json.dumps(core), encoding="utf-8")
    with pytest.raises(TokenizerError, match="CTC"):
        Tokenizer.from_folder(path.parent)
