"""The adapters between Triton's Python backend and the ensemble: the only file here that knows the server."""

import gc
import json
import threading
import time
import traceback
import uuid
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils
from piccard_contract.cancel_board import CancelBoard, board_path
from piccard_contract.capabilities import cancel_of, make_response
from piccard_contract.claims import ClaimsCheck
from piccard_contract.code_hash import ENSEMBLE_PACKAGES, own_code_hash
from piccard_contract.errors import ErrorCode, RequestError, kind_of
from piccard_contract.home import Service
from piccard_contract.inherited_sockets import close_inherited_sockets
from piccard_contract.live_state import LiveState
from piccard_contract.process_lock import AlreadyHeldError, ProcessLock
from piccard_contract.receipts import Receipts, receipts_path
from piccard_contract.reports import AdmissionReport, RouterReport
from piccard_contract.request import GenerateRequest, RequestExtensions, request_inputs
from piccard_contract.response import Response, parse_response, response_outputs
from piccard_contract.tensors import ADMITTED, INPUT_SPECS, OUTPUT_SPECS, TensorSpec

from piccard_canary.admission import Admission
from piccard_canary.announcer import Announcer
from piccard_canary.availability import Availability
from piccard_canary.breakers import Breakers
from piccard_canary.call_errors import call_error
from piccard_canary.cancel import CancelDesk
from piccard_canary.completions import Completions, Settlements
from piccard_canary.counters import Counters
from piccard_canary.decision import Fleet
from piccard_canary.fallback_budget import FallbackBudget
from piccard_canary.load import LoadMeter
from piccard_canary.metrics_export import Kind, MetricsExport
from piccard_canary.policy_file import PolicyFile
from piccard_canary.protocols import Frame, Stamp
from piccard_canary.publisher import INTERVAL as PUBLISH_INTERVAL
from piccard_canary.publisher import Publisher
from piccard_canary.request_log import RequestLog
from piccard_canary.router import Router, RouterSettings
from piccard_canary.shadows import Shadows
from piccard_canary.stable_link import read_stable
from piccard_canary.state_file import StateFile
from piccard_canary.stream import Surroundings
from piccard_canary.thread_reserve import Handover, ThreadReserve
from piccard_canary.token_cost import outlook
from piccard_canary.token_limits import TokenLimits
from piccard_canary.triton_tensors import to_array, to_values
from piccard_canary.watchdog import Watchdog

_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

# What the owners of routers' sections begin with.
_ROUTERS = "router"


def _tensor(spec: TensorSpec, values: list[Any]) -> Any:
    return pb_utils.Tensor(spec.name, to_array(spec, values))


def _triton_error(error: RequestError) -> Any:
    """The one place where a failure becomes an error of Triton."""
    code = getattr(pb_utils.TritonError, kind_of(error.code).triton, pb_utils.TritonError.INTERNAL)
    return pb_utils.TritonError(error.head(), code)


def _log_error(text: str) -> None:
    pb_utils.Logger.log_error(text)


class _Process:
    """What every model of the ensemble is to the others: a lock, a section, and what it reads of them."""

    def __init__(self, args: dict[str, str], owner: str) -> None:
        close_inherited_sockets()
        self.service = Service.of_model(Path(args["model_repository"]))
        # The second folder of a model is its twin while code is rolled.
        version = int(args["model_version"])
        self.owner = owner if version == 1 else f"{owner}.{version}"
        self._lock = ProcessLock(self.service.process_lock(self.owner))
        self._lock.acquire()
        self.live_state = LiveState(self.service.live_state, self.service.run_folder)
        self.writer = self.live_state.writer(self.owner)
        self.policy = PolicyFile(self.service.policy_file)
        self.claims = ClaimsCheck(self.service.gateway_secret)
        self.code_hash = own_code_hash(ENSEMBLE_PACKAGES)

    def end(self) -> None:
        self._lock.release()


