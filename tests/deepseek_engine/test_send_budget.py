from deepseek_engine.send_budget import GRAIN, SHARE, SendBudget
from hypothesis import given
from hypothesis import strategies as st


@given(st.lists(st.tuples(st.floats(0.0, 0.01), st.floats(0.0, 0.05)), min_size=1, max_size=50), st.floats(0.0, 4.0))
def test_what_is_sent_takes_its_share_of_a_core_and_no_more(sends: list[tuple[float, float]], relay: float) -> None:
    budget = SendBudget()
    start = now = 1.0
    spent = 0.0
    for work, idle in sends:
        now += idle
        while pause := budget.rest(now):
            now += pause
        # What is in debt when a response goes is at most a grain.
        assert spent <= SHARE * (now - start + GRAIN) + 1e-9
        budget.spend(now, work, relay)
        spent += work * (1.0 + relay)
        now += work


@given(st.lists(st.floats(0.0, 0.001), min_size=1, max_size=50))
def test_nothing_waits_while_there_is_time_to_spare(works: list[float]) -> None:
    budget = SendBudget()
    now = 1.0
    for work in works:
        assert budget.rest(now) == 0.0
        budget.spend(now, work, 3.0)
        now += 0.008


def test_a_rest_is_taken_whole() -> None:
    budget = SendBudget()
    budget.spend(1.0, 0.004, 0.0)
    assert budget.rest(1.0) == 1.0 + 0.004 / SHARE - 1.0
    assert budget.rest(1.0 + 0.004 / SHARE - GRAIN / 2) > 0.0
    assert budget.rest(1.0 + 0.004 / SHARE) == 0.0
