"""Stand-ins for the world around a router: versions that play a list, a client that keeps what it gets."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from patience import PATIENCE, wait_until
from piccard_canary.availability import LoadedVersion
from piccard_canary.breakers import Breakers
from piccard_canary.cancel import CancelDesk
from piccard_canary.counters import Counters
from piccard_canary.decision import Fleet
from piccard_canary.fallback_budget import FallbackBudget
from piccard_canary.load import LoadMeter
from piccard_canary.protocols import Frame, Stamp
from piccard_canary.request_log import RequestLine
from piccard_canary.router import Router, RouterSettings
from piccard_canary.shadows import Shadows
from piccard_canary.stream import Surroundings
from piccard_canary.watchdog import Watchdog
from piccard_contract.claims import ClaimsCheck
from piccard_contract.errors import ErrorCode, RequestError
from piccard_contract.policy import Policy
from piccard_contract.request import GenerateRequest
from piccard_contract.response import Choice, Response, Usage, parse_response, response_outputs


class HandClock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class PlayedFrame:
    """A version's response, through the tensors that it would be sent as."""

    def __init__(self, response: Response, request: GenerateRequest, *, final: bool) -> None:
        self.outputs = response_outputs(response, request.returns, final=final)
        self.plain = "status" not in self.outputs

    def token_ids(self) -> list[int]:
        return list(self.outputs["token_ids"])

    def cumulative_logprob(self) -> float | None:
        return self.outputs["cumulative_logprob"][0] if "cumulative_logprob" in self.outputs else None

    def read(self) -> Response:
        return parse_response(self.outputs)


@dataclass
class Play:
    """What a version does with a request: token i of the whole output is `base + i`, its text `<base + i>`.

    Attributes:
        tokens: of the whole output, with those that it was resumed from.
        fail_at: fails with `error` instead of the token of this index.
        raise_at: an exception comes out of the call there.
        hang_at: nothing comes from there on, until the test ends.
        late_at: the token of this index, and all after it, come once `over` is set.
        end_at: the iterator ends there without a word.
        choices: of each response.
    """

    tokens: int = 4
    base: int = 1000
    fail_at: int | None = None
    raise_at: int | None = None
    hang_at: int | None = None
    late_at: int | None = None
    end_at: int | None = None
    error: ErrorCode = ErrorCode.INTERNAL
    open_error: RequestError | None = None
    choices: int = 1


class PlayedVersions:
    """Versions by number; every call is kept."""

    def __init__(self, plays: dict[int, Play]) -> None:
        self.plays = plays
        self.calls: list[tuple[int, GenerateRequest, frozenset[str]]] = []
        self.cancels: list[tuple[int, str]] = []
        self.cancelled: Callable[[int, str], bool] = lambda version, token: True
        self.hanging = threading.Event()
        self.over = threading.Event()

    def open(self, version: int, request: GenerateRequest, outputs: frozenset[str]) -> Iterator[Frame]:
        self.calls.append((version, request, outputs))
        play = self.plays[version]
        if play.open_error is not None:
            raise play.open_error
        return self._frames(play, request)

    def cancel(self, version: int, token: str) -> bool:
        self.cancels.append((version, token))
        return self.cancelled(version, token)

    def _frames(self, play: Play, request: GenerateRequest) -> Iterator[Frame]:
        start = len(request.output_ids)
        for index in range(start, play.tokens):
            if index == play.fail_at:
                failed = Response([Choice(finish_reason="abort") for _ in range(play.choices)])
                failed.error = RequestError(play.error, f"token {index}")
                yield PlayedFrame(failed, request, final=True)
                return
            if index == play.raise_at:
                raise OSError("the call broke")
            if index == play.end_at:
                return
            if index == play.late_at:
                self.hanging.set()
                self.over.wait(60)
            if index == play.hang_at:
                self.hanging.set()
                self.over.wait()
                return
            last = index == play.tokens - 1
            choices = [
                Choice(
                    f"<{play.base + index}>",
                    [play.base + index],
                    "stop" if last else None,
                    cumulative_logprob=-1.0 * (index - start + 1),
                )
                for _ in range(play.choices)
            ]
            usage = Usage(prompt_tokens=7, completion_tokens=index + 1)
            yield PlayedFrame(Response(choices, usage), request, final=last)


