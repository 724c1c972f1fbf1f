"""Serves one version: requests as tensors in, responses as tensors out. Knows no server; an adapter calls it."""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

from piccard_contract.claims import ClaimsCheck
from piccard_contract.errors import ErrorCode, RequestError
from piccard_contract.reports import BYTES_PER_TOKEN
from piccard_contract.request import Attempt, GenerateRequest, parse_request
from piccard_contract.response import Choice, Response, response_outputs

from deepseek_engine.callers import Callers
from deepseek_engine.engine_loop import EngineLoop
from deepseek_engine.failures import failure_of
from deepseek_engine.flights import Flight, Flights, Reply
from deepseek_engine.generation import Generation
from deepseek_engine.prompt import Prompt, PromptReader
from deepseek_engine.request import EngineOutput, EngineStats
from deepseek_engine.responder import Responder, Taken, always
from deepseek_engine.tenants import Tenants
from deepseek_engine.version import OpenVersion

_log = logging.getLogger(__name__)

# Seconds between two looks at whether direct clients are still there: a look costs some 0.2 ms a client, so many
# clients are looked at less often, and all of them soon enough to end a generation within 200 ms.
DISCONNECT_POLL = 0.05
DISCONNECT_POLL_EACH = 0.002
DISCONNECT_POLL_MOST = 0.15
READER_THREADS = 2
# What the server, and a router with it, spend on a response of a version, in multiples of what the version spends
# (measured, docs/performance.md).
RELAY_DIRECT = 1.0
RELAY_ROUTER = 3.0
# How long the last responses of a version that dies may take.
DEATH_SECONDS = 2.0
# How long a response to a router that has died may take: one that was on its way when it died never ends.
ORPHAN_SECONDS = 1.0


