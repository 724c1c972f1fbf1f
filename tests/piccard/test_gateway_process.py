"""The supervisor's part of the gateway, over processes that end at once or go on."""

import subprocess
import sys
from typing import Any

import pytest
from patience import wait_until
from piccard import gateway_process
from piccard.gateway_process import GatewayProcess
from piccard.revival_counts import RevivalCounts
from piccard.server_settings import ServerSettings
from piccard_contract.home import Service


def test_one_that_ends_is_started_again_after_growing_pauses_and_given_up(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []

    def popen(command: list[str], **options: Any) -> "subprocess.Popen[bytes]":
        started.append(command)
        return real([sys.executable, "-c", ""], **options)

    real = subprocess.Popen
    monkeypatch.setattr(gateway_process.subprocess, "Popen", popen)
    now = [0.0]
    told: list[str] = []
    settings = ServerSettings(gateway_port=8004, give_up_after=3)
    gateway = GatewayProcess(service.home, settings, told.append, RevivalCounts(), lambda: now[0])
    gateway.start()
    waits = []
    for _ in range(3):
        wait_until(lambda: not gateway.pid)
        gateway.look([service])
        if (left := gateway.seconds_left()) is not None and not gateway.given_up and not gateway.pid:
            waits.append(left)
            now[0] += left
            gateway.look([service])
    wait_until(lambda: not gateway.pid)
    gateway.look([service])

    assert len(started) == 4
    assert "died again" in gateway.given_up
    now[0] += 1000.0
    gateway.look([service])
    assert len(started) == 4
    assert any("is given up" in line for line in told)
    assert service.gateway_secret.stat().st_mode & 0o077 == 0
    gateway.stop(0.0)


def test_one_that_runs_is_ended_in_order(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    real = subprocess.Popen
    endless = [sys.executable, "-c", "import time; time.sleep(600)"]
    monkeypatch.setattr(gateway_process.subprocess, "Popen", lambda command, **options: real(endless, **options))
    gateway = GatewayProcess(service.home, ServerSettings(gateway_port=8004), print, RevivalCounts())
    gateway.start()
    assert gateway.pid
    assert gateway.seconds_left() is None
    gateway.stop(60.0)
    assert not gateway.pid
