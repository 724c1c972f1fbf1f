"""One JSON line a request, written by a thread; never the prompt, the text or a token."""

import fcntl
import json
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

MAX_BYTES = 64 * 2**20
KEPT_FILES = 3
BATCH_SECONDS = 0.2

# Lines that wait for a slow disk; further ones are counted and dropped.
MAX_WAITING = 10_000


@dataclass(slots=True)
class RequestLine:
    """What is known of a request when it ends. Times are seconds from the router's receipt.

    Attributes:
        at: when it ended, ISO 8601 in UTC.
        version, reason: what served it last; None where no version was found.
        decision: the first reason.
        attempts: the versions that failed it, each with its code.
        code: OK or why it failed.
        truncated: the versions that failed it after their first token.
        token_gap_s: between two tokens on average, of the last attempt.
        first_load, gap_load: requests of that version in flight on average until its first token, and after it.
        others: requests of other versions in flight when it began.
        shadow: of a mirrored request, which nobody was answered and whose line has the id of the client's: what it is
            compared with (`of`, the version that answered the client, and its latencies and loads), whether tokens were
            compared, and the position of the first that differs; empty where it failed.
        passed_over: the version that it was meant for, where that was not loaded or its breaker open.
    """

    at: str
    id: str
    router: str
    stream: bool
    version: int | None
    reason: str | None
    decision: str | None
    code: str
    finish_reasons: list[str | None] = field(default_factory=list)
    attempts: list[dict[str, Any]] = field(default_factory=list)
    first_token_s: float | None = None
    seconds: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    tenant: str = ""
    truncated: list[int] = field(default_factory=list)
    token_gap_s: float | None = None
    first_load: float | None = None
    gap_load: float | None = None
    others: int = 0
    passed_over: int | None = None
    shadow: dict[str, Any] | None = None


class RequestLog:
    """Appends lines to `path`; several processes may share the file.

    Args:
        max_bytes: size at which the file is put aside as `<name>.1`.
        kept: files kept beside the present one.

    Attributes:
        dropped: lines that found the queue full or could not be written.
    """

    def __init__(
        self, path: Path, log: Callable[[str], None], *, max_bytes: int = MAX_BYTES, kept: int = KEPT_FILES
    ) -> None:
        self._path = path
        self._log = log
        self._max_bytes = max_bytes
        self._kept = kept
        self._queue: queue.Queue[RequestLine | None] = queue.Queue(MAX_WAITING)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="request-log", daemon=True)
        self._thread.start()
        self.dropped = 0

    def put(self, line: RequestLine) -> None:
        """Write a line soon; never waits."""
        try:
            self._queue.put_nowait(line)
        except queue.Full:
            self.dropped += 1

    def close(self, timeout: float = 5.0) -> None:
        """Write what waits and end the thread."""
        self._closing.set()
        self._queue.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            lines = [self._queue.get()]
            # Opening and locking the file costs more than a line, so a busy second is written in a few batches.
            self._closing.wait(BATCH_SECONDS)
            while not self._queue.empty():
                lines.append(self._queue.get())
            text = "".join(_line(line) for line in lines if line is not None)
            try:
                self._append(text)
            except OSError as error:
                self.dropped += len(lines)
                self._log(f"the request log {self._path} cannot be written: {error}")
            if None in lines:
                return

    def _append(self, text: str) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._path, "ab") as file:
            # Another process may be putting the file aside.
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(text.encode("utf-8"))
            file.flush()
            if file.tell() >= self._max_bytes and self._is_present(file.fileno()):
                self._put_aside()

    def _is_present(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self._path))
        except FileNotFoundError:
            return False

    def _put_aside(self) -> None:
        for number in range(self._kept - 1, 0, -1):
            older = self._aside(number)
            if older.exists():
                older.replace(self._aside(number + 1))
        self._path.replace(self._aside(1))

    def _aside(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")


def _line(line: RequestLine) -> str:
    return json.dumps(asdict(line), separators=(",", ":")) + "\n"
