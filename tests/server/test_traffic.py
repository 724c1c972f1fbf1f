"""Gateway, rollout, breaker and limits of tokens at once, on a real server: what callers hear while versions go bad."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
from entry_points import ENTRY_POINTS
from piccard.gateway_keys import add_key
from piccard_contract.lifecycle import VersionState
from piccard_server import RunningServer, wait_for
from quick_rollouts import begin, rollout, traffic_of, wait_phase
from running_stream import RunningStream
from short_calls import answers_gateway

FreshServer = Callable[..., RunningServer]

TOKENS = 6
# Tagged with the version that made it, every token is a word of the prompt.
WORDS = [f"{'abc'[number % 3]}" for number in range(TOKENS)]


class Callers:
    """Callers of the gateway, each of whom sends one request after the other until `end`.

    Attributes:
        canary: what version 2 plays; whoever changes it, changes it for the requests that are still to come.
        heard: versions that made each whole stream, in the order of its tokens.
        codes: of what was no whole stream, by kind of caller.
        waits: seconds after which refused ones were told to come again.
    """

    def __init__(self, server: RunningServer, keys: dict[str, str]) -> None:
        self.canary: dict[str, Any] = {}
        self.heard: list[list[str]] = []
        self.codes: dict[str, list[str]] = {"steady": [], "greedy": [], "wrong": [], "leaving": []}
        self.waits: list[int] = []
        self._server = server
        self._keys = keys
        self._over = threading.Event()
        kinds = [self.steady, self.steady, self.steady, self.greedy, self.wrong, self.leaving]
        self._pool = ThreadPoolExecutor(len(kinds))
        self._running = [self._pool.submit(self._repeat, kind) for kind in kinds]

    def end(self) -> None:
        """Wait for their last requests; raises what any of them met."""
        self._over.set()
        for caller in self._running:
            caller.result(120)
        self._pool.shutdown()

    def _repeat(self, call: Callable[[openai.OpenAI], None]) -> None:
        name = "greedy" if call == self.greedy else "steady"
        client = openai.OpenAI(
            base_url=f"http://{self._server.gateway}/v1", api_key=self._keys[name], max_retries=0, timeout=60
        )
        with client:
            while not self._over.wait(0.01):
                call(client)

    def _stream(self, client: openai.OpenAI, tokens: int, **more: Any) -> Any:
        script = {"tokens": tokens, "delay_s": 0.01, "tag": True, "versions": {"2": dict(self.canary)}}
        asked: dict[str, Any] = {"model": "deepseek", "prompt": "a b c", "stream": True, "max_tokens": 2 * tokens}
        return client.completions.create(**(asked | more), extra_body={"extensions": {"script": script}})

    def steady(self, client: openai.OpenAI) -> None:
        """Hears a whole stream every time, whoever makes it."""
        try:
            events = list(self._stream(client, TOKENS))
        except openai.APIError as error:
            self.codes["steady"].append(str(error.code))
            return
        words = [word.split("@") for word in "".join(event.choices[0].text for event in events).split()]
        assert [word for word, _ in words] == WORDS
        assert events[-1].choices[0].finish_reason == "stop"
        self.heard.append([version for _, version in words])

    def greedy(self, client: openai.OpenAI) -> None:
        """Asks for more tokens than its tenant has."""
        try:
            list(self._stream(client, TOKENS, max_tokens=100))
        except openai.APIError as error:
            self.codes["greedy"].append(str(error.code))
            if isinstance(error, openai.RateLimitError):
                self.waits.append(int(error.response.headers["retry-after"]))

    def wrong(self, client: openai.OpenAI) -> None:
        """Asks for what no version has."""
        try:
            self._stream(client, TOKENS, max_tokens=10**6)
        except openai.BadRequestError as error:
            self.codes["wrong"].append(str(error.code))

    def leaving(self, client: openai.OpenAI) -> None:
        """Goes away in the middle of a stream."""
        try:
            with self._stream(client, 3000) as events:
                next(events)
            self.codes["leaving"].append("left")
        except openai.APIError as error:
            self.codes["leaving"].append(str(error.code))


@contextmanager
def callers(server: RunningServer) -> Iterator[Callers]:
    keys = {name: add_key(server.home, name, tenant=name) for name in ("steady", "greedy")}
    wait_for(lambda: answers_gateway(server), 60, "the gateway")
    found = Callers(server, keys)
    try:
        wait_for(lambda: len(found.heard) > 5, 60, "the first answers")
        yield found
    finally:
        found.end()


def served(server: RunningServer, found: Callers, count: int = 10) -> list[list[str]]:
    """The next whole streams from now on, begun after some that may have been under way."""
    begun = len(found.heard) + 6
    wait_for(lambda: len(found.heard) >= begun + count, 60, "further streams")
    return found.heard[begun:]


def test_a_canary_that_breaks_streams_off_harms_no_caller_of_the_gateway(
    fresh_server: FreshServer, tmp_path: Path
) -> None:
    """Each stream is whole. Who is refused, leaves, or asks for nonsense counts for neither version."""
    limits = {"tenants": {"greedy": {"tokens_per_second": 1, "burst": 300}}}
    server = fresh_server(options=("--gateway",), admission=limits)
    with callers(server) as found:
        found.canary = {"fail_at": 2, "error": "INTERNAL"}
        begin(server, tmp_path)
        told = wait_phase(server, "aborted", "promoted", "paused")
        assert told["phase"] == "aborted", told
        assert traffic_of(server) == (None, 0.0)
        assert {version for words in served(server, found) for version in words} == {"1"}
        # The two that it began, then stable; a breaker that opened sent the others there at once.
        assert {tuple(words) for words in found.heard} <= {("1",) * 6, ("2",) * 2 + ("1",) * 4, ("2",) * 6}
        assert ["2"] * 2 + ["1"] * 4 in found.heard
        for kind, code in (("greedy", "overloaded"), ("wrong", "context_length_exceeded"), ("leaving", "left")):
            wait_for(lambda kind=kind: len(found.codes[kind]) >= 3, 60, f"what became of the {kind} caller")
            assert set(found.codes[kind]) == {code}
    assert len(found.waits) == len(found.codes["greedy"])
    assert min(found.waits) >= 1
    assert found.codes["steady"] == []
    metrics = told["judgement"]["metrics"]
    assert {metrics[name]["stable"] for name in ("errors", "truncated", "fallback")} == {0.0}
    assert metrics["errors"]["canary"] > 0.9
    wait_for(lambda: server.in_flight(1) + server.in_flight(2) == 0, 60, "what was left to end")
    assert server.state().stable == 1
    assert server.metric("piccard_breaker_opens_total", version="2") >= 1
    assert server.problems() == []


def test_a_promoted_version_that_turns_bad_is_rolled_back_by_nobody(fresh_server: FreshServer, tmp_path: Path) -> None:
    """Within its bake time, in which the old version takes over what it fails: its callers hear of nothing."""
    server = fresh_server(options=("--gateway",))
    with callers(server) as found:
        begin(server, tmp_path, bake=600.0)
        wait_phase(server, "baking")
        assert server.state().stable == 2
        assert {version for words in served(server, found) for version in words} == {"2"}
        assert found.codes["steady"] == []
        found.canary = {"fail_at": 0, "error": "OUT_OF_MEMORY"}
        told = wait_phase(server, "rolled_back", "promoted")
        assert told["phase"] == "rolled_back"
        assert "errors" in told["reason"]
        assert server.state().stable == 1
        assert traffic_of(server) == (None, 0.0)
        assert {version for words in served(server, found) for version in words} == {"1"}
        assert found.codes["steady"] == []
    assert server.problems() == []


def test_gates_pauses_and_two_controllers_and_the_old_version_goes_after_its_last_stream(
    fresh_server: FreshServer, tmp_path: Path
) -> None:
    server = fresh_server(options=("--gateway",))
    second = subprocess.Popen([sys.executable, "-m", "piccard", "rollout", "run", f"--home={server.home}"])
    try:
        # Begun by the old version, it outlasts the rollout until it is cancelled.
        old = RunningStream(
            server.grpc,
            server.service.ensemble,
            headers={"x-canary": "false"},
            timeout=600.0,
            text_input="a b c",
            sampling_parameters={"max_tokens": 30_000},
            extensions={"script": {"tokens": 30_000, "delay_s": 0.02}},
        ).wait_first()
        with callers(server) as found:
            begin(server, tmp_path, steps=[0.5, 1.0], gates=[1.0], retire_old=True)
            wait_phase(server, "waiting")
            server.piccard("rollout", "pause")
            assert rollout(server)["phase"] == "paused"
            assert traffic_of(server) == (2, 0.5)
            assert {version for words in served(server, found, 40) for version in words} == {"1", "2"}
            assert rollout(server)["phase"] == "paused"
            server.piccard("rollout", "resume")
            wait_phase(server, "waiting")
            assert server.state().stable == 1
            server.piccard("rollout", "approve")
            wait_phase(server, "promoted")
            assert server.state().stable == 2
            assert {version for words in served(server, found) for version in words} == {"2"}
            assert server.state().versions[1].state is VersionState.DRAINING
            assert old.running
        assert found.codes["steady"] == []
        # One of the two acted, once each time.
        moves = [event["what"].partition(":")[0] for event in rollout(server)["events"]]
        assert moves.count("promoting") == moves.count("baking") == moves.count("retiring") == 1
        assert second.poll() is None
        # Nobody can call it any more, and the router that is asked here is not that of the stream.
        assert old.versions == {1}
        token = old.responses[0]["cancel_token"][0]
        ENTRY_POINTS["http_infer"](server, {}, {}, {"extensions": {"cancel": token}})
        old.wait()
        wait_for(lambda: server.state().versions[1].state is VersionState.RETIRED, 60, "the old version to go")
    finally:
        second.terminate()
        second.wait(60)
    assert server.problems() == []
