"""What the sections found: lines appended as they come, a table, and one file a card. Needs no torch."""

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal


@dataclass
class Row:
    """One figure.

    Attributes:
        value: what is held against the target, in `unit`.
        better: which side of the target is met.
        target: None where the figure is reported only.
        peer: the peer's figure, in the same unit.
        ms, floor_ms, tokens_per_second: beside it, where they mean something.
        details: whatever else is kept.
    """

    section: str
    case: str
    value: float
    unit: str
    better: Literal["less", "more"] = "less"
    target: float | None = None
    peer: str = ""
    ms: float | None = None
    floor_ms: float | None = None
    tokens_per_second: float | None = None
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        if self.target is None:
            return ""
        met = self.value <= self.target if self.better == "less" else self.value >= self.target
        if met:
            return "met"
        if not self.target:
            return "missed"
        return f"missed by {abs(self.value / self.target - 1.0):.0%}"


class Log:
    """A file of JSON lines, each flushed at once, so that a crash or a time limit loses nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, **line: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def add(self, row: Row) -> None:
        """Keep a figure and print it."""
        self.write(row=asdict(row))
        print(line_of(row), flush=True)

    def begun(self) -> list[str]:
        return [line["begin"] for line in read([self.path]) if "begin" in line]


def read(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """All whole lines of the files that are there."""
    lines = []
    for path in paths:
        for text in path.read_text().splitlines() if path.exists() else []:
            try:
                lines.append(json.loads(text))
            # A process that was killed may leave half a line.
            except ValueError:
                continue
    return lines


def rows_of(lines: Iterable[dict[str, Any]]) -> list[Row]:
    """The figures, the latest of each section and case, and the ratios that two sections make together."""
    latest: dict[tuple[str, str], Row] = {}
    for line in lines:
        if "row" in line:
            row = Row(**line["row"])
            latest[row.section, row.case] = row
    for row in [*_against_transformers(latest), *_price_of_invariance(latest)]:
        latest[row.section, row.case] = row
    return list(latest.values())


# Batch to times transformers' tokens a second.
TRANSFORMERS_TARGETS = {1: 12.0, 32: 7.0}


def _against_transformers(rows: dict[tuple[str, str], Row]) -> Iterable[Row]:
    """Tokens a second of whole generations over transformers' best, on the same weights and prompts' length."""
    for batch, target in TRANSFORMERS_TARGETS.items():
        ours = rows.get(("generate", f"batch {batch}"))
        theirs = [
            row for (name, case), row in rows.items() if name == "transformers" and case.startswith(f"batch {batch},")
        ]
        if ours is None or not theirs:
            continue
        best = max(theirs, key=lambda row: row.value)
        yield Row(
            "generate",
            f"batch {batch}, over transformers",
            ours.value / best.value,
            "x",
            "more",
            target,
            tokens_per_second=ours.value,
            details={"transformers": best.value, "transformers_case": best.case},
        )


def _price_of_invariance(rows: dict[tuple[str, str], Row]) -> Iterable[Row]:
    """A step of the batch-invariant mode over a usual one, of each batch."""
    for (section, case), row in rows.items():
        usual = rows.get(("decode", case))
        if section == "invariant" and usual is not None and row.ms and usual.ms:
            yield Row("invariant", f"{case}, over usual", row.ms / usual.ms, "x", ms=row.ms)


_COLUMNS = ("section", "what", "figure", "unit", "target", "peer", "verdict", "ms", "floor ms", "tokens/s")


def cells(row: Row) -> list[str]:
    def number(value: float | None, form: str = "{:,.3f}") -> str:
        return "" if value is None else form.format(value)

    return [
        row.section,
        row.case,
        _significant(row.value),
        row.unit,
        "" if row.target is None else _significant(row.target),
        row.peer,
        row.verdict,
        number(row.ms),
        number(row.floor_ms),
        number(row.tokens_per_second, "{:,.0f}"),
    ]


def _significant(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def line_of(row: Row) -> str:
    """One figure in words."""
    named = zip(_COLUMNS[4:], cells(row)[4:], strict=True)
    rest = ", ".join(f"{name} {text}" for name, text in named if text)
    return f"{row.section}: {row.case}: {_significant(row.value)} {row.unit}" + (f" ({rest})" if rest else "")


def table(rows: list[Row]) -> str:
    """All figures under each other."""
    lines = [list(_COLUMNS), *map(cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def unfinished(lines: Iterable[dict[str, Any]]) -> list[str]:
    """What was skipped or failed, in words."""
    told = []
    for line in lines:
        if "skipped" in line:
            told.append(f"skipped {line['skipped']}: {line['why']}")
        if "failed" in line:
            told.append(f"failed {line['failed']}: {line['why']}")
    return told


def assemble(lines: list[dict[str, Any]], folder: Path, name: str = "gpu_engine") -> tuple[Path, list[Row]]:
    """Write <name>-<card>.json, a figure a line; returns its path and the figures."""
    headers: dict[str, Any] = {}
    for line in lines:
        headers |= line.get("header", {})
    rows = rows_of(lines)
    card = re.sub(r"[^a-z0-9]+", "-", str(headers.get("card", "unknown")).lower()).strip("-")
    path = folder / f"{name}-{card}.json"
    body = ",\n  ".join(json.dumps(asdict(row) | {"verdict": row.verdict}) for row in rows)
    head = f'"header": {json.dumps(headers)},\n "unfinished": {json.dumps(unfinished(lines))}'
    path.write_text(f'{{{head},\n "rows": [\n  {body}\n]}}\n')
    return path, rows
