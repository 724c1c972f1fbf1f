"""The load of a version while a request ran, and what the log has of it."""

from collections.abc import Iterator

import pytest
from canary_fakes import HandClock, Play, Scene
from piccard_canary.load import AttemptLoad, LoadMeter
from piccard_canary.protocols import Frame
from piccard_contract.request import GenerateRequest


def test_the_mean_over_a_request() -> None:
    clock = HandClock()
    meter = LoadMeter(clock)
    load = AttemptLoad(meter, 2, 0)
    clock.now += 1.0
    meter.enter(2)
    meter.enter(1)
    clock.now += 3.0
    load.first_token()
    clock.now += 2.0
    meter.leave(2)
    clock.now += 2.0
    load.end()
    clock.now += 100.0
    meter.enter(2)

    # One second alone, three with another; two with it, two alone.
    assert load.waiting() == pytest.approx(7 / 4)
    assert load.sending() == pytest.approx(6 / 4)
    assert load.others == 0
    assert AttemptLoad(meter, 2, 0).others == 1


def test_what_came_another_way_counts() -> None:
    clock = HandClock()
    meter = LoadMeter(clock)
    meter.enter(2)
    load = AttemptLoad(meter, 2, 5)
    clock.now += 1.0
    load.first_token()
    # Two here, four of the version's five elsewhere.
    assert load.waiting() == pytest.approx(6.0)
    assert load.sending() is None


def test_a_request_that_never_began_has_no_load() -> None:
    clock = HandClock()
    load = AttemptLoad(LoadMeter(clock), 1, 0)
    clock.now += 1.0
    load.end()
    assert load.waiting() is None
    assert load.sending() is None


def test_the_line_has_it(request_: GenerateRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene({1: Play(tokens=4), 2: Play(tokens=4)}, traffic_ratio=0.0)
    frames = scene.versions.open

    def slow(version: int, request: GenerateRequest, outputs: frozenset[str]) -> Iterator[Frame]:
        for frame in frames(version, request, outputs):
            # Over no time there is no mean.
            scene.clock.now += 0.1
            yield frame

    monkeypatch.setattr(scene.versions, "open", slow)
    scene.run(request_)
    line = scene.lines[0]

    assert line.token_gap_s is not None
    assert line.first_load is not None
    assert line.truncated == []
    assert scene.around.load.count(1) == 0


@pytest.mark.parametrize(("at", "truncated"), [(0, []), (2, [2])])
def test_the_line_has_who_broke_it_off(request_: GenerateRequest, at: int, truncated: list[int]) -> None:
    scene = Scene({1: Play(tokens=4), 2: Play(tokens=4, fail_at=at)}, traffic_ratio=1.0)
    scene.run(request_)
    assert scene.lines[0].truncated == truncated
    assert scene.lines[0].code == "OK"
    assert (scene.around.load.count(1), scene.around.load.count(2)) == (0, 0)


@pytest.fixture
def request_() -> GenerateRequest:
    return GenerateRequest(id="r", text="a b", stream=True)
