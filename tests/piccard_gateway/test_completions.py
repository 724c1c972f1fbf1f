"""/v1/completions over a generator with knobs."""

import json
from pathlib import Path
from typing import Any

import pytest
from gateway_fakes import FakeGateway, events
from piccard_contract.version_file import VersionFile
from piccard_gateway.fill_in_middle import BEGIN, END, HOLE

PATH = "/v1/completions"
BODY: dict[str, Any] = {"model": "deepseek", "prompt": "a b"}


def test_a_whole_answer(gateway: FakeGateway) -> None:
    body = gateway.post(PATH, BODY).json()
    assert body["object"] == "text_completion"
    assert body["choices"] == [{"index": 0, "text": "Hello world", "logprobs": None, "finish_reason": "length"}]
    assert gateway.generator.asked[0].text == "a b"


def test_several_prompts_and_choices(gateway: FakeGateway) -> None:
    body = {**BODY, "prompt": ["x", "y"], "n": 2, "echo": True}
    choices = gateway.post(PATH, body).json()["choices"]
    assert [(item["index"], item["text"]) for item in choices] == [
        (0, "xHello world"),
        (1, "xHello world"),
        (2, "yHello world"),
        (3, "yHello world"),
    ]
    texts = dict.fromkeys(range(4), "")
    for item in events(gateway.post(PATH, {**body, "stream": True}))[:-1]:
        texts[item["choices"][0]["index"]] += item["choices"][0]["text"]
    assert texts == {item["index"]: item["text"] for item in choices}


@pytest.mark.parametrize(("prompt", "asked"), [([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])])
def test_prompts_of_token_ids(gateway: FakeGateway, prompt: Any, asked: list[list[int]]) -> None:
    assert gateway.post(PATH, {**BODY, "prompt": prompt}).status_code == 200
    assert [generation.input_ids for generation in gateway.generator.asked] == asked


def test_log_probabilities_of_an_echoed_prompt(gateway: FakeGateway) -> None:
    body = {**BODY, "echo": True, "logprobs": 1}
    choice = gateway.post(PATH, body).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["a", " b", "Hello", " world"]
    assert logprobs["token_logprobs"] == [None, -1.5, -0.5, -0.5]
    assert logprobs["top_logprobs"][2] == {"other": -0.1}
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(token)
    parts = [item["choices"][0]["logprobs"] for item in events(gateway.post(PATH, {**body, "stream": True}))[:-1]]
    streamed = {name: [value for part in parts if part for value in part[name]] for name in logprobs}
    assert streamed == logprobs


@pytest.mark.parametrize("two", [2, 2.0, "2", "2.0"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_number_may_be_sent_in_any_form(gateway: FakeGateway, two: Any, stream: bool) -> None:
    body = {**BODY, "prompt": ["x", "y"], "n": two, "max_tokens": two, "logprobs": two, "stream": stream}
    answer = gateway.post(PATH, body)
    told = events(answer)[:-1] if stream else [answer.json()]
    indices = [choice["index"] for item in told for choice in item["choices"]]
    assert all(isinstance(index, int) for index in indices)
    assert set(indices) == {0, 1, 2, 3}
    assert gateway.generator.asked[0].sampling == {"n": 2, "max_tokens": 2, "logprobs": 2}


def publish(gateway: FakeGateway, version: int, checkpoint: Path, tokens: list[str]) -> None:
    checkpoint.mkdir()
    (checkpoint / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"content": token} for token in tokens]}))
    folder = gateway.service.version_folder(version)
    folder.mkdir(parents=True)
    (folder / "version.yaml").write_text(VersionFile(label="v1", checkpoint=str(checkpoint)).dump())


def test_a_gap_is_filled_where_all_that_serve_have_the_tokens(gateway: FakeGateway, tmp_path: Path) -> None:
    for version in (1, 2):
        publish(gateway, version, tmp_path / f"c{version}", [BEGIN, HOLE, END])
    assert gateway.post(PATH, {**BODY, "suffix": "z"}).status_code == 200
    assert gateway.generator.asked[0].text == f"{BEGIN}a b{HOLE}z{END}"


def test_a_gap_is_refused_where_one_lacks_them(gateway: FakeGateway, tmp_path: Path) -> None:
    publish(gateway, 1, tmp_path / "c1", [BEGIN, HOLE, END])
    publish(gateway, 2, tmp_path / "c2", [BEGIN])
    answer = gateway.post(PATH, {**BODY, "suffix": "z"})
    assert answer.status_code == 422
    assert "version 2" in answer.json()["error"]["message"]
    assert gateway.post(PATH, {**BODY, "suffix": "z", "version": 1}).status_code == 200


@pytest.mark.parametrize(
    ("more", "status"),
    [
        ({"prompt": []}, 400),
        ({"prompt": ""}, 400),
        ({"prompt": ["x"] * 65}, 413),
        ({"prompt": [2**63]}, 400),
        ({"prompt": [[1], [-(2**63)]]}, 400),
        ({"prompt": [10**30]}, 400),
        ({"prompt_logprobs": 1}, 422),
        ({"detokenize": False}, 422),
        ({"prompt": [1], "echo": True}, 422),
        ({"suffix": "z", "echo": True}, 400),
        ({"best_of": 3}, 422),
        ({"logprobs": 21}, 400),
    ],
)
def test_refusals(gateway: FakeGateway, more: dict[str, Any], status: int) -> None:
    assert gateway.post(PATH, {**BODY, **more}).status_code == status
    assert gateway.generator.asked == []


def test_models_and_health(gateway: FakeGateway) -> None:
    assert [model["id"] for model in gateway.get("/v1/models").json()["data"]] == ["deepseek"]
    assert gateway.get("/v1/models/deepseek").json()["object"] == "model"
    assert gateway.get("/v1/models/none").json()["error"]["code"] == "model_not_found"
    assert gateway.get("/health").status_code == 200
    gateway.generator.alive = False
    assert gateway.get("/health").status_code == 503
    assert gateway.get("/elsewhere").json()["error"]["code"] == "not_found"
    assert gateway.get(PATH).status_code == 405
    assert gateway.post(f"{PATH}/", BODY).json()["error"]["code"] == "not_found"
