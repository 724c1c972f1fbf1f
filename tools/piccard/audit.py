"""The audit log of a home: one JSON line for each change, who made it, and from what to what."""

import getpass
import json
import os
from typing import Any

from piccard_contract.home import Service
from piccard_contract.lifecycle import now


def write_audit(service: Service, what: str, before: Any, after: Any, *, failed: str = "") -> None:
    """Append one line.

    Args:
        what: the command with its arguments, such as `promote 2`.
        before, after: what it changed, JSON.
        failed: why it was undone; empty where it was done.
    """
    line = {
        "time": now(),
        "who": _who(),
        "pid": os.getpid(),
        "service": service.name,
        "what": what,
        "from": before,
        "to": after,
    }
    if failed:
        line["failed"] = failed
    service.audit_log.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(service.audit_log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
    try:
        # One write of one line: lines of several processes do not mix.
        os.write(descriptor, (json.dumps(line, ensure_ascii=False) + "\n").encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _who() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"
