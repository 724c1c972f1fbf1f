"""Figures: verdicts, the table, the file of a card, and what two sections make together."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from whole_engine.results import Log, Row, assemble, line_of, read, rows_of, table, unfinished


@pytest.mark.parametrize(
    ("value", "better", "target", "verdict"),
    [
        (1.2, "less", 1.25, "met"),
        (1.25, "less", 1.25, "met"),
        (1.5, "less", 1.25, "missed by 20%"),
        (90.0, "more", 90.0, "met"),
        (45.0, "more", 90.0, "missed by 50%"),
        (3.0, "less", 0.0, "missed"),
        (0.0, "less", 0.0, "met"),
        (3.0, "less", None, ""),
    ],
)
def test_verdict(value: float, better: str, target: float | None, verdict: str) -> None:
    assert Row("decode", "batch 1", value, "x", better, target).verdict == verdict  # type: ignore[arg-type]


def test_lines_come_back_and_half_a_line_is_left_out(tmp_path: Path) -> None:
    log = Log(tmp_path / "run.jsonl")
    assert log.begun() == []
    log.write(begin="decode")
    log.add(Row("decode", "batch 1", 1.5, "x floor", ms=2.0, details={"steps_ms": [2.0]}))
    log.write(failed="decode", why="its process ended")
    log.write(skipped="long", why="the time is used up")
    with log.path.open("a") as file:
        file.write('{"row": {"sec')
    lines = read([log.path, tmp_path / "absent.jsonl"])
    assert log.begun() == ["decode"]
    assert [row.ms for row in rows_of(lines)] == [2.0]
    assert unfinished(lines) == ["failed decode: its process ended", "skipped long: the time is used up"]


def test_a_later_run_replaces_a_figure(tmp_path: Path) -> None:
    first, second = Log(tmp_path / "1.jsonl"), Log(tmp_path / "2.jsonl")
    first.add(Row("decode", "batch 1", 2.5, "x floor"))
    first.add(Row("decode", "batch 8", 1.5, "x floor"))
    second.add(Row("decode", "batch 1", 1.9, "x floor"))
    found = {row.case: row.value for row in rows_of(read([first.path, second.path]))}
    assert found == {"batch 1": 1.9, "batch 8": 1.5}


def test_ratios_to_transformers_take_its_best() -> None:
    lines = [
        {"row": vars(Row("generate", "batch 1", 300.0, "tokens/s", "more"))},
        {"row": vars(Row("generate", "batch 32", 4000.0, "tokens/s", "more"))},
        {"row": vars(Row("transformers", "batch 1, eager", 20.0, "tokens/s", "more"))},
        {"row": vars(Row("transformers", "batch 1, grouped_mm", 30.0, "tokens/s", "more"))},
    ]
    ratios = [row for row in rows_of(lines) if "over transformers" in row.case]
    assert [(row.case, row.value, row.target, row.verdict) for row in ratios] == [
        ("batch 1, over transformers", 10.0, 12.0, "missed by 17%")
    ]


def test_the_file_of_a_card(tmp_path: Path) -> None:
    log = Log(tmp_path / "run.jsonl")
    log.write(header={"card": "NVIDIA H200", "torch": "2.11"})
    log.write(header={"settings_bulk": {"block_size": 64}})
    log.add(Row("first", "128-token prompt", 14.0, "ms", "less", 15.0, "12-22"))
    path, rows = assemble(read([log.path]), tmp_path)
    assert path.name == "gpu_engine-nvidia-h200.json"
    kept = json.loads(path.read_text())
    assert kept["header"] == {"card": "NVIDIA H200", "torch": "2.11", "settings_bulk": {"block_size": 64}}
    assert [(row["case"], row["verdict"]) for row in kept["rows"]] == [("128-token prompt", "met")]
    assert [row.case for row in rows] == ["128-token prompt"]


def test_nothing_measured_is_still_a_file(tmp_path: Path) -> None:
    path, rows = assemble([], tmp_path)
    assert json.loads(path.read_text())["rows"] == rows == []
    assert table(rows).startswith("section")


@given(values=st.lists(st.floats(0.001, 1e7), min_size=1, max_size=5))
def test_columns_stand_under_each_other(values: list[float]) -> None:
    rows = [Row("decode", f"batch {value}", value, "x floor", ms=value, tokens_per_second=value) for value in values]
    head, *lines = table(rows).splitlines()
    for row, line in zip(rows, lines, strict=True):
        assert line[head.index("unit") :].startswith("x floor")
        assert line[head.index("what") :].startswith(row.case)
        assert f"ms {row.ms:,.3f}" in line_of(row)
