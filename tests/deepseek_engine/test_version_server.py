import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepseek_engine import version_server
from deepseek_engine.callers import Callers
from deepseek_engine.departures import Departures
from deepseek_engine.request import EngineOutput
from deepseek_engine.runners.torch import TorchRunner
from deepseek_engine.scripted.version import open_scripted
from deepseek_engine.step_plan import StepResult
from deepseek_engine.version import OpenVersion
from deepseek_engine.version_server import VersionServer
from patience import wait_until
from piccard_contract.cancel_board import CancelBoard, board_path
from piccard_contract.process_lock import ProcessLock
from piccard_contract.request import Attempt
from piccard_contract.response import parse_response
from piccard_contract.version_file import VersionFile
from toy_model import toy_engine
from toy_tokenizer import toy_tokenizer

# With these it takes longer than any test waits.
ENDLESS = {"tokens": 10**6, "delay_s": 0.005}
MANY = {"max_tokens": 9000}


class FakeReply:
    """Keeps the responses of one request."""

    def __init__(self) -> None:
        self.responses: list[dict[str, list[Any]]] = []
        self.finals: list[bool] = []
        self.gone = False
        self.broken = False
        self.first = threading.Event()
        self.ended = threading.Event()

    def send(self, outputs: dict[str, list[Any]], *, final: bool) -> None:
        if self.broken and not final:
            raise OSError("no memory left in the shared region")
        self.responses.append(outputs)
        self.finals.append(final)
        self.first.set()
        if final:
            self.ended.set()

    def is_cancelled(self) -> bool:
        return self.gone

    @property
    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = json.loads(self.responses[-1]["status"][0])
        return status

    @property
    def text(self) -> str:
        return "".join(response["text_output"][0] for response in self.responses)


def scripted_version() -> OpenVersion:
    return open_scripted(
        VersionFile.model_validate({"label": "v1", "checkpoint": "scripted", "runner": "scripted"}), number=3
    )


@pytest.fixture
def server() -> Iterator[VersionServer]:
    server = VersionServer(scripted_version(), number=3, on_fatal=lambda: None)
    server.start()
    yield server
    server.stop()


def ask(server: VersionServer, *, parameters: dict[str, Any] | None = None, **inputs: Any) -> FakeReply:
    """Send a request; dicts and lists of dicts are sent as JSON, other values as one element."""
    reply = FakeReply()
    tensors = {
        name: value if name.endswith("_ids") else [json.dumps(value) if isinstance(value, dict | list) else value]
        for name, value in inputs.items()
    }
    server.take(tensors, parameters or {}, request_id="a", reply=reply)
    return reply


def answer(server: VersionServer, **inputs: Any) -> FakeReply:
    reply = ask(server, **inputs)
    assert reply.ended.wait(60)
    assert reply.finals == [False] * (len(reply.finals) - 1) + [True]
    return reply


def wait_until_idle(server: VersionServer, free_blocks: int) -> None:
    wait_until(lambda: server.stats.free_blocks == free_blocks)


def test_without_stream_one_response_holds_the_prompt_and_the_text(server: VersionServer) -> None:
    reply = answer(server, text_input="one two", sampling_parameters={"max_tokens": 3})
    assert len(reply.responses) == 1
    assert reply.text == "one two one two one"
    assert reply.status == {"code": "OK"}
    assert reply.responses[0]["served_version"] == [3]
    assert reply.responses[0]["route_reason"] == ["direct"]
    assert "finish_reason" not in reply.responses[0]


def test_with_stream_tokens_come_as_they_are_made(server: VersionServer) -> None:
    reply = answer(
        server, text_input="one two", stream=True, return_finish_reason=True, extensions={"script": {"tokens": 4}}
    )
    assert reply.text == " one two one two"
    assert [response["finish_reason"] for response in reply.responses[:-1]] == [["None"]] * (len(reply.responses) - 1)
    assert reply.responses[-1]["finish_reason"] == ["stop"]
    usage = parse_response(reply.responses[-1]).usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (2, 4)


def test_a_resumed_request_goes_on(server: VersionServer) -> None:
    whole = answer(server, text_input="one two", exclude_input_in_output=True)
    ids = whole.responses[0]["token_ids"]
    rest = answer(server, text_input="one two", exclude_input_in_output=True, output_ids=ids[:5])
    assert ids[:5] + rest.responses[0]["token_ids"] == ids
    assert parse_response(rest.responses[0]).usage.completion_tokens == len(ids)


