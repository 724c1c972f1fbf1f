"""Cancel tokens, and the calls that carry them to versions without ever blocking the caller for long."""

import re
import secrets
import threading
from collections.abc import Callable

from piccard_canary.protocols import VersionClient

# Calls in flight at most: a hung version holds each of its calls for ever.
MAX_CALLS = 64

_TOKEN = re.compile(r"([1-9][0-9]{0,17})\.[A-Za-z0-9_-]{16,128}")


def mint_token(version: int) -> str:
    """A new cancel token of an attempt at `version`; nobody guesses it."""
    return f"{version}.{secrets.token_urlsafe(24)}"


def token_version(token: str) -> int | None:
    """The version that a token was made for, or None where it is no token."""
    match = _TOKEN.fullmatch(token)
    return int(match[1]) if match else None


class CancelDesk:
    """Sends cancels to versions, each on a thread of its own and never more than `limit` at once.

    Args:
        board: each is posted there too, for a version that the server calls no more, or that hangs.

    Attributes:
        dropped: cancels that were not sent because all threads hang on versions.
    """

    def __init__(
        self,
        client: VersionClient,
        log: Callable[[str], None],
        limit: int = MAX_CALLS,
        *,
        board: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._client = client
        self._log = log
        self._board = board
        self._free = threading.BoundedSemaphore(limit)
        self.dropped = 0

    def post(self, version: int, token: str) -> None:
        """Send a cancel and do not wait."""
        self._start(version, token, _Answer())

    def ask(self, version: int, token: str, timeout: float) -> bool:
        """Send a cancel; whether the version said within `timeout` seconds that it ended a generation."""
        answer = _Answer()
        self._start(version, token, answer)
        answer.ready.wait(timeout)
        return answer.cancelled

    def announce(self, token: str) -> None:
        """Tell of a cancel to whom it concerns, without a call."""
        self._board(token)

    def _start(self, version: int, token: str, answer: "_Answer") -> None:
        self._board(token)
        if not self._free.acquire(blocking=False):
            self.dropped += 1
            answer.ready.set()
            return
        thread = threading.Thread(
            target=self._call, args=(version, token, answer), name=f"cancel-{version}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:
            self._free.release()
            self.dropped += 1
            answer.ready.set()

    def _call(self, version: int, token: str, answer: "_Answer") -> None:
        try:
            answer.cancelled = self._client.cancel(version, token)
        except Exception as error:
            self._log(f"a cancel did not reach version {version}: {error}")
        finally:
            answer.ready.set()
            self._free.release()


class _Answer:
    def __init__(self) -> None:
        self.ready = threading.Event()
        self.cancelled = False
