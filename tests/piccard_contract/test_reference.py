"""The reference pages are made from the tables and nothing in them is left unsaid."""

from pathlib import Path

import pytest
from piccard_contract.reference import PAGES

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", sorted(PAGES))
def test_page_equals_its_tables(name: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == PAGES[name](), "run: python -m piccard_contract.reference docs"


@pytest.mark.parametrize("name", sorted(PAGES))
def test_every_row_has_a_meaning(name: str) -> None:
    rows = [line for line in PAGES[name]().splitlines() if line.startswith("| `")]

    assert rows
    for row in rows:
        meaning = row.removesuffix(" |").rsplit("| ", 1)[-1]
        assert len(meaning) > 3, row
