"""/livez and /readyz."""

import json
import urllib.error
import urllib.request
from typing import Any

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
