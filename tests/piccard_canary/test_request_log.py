"""One JSON line a request, in files that do not grow for ever."""

import json
import threading
from pathlib import Path
from typing import Any

from piccard_canary.request_log import RequestLine, RequestLog


def line(number: int) -> RequestLine:
    return RequestLine(
        at="2025-01-01T00:00:00.000+00:00",
        id=f"r{number}",
        router="router",
        stream=True,
        version=1,
        reason="ratio",
        decision="ratio",
        code="OK",
    )


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def test_every_line_is_written(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "requests.log"
    log = RequestLog(path, print)
    for number in range(100):
        log.put(line(number))
    log.close()

    assert [entry["id"] for entry in read(path)] == [f"r{number}" for number in range(100)]
    assert log.dropped == 0


def test_ids_cannot_forge_lines(tmp_path: Path) -> None:
    path = tmp_path / "requests.log"
    log = RequestLog(path, print)
    forged = line(1)
    forged.id = 'x"}\n{"id": "y\u2028'
    log.put(forged)
    log.close()

    assert [entry["id"] for entry in read(path)] == [forged.id]


def test_a_large_file_is_put_aside(tmp_path: Path) -> None:
    path = tmp_path / "requests.log"
    size = 0
    for number in range(12):
        log = RequestLog(path, print, max_bytes=1000, kept=2)
        log.put(line(number))
        log.close()
        size = max(size, path.stat().st_size if path.exists() else 0)

    names = sorted(found.name for found in tmp_path.iterdir())
    assert names in (
        ["requests.log", "requests.log.1", "requests.log.2"],
        ["requests.log.1", "requests.log.2"],
    )
    assert size < 2000
    # The newest are kept, in order.
    kept = [entry["id"] for name in reversed(names[-2:]) for entry in read(tmp_path / name)]
    kept += [entry["id"] for entry in read(path)] if path.exists() else []
    assert kept == [f"r{number}" for number in range(12)][-len(kept) :]


def test_two_processes_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "requests.log"
    logs = [RequestLog(path, print, max_bytes=20_000, kept=50) for _ in range(2)]

    def write(log: RequestLog) -> None:
        for number in range(300):
            log.put(line(number))

    threads = [threading.Thread(target=write, args=(log,)) for log in logs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for log in logs:
        log.close()

    entries = [entry for found in tmp_path.iterdir() for entry in read(found)]
    assert len(entries) == 600


def test_a_disk_that_refuses_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    logged: list[str] = []
    log = RequestLog(tmp_path / "file" / "requests.log", logged.append)
    log.put(line(1))
    log.close()

    assert log.dropped >= 1
    assert "cannot be written" in logged[0]