class AdmissionModel:
    """Model `<service>_admission`: a client's tensors in, the admitted request out."""

    def initialize(self, args: dict[str, str]) -> None:
        self._process = _Process(args, "admission")
        self._counters = Counters(self._process.service.name, "admission")
        policy, live_state = self._process.policy.current, self._process.live_state
        availability = Availability(self._process.service, live_state, lifetime=PUBLISH_INTERVAL)
        link = self._process.service.stable_link
        self._limits = TokenLimits(
            lambda: policy().admission,
            lambda: outlook(availability.snapshot().ready, policy(), read_stable(link)),
            self._counters,
        )
        self._settlements = Settlements(live_state.sections(prefix=_ROUTERS))
        self._admission = Admission(policy, self._process.claims, self._counters, self._limits)
        self._exporter = _Exporter(self._process)
        self._publisher = Publisher(self._process.writer, self._report, _log_error, also=self._round)
        self._publisher.start()

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def finalize(self) -> None:
        self._publisher.stop()
        self._exporter.end()
        self._process.end()

    def _answer(self, request: Any) -> Any:
        try:
            arrays = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            self._admission.measure({name: array.nbytes for name, array in arrays.items()})
            inputs = {name: to_values(array) for name, array in arrays.items()}
            parameters = json.loads(request.parameters() or "{}")
            admitted = self._admission.admit(inputs, parameters, request.request_id() or uuid.uuid4().hex)
            return pb_utils.InferenceResponse(output_tensors=[_tensor(ADMITTED, [admitted])])
        except RequestError as error:
            return pb_utils.InferenceResponse(error=_triton_error(error))
        except Exception as error:
            _log_error(f"admission failed: {error!r}\n{traceback.format_exc()}")
            defect = RequestError(ErrorCode.INTERNAL, "admission failed; the server's log has the details")
            return pb_utils.InferenceResponse(error=_triton_error(defect))

    def _round(self) -> None:
        self._limits.settle(self._settlements.take(self._process.live_state.sections(prefix=_ROUTERS)))
        self._limits.follow()
        self._exporter.round()

    def _report(self) -> dict[str, Any]:
        # A broken edit is told even when no request comes.
        policy = self._process.policy.current().model_dump(mode="json", by_alias=True)
        report = AdmissionReport(
            policy=policy,
            policy_error=self._process.policy.error,
            code_hash=self._process.code_hash,
            samples=self._counters.samples(),
        )
        return report.model_dump()