def test_responses_are_coalesced_where_that_is_asked_for(server: VersionServer) -> None:
    script = {"tokens": 40, "delay_s": 0.05}
    reply = answer(server, text_input="a b", stream=True, extensions={"script": script, "coalesce_ms": 10_000})
    counts = [len(response["token_ids"]) for response in reply.responses]
    # A slow machine may have more than one token before the first response.
    assert (len(counts), sum(counts)) == (2, 16)


@pytest.mark.parametrize(
    ("inputs", "code"),
    [
        ({}, "MISSING_INPUT"),
        ({"text_input": ""}, "MISSING_INPUT"),
        ({"text_input": b"\xff"}, "INVALID_ENCODING"),
        ({"text_input": "a", "input_ids": [1]}, "CONFLICTING_INPUTS"),
        ({"text_input": "a", "sampling_parameters": "{"}, "INVALID_JSON"),
        ({"text_input": "a", "sampling_parameters": {"maxtokens": 1}}, "UNKNOWN_PARAMETER"),
        ({"text_input": "a", "sampling_parameters": {"top_p": 2}}, "INVALID_VALUE"),
        ({"text_input": "a", "sampling_parameters": {"max_tokens": 10**6}}, "CONTEXT_LENGTH_EXCEEDED"),
        ({"input_ids": [2**60]}, "INVALID_TOKEN"),
        ({"text_input": "a", "extensions": {"script": {"unknown": 1}}}, "INVALID_VALUE"),
        ({"text_input": "a", "extensions": {"script": {"fail_at": 0, "error": "NUMERICAL_ERROR"}}}, "NUMERICAL_ERROR"),
        ({"text_input": "a", "extensions": {"script": {"fail_at": 2, "error": "OUT_OF_MEMORY"}}}, "OUT_OF_MEMORY"),
    ],
)
def test_every_failure_is_one_final_response_with_its_status(
    server: VersionServer, inputs: dict[str, Any], code: str
) -> None:
    for stream in (False, True):
        reply = answer(server, stream=stream, **inputs)
        assert reply.status["code"] == code
        assert reply.responses[-1]["served_version"] == [3]
    assert answer(server, text_input="still here").status["code"] == "OK"


def test_what_was_made_before_a_failure_is_sent(server: VersionServer) -> None:
    reply = answer(server, text_input="one two", stream=True, extensions={"script": {"fail_at": 3}})
    assert reply.text == " one two one"
    assert reply.status["code"] == "INTERNAL"


def test_an_unexpected_exception_ends_the_request_without_its_text(server: VersionServer) -> None:
    class Secretive(dict[str, Any]):
        def items(self) -> Any:
            raise KeyError("a secret")

        values = items

    reply = FakeReply()
    server.take(Secretive(), {}, request_id="a", reply=reply)
    assert reply.ended.wait(60)
    assert reply.status["code"] == "INTERNAL"
    assert "secret" not in reply.status["message"]


def test_a_script_is_for_scripted_versions_only() -> None:
    version = scripted_version()
    plain = OpenVersion(version.file, version.backend, version.tokenizer, 2**58, 100, "cpu", version.pause)
    server = VersionServer(plain, number=1, on_fatal=lambda: None)
    server.start()
    assert answer(server, text_input="a", extensions={"script": {}}).status["code"] == "UNSUPPORTED"
    server.stop()


def test_a_cancel_by_token_ends_the_generation_and_frees_its_blocks(server: VersionServer) -> None:
    free = server.stats.free_blocks
    reply = ask(
        server,
        text_input="a",
        stream=True,
        return_finish_reason=True,
        extensions={"script": ENDLESS},
        sampling_parameters=MANY,
    )
    assert reply.first.wait(60)
    (token,) = reply.responses[0]["cancel_token"]
    cancel = answer(server, extensions={"cancel": token})
    assert json.loads(cancel.responses[0]["details"][0])["cancelled"] is True
    assert cancel.responses[0]["text_output"] == [""]
    assert reply.ended.wait(60)
    assert reply.status["code"] == "CANCELLED"
    assert reply.responses[-1]["finish_reason"] == ["abort"]
    wait_until_idle(server, free)
    again = answer(server, extensions={"cancel": token})
    assert json.loads(again.responses[0]["details"][0])["cancelled"] is False


