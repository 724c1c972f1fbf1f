"""Breakers of two routers on one service: what one learns the other follows, and one request probes at a time."""

from pathlib import Path

import pytest
from canary_fakes import HandClock
from piccard_canary.availability import LoadedVersion
from piccard_canary.breaker import BreakerState
from piccard_canary.breakers import Breakers
from piccard_canary.counters import Counters
from piccard_contract.live_state import Section
from piccard_contract.policy import BreakerLimits
from piccard_contract.reports import RouterReport

LIMITS = BreakerLimits(consecutive_errors=3, error_share=0.5, min_requests=8, probes=2)
LOADED = {1: LoadedVersion(1, pid=101), 2: LoadedVersion(2, pid=102)}


class Pair:
    def __init__(self, folder: Path) -> None:
        self.clock = HandClock()
        self.counters = [Counters("deepseek", "router") for _ in range(2)]
        self.routers = [Breakers(counters, folder / "probe.lock", clock=self.clock) for counters in self.counters]
        for router in self.routers:
            assert router.states(LOADED, LIMITS) == {}

    def share(self, *, alive: bool = True) -> None:
        sections = []
        for number, router in enumerate(self.routers):
            # Through JSON, as in the state file.
            report = RouterReport(breakers=router.report(LIMITS)).model_dump(mode="json")
            sections.append(Section(f"router{number}", 1, 0.0, alive, report))
        for number, router in enumerate(self.routers):
            router.share(sections, f"router{number}", LIMITS)

    def states(self, version: int = 2) -> list[BreakerState]:
        return [router.states(LOADED, LIMITS).get(version, BreakerState.CLOSED) for router in self.routers]

    def counted(self, router: int, name: str, **labels: str) -> float:
        return sum(
            value
            for sample, found, value in self.counters[router].samples()
            if sample == name and labels.items() <= found.items()
        )


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def fail(breakers: Breakers, times: int = 3, version: int = 2) -> None:
    for _ in range(times):
        breakers.record(version, LOADED[version].pid, LIMITS, failed=True)


def test_one_opens_and_the_other_follows(pair: Pair) -> None:
    fail(pair.routers[0])
    assert pair.states() == [BreakerState.OPEN, BreakerState.CLOSED]
    pair.share()
    assert pair.states() == [BreakerState.OPEN, BreakerState.OPEN]
    assert pair.states(1) == [BreakerState.CLOSED] * 2
    assert [pair.counted(router, "piccard_breaker_open", version="2") for router in range(2)] == [1, 1]
    # Only who opened it counts the opening.
    assert [pair.counted(router, "piccard_breaker_opens_total") for router in range(2)] == [1, 0]


def test_one_probe_at_a_time_and_any_router_closes_it_for_all(pair: Pair) -> None:
    fail(pair.routers[0])
    pair.clock.now += 1.0
    pair.share()
    pair.clock.now += LIMITS.open_for
    for _ in range(LIMITS.probes):
        assert pair.states() == [BreakerState.HALF_OPEN] * 2
        probe = pair.routers[1].probe(2, 102, LIMITS)
        assert probe is not None
        assert pair.routers[0].probe(2, 102, LIMITS) is None
        assert pair.routers[1].probe(2, 102, LIMITS) is None
        pair.routers[1].settle(probe, failed=False)
        pair.share()
    assert pair.states() == [BreakerState.CLOSED] * 2
    assert [pair.counted(router, "piccard_breaker_open") for router in range(2)] == [0, 0]
    assert pair.counted(1, "piccard_breaker_probes_total", outcome="passed") == 2


@pytest.mark.parametrize("at_once", [False, True])
def test_probes_of_all_routers_add_up(pair: Pair, at_once: bool) -> None:
    fail(pair.routers[0])
    pair.share()
    pair.clock.now += LIMITS.open_for
    for router in pair.routers:
        probe = router.probe(2, 102, LIMITS)
        assert probe is not None
        router.settle(probe, failed=False)
        if not at_once:
            pair.share()
    pair.share()
    assert pair.states() == [BreakerState.CLOSED] * 2
    assert pair.counted(0, "piccard_breaker_open") == 0


def test_a_failed_probe_opens_it_for_all(pair: Pair) -> None:
    fail(pair.routers[0])
    pair.share()
    pair.clock.now += LIMITS.open_for
    probe = pair.routers[1].probe(2, 102, LIMITS)
    assert probe is not None
    pair.routers[1].settle(probe, failed=True)
    pair.share()
    assert pair.states() == [BreakerState.OPEN] * 2
    assert pair.counted(1, "piccard_breaker_opens_total", cause="probe") == 1


def test_a_probe_that_says_nothing_gives_its_permit_back(pair: Pair) -> None:
    fail(pair.routers[0])
    pair.clock.now += LIMITS.open_for
    probe = pair.routers[0].probe(2, 102, LIMITS)
    assert probe is not None
    pair.routers[0].settle(probe, failed=None)
    assert pair.states()[0] is BreakerState.HALF_OPEN
    another = pair.routers[0].probe(2, 102, LIMITS)
    assert another is not None
    another.release()


def test_errors_add_up_over_routers(pair: Pair) -> None:
    for router in pair.routers:
        # Never three in a row.
        for failed in (True, True, False, True):
            router.record(2, 102, LIMITS, failed=failed)
    pair.share()
    pair.routers[1].record(2, 102, LIMITS, failed=True)
    assert pair.states()[1] is BreakerState.OPEN
    assert pair.counted(1, "piccard_breaker_opens_total", cause="error_share") == 1


def test_the_dead_are_not_followed(pair: Pair) -> None:
    fail(pair.routers[0])
    pair.share(alive=False)
    assert pair.states() == [BreakerState.OPEN, BreakerState.CLOSED]


def test_a_process_that_was_started_again_begins_anew(pair: Pair) -> None:
    fail(pair.routers[0])
    again = LOADED | {2: LoadedVersion(2, pid=202)}
    assert pair.routers[0].states(again, LIMITS) == {}
    assert pair.counted(0, "piccard_breaker_open") == 0
    # What ends late tells of the old one, and so do routers that have not seen the new one.
    fail(pair.routers[0])
    fail(pair.routers[1])
    pair.share()
    assert pair.routers[0].states(again, LIMITS) == {}


def test_versions_that_there_are_no_more_are_forgotten(pair: Pair) -> None:
    fail(pair.routers[0])
    pair.routers[0].forget({1})
    assert list(pair.routers[0].report(LIMITS)) == [1]
    assert pair.counted(0, "piccard_breaker_open") == 0
