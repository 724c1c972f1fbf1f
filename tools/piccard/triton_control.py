"""Model control of a running server, over gRPC.

Over HTTP no request on other connections completes while a model loads, so control goes over gRPC. The set of
versions is changed only through the load API's config override: a plain load follows the config on disk, which names
the stable version alone.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from piccard_contract.home import Service
from piccard_contract.live_state import LiveState
from piccard_contract.reports import SupervisorReport

from piccard.errors import OperationError
from piccard.found_server import find_server
from piccard.keys import admin_key_path, read_secret
from piccard.model_config import config_json, config_with_versions, model_configs
from piccard.server_settings import ADMIN_KEY_NAME

if TYPE_CHECKING:
    import tritonclient.grpc

# Seconds for calls that only ask.
_ASK = 10.0

# The Python backend's traceback: a heading and an indented line a frame.
_FRAMES = re.compile(r"\s*\n\s*At:\n(?:[ \t]+[^\n]*(?:\n|$))*")


class LoadError(OperationError):
    """The server did not load what it was told to; the versions that ran before still do."""


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """A version in the server's index: state READY, LOADING, UNLOADING, UNAVAILABLE, or empty where never loaded."""

    model: str
    version: int
    state: str
    reason: str

    @property
    def ready(self) -> bool:
        return self.state == "READY"


class TritonControl:
    """A connection to a server's model control.

    Args:
        address: host:port of its gRPC.
        admin_key: the home's.
    """

    def __init__(self, address: str, admin_key: str) -> None:
        import tritonclient.grpc

        self.address = address
        self._headers = {f"triton-grpc-protocol-{ADMIN_KEY_NAME}": admin_key}
        self._client: tritonclient.grpc.InferenceServerClient = tritonclient.grpc.InferenceServerClient(address)

    def __enter__(self) -> TritonControl:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._client.close()

    def live(self) -> bool:
        """Whether the server answers."""
        from tritonclient.utils import InferenceServerException

        try:
            return bool(self._client.is_server_live(client_timeout=_ASK))
        except InferenceServerException:
            return False

    def index(self) -> list[IndexEntry]:
        """All versions that the server knows.

        Raises:
            OperationError: it does not answer.
        """
        answer = self._call(
            "read the index", lambda: self._client.get_model_repository_index(self._headers, client_timeout=_ASK)
        )
        return [
            IndexEntry(entry.name, int(entry.version), entry.state, entry.reason)
            for entry in answer.models
            if entry.version.isdigit()
        ]

    def ready_versions(self, model: str) -> list[int]:
        """The versions of `model` that the server has loaded."""
        return sorted(entry.version for entry in self.index() if entry.model == model and entry.ready)

    def set_versions(self, service: Service, model: str, versions: Iterable[int], timeout: float | None = None) -> None:
        """Have exactly `versions` of `model` loaded. Those that are loaded already go on untouched.

        Args:
            timeout: seconds to wait for the answer; None waits as long as loading takes.

        Raises:
            LoadError: one of them is not loaded afterwards; the message is the server's reason.
        """
        wanted = sorted(set(versions))
        config = config_json(config_with_versions(service, model, wanted))
        self._load(model, config, timeout)
        # A version that the policy names and the disk lacks is only logged, so the answer alone proves nothing.
        entries = {entry.version: entry for entry in self.index() if entry.model == model}
        for version in wanted:
            entry = entries.get(version)
            if entry is None or not entry.ready:
                reason = (
                    server_words(entry.reason if entry else "")
                    or "it is not in the server's index; is its folder complete?"
                )
                raise LoadError(f"version {version} of {model} is not loaded: {reason}")

    def load_plain(self, service: Service, model: str) -> None:
        """Load a model that was not loaded before, by the configuration that this Piccard writes."""
        self._load(model, config_json(model_configs(service)[model]), None)

    def unload(self, model: str) -> None:
        """Unload all versions of `model`; returns at once, they end after their last request."""
        self._call("unload", lambda: self._client.unload_model(model, headers=self._headers, client_timeout=_ASK))

    def wait_unloaded(self, model: str, timeout: float) -> bool:
        """Whether no version of `model` was left loaded within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if not any(entry.model == model and entry.ready for entry in self.index()):
                return True
            time.sleep(0.02)
        return False

    def _load(self, model: str, config: str, timeout: float | None) -> None:
        from tritonclient.utils import InferenceServerException

        try:
            self._client.load_model(model, headers=self._headers, config=config, client_timeout=timeout)
        except InferenceServerException as error:
            raise LoadError(_reason(error)) from error

    def _call(self, what: str, call: Any) -> Any:
        from tritonclient.utils import InferenceServerException

        try:
            return call()
        except InferenceServerException as error:
            raise OperationError(
                f"cannot {what} at {self.address}: {_reason(error)}; see `piccard doctor` and the server's log"
            ) from error


def find_supervisor(home: Path, services: Iterable[Service]) -> SupervisorReport | None:
    """What the living supervisor of `home` published; None where no server runs."""
    for service in services:
        report = _living_report(service)
        if report is not None and report.grpc:
            return report
    return None


def supervisor_phase(service: Service) -> str:
    """What the living supervisor is at: starting, serving or stopping; empty where none lives."""
    report = _living_report(service)
    return "" if report is None else str(report.details.get("phase", ""))


def supervisor_gives_up(service: Service) -> dict[str, str]:
    """Why the living supervisor does not start a process any more, by `service/owner`."""
    report = _living_report(service)
    return {} if report is None else report.given_up


def _living_report(service: Service) -> SupervisorReport | None:
    if not service.live_state.exists():
        return None
    state = LiveState(service.live_state, service.run_folder)
    try:
        section = state.read("supervisor")
    finally:
        state.close()
    return SupervisorReport.model_validate(section.data) if section is not None and section.alive else None


def connect(home: Path, services: Iterable[Service]) -> TritonControl | None:
    """Control of the running server of `home`; None where none runs.

    Raises:
        OperationError: it runs and does not answer.
    """
    report = find_supervisor(home, services)
    # Without a supervisor the server may run all the same.
    found = None if report is not None else find_server(home)
    address = report.grpc if report is not None else found.grpc if found is not None else ""
    if not address:
        return None
    control = TritonControl(address, read_secret(admin_key_path(home)))
    if not control.live():
        control.close()
        raise OperationError(f"the server at {address} does not answer; wait for its start or read its log")
    return control


def _reason(error: Any) -> str:
    """The server's words, without the wrapping that gRPC and Triton put around them."""
    return server_words(error.message() or str(error))


def server_words(text: str) -> str:
    """What the server says of a failure in one line, without the frames that the Python backend puts after it."""
    text = _FRAMES.sub("", text).rstrip("; \n")
    return " ".join(text.replace("failed to load", "did not load", 1).split())
