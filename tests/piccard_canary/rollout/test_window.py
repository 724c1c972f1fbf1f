"""Windows: every request is counted once, in the stratum and the bin that are its own."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from piccard_canary.rollout.observations import Observation, Observations
from piccard_canary.rollout.strata import BIN_RATIO, STRATA, bin_seconds, stratum_of, value_bin
from piccard_canary.rollout.window import Window

positive = st.floats(0, 1e6)


@given(st.lists(st.tuples(positive, positive, positive), min_size=1))
def test_every_condition_has_a_stratum(rows: list[tuple[float, float, float]]) -> None:
    load, prompt, others = (np.array(column) for column in zip(*rows, strict=True))
    strata = stratum_of(load, prompt, others)
    assert ((strata >= 0) & (strata < STRATA)).all()


def test_loads_of_one_stratum_differ_by_less_than_a_fifth() -> None:
    loads = np.geomspace(1.0, 1000.0, 5000)
    strata = stratum_of(loads, np.full(5000, 100.0), np.zeros(5000))
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
    assert {name: int(table.sum()) for name, table in window.tables.items()} == {"first_token": 3, "token_gap": 2}
    assert window.rate("errors") == 0.5
    assert Window().rate("errors") == 0.0
