"""Versions with a real checkpoint on a real server: what the engine says alone is what a client gets."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deepseek_engine.request import EngineRequest
from deepseek_engine.torch_version import open_torch
from piccard.home_init import init_home
from piccard_contract.home import version_owner
from piccard_contract.sampling import SamplingParams
from piccard_contract.version_file import Runner, VersionFile
from piccard_server import RunningServer, wait_for
from triton_calls import GrpcStream, Outputs, grpc_stream, text_of

LLM = "deepseek_llm"
PROMPT = "def fibonacci(n):"
GREEDY = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
SEEDED = {"max_tokens": 40, "temperature": 1.0, "seed": 7, "ignore_eos": True}


def version_file(checkpoint: Path, **settings: Any) -> VersionFile:
    settings = {"label": "v1", "runner": Runner.TORCH, "memory": "64MiB", "linked": True, "device": "cpu", **settings}
    return VersionFile.model_validate({"checkpoint": str(checkpoint), **settings})


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[RunningServer]:
    """Version 1 as it should be; version 2's checkpoint has no weights."""
    broken = tmp_path_factory.mktemp("broken")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (broken / name).write_bytes((checkpoint / name).read_bytes())
    home = tmp_path_factory.mktemp("torch") / "home"
    init_home(home, {1: version_file(checkpoint), 2: version_file(broken)})
    running = RunningServer(home)
    try:
        wait_for(lambda: running.get("readyz")[0] == 200, 90, "version 1")
        yield running
    finally:
        running.stop()


def call(server: RunningServer, **inputs: Any) -> list[Outputs]:
    inputs.setdefault("text_input", PROMPT)
    return grpc_stream(server.grpc, LLM, version="1", stream=True, **inputs)


def ids_of(responses: list[Outputs]) -> list[int]:
    return [token for response in responses for token in response["token_ids"]]


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED])
def test_a_client_gets_what_the_engine_says_alone(
    server: RunningServer, checkpoint: Path, sampling: dict[str, Any]
) -> None:
    version = open_torch(version_file(checkpoint), checkpoint=checkpoint, progress=lambda share: None)
    version.backend.add(EngineRequest("a", version.tokenizer.encode(PROMPT), SamplingParams(**sampling)))
    outputs = []
    while version.backend.has_work():
        outputs += version.backend.step()
    responses = call(server, sampling_parameters=sampling)
    assert ids_of(responses) == [token for output in outputs for token in output.token_ids]
    assert text_of(responses) == "".join(output.text for output in outputs)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED])
def test_eight_streams_at_once_say_what_one_says(server: RunningServer, sampling: dict[str, Any]) -> None:
    alone = ids_of(call(server, sampling_parameters=sampling))
    streams = [GrpcStream(server.grpc) for _ in range(8)]
    for stream in streams:
        stream.send(LLM, version="1", text_input=PROMPT, stream=True, sampling_parameters=sampling)
    together = [ids_of(list(stream.responses())) for stream in streams]
    for stream in streams:
        stream.__exit__()
    assert together == [alone] * 8


@pytest.mark.parametrize("cut", [1, 5, 39])
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED])
def test_a_resumed_stream_equals_the_unbroken_one(server: RunningServer, sampling: dict[str, Any], cut: int) -> None:
    whole = ids_of(call(server, sampling_parameters=sampling))
    rest = call(server, sampling_parameters=sampling, output_ids=whole[:cut])
    assert whole[:cut] + ids_of(rest) == whole
    assert json.loads(rest[-1]["details"][0])["usage"]["completion_tokens"] == 40


def test_what_serves_its_operators_is_told(server: RunningServer) -> None:
    found = json.loads(server.piccard("status", "--verbose", "--json").stdout)["versions"][0]["operators"]
    assert {"linear", "mla_attention", "moe_experts"} <= {use["operator"] for use in found["operators"]}
    assert found["pid"] == server.pid(version_owner(1))
    assert found["fallbacks"] == {}
    (note,) = [
        note
        for note in json.loads(server.piccard("doctor", "--json", check=False).stdout)["after"]["notes"]
        if note.startswith("version 1")
    ]
    assert "version 1 on cpu (float32)" in note
    wait_for(
        lambda: server.metric("piccard_operators_fused_share", version="1") == pytest.approx(found["fused_share"]),
        60,
        "the metric",
    )


def test_a_cancel_returns_the_blocks(server: RunningServer) -> None:
    def idle_since(moment: float) -> bool:
        section = server.section(version_owner(1))
        assert section is not None
        return section.updated_at > moment and section.data["total_blocks"] == section.data["free_blocks"]

    with GrpcStream(server.grpc) as stream:
        stream.send(
            LLM,
            version="1",
            text_input=PROMPT,
            stream=True,
            sampling_parameters={"max_tokens": 450, "ignore_eos": True},
        )
        first, _ = stream.next()
        call(server, text_input="", extensions={"cancel": first["cancel_token"][0]})
        last = list(stream.responses())[-1]
    assert json.loads(last["status"][0])["code"] == "CANCELLED"
    ended = time.time()
    wait_for(lambda: idle_since(ended), 60, "the blocks to return")


def test_beyond_the_context_is_refused_with_the_numbers(server: RunningServer) -> None:
    status = json.loads(call(server, sampling_parameters={"max_tokens": 511})[-1]["status"][0])
    assert status["code"] == "CONTEXT_LENGTH_EXCEEDED"
    assert "512" in status["message"]


def test_a_version_that_cannot_be_loaded_tells_why_and_harms_no_other(server: RunningServer) -> None:
    wait_for(lambda: server.section(version_owner(2)), 60, "version 2's report")
    wait_for(lambda: (found := server.section(version_owner(2))) and found.data["phase"] == "failed", 60, "it to fail")
    assert "model.safetensors is missing" in server.report(version_owner(2))["reason"]
    assert len(ids_of(call(server, sampling_parameters=GREEDY))) == 40


def test_the_report_tells_what_the_version_is(server: RunningServer) -> None:
    report = server.report(version_owner(1))
    told = {key: report[key] for key in ("phase", "label", "runner", "device", "max_model_len", "vocab_size")}
    assert told == {
        "phase": "ready",
        "label": "v1",
        "runner": "torch",
        "device": "cpu",
        "max_model_len": 512,
        "vocab_size": 320,
    }
    assert report["total_blocks"] > 100
    assert len(report["tokenizer_hash"]) == 64
