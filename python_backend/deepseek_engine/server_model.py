"""A version as a model of Triton's Python backend."""

import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from piccard_contract.capabilities import make_response
from piccard_contract.claims import ClaimsCheck
from piccard_contract.code_hash import ENGINE_PACKAGES, own_code_hash
from piccard_contract.home import Service, version_owner
from piccard_contract.inherited_sockets import close_inherited_sockets
from piccard_contract.live_state import LiveState
from piccard_contract.process_lock import ProcessLock
from piccard_contract.reports import VersionReport
from piccard_contract.request import check_tensor_bytes
from piccard_contract.tensors import DATATYPES, OUTPUT_SPECS

from deepseek_engine.callers import Callers
from deepseek_engine.operators_file import OperatorsFile
from deepseek_engine.version import OpenVersion, open_version
from deepseek_engine.version_metrics import VersionMetrics
from deepseek_engine.version_report import ReportPublisher
from deepseek_engine.version_server import VersionServer

_log = logging.getLogger(__name__)

# Exit status of a process whose engine has failed (EX_SOFTWARE of sysexits.h).
FATAL_STATUS = 70

_DTYPES = {name: np.dtype(DATATYPES[spec.datatype][1]) for name, spec in OUTPUT_SPECS.items()}


class TritonReply:
    """The response sender of one request, as `deepseek_engine.flights.Reply`.

    Args:
        asked: outputs that the caller reads.
    """

    def __init__(self, sender: Any, asked: frozenset[str]) -> None:
        self._sender = sender
        self._asked = asked
        self._final = False
        # The server frees what is_cancelled() asks when the final response was sent.
        self._ending = threading.Lock()

    def send(self, outputs: dict[str, list[Any]], *, final: bool) -> None:
        """Send tensors, name -> values."""
        # The stub drops what was not asked for itself, but without the interpreter's lock: the tensor's array is then
        # freed beside running Python code, which sooner or later kills the process (pb_utils of 24.10).
        tensors = [_tensor(name, outputs[name]) for name in outputs if name in self._asked]
        response = make_response(pb_utils, tensors, _told(outputs))
        if not final:
            self._sender.send(response)
            return
        with self._ending:
            if self._final:
                return
            self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            self._final = True

    def is_cancelled(self) -> bool:
        """Whether the client is gone."""
        with self._ending:
            return not self._final and bool(self._sender.is_cancelled())


