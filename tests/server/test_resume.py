"""Versions with a real checkpoint die after a chosen token: what the client gets is what nothing had interrupted.

One death serves all corners: every stream stops at its own token in version 2, whose process is then killed at rest,
and later the same in version 1.
"""

import itertools
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import held_engine
import psutil
import pytest
from deepseek_engine.text.output_text import OutputText
from deepseek_engine.text.tokenizer import Tokenizer
from entry_points import ENTRY_POINTS, Answer
from installation import Installation, InstalledServer
from piccard.home_init import init_home
from piccard.installation import demo_checkpoint
from piccard.policy_store import update_policy
from piccard_contract.home import Service, version_owner
from piccard_contract.version_file import Runner, VersionFile
from piccard_server import TRIES, ServerDiedError, wait_for
from running_stream import RunningStream
from triton_calls import grpc_stream

pytestmark = pytest.mark.timeout(900)

PROMPT = "def fibonacci(n):"
LENGTH = 16
GREEDY = {"max_tokens": LENGTH, "temperature": 0, "ignore_eos": True}
SEEDED = {"max_tokens": LENGTH, "temperature": 1.0, "seed": 7, "ignore_eos": True}
PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.3}
# Bytes of which the demo's tokenizer makes no tokens of more than one: most characters are cut.
LETTERS = "\u00e9\u20ac\u4f60"
RETURNS = {f"return_{name}": True for name in ("finish_reason", "num_input_tokens", "num_output_tokens")}
LOGPROBS = {"return_logprobs": True, "return_cumulative_logprob": True}


@dataclass
class Corner:
    """A request and the token after which its version dies.

    Attributes:
        whole: what version 1 answers when nothing happens.
    """

    inputs: dict[str, Any]
    at: int
    whole: Answer = field(default_factory=Answer)

    def ask(self, hold: dict[int, int] | None = None) -> dict[str, Any]:
        """Its inputs, with the version -> token at which each is to stop."""
        script = {str(version): at for version, at in (hold or {}).items()}
        return {**self.inputs, "extensions": {"script": script}}


def corners(server: InstalledServer) -> dict[str, Corner]:
    """Every corner, those within texts found in what the model says."""
    tokenizer = Tokenizer.from_folder(demo_checkpoint())
    found = {
        "the first token": corner(1, GREEDY),
        "one before max_tokens": corner(LENGTH - 1, GREEDY),
        "a seed at temperature 1": corner(9, SEEDED),
        "penalties": corner(9, {**SEEDED, **PENALTIES}),
        "logprobs": corner(5, {**SEEDED, "logprobs": 3}, **LOGPROBS),
        "a sum alone": corner(7, SEEDED, return_cumulative_logprob=True),
        "a chat": corner(4, SEEDED, text_input=None, messages=[{"role": "user", "content": "Write a loop."}]),
    }
    ids = direct(server, found["the first token"]).token_ids
    for include in (False, True):
        at, stop = split_stop(tokenizer, ids)
        sampling = {**GREEDY, "stop": [stop, "never"], "include_stop_str_in_output": include}
        found["a stop string" + (" that is told" if include else "")] = corner(at, sampling)
    letters = tokenizer.encode(LETTERS, add_special_tokens=False)
    sampling = {**SEEDED, "logit_bias": {str(token): 60.0 for token in letters}}
    ids = direct(server, corner(0, sampling)).token_ids
    found["half a character"] = corner(within_character(tokenizer, ids), sampling)
    for one in found.values():
        one.whole = direct(server, one)
    return found


def corner(at: int, sampling: dict[str, Any], **inputs: Any) -> Corner:
    asked = {"text_input": PROMPT, "sampling_parameters": sampling, **RETURNS, **inputs}
    return Corner({name: value for name, value in asked.items() if value is not None}, at)


def direct(server: InstalledServer, one: Corner) -> Answer:
    """The answer of version 1 itself."""
    return Answer(grpc_stream(server.grpc, server.service.llm, version="1", stream=True, **one.ask()))


