"""/livez, /readyz and /readyz/SERVICE."""

import json
import socket
import urllib.error
import urllib.request
from contextlib import ExitStack
from typing import Any

import pytest
from piccard.health_server import Health, HealthServer, Question
from piccard_server import free_ports


def ask(port: int, path: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def no_service(name: str) -> Question | None:
    return None


def test_one_that_was_never_started_is_stopped() -> None:
    (port,) = free_ports(1)
    for _ in range(2):
        HealthServer("127.0.0.1", port, lambda: (True, {}), lambda: (True, {}), no_service).stop()


def test_answers_and_keeps_them_for_a_while() -> None:
    (port,) = free_ports(1)
    asked: list[int] = []

    def ready() -> tuple[bool, dict[str, Any]]:
        asked.append(1)
        return False, {"ready": False}

    server = HealthServer("127.0.0.1", port, lambda: (True, {"live": True}), ready, no_service, keep=60)
    server.start()
    try:
        assert ask(port, "livez") == (200, {"live": True})
        assert [ask(port, "readyz?verbose")[0] for _ in range(5)] == [503] * 5
        assert len(asked) == 1
        assert ask(port, "other")[0] == 404
    finally:
        server.stop()


def test_each_service_answers_for_itself() -> None:
    (port,) = free_ports(1)
    asked: list[str] = []

    def question(name: str) -> Question | None:
        def answer() -> Health:
            asked.append(name)
            return name == "sound", {"service": name}

        return answer if name in ("sound", "sick") else None

    server = HealthServer("127.0.0.1", port, lambda: (True, {}), lambda: (False, {}), question, keep=60)
    server.start()
    try:
        for _ in range(3):
            assert ask(port, "readyz")[0] == 503
            assert ask(port, "readyz/sound?verbose") == (200, {"service": "sound"})
            assert ask(port, "readyz/sick") == (503, {"service": "sick"})
        # Each is asked once in a while, and not at the other's.
        assert asked == ["sound", "sick"]
        for unknown in ("readyz/", "readyz/none", "readyz/sound/more", "readyz/../livez"):
            status, body = ask(port, unknown)
            assert (status, body) == (404, {"error": "there is no such service"})
    finally:
        server.stop()


def test_connections_that_only_hold_the_line_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("piccard.health_server.MOST_CONNECTIONS", 8)
    (port,) = free_ports(1)
    server = HealthServer("127.0.0.1", port, lambda: (True, {"live": True}), lambda: (True, {}), no_service)
    server.start()
    with ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60)) for _ in range(30)]
        for connection in idle[::2]:
            connection.sendall(b"GET /livez HTTP/1.1\r\n")
        assert ask(port, "livez") == (200, {"live": True})
        # The first to come was the first to go.
        assert idle[1].recv(1) == b""
    server.stop()