class RouterModel:
    """Models `<service>_router` and `<service>_router_unary`: an admitted request in, what a version answers out."""

    def initialize(self, args: dict[str, str]) -> None:
        decoupled = pb_utils.using_decoupled_model_transaction_policy(json.loads(args["model_config"]))
        self._process = _Process(args, "router" if decoupled else "router_unary")
        service = self._process.service
        availability = Availability(service, self._process.live_state)
        self._fleet = lambda: _fleet(service, availability)
        client = self._client = _Versions(
            service.llm, Receipts(receipts_path(service.process_lock(self._process.owner)))
        )
        self._counters = Counters(service.name, "router")
        self._log = RequestLog(service.request_log, _log_error)
        self._threads = ThreadReserve("stream")
        self._completions = Completions()
        self._breakers = Breakers(self._counters, service.process_lock("probe"))
        self._budget = FallbackBudget()
        self._availability = availability
        self._loaded = lambda: availability.snapshot().ready
        board = CancelBoard(board_path(service.process_lock(self._process.owner)))
        cancels = CancelDesk(client, _log_error, board=board.post)
        self._announcer = Announcer(_log_error)
        meter = LoadMeter(time.monotonic)
        self._shadows = Shadows(
            self._process.owner,
            client,
            loaded=self._loaded,
            process=availability.process,
            cancels=cancels,
            breakers=self._breakers,
            counters=self._counters,
            meter=meter,
            write=self._log.put,
            log=_log_error,
            start=Handover("shadows", ThreadReserve("shadow", keep=16), _log_error).run,
        )
        around = Surroundings(
            name=self._process.owner,
            client=client,
            fleet=self._fleet,
            loaded=self._loaded,
            cancels=cancels,
            counters=self._counters,
            write=self._log.put,
            log=_log_error,
            completions=self._completions,
            breakers=self._breakers,
            budget=self._budget,
            load=meter,
            shadows=self._shadows,
            announce=self._announcer.put,
        )
        self._router = Router(
            around,
            policy=self._process.policy.current,
            claims=self._process.claims,
            settings=RouterSettings(streams=decoupled),
            wake=lambda: self._watchdog.wake(),
        )
        self._watchdog = Watchdog(self._router.streams, availability.process, _log_error)
        self._state = StateFile(service.state_json)
        self._known: frozenset[int] | None = None
        self._publisher = Publisher(self._process.writer, self._report, _log_error, also=self._tidy)
        self._watchdog.start()
        self._announcer.start()
        self._publisher.start()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            self._start(request)

    def finalize(self) -> None:
        self._watchdog.stop()
        self._announcer.stop()
        self._publisher.stop()
        self._log.close()
        # What holds shared memory has to go before the stub gives it back.
        time.sleep(0.1)
        self._client.spent.drop_old(0.0)
        gc.collect()
        self._process.end()

    def is_ready(self) -> bool:
        """Whether any version can serve; servers ask from 26.03 on, and call the ensemble ready by it.

        One that is not ready may be refused all requests, those for the canary, a pinned version or a fallback too.
        """
        return bool(self._fleet().ready)

    def _start(self, request: Any) -> None:
        sender = _Client(request.get_response_sender(), frozenset(request.requested_output_names()))
        try:
            admitted = pb_utils.get_input_tensor_by_name(request, ADMITTED.name).as_numpy().reshape(-1)[0]
            self._threads.run(lambda: self._router.answer(admitted, sender))
        except Exception as error:
            _log_error(f"a request could not be started: {error!r}")
            sender.fail(RequestError(ErrorCode.OVERLOADED, "the router cannot take another request", retry_after=1.0))

    def _tidy(self) -> None:
        self._client.spent.drop_old()
        sections = self._process.live_state.sections(prefix=_ROUTERS)
        # Also where no request comes, so that the first one finds what other routers know.
        policy = self._process.policy.current()
        limits = policy.breaker
        self._shadows.follow(policy)
        self._breakers.states(self._availability.look().ready, limits)
        self._breakers.share(sections, self._process.owner, limits)
        self._budget.share(sections, self._process.owner)
        known = self._state.known()
        if known is not None and known != self._known:
            self._breakers.forget(known)
            self._shadows.forget(known)
            self._counters.forget(known)
            self._known = known

    def _report(self) -> dict[str, Any]:
        policy = self._process.policy.current()
        return RouterReport(
            completions=self._completions.totals(),
            breakers=self._breakers.report(policy.breaker),
            shadows=self._shadows.report(),
            taken_over=self._budget.report(policy.fallback_budget),
            in_flight=self._router.in_flight(),
            code_hash=self._process.code_hash,
            samples=self._counters.samples(),
        ).model_dump()


def _fleet(service: Service, availability: Availability) -> Fleet:
    snapshot, stable = availability.snapshot(), read_stable(service.stable_link)
    return Fleet(stable, snapshot.ready.keys(), snapshot.expected, previous=snapshot.previous(stable))


class _Frame:
    """A version's response, its tensors untouched."""

    __slots__ = ("_error", "_version", "plain", "tensors")

    def __init__(self, response: Any, version: int) -> None:
        self._version = version
        self._error = response.error().message() if response.has_error() else None
        self.tensors = {} if self._error is not None else {t.name(): t for t in response.output_tensors()}
        self.plain = self._error is None and "status" not in self.tensors

    def token_ids(self) -> list[int]:
        tokens: list[int] = self.tensors["token_ids"].as_numpy().tolist()
        return tokens

    def cumulative_logprob(self) -> float | None:
        tensor = self.tensors.get("cumulative_logprob")
        return None if tensor is None else float(tensor.as_numpy()[0])

    def read(self) -> Response:
        if self._error is not None:
            raise call_error(self._error, self._version)
        try:
            return parse_response({name: to_values(tensor.as_numpy()) for name, tensor in self.tensors.items()})
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise RequestError(
                ErrorCode.INTERNAL, f"version {self._version} sent what is no response: {error!r}"
            ) from error