def split_stop(tokenizer: Tokenizer, ids: list[int]) -> tuple[int, str]:
    """A stop string that two tokens make together, and the number of tokens up to its first half."""
    text = ""
    for index, (token, after) in enumerate(itertools.pairwise(ids)):
        one, two = tokenizer.decode([token]), tokenizer.decode([after])
        stop = one[-1:] + two[:2]
        text += one
        # The first token stays out of it, so that something was told before.
        if index and len(stop) == 3 and stop.isascii() and stop not in text and stop in tokenizer.decode(ids):
            return index + 1, stop
    raise AssertionError(f"no place for a stop string in {tokenizer.decode(ids)!r}")


def within_character(tokenizer: Tokenizer, ids: list[int]) -> int:
    """The number of tokens after which, for the second time, half a character is held back."""
    text = OutputText(tokenizer)
    silent = [index + 1 for index, token in enumerate(ids) if not text.push([token])[0]]
    assert len(silent) > 1, ids
    return silent[1]


@dataclass
class Scene:
    """Everything that was asked, by the name of its corner: how it went and what the client got."""

    server: InstalledServer
    corners: dict[str, Corner]
    pid: int
    lock_exceptions: int
    resumed: dict[str, RunningStream] = field(default_factory=dict)
    gathered: dict[str, Answer] = field(default_factory=dict)
    pinned: dict[str, RunningStream] = field(default_factory=dict)
    twice: dict[str, RunningStream] = field(default_factory=dict)
    never: dict[str, RunningStream] = field(default_factory=dict)
    from_stable: dict[str, RunningStream] = field(default_factory=dict)

    def play(self) -> "Scene":
        """Ask for everything and kill version 2, then version 1.

        Raises:
            ServerDiedError: the server did not live through it.
        """
        unary = [threading.Thread(target=self._gather, args=(name,), daemon=True) for name in self.corners]
        for thread in unary:
            thread.start()
        for name, one in self.corners.items():
            self.resumed[name] = self._start(one, {2: one.at}, {"x-canary": "true"})
            self.pinned[name] = self._start(one, {2: one.at}, version=2)
            if one.at + 1 < len(one.whole.token_ids):
                self.twice[name] = self._start(one, {2: one.at, 1: one.at + 1}, {"x-canary": "true"})
        self._kill(2, [*self._stopped(self.resumed), *self._stopped(self.pinned), *self._stopped(self.twice)])
        for thread in unary:
            thread.join(120)
        self._wait(lambda: self.server.version_ready(2), "version 2 to be revived")
        for name, one in self.corners.items():
            self.never[name] = self._start(one, {1: one.at}, {"x-canary": "false"})
            self.from_stable[name] = self._start(one, {1: one.at})
        stopped = [*self._stopped(self.never), *self._stopped(self.from_stable), *self._stopped(self.twice, more=1)]
        self._kill(1, stopped)
        for streams in (self.resumed, self.pinned, self.twice, self.never, self.from_stable):
            for stream in streams.values():
                self._wait(lambda stream=stream: not stream.running, "a stream to end")  # type: ignore[misc]
        return self

    def _start(
        self, one: Corner, hold: dict[int, int], headers: dict[str, str] | None = None, **parameters: int
    ) -> RunningStream:
        server = self.server
        return RunningStream(
            server.grpc, server.service.ensemble, headers=headers, parameters=parameters, **one.ask(hold)
        )

    def _gather(self, name: str) -> None:
        """The same request for a single answer."""
        inputs = {**self.corners[name].ask({2: self.corners[name].at}), "exclude_input_in_output": True}
        self.gathered[name] = ENTRY_POINTS["grpc_unary"](self.server, {"x-canary": "true"}, {}, inputs)

    def _stopped(self, streams: dict[str, RunningStream], more: int = 0) -> list[tuple[RunningStream, int]]:
        """Streams with the number of tokens at which each stops."""
        return [(stream, self.corners[name].at + more) for name, stream in streams.items()]

    def _kill(self, version: int, streams: list[tuple[RunningStream, int]]) -> None:
        """kill -9, once all of them have stopped and the version is at rest."""
        self._wait(
            lambda: all(len(stream.token_ids) == at for stream, at in streams) and self._rests(version),
            f"all streams of version {version} to stop",
        )
        os.kill(self.server.pid(version_owner(version)), signal.SIGKILL)

    def _rests(self, version: int) -> bool:
        section = self.server.section(version_owner(version))
        return section is not None and section.data["running"] + section.data["waiting"] == 0

    def _wait(self, look: Callable[[], bool], what: str) -> None:
        wait_for(lambda: look() or self._died(), 120, what)
        if self._died():
            assert self.server.lock_exceptions() > self.lock_exceptions, f"{what}: {self.server.printed()}"
            raise ServerDiedError(what)

    def _died(self) -> bool:
        return self.server.server_pid() != self.pid or not psutil.pid_exists(self.pid)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InstalledServer]:
    """Versions 1 (stable) and 2 of the demo checkpoint; each may take the other's requests."""
    folder = tmp_path_factory.mktemp("resume")
    installation = Installation(folder / "installation")
    held_engine.install(installation)
    settings = {"checkpoint": str(demo_checkpoint()), "runner": Runner.TORCH, "memory": "64MiB", "device": "cpu"}
    init_home(folder / "home", {n: VersionFile(label=f"v{n}", linked=True, **settings) for n in (1, 2)})
    # It is the death that is to be noticed.
    patience = {"first_token": 3600.0, "between_tokens": 3600.0}
    update_policy(Service(folder / "home"), fallback_policy="both", traffic_ratio=0.0, deadlines=patience)
    running = InstalledServer(installation, folder / "home")
    try:
        yield running.wait_ready()
    finally:
        running.stop()


