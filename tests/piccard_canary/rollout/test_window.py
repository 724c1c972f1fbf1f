"""Windows: every request is counted once, in the stratum and the bin that are its own."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from piccard_canary.rollout.observations import Observation, Observations
from piccard_canary.rollout.strata import (
    ANSWER_STRATA,
    BIN_RATIO,
    STRATA,
    VALUE_BINS,
    answer_stratum_of,
    bin_seconds,
    condition_of,
    stratum_of,
    value_bin,
)
from piccard_canary.rollout.table import Table
from piccard_canary.rollout.window import Window

positive = st.floats(0, 1e6)


@given(st.lists(st.tuples(positive, positive, positive, positive), min_size=1))
def test_every_condition_has_a_stratum(rows: list[tuple[float, float, float, float]]) -> None:
    load, prompt, others, answer = (np.array(column) for column in zip(*rows, strict=True))
    strata = stratum_of(load, condition_of(prompt, others))
    assert ((strata >= 0) & (strata < STRATA)).all()
    whole = answer_stratum_of(strata, answer)
    assert ((whole >= 0) & (whole < ANSWER_STRATA)).all()
    # Nothing is mixed by it that was apart.
    assert len(np.unique(whole)) >= len(np.unique(strata))


def test_loads_of_one_stratum_differ_by_less_than_a_fifth() -> None:
    loads = np.geomspace(1.0, 1000.0, 5000)
    strata = stratum_of(loads, condition_of(np.full(5000, 100.0), np.zeros(5000)))
    for number in np.unique(strata):
        inside = loads[strata == number]
        assert inside.max() / inside.min() < 1.2


@given(st.floats(0.0006, 100))
def test_bins_are_five_percent_wide(seconds: float) -> None:
    number = int(value_bin(np.array([seconds]))[0])
    assert bin_seconds(number) == pytest.approx(seconds, rel=BIN_RATIO**0.5 - 1 + 1e-6)


def test_what_cannot_be_measured_is_counted_all_the_same() -> None:
    window = Window()
    window.add(
        Observations.of(
            [
                Observation(first_token=0.1, token_gap=0.01, first_load=3.0, gap_load=4.0, prompt_tokens=10),
                Observation(first_token=0.1, first_load=3.0),
                Observation(failed=True, truncated=True, fallback=True, first_token=0.1, first_load=3.0),
                Observation(failed=True),
                Observation(first_token=0.1, token_gap=0.01, first_load=3.0, gap_load=4.0, shadow=True),
            ]
        )
    )
    window.add(Observations.of([]))

    assert window.requests == 4
    assert window.events == {"errors": 2, "truncated": 1, "fallback": 1}
    assert {name: int(table.cells.sum()) for name, table in window.tables.items()} == {
        "first_token": 3,
        "token_gap": 2,
        "token_rate": 0,
    }
    assert window.rate("errors") == 0.5
    assert Window().rate("errors") == 0.0


def seen(**values: float) -> Observation:
    known = {"first_token": 0.2, "token_gap": 0.01, "first_load": 8.0, "gap_load": 2.0, "prompt_tokens": 10}
    return Observation(**(known | {"completion_tokens": 31} | values))


def the_only_cell(observation: Observation) -> tuple[int, int]:
    """Stratum and bin of the one whole request that is counted."""
    window = Window()
    window.add(Observations.of([observation]))
    (cell,) = np.flatnonzero(window.tables["token_rate"].cells)
    return int(cell) // VALUE_BINS, int(cell) % VALUE_BINS


def test_a_whole_request_counts_its_wait_and_its_mean_load() -> None:
    """0.2 s at a load of 8 and 30 gaps of 10 ms at a load of 2: 0.5 s for 31 tokens at 4.4."""
    stratum, number = the_only_cell(seen())
    assert bin_seconds(number) == pytest.approx(0.5 / 31, rel=0.025)
    expected = stratum_of(np.array([4.4]), condition_of(np.array([10.0]), np.zeros(1)))
    assert stratum == answer_stratum_of(expected, np.array([31.0]))[0]


def test_one_token_is_a_whole_request_too() -> None:
    stratum, number = the_only_cell(seen(completion_tokens=1, token_gap=float("nan"), gap_load=float("nan")))
    assert bin_seconds(number) == pytest.approx(0.2, rel=0.025)
    expected = stratum_of(np.array([8.0]), condition_of(np.array([10.0]), np.zeros(1)))
    assert stratum == answer_stratum_of(expected, np.ones(1))[0]


@pytest.mark.parametrize("lost", ["first_token", "token_gap", "first_load", "gap_load"])
def test_a_whole_request_of_which_a_part_is_unknown_is_not_counted(lost: str) -> None:
    window = Window()
    window.add(Observations.of([seen(**{lost: float("nan")}), seen(failed=True), seen(completion_tokens=0)]))
    assert window.tables["token_rate"].cells.sum() == 0


@given(st.lists(st.lists(st.tuples(st.integers(0, 9), st.integers(0, VALUE_BINS - 1)))))
def test_a_table_knows_the_requests_of_each_stratum(rounds: list[list[tuple[int, int]]]) -> None:
    table, cells = Table(10), np.zeros((10, VALUE_BINS), dtype=np.int64)
    for requests in rounds:
        table.count(*np.array(requests, dtype=np.int64).reshape(-1, 2).T)
        for stratum, number in requests:
            cells[stratum, number] += 1
    assert (table.cells == cells).all()
    assert (table.requests == cells.sum(axis=1)).all()
