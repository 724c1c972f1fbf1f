"""The pacer against a machine whose prices are known."""

import pytest
from deepseek_engine.pacing import PrefillPacer
from hypothesis import given
from hypothesis import strategies as st


def paced(decode, token, gap=2.0, ceiling=256, floor=16, steps=60):
    """A pacer that has watched `steps` mixed steps of a machine with these prices."""
    pacer = PrefillPacer(ceiling, floor, gap)
    pacer.observe(8, 0, decode)
    for _ in range(steps):
        chunk = pacer.chunk()
        pacer.observe(8, chunk, decode + chunk * token)
    return pacer


@given(decode=st.floats(1e-4, 1.0), token=st.floats(1e-6, 1e-2), gap=st.floats(1.1, 4.0))
def test_a_mixed_step_comes_to_the_wanted_multiple(decode, token, gap):
    chunk = paced(decode, token, gap).chunk()
    assert 16 <= chunk <= 256
    exact = (gap - 1) * decode / token
    if 16 <= exact <= 256:
        assert chunk == pytest.approx(exact, abs=1)
    else:
        assert chunk == (16 if exact < 16 else 256)


def test_it_follows_prices_that_rise():
    pacer = paced(0.01, 1e-4)
    assert pacer.chunk() == pytest.approx(100, abs=1)
    for _ in range(60):
        pacer.observe(8, 50, 0.01 + 50 * 4e-4)
    assert pacer.chunk() == pytest.approx(25, abs=1)


def test_until_it_knows_both_prices_it_takes_the_ceiling():
    pacer = PrefillPacer(256, 16, 2.0)
    assert pacer.chunk() == 256
    pacer.observe(0, 256, 0.1)
    assert pacer.chunk() == 256
    pacer.observe(8, 0, 0.01)
    assert pacer.chunk() == 25


def test_without_a_gap_the_clock_does_not_matter():
    assert paced(0.001, 1.0, gap=None).chunk() == 256


def test_a_ceiling_below_the_floor_wins():
    assert paced(1e-6, 1.0, ceiling=4).chunk() == 4
