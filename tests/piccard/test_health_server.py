"""/livez and /readyz."""

import json
import socket
import urllib.error
import urllib.request
from contextlib import ExitStack
from typing import Any

import pytest
from piccard.health_server import HealthServer
from piccard_server import free_ports


def ask(port: int, path: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_one_that_was_never_started_is_stopped() -> None:
    (port,) = free_ports(1)
    for _ in range(2):
        HealthServer("127.0.0.1", port, lambda: (True, {}), lambda: (True, {})).stop()


def test_answers_and_keeps_them_for_a_while() -> None:
    (port,) = free_ports(1)
    asked: list[int] = []

    def ready() -> tuple[bool, dict[str, Any]]:
        asked.append(1)
        return False, {"ready": False}

    server = HealthServer("127.0.0.1", port, lambda: (True, {"live": True}), ready, keep=60)
    server.start()
    try:
        assert ask(port, "livez") == (200, {"live": True})
        assert [ask(port, "readyz?verbose")[0] for _ in range(5)] == [503] * 5
        assert len(asked) == 1
        assert ask(port, "other")[0] == 404
    finally:
        server.stop()


def test_connections_that_only_hold_the_line_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("piccard.health_server.MOST_CONNECTIONS", 8)
    (port,) = free_ports(1)
    server = HealthServer("127.0.0.1", port, lambda: (True, {"live": True}), lambda: (True, {}))
    server.start()
    with ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60)) for _ in range(30)]
        for connection in idle[::2]:
            connection.sendall(b"GET /livez HTTP/1.1\r\n")
        assert ask(port, "livez") == (200, {"live": True})
        # The first to come was the first to go.
        assert idle[1].recv(1) == b""
    server.stop()