def test_a_cancel_that_overtakes_its_request_is_not_lost(server: VersionServer) -> None:
    answer(server, extensions={"cancel": "mine"})
    attempt = {"cancel_token": "mine", "tenant": "", "priority": 0}
    reply = answer(server, text_input="a", extensions={"script": {"hang_at": 0}, "attempt": attempt})
    assert reply.status["code"] == "CANCELLED"


def test_a_cancel_does_not_wait_behind_prompts_that_are_read(
    server: VersionServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply = ask(server, text_input="a", stream=True, extensions={"script": {"hang_at": 1}})
    assert reply.first.wait(60)
    release = threading.Event()
    monkeypatch.setattr("deepseek_engine.version_server.PromptReader.read", lambda *_: release.wait(60))
    for _ in range(4):
        ask(server, text_input="long")
    answer(server, extensions={"cancel": reply.responses[0]["cancel_token"][0]})
    assert reply.ended.wait(60)
    assert not release.is_set()
    release.set()


def test_a_direct_client_that_leaves_ends_its_generation(server: VersionServer) -> None:
    free = server.stats.free_blocks
    reply = ask(server, text_input="a", extensions={"script": {"hang_at": 2}})
    wait_until(lambda: server.stats.running)
    reply.gone = True
    assert reply.ended.wait(60)
    assert reply.status["code"] == "CANCELLED"
    wait_until_idle(server, free)


def test_an_announcement_brings_the_token_before_the_first_one(server: VersionServer) -> None:
    script = {"hang_at": 0}
    reply = ask(server, text_input="a", stream=True, extensions={"script": script, "announce": True})
    assert reply.first.wait(60)
    assert reply.responses[0]["token_ids"] == []
    answer(server, extensions={"cancel": reply.responses[0]["cancel_token"][0]})
    assert reply.ended.wait(60)


def test_a_reply_that_cannot_be_sent_ends_its_generation_only(server: VersionServer) -> None:
    free = server.stats.free_blocks
    reply = FakeReply()
    reply.broken = True
    script = json.dumps({"script": ENDLESS})
    server.take({"text_input": ["a"], "stream": [True], "extensions": [script]}, {}, request_id="a", reply=reply)
    assert reply.ended.wait(60)
    assert reply.status["code"] == "INTERNAL"
    wait_until_idle(server, free)
    assert answer(server, text_input="a").status["code"] == "OK"


def test_an_engine_that_fails_answers_everyone_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    # The answers have two seconds, which is not enough where the machine is busy with other tests.
    monkeypatch.setattr(version_server, "DEATH_SECONDS", 60.0)
    version = scripted_version()
    died = threading.Event()
    asked = threading.Event()

    def broken_step(_: Departures) -> list[EngineOutput]:
        asked.wait(60)
        raise ZeroDivisionError

    version.backend.step = broken_step  # type: ignore[method-assign]
    server = VersionServer(version, number=1, on_fatal=died.set)
    server.start()
    replies = [ask(server, text_input="a") for _ in range(3)]
    asked.set()
    assert died.wait(60)
    assert all(reply.ended.is_set() for reply in replies)
    assert {reply.status["code"] for reply in replies} <= {"INTERNAL", "UNAVAILABLE"}


class LosesTheDevice(TorchRunner):
    """Takes two steps at once; the device is lost when the third is collected, with the fourth under way."""

    steps_in_flight = 2
    collected = 0

    def collect(self, handle: Any) -> StepResult:
        self.collected += 1
        if self.collected == 3:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nadvice of torch")
        return super().collect(handle)


def test_a_lost_device_fails_requests_with_its_cause_and_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(version_server, "DEATH_SECONDS", 60.0)
    engine = toy_engine(runner=LosesTheDevice)
    version = replace(scripted_version(), backend=engine, tokenizer=toy_tokenizer(), pause=None, play=None)
    died = threading.Event()
    server = VersionServer(version, number=1, on_fatal=died.set)
    reply = ask(server, input_ids=list(range(40, 50)), stream=True, sampling_parameters={"max_tokens": 100})
    late = ask(server, input_ids=[40], sampling_parameters={"max_tokens": 100})
    server.start()
    assert died.wait(60)
    assert not server.alive
    for failed in (reply, late):
        assert failed.ended.is_set()
        assert failed.finals[-1]
        assert failed.status["code"] == "INTERNAL"
        assert "(CUDA: an illegal memory access was encountered)" in failed.status["message"]
        assert "advice" not in failed.status["message"]
    # What came before is sound and was sent.
    assert sum(len(response["token_ids"]) for response in reply.responses) == 2
    assert "illegal memory access" in caplog.text
    server.stop()


def test_bytes_per_token_are_measured(server: VersionServer) -> None:
    assert server.bytes_per_token == 4.0
    answer(server, text_input="abcdef abcdef")
    assert server.bytes_per_token == 13 / 2


def test_after_stop_requests_are_refused() -> None:
    server = VersionServer(scripted_version(), number=1, on_fatal=lambda: None)
    server.start()
    server.stop()
    assert answer(server, text_input="a").status["code"] == "UNAVAILABLE"


@pytest.fixture
def router(tmp_path: Path) -> Iterator[ProcessLock]:
    lock = ProcessLock(tmp_path / "router.lock")
    lock.acquire()
    yield lock
    lock.release()


def routed(server: VersionServer) -> FakeReply:
    attempt = {"cancel_token": f"3.{time.monotonic_ns()}", "router": "router", "process": os.getpid()}
    extensions = {"script": ENDLESS, "attempt": attempt}
    return ask(server, text_input="a b", stream=True, sampling_parameters=MANY, extensions=extensions)


def test_a_router_that_died_is_sent_nothing_and_its_generation_ends(tmp_path: Path, router: ProcessLock) -> None:
    callers = Callers(lambda owner: tmp_path / f"{owner}.lock")
    server = VersionServer(scripted_version(), number=1, on_fatal=lambda: None, callers=callers)
    server.start()
    try:
        reply = routed(server)
        other = ask(server, text_input="c", stream=True, sampling_parameters=MANY, extensions={"script": ENDLESS})
        assert reply.first.wait(60)
        assert other.first.wait(60)
        router.release()
        wait_until(lambda: server.stats.running == 1)
        # One thread sends to both in turn, so that what was on its way is told once the other has heard more.
        heard = len(other.responses)
        wait_until(lambda: len(other.responses) > heard + 3)
        told = len(reply.responses)
        wait_until(lambda: len(other.responses) > heard + 6)
        assert len(reply.responses) == told
        assert not reply.ended.is_set()
    finally:
        server.stop()


def test_a_cancel_reaches_a_version_that_nobody_can_call(tmp_path: Path, router: ProcessLock) -> None:
    """By the board of any router, as when the server unloads the version."""
    board = CancelBoard(board_path(tmp_path / "router_unary.lock"))
    callers = Callers(lambda owner: tmp_path / f"{owner}.lock")
    server = VersionServer(scripted_version(), number=1, on_fatal=lambda: None, callers=callers)
    server.start()
    try:
        replies = [routed(server) for _ in range(2)]
        assert all(reply.first.wait(60) for reply in replies)
        board.post(replies[0].responses[0]["cancel_token"][0])
        assert replies[0].ended.wait(60)
        assert replies[0].status["code"] == "CANCELLED"
        assert not replies[1].ended.is_set()
        wait_until(lambda: server.stats.running == 1)
    finally:
        server.stop()


def test_a_response_that_hangs_on_a_dead_router_ends_the_process(tmp_path: Path, router: ProcessLock) -> None:
    died, sending, released = threading.Event(), threading.Event(), threading.Event()

    def hang(outputs: dict[str, list[Any]], *, final: bool) -> None:
        sending.set()
        released.wait(60)

    callers = Callers(lambda owner: tmp_path / f"{owner}.lock")
    server = VersionServer(scripted_version(), number=1, on_fatal=died.set, callers=callers)
    server.start()
    try:
        reply = routed(server)
        assert reply.first.wait(60)
        reply.send = hang  # type: ignore[method-assign]
        assert sending.wait(60)
        # A router that lives may be slow.
        assert not died.wait(2.5)
        router.release()
        assert died.wait(60)
    finally:
        released.set()
        server.stop()


def test_another_process_with_the_lock_of_a_dead_router_is_not_it(tmp_path: Path, router: ProcessLock) -> None:
    callers = Callers(lambda owner: tmp_path / f"{owner}.lock")
    assert not callers.gone(None)
    assert not callers.gone(Attempt(cancel_token="a"))
    assert not callers.gone(Attempt(cancel_token="a", router="router", process=os.getpid()))
    assert callers.gone(Attempt(cancel_token="a", router="router", process=2**22 + 1))
