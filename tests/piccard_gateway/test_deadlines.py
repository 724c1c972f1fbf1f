"""Deadlines of first tokens that follow what they took of late."""

import asyncio

import pytest
from gateway_fakes import FakeGateway
from hypothesis import given
from hypothesis import strategies as st
from patience import PATIENCE
from piccard_contract.gateway_file import AdaptiveDeadlines
from piccard_gateway.deadlines import ENOUGH, FirstTokenDeadlines

MOST = 100.0


def deadlines(hour: int = 0, **settings: object) -> FirstTokenDeadlines:
    found = AdaptiveDeadlines.model_validate({"floor": 0.5, **settings})
    return FirstTokenDeadlines(lambda: found, lambda: hour)


def test_until_enough_is_known_the_policy_counts() -> None:
    known = deadlines()
    for _ in range(ENOUGH - 1):
        known.took(0, 0.1)
        assert known.seconds(0, MOST) == MOST
    known.took(0, 0.1)
    assert known.seconds(0, MOST) == pytest.approx(1.0)


def test_a_longer_prompt_gets_longer() -> None:
    known = deadlines(length_bytes=1000)
    for _ in range(ENOUGH):
        known.took(1000, 0.2)
    assert known.seconds(0, MOST) == pytest.approx(1.0)
    assert known.seconds(9000, MOST) == pytest.approx(10.0)


def test_the_daily_curve_is_off_until_it_is_set() -> None:
    curve = [1.0] * 24
    curve[7] = 3.0
    for hour, expected in ((7, 3.0), (8, 1.0)):
        known = deadlines(hour, daily=curve)
        for _ in range(ENOUGH):
            known.took(0, 0.1)
        assert known.seconds(0, MOST) == pytest.approx(expected)


@given(st.lists(st.tuples(st.integers(0, 10**6), st.floats(0, 1000))), st.integers(0, 10**6), st.floats(1, 500))
def test_a_deadline_is_between_the_floor_and_the_policy_s(
    seen: list[tuple[int, float]], size: int, most: float
) -> None:
    known = deadlines(floor=0.5)
    for prompt, seconds in seen:
        known.took(prompt, seconds)
    assert 0.5 <= known.seconds(size, most) <= most
    assert known.seconds(size, most) <= known.seconds(size + 5000, most)


def test_long_prompts_do_not_make_short_ones_wait_longer() -> None:
    """Long ones of 40 times the time at 40 times the length leave the deadline of short ones as it was."""
    short, mixed = deadlines(length_bytes=1000), deadlines(length_bytes=1000)
    for _ in range(4 * ENOUGH):
        short.took(0, 0.1)
        mixed.took(0, 0.1)
        mixed.took(39_000, 4.0)
    assert mixed.seconds(0, MOST) == pytest.approx(short.seconds(0, MOST))


def test_short_requests_pass_long_ones_that_hang(gateway: FakeGateway) -> None:
    async def run() -> None:
        body = {"model": "deepseek", "prompt": "x"}
        async with gateway.client() as client:
            gateway.generator.hang = True
            long = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(16)]
            while len(gateway.generator.asked) < 16:
                await asyncio.sleep(0)
            gateway.generator.hang = False
            async with asyncio.timeout(PATIENCE):
                for _ in range(8):
                    assert (await client.post("/v1/completions", json=body)).status_code == 200
            assert not any(task.done() for task in long)
            for task in long:
                task.cancel()
            await asyncio.gather(*long, return_exceptions=True)

    asyncio.run(run())
