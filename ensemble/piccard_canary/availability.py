"""Which versions may serve: those whose process lives, whose engine is ready, and which state.json lets serve."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from piccard_contract.home import Service, version_owner
from piccard_contract.live_state import LiveState, Section
from piccard_contract.process_lock import holder_pid
from piccard_contract.reports import BYTES_PER_TOKEN

from piccard_canary.state_file import StateFile

_PREFIX = version_owner(0).removesuffix("0")


@dataclass(frozen=True, slots=True)
class LoadedVersion:
    """A version that can serve.

    Attributes:
        pid: its process; attempts end when another stands in its place.
        tokenizer_hash, template_hash: streams move only between versions where both agree.
        requests: that it runs and lets wait, whoever sent them.
        load: 0 to 1.
        bytes_per_token: of text.
        max_model_len: tokens of its context, 0 where it does not tell.
    """

    version: int
    pid: int
    tokenizer_hash: str = ""
    template_hash: str = ""
    requests: int = 0
    load: float = 0.0
    bytes_per_token: float = BYTES_PER_TOKEN
    max_model_len: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The versions at one moment.

    Attributes:
        ready: those that can serve, by number.
        expected: those that state.json means to serve.
        roles: stable and previous by state.json, those of them that may serve.
    """

    ready: dict[int, LoadedVersion] = field(default_factory=dict)
    expected: frozenset[int] = frozenset()
    roles: tuple[int, ...] = ()

    def previous(self, stable: int | None) -> int | None:
        """What was stable before `stable`, which the link names, or None.

        A rollback writes state.json before it moves the link: in between it is what the link will name.
        """
        return next((version for version in self.roles if version != stable), None)


class Availability:
    """Looks at the state file and state.json, at most every `lifetime` seconds.

    Args:
        lifetime: seconds that a look is good for.
    """

    def __init__(
        self,
        service: Service,
        live_state: LiveState,
        *,
        lifetime: float = 0.05,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._service = service
        self._live_state = live_state
        self._lifetime = lifetime
        self._clock = clock
        self._lock = threading.Lock()
        self._snapshot = Snapshot()
        self._looked_at: float | None = None
        self._state = StateFile(service.state_json)

    def snapshot(self) -> Snapshot:
        """The versions now, or as they were up to `lifetime` seconds ago."""
        looked_at = self._looked_at
        if looked_at is not None and self._clock() - looked_at < self._lifetime:
            return self._snapshot
        with self._lock:
            self._snapshot = self._look()
            self._looked_at = self._clock()
            return self._snapshot

    def look(self) -> Snapshot:
        """The versions now; what `snapshot` hands out grows no younger by it.

        Who looks now and then, without a request, must not have the next request see what was before.
        """
        with self._lock:
            return self._look()

    def process(self, version: int) -> int | None:
        """The living process of `version`, looked up at once; None where there is none."""
        return holder_pid(self._service.process_lock(version_owner(version)))

    def _look(self) -> Snapshot:
        serving = self._state.serving()
        loaded = [_loaded(section) for section in self._live_state.sections(prefix=_PREFIX)]
        ready = {
            version.version: version
            for version in loaded
            if version is not None and (serving is None or version.version in serving)
        }
        return Snapshot(ready, frozenset(ready) if serving is None else serving, self._state.roles())


def _loaded(section: Section) -> LoadedVersion | None:
    data = section.data
    if not section.alive or data.get("phase") != "ready":
        return None
    return LoadedVersion(
        int(data["version"]),
        section.pid,
        data.get("tokenizer_hash", ""),
        data.get("template_hash", ""),
        int(data.get("running", 0)) + int(data.get("waiting", 0)),
        _load(data),
        float(data.get("bytes_per_token", 0)) or BYTES_PER_TOKEN,
        int(data.get("max_model_len", 0)),
    )


def _load(data: dict[str, Any]) -> float:
    """The load that a version tells; of an older one, the share of its cache in use."""
    told = data.get("load")
    if told is not None:
        return float(told)
    total = int(data.get("total_blocks", 0))
    return 1.0 - int(data.get("free_blocks", 0)) / total if total else 0.0