class VersionModel:
    """The model of `<service>_llm`; one instance a version, each in a process of its own."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the version; what is raised becomes the error of the load."""
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        close_inherited_sockets()
        self._number = int(args["model_version"])
        model_folder = Path(args["model_repository"])
        self._service = Service.of_model(model_folder)
        owner = version_owner(self._number)
        self._lock = ProcessLock(self._service.process_lock(owner))
        self._lock.acquire()
        self._operators: OperatorsFile | None = None
        self._state = LiveState(self._service.live_state, self._service.run_folder)
        self._report = ReportPublisher(
            self._state.writer(owner),
            VersionReport(version=self._number, started_at=time.time(), code_hash=own_code_hash(ENGINE_PACKAGES)),
        )
        self._report.start()
        try:
            version = open_version(
                model_folder / str(self._number),
                number=self._number,
                home=self._service.home,
                progress=self._report.progress,
            )
            self._serve(version)
        except BaseException as error:
            self._report.update(phase="failed", reason=f"{type(error).__name__}: {error}"[:2000])
            self._leave()
            raise

    def execute(self, requests: list[Any]) -> None:
        """Take the requests; their responses come later from other threads."""
        for request in requests:
            reply = TritonReply(request.get_response_sender(), frozenset(request.requested_output_names()))
            try:
                self._server.take(_inputs(request), _parameters(request), request_id=request.request_id(), reply=reply)
            # Whatever is raised here would leave the request hanging for ever.
            except BaseException as error:
                _log.exception("a request could not be taken")
                self._server.refuse(reply, error)

    def is_ready(self) -> bool:
        """Whether requests can be served now; servers ask from 26.03 on."""
        return self._server.alive

    def finalize(self) -> None:
        """Called after the last request has ended."""
        self._report.update(phase="ending")
        self._server.stop()
        self._leave()

    def _leave(self) -> None:
        self._report.stop()
        if self._operators is not None:
            self._operators.remove()
        self._state.close()
        self._lock.release()

    def _end_process(self) -> None:
        """End at once: what the process holds of a device may never be given back, and others wait for its lock."""
        _log.critical("version %d ends with status %d, to be started anew", self._number, FATAL_STATUS)
        os._exit(FATAL_STATUS)

    def _serve(self, version: OpenVersion) -> None:
        self._server = VersionServer(
            version,
            number=self._number,
            on_fatal=self._end_process,
            callers=Callers(self._service.process_lock),
            claims=ClaimsCheck(self._service.gateway_secret),
        )
        self._metrics = VersionMetrics(self._service.name, self._number, self._server.stats, version.operators)
        self._pulse = version.pulse
        self._tell_operators(version)
        self._server.start()
        file = version.file
        self._report.update(
            phase="ready",
            progress=1.0,
            label=file.label,
            runner=file.runner.value,
            profile=file.profile.value,
            device=version.device,
            linked=file.linked,
            tokenizer_hash=version.tokenizer.hash(),
            template_hash=version.tokenizer.template_hash(),
            max_model_len=version.max_model_len,
            vocab_size=version.vocab_size,
            **self._figures(),
        )
        self._report.follow(self._figures)
        stats = self._server.stats
        _log.info(
            "version %d (%s, runner %s) serves on %s: context %d tokens, %d cache blocks",
            self._number,
            file.label,
            file.runner.value,
            version.device,
            version.max_model_len,
            stats.total_blocks,
        )

    def _tell_operators(self, version: OpenVersion) -> None:
        watch = version.operators
        if watch is None:
            return
        self._operators = OperatorsFile(
            self._service.operators_file(self._number),
            lambda: watch.report(self._number, version.device, version.file.runner.value),
            lambda: watch.revision,
        )

    def _figures(self) -> dict[str, Any]:
        if self._operators is not None:
            self._operators.refresh()
        stats = self._server.stats
        self._metrics.observe(stats, self._server.unsigned_claims)
        return {
            "running": stats.running,
            "waiting": stats.waiting,
            "load": stats.load,
            "free_blocks": stats.free_blocks,
            "total_blocks": stats.total_blocks,
            "preemptions": stats.preemptions,
            "tokens_generated": stats.generated_tokens,
            "bytes_per_token": self._server.bytes_per_token,
            "busy": self._pulse.busy,
            "beats": self._pulse.beats,
            "samples": self._metrics.samples(),
        }


def _told(outputs: dict[str, list[Any]]) -> dict[str, bool | int | str]:
    """Parameters of a response that says why it is this version's: that of a direct call. A router makes its own."""
    if "route_reason" not in outputs:
        return {}
    return {name: outputs[name][0] for name in ("served_version", "route_reason")}


def _inputs(request: Any) -> dict[str, list[Any]]:
    """The request's tensors as flat lists of plain values; copies, since the request is freed after execute."""
    arrays = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
    check_tensor_bytes({name: array.nbytes for name, array in arrays.items()})
    return {name: array.reshape(-1).tolist() for name, array in arrays.items()}


def _parameters(request: Any) -> dict[str, Any]:
    """The request's parameters: a JSON text from the servers we know, taken as a mapping too."""
    parameters = request.parameters()
    return dict(parameters) if isinstance(parameters, dict) else json.loads(parameters or "{}")


def _tensor(name: str, values: list[Any]) -> Any:
    if _DTYPES[name].hasobject:
        values = [value.encode() for value in values]
    return pb_utils.Tensor(name, np.array(values, dtype=_DTYPES[name]))