class _Spent:
    """Keeps iterators of BLS calls for a while after their end.

    The stub holds each in a map too and drops its reference on a thread that does not hold the interpreter's lock. If
    that reference is the last, the responses and their arrays are freed beside running Python code, which sooner or
    later kills the process (seen, and read in pb_stub.cc of 24.10). So ours has to be the last.
    """

    # The stub drops its own within a few messages to the server, so within milliseconds.
    SECONDS = 5.0

    def __init__(self) -> None:
        self._kept: deque[tuple[float, Any]] = deque()
        self._lock = threading.Lock()

    def keep(self, iterator: Any) -> None:
        with self._lock:
            self._kept.append((time.monotonic(), iterator))
        self.drop_old()

    def drop_old(self, seconds: float = SECONDS) -> None:
        """Drop those that are old enough; called now and then, so that an idle router holds none."""
        limit = time.monotonic() - seconds
        with self._lock:
            while self._kept and self._kept[0][0] < limit:
                self._kept.popleft()


class _Versions:
    """Calls versions of the model `llm` through BLS."""

    def __init__(self, llm: str, receipts: Receipts) -> None:
        self._llm = llm
        self._receipts = receipts
        self.spent = _Spent()
        # Calls under way by their cancel token: newer servers cancel a call itself.
        self._calls: dict[str, Any] = {}

    def open(self, version: int, request: GenerateRequest, outputs: frozenset[str]) -> Iterator[_Frame]:
        receipt = self._receipts.open()
        whole = True
        try:
            asked = request_inputs(_with_slot(request, receipt.slot))
            attempt = request.extensions.attempt
            token = attempt.cancel_token if attempt else ""
            for response in self._exec(version, asked, list(outputs), token):
                receipt.took()
                # Nothing comes after an error of the server, and whoever reads it leaves.
                whole = response.has_error()
                # The last one may hold the final flag alone.
                if response.has_error() or response.output_tensors():
                    yield _Frame(response, version)
            whole = True
        finally:
            receipt.close(whole=whole)

    def cancel(self, version: int, token: str) -> bool:
        # It reaches a call that the server has not handed to the version yet; the version itself goes by the token.
        stop = cancel_of(self._calls.get(token))
        if stop is not None:
            stop()
        asked = RequestExtensions(cancel=token).model_dump_json(exclude_defaults=True)
        cancelled = False
        for response in self._exec(version, {"extensions": [asked]}, ["details"]):
            if response.has_error():
                raise call_error(response.error().message(), version)
            for tensor in response.output_tensors():
                cancelled = cancelled or bool(json.loads(to_values(tensor.as_numpy())[0]).get("cancelled"))
        return cancelled

    def _exec(self, version: int, inputs: dict[str, list[Any]], outputs: list[str], token: str = "") -> Iterator[Any]:
        request = pb_utils.InferenceRequest(
            model_name=self._llm,
            model_version=version,
            requested_output_names=outputs,
            inputs=[_tensor(INPUT_SPECS[name], values) for name, values in inputs.items()],
        )
        responses: Any = None
        try:
            responses = request.exec(decoupled=True)
            if token:
                self._calls[token] = responses
            yield from responses
        except pb_utils.TritonModelException as error:
            raise call_error(str(error), version) from error
        finally:
            self._calls.pop(token, None)
            self.spent.keep(responses)


def _with_slot(request: GenerateRequest, slot: int | None) -> GenerateRequest:
    """The request with the place where the version finds how many of its responses were taken."""
    attempt = request.extensions.attempt
    if attempt is None:
        return request
    extensions = request.extensions.model_copy(update={"attempt": attempt.model_copy(update={"slot": slot})})
    return request.model_copy(update={"extensions": extensions})


