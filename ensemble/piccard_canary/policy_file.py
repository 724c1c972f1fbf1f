"""policy.yaml as it is now: read again when the file changes, the last good one kept when an edit is broken."""

import threading
from pathlib import Path

from piccard_contract.file_watch import FileWatch
from piccard_contract.policy import Policy, PolicyError, read_policy


class PolicyFile:
    """The policy at `path`.

    A look costs one stat, so it is made at every request and a change acts on the next one.

    Attributes:
        error: why the file's present content is not in use; empty where it is.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.error = ""
        self._policy = Policy()
        self._watch = FileWatch(path)
        self._lock = threading.Lock()

    def current(self) -> Policy:
        """The policy of a request that starts now. Without any good file: no canary, all traffic to stable."""
        with self._lock:
            if self._watch.changed():
                self._read()
            return self._policy

    def _read(self) -> None:
        before = self._watch.signature()
        try:
            policy = read_policy(self.path)
        except (PolicyError, OSError) as error:
            self.error = f"{error}; the last good policy stays in use"
            return
        # An editor that writes in place may have been met halfway: the next look reads again.
        if self._watch.signature() == before:
            self._policy, self.error = policy, ""