@pytest.fixture(scope="module")
def scene(server: InstalledServer) -> Scene:
    """All requests, after both deaths."""
    found = corners(server)
    assert sorted(found) == sorted(NAMES)
    for _ in range(TRIES):
        try:
            return Scene(server, found, server.server_pid(), server.lock_exceptions()).play()
        except ServerDiedError:
            server.wait_ready()
    raise AssertionError(f"the server went with a process {TRIES} times:\n{server.printed()}")


def answer_of(stream: RunningStream) -> Answer:
    return Answer(stream.responses, error_text=None if stream.error is None else str(stream.error))


def check_whole(answer: Answer, one: Corner, *, version: int) -> None:
    """An answer that `version` brought to its end is what nothing had interrupted."""
    whole = one.whole
    assert answer.code == "OK", answer.error_text
    assert answer.text == whole.text
    assert answer.token_ids == whole.token_ids
    assert (answer.version, answer.reason) == (version, "resumed")
    assert answer.details["usage"]["completion_tokens"] == len(whole.token_ids)
    assert answer.details["usage"]["prompt_tokens"] == whole.details["usage"]["prompt_tokens"]
    assert answer.details.get("stop_reasons") == whole.details.get("stop_reasons")
    assert answer.responses[-1]["finish_reason"] == whole.responses[-1]["finish_reason"]
    assert sum(response["num_output_tokens"][0] for response in answer.responses) == len(whole.token_ids)
    (prompt,) = {response["num_input_tokens"][0] for response in whole.responses}
    assert {response["num_input_tokens"][0] for response in answer.responses} == {prompt}
    if "cumulative_logprob" in whole.responses[-1]:
        sums = [found.responses[-1]["cumulative_logprob"][0] for found in (answer, whole)]
        assert sums[0] == pytest.approx(sums[1], abs=1e-3)
    assert_close(logprobs(answer), logprobs(whole))


def logprobs(answer: Answer) -> list[dict[str, dict[str, Any]]]:
    """Of every token."""
    parts = [json.loads(response["logprobs"][0]) for response in answer.responses if "logprobs" in response]
    return [position for part in parts for position in part or []]