class _Client:
    """Answers a client through Triton's response sender."""

    def __init__(self, sender: Any, asked: frozenset[str]) -> None:
        self.returns: frozenset[str] = frozenset()
        self.ended = False
        self._sender = sender
        self._asked = asked
        # The attempt that the client was last told of, by its token, and the tensor of its version.
        self._told: str | None = None
        self._version: list[Any] = []

    def forward(self, frame: Frame, stamp: Stamp) -> None:
        assert isinstance(frame, _Frame)
        tensors = [tensor for name, tensor in frame.tensors.items() if name in self._asked]
        # Every tensor costs: what does not change is not said again, but for the version.
        parameters: dict[str, bool | int | str] = {}
        if stamp.cancel_token != self._told:
            self._told, self._version = stamp.cancel_token, []
            parameters = _parameters(stamp.version, stamp.reason.value)
            tensors += self._tensors(stamp, "route_reason", "cancel_token")
        self._version = self._version or self._tensors(stamp, "served_version")
        tensors += self._version
        self._sender.send(make_response(pb_utils, tensors, parameters))

    def send(self, response: Response, *, final: bool) -> None:
        outputs = response_outputs(response, self.returns, final=final)
        tensors = [_tensor(OUTPUT_SPECS[name], values) for name, values in outputs.items() if name in self._asked]
        parameters = _parameters(response.served_version, response.route_reason)
        self._send(make_response(pb_utils, tensors, parameters), final=final)
        if response.cancel_token != self._told:
            self._told, self._version = response.cancel_token, []

    def fail(self, error: RequestError) -> None:
        self._send(pb_utils.InferenceResponse(error=_triton_error(error)), final=True)

    def _send(self, response: Any, *, final: bool) -> None:
        self._sender.send(response, flags=_FINAL if final else 0)
        self.ended = self.ended or final

    def _tensors(self, stamp: Stamp, *names: str) -> list[Any]:
        values = {
            "served_version": stamp.version,
            "route_reason": stamp.reason.value,
            "cancel_token": stamp.cancel_token,
        }
        return [_tensor(OUTPUT_SPECS[name], [values[name]]) for name in names if name in self._asked]


def _parameters(version: int | None, reason: str | None) -> dict[str, bool | int | str]:
    """What a response tells of its way beside the tensors, to clients that did not ask for those."""
    return {} if version is None or reason is None else {"served_version": version, "route_reason": reason}


class _Series:
    def __init__(self, metric: Any) -> None:
        self._metric = metric

    def value(self) -> float:
        return float(self._metric.value())

    def increment(self, by: float) -> None:
        self._metric.increment(by)

    def set(self, value: float) -> None:
        self._metric.set(value)


class _TritonFamilies:
    """The server's metrics; families are kept until `clear`, as the server takes one away that nobody holds."""

    def __init__(self) -> None:
        self._families: dict[str, Any] = {}

    def series(self, name: str, kind: Kind, help: str, labels: dict[str, str]) -> _Series:
        if name not in self._families:
            kinds = {"counter": pb_utils.MetricFamily.COUNTER, "gauge": pb_utils.MetricFamily.GAUGE}
            self._families[name] = pb_utils.MetricFamily(name=name, description=help, kind=kinds[kind])
        return _Series(self._families[name].Metric(labels=labels))

    def clear(self) -> None:
        # A family keeps its metrics, so that they end with it alone.
        self._families.clear()
        gc.collect()


class _Exporter:
    """Exports the metrics of all processes, every second; of two admissions only one does."""

    def __init__(self, process: _Process) -> None:
        self._live_state = process.live_state
        self._state = StateFile(process.service.state_json)
        self._lock = ProcessLock(process.service.process_lock("exporter"))
        self._held = False
        self._export: MetricsExport | None = MetricsExport(_TritonFamilies())

    def round(self) -> None:
        if self._export is None:
            return
        if not self._held:
            try:
                self._lock.acquire(timeout=0.0)
            except AlreadyHeldError:
                return
            self._held = True
        self._export.export(self._live_state.sections(), self._state.known())

    def end(self) -> None:
        # A metric tells the server of its end; one that outlives the connection to it crashes the process.
        self._export = None
        gc.collect()
        self._lock.release()
