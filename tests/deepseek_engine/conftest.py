"""What the engine's tests share."""

from collections.abc import Iterator

import pytest
from deepseek_engine.runners.torch import TorchRunner


@pytest.fixture(scope="module", params=[1, 2], ids=["one step", "two steps"])
def steps_in_flight(request: pytest.FixtureRequest) -> Iterator[int]:
    """Lets torch runners take one step at once, then two, as a device does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchRunner, "steps_in_flight", request.param)
        yield request.param
