"""The request log read on while it is written and put aside."""

import os
from pathlib import Path

from piccard.rollout.request_tail import RequestTail
from piccard_canary.request_log import RequestLine, RequestLog


def write(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_each_line_once(tmp_path: Path) -> None:
    path = tmp_path / "requests.log"
    tail = RequestTail(path, 0.0)
    assert tail.lines() == []
    write(path, "a\nb\n")
    assert tail.lines() == [b"a", b"b"]
    assert tail.lines() == []
    write(path, "c")
    assert tail.lines() == []
    write(path, "d\ne\n")
    assert tail.lines() == [b"cd", b"e"]
    tail.close()


def test_what_was_put_aside_is_read_first(tmp_path: Path) -> None:
    path = tmp_path / "requests.log"
    for name, text in (("requests.log.2", "a\n"), ("requests.log.1", "b\n"), ("requests.log", "c\n")):
        write(tmp_path / name, text)
    assert RequestTail(path, 0.0).lines() == [b"a", b"b", b"c"]

    os.utime(tmp_path / "requests.log.2", (10.0, 10.0))
    assert RequestTail(path, 20.0).lines() == [b"b", b"c"]


def test_a_file_that_is_put_aside_is_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "requests.log"
    write(path, "a\n")
    tail = RequestTail(path, 0.0)
    assert tail.lines() == [b"a"]
    write(path, "b\n")
    path.rename(tmp_path / "requests.log.1")
    assert tail.lines() == [b"b"]
    write(path, "c\n")
    assert tail.lines() == [b"c"]
    tail.close()


def test_what_a_router_writes_is_read(tmp_path: Path) -> None:
    """Through the log itself, which puts its file aside again and again."""
    path = tmp_path / "requests.log"
    tail = RequestTail(path, 0.0)
    seen: list[bytes] = []
    for number in range(30):
        log = RequestLog(path, print, max_bytes=600, kept=50)
        log.put(RequestLine("2025-01-01T00:00:00+00:00", f"r{number}", "router", True, 1, "ratio", "ratio", "OK"))
        log.close()
        seen += tail.lines()
    assert [line.split(b'"id":"')[1].split(b'"')[0] for line in seen] == [b"r%d" % number for number in range(30)]
    tail.close()
