"""A dead version is dropped before it is added, whatever the server's index says of it."""

from collections.abc import Iterable
from typing import Any, cast

import pytest
from piccard.triton_control import TritonControl
from piccard.version_loading import revive_version
from piccard_contract.home import Service


class Index:
    """Model control of a server that keeps a list of what it was told."""

    def __init__(self, ready: set[int]) -> None:
        self._ready = ready
        self.told: list[Any] = []

    def ready_versions(self, model: str) -> list[int]:
        return sorted(self._ready)

    def set_versions(self, service: Service, model: str, versions: Iterable[int]) -> None:
        self.told.append(sorted(versions))

    def unload(self, model: str) -> None:
        self.told.append("unload")

    def wait_unloaded(self, model: str, timeout: float) -> bool:
        return True


@pytest.mark.parametrize(
    ("ready", "told"),
    [
        pytest.param({1, 2}, [[1], [1, 2]], id="called ready, as by 24.10"),
        pytest.param({1}, [[1], [1, 2]], id="not called ready, as by 25.12 and later"),
        pytest.param({2}, ["unload", [2]], id="the only one"),
    ],
)
def test_a_dead_version_is_dropped_first(service: Service, ready: set[int], told: list[Any]) -> None:
    index = Index(ready)
    revive_version(cast(TritonControl, index), service, 2)
    assert index.told == told
