"""Breakers and the fallback budget among versions that play a list."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from canary_fakes import Client, Play, Scene
from hypothesis import given, settings
from hypothesis import strategies as st
from piccard_contract.errors import ErrorCode, Fault, kind_of
from piccard_contract.policy import BreakerLimits, FallbackLimits
from piccard_contract.request import GenerateRequest, RequestExtensions
from piccard_contract.routing import RouteKeys
from piccard_contract.sampling import SamplingParams

LIMITS = BreakerLimits(consecutive_errors=3, error_share=None, open_for=10.0, probes=2)
TO_CANARY = RouteKeys(canary="true")
PINNED = RouteKeys(version=2)

SERVERS = [code for code in ErrorCode if kind_of(code).fault is Fault.SERVER and code is not ErrorCode.OVERLOADED]
OTHERS = [code for code in ErrorCode if code not in SERVERS]


@pytest.fixture
def scene() -> Iterator[Callable[..., Scene]]:
    made: list[Scene] = []

    def make(plays: dict[int, Play] | None = None, **policy: Any) -> Scene:
        made.append(Scene(plays or {1: Play(), 2: Play(fail_at=0)}, **({"breaker": LIMITS} | policy)))
        return made[-1]

    yield make
    for one in made:
        one.close()


def ask(route: RouteKeys = TO_CANARY, **changes: Any) -> GenerateRequest:
    sampling = SamplingParams(temperature=0, max_tokens=9)
    return GenerateRequest(
        **({"id": "r", "text": "say", "stream": True, "route": route, "sampling": sampling} | changes)
    )


def way(client: Client) -> tuple[int | None, str | None]:
    """Which version ended the answer, and why it did."""
    assert client.error is None, client.error
    return client.responses[-1].served_version, client.responses[-1].route_reason


def open_it(stage: Scene) -> None:
    for _ in range(3):
        assert way(stage.run(ask())) == (1, "fallback")


def calls(stage: Scene, version: int) -> int:
    return sum(number == version for number, _, _ in stage.versions.calls)


def test_it_opens_half_opens_and_closes(scene: Callable[..., Scene]) -> None:
    stage = scene()
    open_it(stage)
    # The canary is not even asked, and nothing of the answer tells of an attempt.
    client = stage.run(ask())
    assert way(client) == (1, "breaker_open")
    assert "route" not in client.responses[-1].details
    assert calls(stage, 2) == 3
    assert stage.lines[-1].decision == "breaker_open"
    assert stage.lines[-1].passed_over == 2
    assert stage.counted("piccard_requests_total", version="1", reason="breaker_open") == 1
    assert stage.counted("piccard_breaker_open", version="2") == 1

    # A probe fails: its client is served by stable, and the time begins anew.
    stage.clock.now += 10.0
    assert way(stage.run(ask())) == (1, "fallback")
    stage.clock.now += 9.0
    assert way(stage.run(ask())) == (1, "breaker_open")

    stage.clock.now += 1.0
    stage.versions.plays[2] = Play(base=2000)
    for _ in range(2):
        assert way(stage.run(ask())) == (2, "header")
    assert stage.counted("piccard_breaker_open", version="2") == 0
    assert stage.counted("piccard_breaker_probes_total", outcome="passed") == 2
    assert stage.counted("piccard_breaker_probes_total", outcome="failed") == 1
    assert stage.counted("piccard_breaker_opens_total", version="2", cause="consecutive_errors") == 1


def test_one_probe_at_a_time(scene: Callable[..., Scene]) -> None:
    stage = scene()
    open_it(stage)
    stage.clock.now += 10.0
    stage.versions.plays[2] = Play(late_at=2)
    probing = stage.start(ask())
    assert stage.versions.hanging.wait(60)
    for _ in range(3):
        assert way(stage.run(ask())) == (1, "breaker_open")
    assert calls(stage, 2) == 4

    stage.versions.over.set()
    stage.wait_over(probing)
    assert way(probing) == (2, "header")
    assert way(stage.run(ask())) == (2, "header")
    assert stage.counted("piccard_breaker_open") == 0


def test_a_long_probe_passes_before_its_end(scene: Callable[..., Scene]) -> None:
    stage = scene(deadlines={"between_tokens": 600.0})
    open_it(stage)
    stage.clock.now += 10.0
    stage.versions.plays[2] = Play(late_at=2)
    probing = stage.start(ask())
    assert stage.versions.hanging.wait(60)
    stage.clock.now += 10.1
    stage.versions.over.set()
    stage.wait_over(probing)
    # Counted once, with the token that came after ten seconds.
    assert stage.counted("piccard_breaker_probes_total", outcome="passed") == 1


def test_a_pin_passes_an_open_breaker_and_is_no_probe(scene: Callable[..., Scene]) -> None:
    stage = scene()
    open_it(stage)
    for wait in (0.0, 10.0):
        stage.clock.now += wait
        refused = stage.run(ask(PINNED))
        assert refused.error is not None
        assert (refused.error.code, refused.error.version) == (ErrorCode.INTERNAL, 2)
    stage.versions.plays[2] = Play(base=2000)
    assert way(stage.run(ask(PINNED))) == (2, "pin")
    assert stage.counted("piccard_breaker_probes_total") == 0
    assert stage.counted("piccard_breaker_open", version="2") == 1


def test_failures_of_pinned_requests_open_it(scene: Callable[..., Scene]) -> None:
    stage = scene()
    for _ in range(3):
        assert stage.run(ask(PINNED)).error is not None
    assert way(stage.run(ask())) == (1, "breaker_open")


@settings(deadline=None, max_examples=30)
@given(st.lists(st.sampled_from(ErrorCode), min_size=1, max_size=8), st.integers(0, 2))
def test_only_what_is_the_versions_fault_counts(codes: list[ErrorCode], at: int) -> None:
    stage = Scene({1: Play(), 2: Play()}, breaker=LIMITS, fallback_policy="none")
    for code in codes:
        stage.versions.plays[2] = Play(fail_at=at, error=code)
        stage.run(ask(PINNED))
    row = 0
    for code in codes:
        if row < 3:
            row += code in SERVERS
    assert stage.counted("piccard_breaker_open", version="2") == (row == 3)
    stage.close()


def test_what_the_client_cancelled_or_asked_too_much_of_counts_for_nobody(scene: Callable[..., Scene]) -> None:
    stage = scene({1: Play(), 2: Play(hang_at=2)}, abandoned_limit=5.0)
    for _ in range(3):
        stage.versions.hanging.clear()
        client = stage.start(ask())
        assert stage.versions.hanging.wait(60)
        stage.clock.now += 5.1
        stage.watchdog.look()
        stage.wait_over(client)
        assert client.error is not None
        assert client.error.code is ErrorCode.DEADLINE_EXCEEDED
    assert stage.counted("piccard_breaker_open", version="2") == 0


def test_a_probe_that_is_cancelled_lets_the_next_one_try(scene: Callable[..., Scene]) -> None:
    stage = scene()
    open_it(stage)
    stage.clock.now += 10.0
    stage.versions.plays[2] = Play(hang_at=2)
    probing = stage.start(ask())
    assert stage.versions.hanging.wait(60)
    token = probing.responses[0].cancel_token
    stage.versions.cancelled = lambda version, sent: bool(setattr(stage.clock, "now", stage.clock.now + 1.1))
    stage.run(GenerateRequest(id="c", extensions=RequestExtensions(cancel=token)))
    stage.watchdog.look()
    stage.wait_over(probing)
    assert stage.counted("piccard_breaker_probes_total", outcome="void") == 1
    stage.versions.plays[2] = Play(base=2000)
    assert way(stage.run(ask())) == (2, "header")


@pytest.mark.parametrize("policy", ["none", "canary_to_stable", "both"])
def test_a_breaker_keeps_no_request_from_the_last_version(scene: Callable[..., Scene], policy: str) -> None:
    stage = scene({1: Play(fail_at=0)}, canary=None, fallback_policy=policy)
    for _ in range(5):
        client = stage.run(ask(RouteKeys()))
        assert client.error is not None
        assert client.error.code is ErrorCode.INTERNAL
    assert calls(stage, 1) == 5
    stage.versions.plays[1] = Play()
    assert way(stage.run(ask(RouteKeys()))) == (1, "stable")


def test_stable_rests_where_the_canary_may_serve_its_requests(scene: Callable[..., Scene]) -> None:
    stage = scene({1: Play(fail_at=0), 2: Play(base=2000)}, fallback_policy="both", traffic_ratio=0.0)
    for _ in range(3):
        assert way(stage.run(ask(RouteKeys()))) == (2, "fallback")
    assert way(stage.run(ask(RouteKeys()))) == (2, "breaker_open")
    # Who is kept from the canary is not brought to it.
    kept = stage.run(ask(RouteKeys(canary="false")))
    assert kept.error is not None
    assert kept.error.version == 1


BUDGET = FallbackLimits(ratio=0.2, min_per_second=0.2, window=10.0, load=0.8)


def busy(stage: Scene, load: float = 0.9) -> None:
    stage.loaded[1] = replace(stage.loaded[1], load=load)


@pytest.mark.parametrize("kind", ["fails", "open", "gone"])
def test_a_busy_stable_is_not_flooded(scene: Callable[..., Scene], kind: str) -> None:
    off = BreakerLimits(consecutive_errors=None, error_share=None)
    stage = scene(breaker=LIMITS if kind == "open" else off, fallback_budget=BUDGET)
    if kind == "open":
        open_it(stage)
        stage.clock.now += 0.1
    if kind == "gone":
        del stage.loaded[2]
    busy(stage)
    ends = [stage.run(ask()) for _ in range(6)]
    refused = [client.error for client in ends if client.error is not None]
    # Two in ten seconds are free, which those before it have used up.
    assert len(refused) == (6 if kind == "open" else 4)
    assert {(error.code, error.version) for error in refused} == {(ErrorCode.OVERLOADED, 2)}
    assert all(error.retry_after for error in refused)
    assert stage.counted("piccard_fallback_refusals_total", version="2") == len(refused)
    # What was meant for stable comes through, and so does everything once it is not busy.
    assert way(stage.run(ask(RouteKeys(canary="false")))) == (1, "header")
    busy(stage, 0.5)
    assert stage.run(ask()).error is None
    if kind != "fails":
        assert {line.decision for line in stage.lines if line.code == "OVERLOADED"} == {stage.lines[-1].decision}


def test_a_stream_that_has_begun_is_brought_to_its_end(scene: Callable[..., Scene]) -> None:
    stage = scene({1: Play(), 2: Play(fail_at=2)}, fallback_budget=BUDGET)
    busy(stage)
    assert [way(stage.run(ask())) for _ in range(3)] == [(1, "resumed")] * 3
    # They have used the budget up.
    refused = stage.run(ask())
    assert refused.error is not None
    assert refused.error.code is ErrorCode.OVERLOADED


def test_a_request_for_a_canary_where_none_is_set_is_stables_own(scene: Callable[..., Scene]) -> None:
    stage = scene({1: Play()}, canary=None, fallback_budget=BUDGET)
    busy(stage)
    assert [way(stage.run(ask())) for _ in range(5)] == [(1, "canary_unavailable")] * 5


def after_promotion(scene: Callable[..., Scene], stable: Play, **policy: Any) -> Scene:
    """Version 2 is stable and plays `stable`; version 1 was stable before."""
    return scene({1: Play(), 2: stable}, **({"stable": 2, "previous": 1, "canary": None} | policy))


PLAIN = RouteKeys()


def test_the_breaker_of_stable_sends_its_requests_to_previous(scene: Callable[..., Scene]) -> None:
    stage = after_promotion(scene, Play(fail_at=0))
    for _ in range(3):
        assert way(stage.run(ask(PLAIN))) == (1, "fallback")
    for route in (PLAIN, RouteKeys(canary="false"), RouteKeys(canary="true")):
        assert way(stage.run(ask(route))) == (1, "breaker_open")
    assert calls(stage, 2) == 3
    # Version 2 is told of in the log, by which a rollout judges it.
    assert [line.attempts for line in stage.lines[:3]] == [[{"version": 2, "code": "INTERNAL"}]] * 3
    assert [(line.version, line.passed_over) for line in stage.lines[3:]] == [(1, 2)] * 3

    # Probes go on: one that fails is served by previous, and those that go well bring the requests back.
    stage.clock.now += 10.0
    assert way(stage.run(ask(PLAIN))) == (1, "fallback")
    assert calls(stage, 2) == 4
    stage.clock.now += 10.0
    stage.versions.plays[2] = Play(base=2000)
    assert [way(stage.run(ask(PLAIN))) for _ in range(3)] == [(2, "stable")] * 3
    assert stage.counted("piccard_breaker_open") == 0


def test_a_pin_stays_with_a_stable_that_fails(scene: Callable[..., Scene]) -> None:
    stage = after_promotion(scene, Play(fail_at=0))
    for _ in range(5):
        refused = stage.run(ask(PINNED))
        assert refused.error is not None
        assert refused.error.version == 2
    assert calls(stage, 1) == 0


def test_previous_that_is_gone_takes_nothing(scene: Callable[..., Scene]) -> None:
    stage = after_promotion(scene, Play(fail_at=0))
    for _ in range(4):
        assert way(stage.run(ask(PLAIN)))[0] == 1
    stage.previous = None
    refused = stage.run(ask(PLAIN))
    assert refused.error is not None
    assert refused.error.version == 2


def test_after_a_rollback_nothing_goes_to_what_failed(scene: Callable[..., Scene]) -> None:
    stage = after_promotion(scene, Play(base=2000))
    stage.stable, stage.previous = 1, 2
    stage.versions.plays[1] = Play(fail_at=0)
    for _ in range(5):
        refused = stage.run(ask(PLAIN))
        assert refused.error is not None
        assert refused.error.version == 1
    assert calls(stage, 2) == 0


@pytest.mark.parametrize("kind", ["fails", "open", "gone"])
def test_a_busy_previous_is_not_flooded(scene: Callable[..., Scene], kind: str) -> None:
    off = BreakerLimits(consecutive_errors=None, error_share=None)
    limits = LIMITS if kind == "open" else off
    stage = after_promotion(scene, Play(fail_at=0), breaker=limits, fallback_budget=BUDGET)
    if kind == "open":
        for _ in range(3):
            stage.run(ask(PLAIN))
        stage.clock.now += 0.1
    if kind == "gone":
        del stage.loaded[2]
    busy(stage)
    ends = [stage.run(ask(PLAIN)) for _ in range(6)]
    refused = [client.error for client in ends if client.error is not None]
    assert len(refused) == (6 if kind == "open" else 4)
    assert {(error.code, error.version) for error in refused} == {(ErrorCode.OVERLOADED, 2)}
    assert stage.counted("piccard_fallback_refusals_total", version="2") == len(refused)
    # A stream that has begun is brought to its end, and a pin is no matter of the budget.
    if kind == "fails":
        stage.versions.plays[2] = Play(fail_at=1)
        assert way(stage.run(ask(PLAIN))) == (1, "resumed")
    assert way(stage.run(ask(RouteKeys(version=1)))) == (1, "pin")
    busy(stage, 0.5)
    assert stage.run(ask(PLAIN)).error is None
