"""A process's report in its section."""

import json
from typing import Any

import pytest
from patience import wait_until
from piccard_canary.publisher import Publisher
from piccard_contract.live_state import MAX_PAYLOAD, LiveStateError


class Section:
    """Keeps what is published; refuses what is too large."""

    def __init__(self) -> None:
        self.published: list[dict[str, Any]] = []

    def publish(self, data: dict[str, Any]) -> None:
        if len(json.dumps(data)) > MAX_PAYLOAD:
            raise LiveStateError("too large")
        self.published.append(json.loads(json.dumps(data)))


def publisher(section: Section, report: Any, logged: list[str], **settings: Any) -> Publisher:
    return Publisher(section, report, logged.append, interval=0.01, **settings)  # type: ignore[arg-type]


def test_it_publishes_at_once_and_a_last_time() -> None:
    section, values = Section(), iter(range(10_000))
    one = publisher(section, lambda: {"value": next(values)}, [])
    one.start()
    assert section.published[0] == {"value": 0}
    one.stop()

    assert len(section.published) >= 2


def test_old_versions_make_room() -> None:
    section = Section()
    samples = [("x" * 80, {"version": str(n), "le": str(i)}, 1.0) for n in range(1, 41) for i in range(40)]
    publisher(section, lambda: {"samples": samples, "in_flight": {}}, []).publish()
    kept = {int(labels["version"]) for _, labels, _ in section.published[0]["samples"]}

    assert max(kept) == 40
    assert len(kept) in (1, 2, 4, 8, 16, 32)


def test_what_cannot_be_made_to_fit_is_an_error() -> None:
    with pytest.raises(LiveStateError):
        publisher(Section(), lambda: {"value": "x" * MAX_PAYLOAD}, []).publish()


def test_a_failure_is_said_once_and_does_not_end_it() -> None:
    section: Section = Section()
    logged: list[str] = []
    rounds: list[int] = []

    def also() -> None:
        rounds.append(1)
        if len(rounds) < 4:
            raise OSError("no room")

    one = publisher(section, dict, logged, also=also)
    one.start()
    wait_until(lambda: len(rounds) >= 5)
    one.stop()

    assert len(logged) == 1
    assert "no room" in logged[0]