@dataclass
class Client:
    """The client's end of one request."""

    returns: frozenset[str] = frozenset()
    ended: bool = False
    broken: bool = False
    responses: list[Response] = field(default_factory=list)
    forwarded: int = 0
    error: RequestError | None = None
    finals: int = 0
    over: threading.Event = field(default_factory=threading.Event)

    def forward(self, frame: Frame, stamp: Stamp) -> None:
        self._check()
        response = frame.read()
        response.served_version = stamp.version
        response.route_reason = stamp.reason.value
        response.cancel_token = stamp.cancel_token
        self.forwarded += 1
        self.responses.append(response)

    def send(self, response: Response, *, final: bool) -> None:
        self._check()
        self.responses.append(parse_response(response_outputs(response, self.returns, final=final)))
        self._end(final)

    def fail(self, error: RequestError) -> None:
        self._check()
        self.error = error
        self._end(True)

    def text(self, choice: int = 0) -> str:
        return "".join(response.choices[choice].text for response in self.responses)

    def _check(self) -> None:
        assert not self.ended, "sent after the end"
        if self.broken:
            raise RuntimeError("the client is gone")

    def _end(self, final: bool) -> None:
        if final:
            self.ended = True
            self.finals += 1
            self.over.set()


class Scene:
    """A router among fake versions, with a watchdog that looks when told to."""

    def __init__(
        self,
        plays: dict[int, Play],
        *,
        streams: bool = True,
        stable: int | None = 1,
        previous: int | None = None,
        **policy: Any,
    ) -> None:
        self.versions = PlayedVersions(plays)
        self.clock = HandClock()
        self.counters = Counters("deepseek", "router")
        self.lines: list[RequestLine] = []
        self.shadow_lines: list[RequestLine] = []
        self.clients: list[Client] = []
        self.logged: list[str] = []
        # Announcements are made at once, unless a test keeps them.
        self.announce: Callable[[Callable[[], None]], None] = lambda tell: tell()
        self.policy = Policy(**{"canary": 2, **policy})
        self.stable = stable
        self.previous = previous
        self.loaded = {n: LoadedVersion(n, pid=100 + n, tokenizer_hash="t", template_hash="c") for n in plays}
        self.processes: dict[int, int | None] = {n: 100 + n for n in plays}
        self.posted: list[str] = []
        self.cancels = CancelDesk(self.versions, self.logged.append, board=self.posted.append)
        self._folder = TemporaryDirectory(prefix="scene-")
        self.breakers = Breakers(self.counters, Path(self._folder.name) / "probe.lock", clock=self.clock)
        meter = LoadMeter(self.clock)
        self.shadows = Shadows(
            "router",
            self.versions,
            loaded=lambda: dict(self.loaded),
            process=lambda version: self.processes[version],
            cancels=self.cancels,
            breakers=self.breakers,
            counters=self.counters,
            meter=meter,
            write=self.shadow_lines.append,
            log=self.logged.append,
            start=lambda work: threading.Thread(target=work, daemon=True).start(),
            clock=self.clock,
        )
        self.around = Surroundings(
            name="router",
            client=self.versions,
            fleet=lambda: Fleet(self.stable, self.loaded.keys(), frozenset(plays), previous=self.previous),
            loaded=lambda: dict(self.loaded),
            cancels=self.cancels,
            counters=self.counters,
            write=self.lines.append,
            log=self.logged.append,
            breakers=self.breakers,
            budget=FallbackBudget(self.clock),
            load=meter,
            shadows=self.shadows,
            clock=self.clock,
            announce=lambda tell: self.announce(tell),
        )
        self.router = Router(
            self.around,
            policy=lambda: self.policy,
            claims=ClaimsCheck(_nowhere()),
            settings=RouterSettings(streams=streams, max_streams=8),
        )
        self.watchdog = Watchdog(self.router.streams, lambda version: self.processes[version], self.logged.append)

    def run(self, request: GenerateRequest) -> Client:
        """Answer a request on this thread."""
        client = self._client(request)
        self.router.answer(request.model_dump_json(), client)
        return client

    def start(self, request: GenerateRequest) -> Client:
        """Answer a request on a thread of its own."""
        client = self._client(request)
        threading.Thread(target=self.router.answer, args=(request.model_dump_json(), client), daemon=True).start()
        return client

    def wait_over(self, client: Client) -> None:
        """Wait until a request has its end and the router is done with it.

        The client hears of its end before the router has counted it; its line is the last thing that is written.
        """
        assert client.over.wait(PATIENCE), f"no end came, but {len(client.responses)} responses"
        wait_until(lambda: len(self.lines) >= sum(one.ended for one in self.clients))

    def counted(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels."""
        return sum(
            value
            for sample, found, value in self.counters.samples()
            if sample == name and labels.items() <= found.items()
        )

    def close(self) -> None:
        self.versions.over.set()

    def _client(self, request: GenerateRequest) -> Client:
        client = Client()
        # A cancel is no request of its own, and has no line.
        if request.extensions.cancel is None:
            self.clients.append(client)
        return client


def _nowhere() -> Path:
    return Path("/nonexistent/gateway.secret")
