import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")
from deepseek_engine.gpu.memory_profile import CONTEXT_BYTES, MemoryProfile
from deepseek_engine.memory_budget import MemoryBudgetError

GIB = 1 << 30
PROFILE = MemoryProfile(weights=30 * GIB, fixed=31 * GIB, step=4 * GIB, graphs=GIB, block=2 << 20)
SIZES = st.integers(0, 200 * GIB)


@given(
    weights=SIZES,
    buffers=SIZES,
    step=SIZES,
    graphs=SIZES,
    block=st.integers(1, GIB),
    budget=SIZES,
    free=SIZES,
)
def test_what_is_given_out_fits_and_the_rest_is_refused_with_figures(
    weights, buffers, step, graphs, block, budget, free
):
    profile = MemoryProfile(weights, weights + buffers, step, graphs, block)
    own = weights + buffers + step + graphs + CONTEXT_BYTES
    room = budget - weights - CONTEXT_BYTES
    if own + int(0.03 * own) + block <= budget and room <= free:
        blocks = profile.blocks(budget, free)
        assert blocks >= 1
        assert own + blocks * block <= budget
    elif own + block > budget or room > free:
        with pytest.raises(MemoryBudgetError, match=r"(\d+\.\d\d GiB.*){3}"):
            profile.blocks(budget, free)


@given(budget=st.integers(50 * GIB, 140 * GIB), more=st.integers(0, 50 * GIB))
def test_more_memory_is_never_fewer_blocks(budget, more):
    assert PROFILE.blocks(budget, 200 * GIB) <= PROFILE.blocks(budget + more, 200 * GIB)


@given(budget=st.integers(50 * GIB, 140 * GIB))
def test_what_is_left_over_is_less_than_the_slack_and_a_block(budget):
    blocks = PROFILE.blocks(budget, 200 * GIB)
    used = PROFILE.fixed + PROFILE.step + PROFILE.graphs + CONTEXT_BYTES + blocks * PROFILE.block
    assert budget - used <= 0.03 * 36 * GIB + PROFILE.block


def test_a_budget_that_is_too_small_is_told_part_by_part():
    with pytest.raises(MemoryBudgetError) as caught:
        PROFILE.blocks(36 * GIB, 200 * GIB)
    told = str(caught.value)
    for part in ("allows 36.00 GiB", "buffers take 31.00 GiB", "largest step 4.00 GiB", "graphs 1.00 GiB", "0.59 GiB"):
        assert part in told
    assert "raise memory" in told


def test_a_card_that_others_fill_is_told_with_what_is_left():
    with pytest.raises(MemoryBudgetError) as caught:
        PROFILE.blocks(80 * GIB, 20 * GIB)
    told = str(caught.value)
    for part in ("allows 80.00 GiB", "30.00 GiB are taken", "only 20.00 GiB left", "lower memory, or retire a version"):
        assert part in told
