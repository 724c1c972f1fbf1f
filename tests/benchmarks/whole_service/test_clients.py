"""The load of streams: what nobody answers counts as lost, and a stream is whole only with all its tokens."""

from pathlib import Path

import pytest
from ports import free_ports
from whole_service.clients import Clients, Load, Record, _incomplete


def test_streams_that_nobody_answers_are_lost(tmp_path: Path) -> None:
    load = Load(f"127.0.0.1:{free_ports(1)[0]}", streams=3, prompt=4, tokens=2, vocabulary=100, processes=2)
    clients = Clients(load, tmp_path)
    clients.wait_running()
    records = clients.stop()
    assert len(records) >= 3
    assert all("UNAVAILABLE" in record.error and not record.tokens for record in records)


@pytest.mark.parametrize(
    ("answers", "finish", "told"),
    [
        ([(0.0, 1), (0.1, 3)], "length", ""),
        ([(0.0, 1), (0.1, 2)], "length", "3 tokens came, 4 were asked for"),
        ([(0.0, 4)], "stop", "it ended with stop"),
        ([(0.0, 4)], "", "it ended with no reason"),
    ],
)
def test_a_stream_is_whole_or_told_of(answers: list[tuple[float, int]], finish: str, told: str) -> None:
    assert _incomplete(Record(0.0, answers, finish=finish), 4) == told
