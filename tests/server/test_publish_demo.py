"""The life of a real checkpoint on a real server: published with its code and hashes, canary, stable, rolled back.

Stable runs on torch and what is published on ONNX Runtime, so that two implementations answer the same prompts.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from deepseek_engine.request import EngineRequest
from deepseek_engine.torch_version import open_torch
from entry_points import ENTRY_POINTS
from piccard.home_init import init_home
from piccard.probe import GOLDEN_PROMPTS, GOLDEN_TOKENS
from piccard.snapshot import CODE_FOLDER, checkpoint_hashes, code_hash
from piccard_contract.code_hash import ENGINE_PACKAGES
from piccard_contract.home import version_owner
from piccard_contract.lifecycle import VersionState
from piccard_contract.sampling import SamplingParams
from piccard_contract.version_file import Runner, VersionFile, read_version_file
from piccard_gateway.fill_in_middle import with_gap
from piccard_server import RunningServer, wait_for
from running_stream import RunningStream
from short_calls import answers_gateway

DEMO = Path(__file__).parents[2] / "assets" / "demo"
PROMPT = "def fibonacci(n):"
GREEDY = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
# Some seconds of tokens, during which its version is promoted and rolled back.
LONG = {"max_tokens": 600, "temperature": 0, "ignore_eos": True}
SETTINGS = {"runner": Runner.TORCH, "memory": "256MiB", "device": "cpu"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server, with its gateway, whose version 1, stable, is the demo checkpoint with the installed engine."""
    home = tmp_path_factory.mktemp("demo") / "home"
    stable = VersionFile.model_validate({"label": "v1.0.0", "checkpoint": str(DEMO), "linked": True, **SETTINGS})
    init_home(home, {1: stable})
    running = RunningServer(home, "--gateway")
    try:
        running.wait_ready()
        wait_for(lambda: answers_gateway(running), 60, "the gateway")
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="module")
def expected() -> list[int]:
    """What the engine continues the prompt with, alone and in this process."""
    file = VersionFile.model_validate({"label": "alone", "checkpoint": str(DEMO), **SETTINGS})
    version = open_torch(file, checkpoint=DEMO, progress=lambda share: None, threads=1)
    version.backend.add(EngineRequest("a", version.tokenizer.encode(PROMPT), SamplingParams(**GREEDY)))
    tokens: list[int] = []
    while version.backend.has_work():
        tokens += [token for output in version.backend.step() for token in output.token_ids]
    assert len(tokens) == GREEDY["max_tokens"]
    return tokens


def ask(server: RunningServer, canary: str, version: int, reason: str, expected: list[int]) -> None:
    """A stream has to come from `version` for `reason`, whole, with the tokens that the engine gives alone."""
    inputs = {"text_input": PROMPT, "stream": True, "sampling_parameters": GREEDY}
    answer = ENTRY_POINTS["grpc_stream"](server, {"X-Canary": canary}, {}, inputs)
    assert answer.code == "OK", answer.error_text
    assert {response["served_version"][0] for response in answer.responses} == {version}
    assert answer.reason == reason
    assert answer.token_ids == expected
    assert answer.details["finish_reasons"] == ["length"]


def assert_published(server: RunningServer, version: int) -> None:
    """The folder holds what was published and the process runs that, after it has answered the golden prompts."""
    folder = server.service.version_folder(version)
    file = read_version_file(folder)
    assert (file.runner, file.linked, file.label) == (Runner.ONNXRUNTIME, False, "v1.1.0")
    assert Path(file.checkpoint) == DEMO
    parts = checkpoint_hashes(DEMO)
    assert None not in (parts.weights, parts.tokenizer, parts.template)
    made = {"export": Path(str(file.export)).name, "ops_library": Path(str(file.ops_library)).stem}
    assert file.hashes == parts.model_copy(update={"code": code_hash(folder / CODE_FOLDER), **made})
    for package in ENGINE_PACKAGES:
        assert (folder / CODE_FOLDER / package / "__init__.py").is_file()
    report = server.report(version_owner(version))
    assert report["phase"] == "ready"
    assert report["runner"] == "onnxruntime"
    assert report["code_hash"] == file.hashes.code
    assert report["tokenizer_hash"] == file.hashes.tokenizer


def generated(server: RunningServer, version: int) -> int:
    tokens: int = server.report(version_owner(version))["tokens_generated"]
    return tokens


def test_the_gateway_fills_the_gap_between_two_texts(server: RunningServer) -> None:
    asked = with_gap("def add(a, b):\n    ", "\n    return total\n")
    inputs = {"text_input": asked, "stream": True, "sampling_parameters": GREEDY}
    answer = ENTRY_POINTS["grpc_stream"](server, {}, {}, inputs)
    assert answer.code == "OK", answer.error_text
    client = openai.OpenAI(base_url=f"http://{server.gateway}/v1", api_key="none", max_retries=0, timeout=60)
    filled = client.completions.create(
        model="deepseek",
        prompt="def add(a, b):\n    ",
        suffix="\n    return total\n",
        max_tokens=GREEDY["max_tokens"],
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert filled.choices[0].text == answer.text
    plain = client.completions.create(
        model="deepseek",
        prompt="def add(a, b):\n    ",
        max_tokens=GREEDY["max_tokens"],
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert filled.usage is not None
    assert plain.usage is not None
    assert filled.usage.prompt_tokens > plain.usage.prompt_tokens


@pytest.mark.usefixtures("library")
def test_the_demo_is_published_canaried_promoted_and_rolled_back(server: RunningServer, expected: list[int]) -> None:
    options = ("--runner=onnxruntime", "--label=v1.1.0", "--memory=256MiB", "--device=cpu", "--json")
    told = server.piccard("publish", str(DEMO), *options)
    assert json.loads(told.stdout)["after"]["version"] == 2
    assert "probing version 2" in told.stderr
    assert server.state().versions[2].state is VersionState.READY
    assert_published(server, 2)
    # Every golden prompt twice; nobody else has asked it yet.
    golden = 2 * len(GOLDEN_PROMPTS) * GOLDEN_TOKENS
    wait_for(lambda: generated(server, 2) >= golden, 60, "the golden prompts in the report")
    ask(server, "true", 1, "canary_unavailable", expected)

    server.piccard("canary", "set", "--version=2", "--ratio=0")
    ask(server, "true", 2, "header", expected)
    ask(server, "false", 1, "header", expected)

    running = RunningStream(
        server.grpc,
        server.service.ensemble,
        headers={"x-canary": "true"},
        timeout=300.0,
        text_input=PROMPT,
        sampling_parameters=LONG,
    ).wait_first()
    server.piccard("promote", "2")
    ask(server, "false", 2, "header", expected)

    server.piccard("rollback")
    ask(server, "false", 1, "header", expected)

    running.wait()
    assert (running.error, running.status, running.versions) == (None, "OK", {2})
    assert len(running.token_ids) == LONG["max_tokens"]
    assert running.token_ids[: len(expected)] == expected
    state = server.state()
    assert (state.stable, state.previous, state.canary) == (1, 2, None)