class VersionServer:
    """Takes requests of one version and answers each through its `Reply`, always and exactly to an end.

    Requests are read on a small pool, generated on the engine's thread and answered on the responder's.

    Args:
        version: what serves.
        number: told as served_version.
        on_fatal: called when the engine has failed and its requests were answered, or when no response can be sent any
            more; it is to end the process.
        callers: which routers live; without it all do.
        claims: knows which tenants the gateway vouched for; without it all are believed.
    """

    def __init__(
        self,
        version: OpenVersion,
        *,
        number: int,
        on_fatal: Callable[[], None],
        callers: Callers | None = None,
        claims: ClaimsCheck | None = None,
    ) -> None:
        self._version = version
        self._number = number
        self._on_fatal = on_fatal
        self._callers = callers
        self._tenants = Tenants(claims)
        self._sending: tuple[Flight, float] | None = None
        self._prompts = PromptReader(version.tokenizer, version.vocab_size, version.max_model_len)
        self._loop = EngineLoop(version.backend, on_fatal=self._die, pause=version.pause, pulse=version.pulse)
        self._responder = Responder()
        self._flights = Flights()
        self._readers = ThreadPoolExecutor(READER_THREADS, thread_name_prefix="reader")
        # A cancel does not wait until long prompts are read.
        self._cancels = ThreadPoolExecutor(1, thread_name_prefix="cancels")
        self._ids = count()
        self._stopped = threading.Event()
        self._watch = threading.Thread(target=self._watch_clients, name="disconnects", daemon=True)
        self._text_bytes = 0
        self._text_tokens = 0

    def start(self) -> None:
        """Start the threads."""
        self._loop.start()
        self._responder.start()
        self._watch.start()

    def stop(self) -> None:
        """End the threads; what still runs is failed and told so."""
        self._stopped.set()
        self._readers.shutdown()
        self._cancels.shutdown()
        self._loop.stop()
        self._responder.stop()

    @property
    def stats(self) -> EngineStats:
        """The engine's gauges and counters."""
        return self._loop.stats

    @property
    def alive(self) -> bool:
        """Whether requests can be served."""
        return self._loop.alive and not self._stopped.is_set()

    @property
    def bytes_per_token(self) -> float:
        """Of the prompts so far; BYTES_PER_TOKEN before the first."""
        return self._text_bytes / self._text_tokens if self._text_tokens else BYTES_PER_TOKEN

    @property
    def unsigned_claims(self) -> int:
        """Requests whose tenant and priority were ignored, since nobody vouched for them."""
        return self._tenants.ignored

    def take(
        self, inputs: Mapping[str, Sequence[Any]], parameters: Mapping[str, Any], *, request_id: str, reply: Reply
    ) -> None:
        """Serve a request, given as `parse_request` reads it. Returns at once; what fails is told through `reply`."""
        readers = self._cancels if _may_cancel(inputs) else self._readers
        try:
            readers.submit(self._read, inputs, parameters, request_id, reply)
        except RuntimeError:
            self.refuse(reply, RequestError(ErrorCode.UNAVAILABLE, "the version is being unloaded; send it again"))

    def _read(
        self, inputs: Mapping[str, Sequence[Any]], parameters: Mapping[str, Any], request_id: str, reply: Reply
    ) -> None:
        try:
            request = parse_request(inputs, parameters, request_id=request_id)
            if request.extensions.cancel is not None:
                self._cancel(request.extensions.cancel, reply)
            else:
                self._begin(self._tenants.settle(request), reply)
        # A request that nobody ends would hang its client for ever.
        except BaseException as error:
            if not isinstance(error, RequestError):
                _log.exception("request %s could not be read", request_id)
            self.refuse(reply, error)

    def _begin(self, request: GenerateRequest, reply: Reply) -> None:
        prompt = self._prompts.read(request)
        self._measure(prompt)
        attempt = request.extensions.attempt
        generation = Generation(
            request,
            prompt,
            self._version.tokenizer,
            id=str(next(self._ids)),
            version=self._number,
            cancel_token=attempt.cancel_token if attempt else f"{self._number}.{secrets.token_urlsafe(16)}",
            direct=attempt is None,
        )
        engine_request = self._version.scripted(generation.engine_request(), request.extensions.script)
        flight = Flight(generation, reply, direct=attempt is None)
        outbox = self._responder.outbox(
            lambda outputs, error, final: self._answer(flight, outputs, error, final),
            hold=not request.stream,
            interval=request.extensions.coalesce_ms / 1000,
            relay=RELAY_ROUTER if attempt else RELAY_DIRECT,
            taken=self._taken(attempt),
        )
        if not self._flights.add(flight):
            outbox.fail(_cancelled("by its token"))
            return
        if request.stream and request.extensions.announce:
            outbox.announce()
        self._loop.submit(engine_request, outbox)
        if flight.cancelled:
            # The cancel may have passed the engine before the request came to it.
            self._loop.abort(generation.id, _cancelled("by its token"))

    def _answer(self, flight: Flight, outputs: list[EngineOutput], error: RequestError | None, final: bool) -> None:
        """Send one response of a flight; on the responder's thread."""
        generation = flight.generation
        if final:
            self._flights.remove(flight)
        if self._orphaned(flight):
            # Nothing is sent, not even the last response: the request goes with its reply.
            if not final:
                self._loop.abort(generation.id, _cancelled("since its router died"))
            return
        try:
            response = generation.respond(outputs, error)
            self._sending = (flight, time.monotonic())
            flight.reply.send(response_outputs(response, generation.request.returns, final=final), final=final)
        except Exception as failure:
            if not final:
                # It comes back here as the last response.
                self._loop.abort(generation.id, failure_of(failure))
                raise
            _log.exception("the last response of request %s could not be sent", generation.request.id)
            self.refuse(flight.reply, failure)
        finally:
            self._sending = None

    def _taken(self, attempt: Attempt | None) -> Taken:
        """Tells whether what was sent of an attempt has been taken."""
        return always if attempt is None or self._callers is None else self._callers.taken(attempt)

    def _orphaned(self, flight: Flight) -> bool:
        """Whether the router that waits for a flight has died."""
        attempt = flight.generation.request.extensions.attempt
        return self._callers is not None and self._callers.gone(attempt)

    def _check_sending(self) -> None:
        """End the process where its only sender hangs on a router that died in the middle of a response."""
        sending = self._sending
        if sending is None or time.monotonic() - sending[1] < ORPHAN_SECONDS or not self._orphaned(sending[0]):
            return
        _log.critical("a response to a router that died hangs; this process ends, so that it is started again")
        self._on_fatal()

    def _cancel(self, token: str, reply: Reply) -> None:
        flight = self._flights.cancel(token)
        if flight is not None:
            self._loop.abort(flight.generation.id, _cancelled("by its token"))
        response = Response([Choice()], served_version=self._number, details={"cancelled": flight is not None})
        reply.send(response_outputs(response, frozenset(), final=True), final=True)

    def refuse(self, reply: Reply, error: BaseException) -> None:
        """End a request that has no flight (any more) with an error."""
        response = Response([Choice()], served_version=self._number, error=failure_of(error))
        try:
            reply.send(response_outputs(response, frozenset({"finish_reason"}), final=True), final=True)
        except Exception:
            _log.exception("a request could not be ended")

    def _measure(self, prompt: Prompt) -> None:
        if prompt.text is not None:
            self._text_bytes += len(prompt.text.encode())
            self._text_tokens += len(prompt.ids)

    def _watch_clients(self) -> None:
        while not self._stopped.is_set():
            self._check_sending()
            self._flights.wait_any(timeout=1.0)
            self._read_boards()
            flights = self._flights.direct()
            for flight in flights:
                if self._is_gone(flight):
                    self._loop.abort(flight.generation.id, _cancelled("by its client, who is gone"))
            pause = max(DISCONNECT_POLL, DISCONNECT_POLL_EACH * len(flights))
            self._stopped.wait(min(pause, DISCONNECT_POLL_MOST))

    def _read_boards(self) -> None:
        """End what routers have cancelled; their calls come here no more once the server unloads the version."""
        if self._callers is None:
            return
        for token in self._callers.cancelled(self._flights.tokens()):
            flight = self._flights.cancel(token)
            if flight is not None:
                self._loop.abort(flight.generation.id, _cancelled("by its token"))

    @staticmethod
    def _is_gone(flight: Flight) -> bool:
        try:
            return flight.reply.is_cancelled()
        except Exception:
            _log.exception("whether a client is there could not be seen")
            return False

    def _die(self, error: BaseException) -> None:
        try:
            self._responder.stop(DEATH_SECONDS)
        finally:
            self._on_fatal()


def _may_cancel(inputs: Mapping[str, Sequence[Any]]) -> bool:
    """Whether a request looks like a cancel, told without parsing it."""
    texts = inputs.get("extensions", ())
    return any((b'"cancel"' if isinstance(text, bytes) else '"cancel"') in text for text in texts)


def _cancelled(how: str) -> RequestError:
    return RequestError(ErrorCode.CANCELLED, f"the generation was cancelled {how}")
