"""The load of the soak, as a file for Locust, which runs it in a process of its own (tests/support/soak_run.py).

Read from the environment: SOAK_GRPC and SOAK_GATEWAY, host:port each; SOAK_WORKER, the socket of soak_worker.py; and
SOAK_RESULT, where what came of it is kept.
"""

import itertools
import json
import os
import socket
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from locust import User, events, task
from soak_requests import ABNORMAL, FAULT, HERE, NORMAL, SoakClient, outcome_of

# One request in so many is abnormal: 5 %.
ABNORMAL_EVERY = 20

# Faults whose words are kept.
KEPT = 50

# Over-long requests that every client begins with, one of each kind and more.
LARGEST = 4

numbers = itertools.count(1)
outcomes: Counter[tuple[str, str]] = Counter()
faults: list[str] = []


class SoakUser(User):
    """Sends one request after the other, without a pause."""

    def on_start(self) -> None:
        self._client = SoakClient(os.environ["SOAK_GRPC"], os.environ["SOAK_GATEWAY"])
        self._worker = socket.socket(socket.AF_UNIX)
        self._worker.connect(os.environ["SOAK_WORKER"])
        self._told = self._worker.makefile("rb")
        # The heaps of every thread that serves have to meet the largest requests once, all at the same time; later a
        # process that grows with them is one that keeps them.
        for number in range(LARGEST):
            self._send(SoakClient.over_long, number)

    def on_stop(self) -> None:
        self._client.close()
        self._told.close()
        self._worker.close()

    @task
    def request(self) -> None:
        number = next(numbers)
        if number % ABNORMAL_EVERY:
            send = NORMAL[number % len(NORMAL)]
        else:
            number //= ABNORMAL_EVERY
            send, number = ABNORMAL[number % len(ABNORMAL)], number // len(ABNORMAL)
        self._send(send, number)

    def _send(self, send: Callable[[SoakClient, int], str], number: int) -> None:
        name, begun = send.__name__, time.perf_counter()
        if send in HERE:
            outcome, fault = outcome_of(self._client, name, number)
        else:
            self._worker.sendall(f"{name} {number}\n".encode())
            outcome, fault = json.loads(self._told.readline())
        outcomes[name, outcome] += 1
        if outcome == FAULT and len(faults) < KEPT:
            faults.append(f"{name} {number}: {fault}")
        events.request.fire(
            request_type="normal" if send in NORMAL else "abnormal",
            name=name,
            response_time=1000 * (time.perf_counter() - begun),
            response_length=0,
            exception=fault,
            context={},
        )


@events.quitting.add_listener
def keep(environment: Any, **_: Any) -> None:
    """Write what came of all requests."""
    entries = {}
    for entry in environment.stats.entries.values():
        entries[entry.name] = {
            "kind": entry.method,
            "requests": entry.num_requests,
            "outcomes": {outcome: count for (name, outcome), count in sorted(outcomes.items()) if name == entry.name},
            "median_ms": entry.median_response_time,
            "p99_ms": entry.get_response_time_percentile(0.99),
        }
    begun = next(numbers) - 1 + LARGEST * environment.parsed_options.num_users
    result = {"begun": begun, "requests": entries, "faults": faults}
    Path(os.environ["SOAK_RESULT"]).write_text(json.dumps(result))