def assert_close(found: list[dict[str, dict[str, Any]]], wanted: list[dict[str, dict[str, Any]]]) -> None:
    assert [list(position) for position in found] == [list(position) for position in wanted]
    for position, other in zip(found, wanted, strict=True):
        for token, told in position.items():
            assert told["logprob"] == pytest.approx(other[token]["logprob"], abs=1e-3)
            assert (told["rank"], told["decoded_token"]) == (other[token]["rank"], other[token]["decoded_token"])


def check_beginning(stream: RunningStream, one: Corner, count: int) -> None:
    """A stream that failed gave the first `count` tokens and the text that they release, then an error."""
    assert stream.token_ids == one.whole.token_ids[:count]
    assert one.whole.text.startswith(stream.text)
    assert stream.error is not None


def made_by(stream: RunningStream, version: int) -> int:
    """Tokens that `version` made."""
    return sum(len(r["token_ids"]) for r in stream.responses if r["served_version"] == [version])


NAMES = (
    "the first token",
    "one before max_tokens",
    "a stop string",
    "a stop string that is told",
    "half a character",
    "a seed at temperature 1",
    "penalties",
    "logprobs",
    "a sum alone",
    "a chat",
)
over_corners = pytest.mark.parametrize("name", NAMES)


@over_corners
def test_a_stream_whose_canary_dies_is_whole(scene: Scene, name: str) -> None:
    stream, one = scene.resumed[name], scene.corners[name]
    check_whole(answer_of(stream), one, version=1)
    assert (made_by(stream, 2), made_by(stream, 1)) == (one.at, len(one.whole.token_ids) - one.at)
    route = {"decision": "header", "attempts": [{"version": 2, "code": "VERSION_DIED"}]}
    assert answer_of(stream).details["route"] == route


@over_corners
def test_an_answer_whose_canary_dies_is_whole(scene: Scene, name: str) -> None:
    check_whole(scene.gathered[name], scene.corners[name], version=1)


@over_corners
def test_a_stream_whose_stable_version_dies_is_whole(scene: Scene, name: str) -> None:
    stream, one = scene.from_stable[name], scene.corners[name]
    check_whole(answer_of(stream), one, version=2)
    assert made_by(stream, 1) == one.at


@over_corners
def test_a_pinned_stream_dies_with_its_version(scene: Scene, name: str) -> None:
    stream, one = scene.pinned[name], scene.corners[name]
    check_beginning(stream, one, one.at)
    assert (answer_of(stream).code, stream.versions) == ("VERSION_DIED", {2})


@over_corners
def test_a_stream_kept_from_the_canary_dies_with_stable(scene: Scene, name: str) -> None:
    stream, one = scene.never[name], scene.corners[name]
    check_beginning(stream, one, one.at)
    assert (answer_of(stream).code, stream.versions) == ("VERSION_DIED", {1})


@over_corners
def test_a_stream_whose_versions_both_die_ends_with_an_error(scene: Scene, name: str) -> None:
    one = scene.corners[name]
    if name not in scene.twice:
        # Nothing is left between its death in version 2 and its end.
        assert one.at + 1 == len(one.whole.token_ids)
        return
    stream = scene.twice[name]
    check_beginning(stream, one, one.at + 1)
    assert (answer_of(stream).code, stream.versions) == ("RESUME_IMPOSSIBLE", {1, 2})
    assert (made_by(stream, 2), made_by(stream, 1)) == (one.at, 1)


@pytest.mark.parametrize("name", ["one before max_tokens", "a stop string", "half a character", "logprobs"])
def test_the_end_alone_is_told_where_the_last_token_was_sent(scene: Scene, server: InstalledServer, name: str) -> None:
    """A version that died after its last token and before it said so; here the client resumes itself."""
    one = scene.corners[name]
    answer = Answer(
        grpc_stream(server.grpc, server.service.ensemble, stream=True, output_ids=one.whole.token_ids, **one.ask())
    )
    assert answer.token_ids == []
    assert answer.responses[-1]["finish_reason"] == one.whole.responses[-1]["finish_reason"]
    assert answer.responses[-1]["num_output_tokens"] == [0]
    assert answer.details["usage"]["completion_tokens"] == len(one.whole.token_ids)
    assert one.whole.text.endswith(answer.text)
