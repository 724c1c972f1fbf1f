"""The thread that runs rollouts: it waits for the lock, and no trouble ends it."""

import threading
from typing import Any

from patience import wait_until
from piccard.rollout import keeper
from piccard.rollout.controller import Controller, tick_told
from piccard.rollout.keeper import Keeper
from piccard_contract.home import Service
from piccard_contract.process_lock import is_held


def test_it_takes_over_when_the_other_one_ends(service: Service, monkeypatch: Any) -> None:
    monkeypatch.setattr(keeper, "TICK", 0.01)
    ticks = threading.Event()
    monkeypatch.setattr(Controller, "tick", lambda self: ticks.set())
    other, ending = Controller(service, print), threading.Event()
    thread = threading.Thread(target=Keeper(lambda: [service], print, ending).run, daemon=True)
    thread.start()
    assert not ticks.is_set()
    other.close()
    assert ticks.wait(60)
    ending.set()
    thread.join(60)
    wait_until(lambda: not is_held(service.process_lock("rollout")))


def test_trouble_is_told_once(service: Service) -> None:
    said: list[str] = []
    controller = Controller(service, print)
    service.rollout_file.write_text("{")
    told = tick_told(controller, said.append, "")
    assert "rollout.json cannot be read" in told
    assert tick_told(controller, said.append, told) == told
    assert len(said) == 1
    service.rollout_file.unlink()
    assert tick_told(controller, said.append, told) == ""

    controller.tick = lambda: 1 / 0  # type: ignore[method-assign, return-value, assignment]
    assert "ZeroDivisionError" in tick_told(controller, said.append, "")
    controller.close()
