"""How long tests wait for what has to happen: far longer than it takes, so that a busy machine fails none of them."""

import time
from collections.abc import Callable

# Seconds. Whatever waits this long has failed; what goes well never comes near it.
PATIENCE = 60.0


def wait_until(happened: Callable[[], object]) -> None:
    """Look again and again until `happened` says yes; fails the test after `PATIENCE` seconds."""
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < deadline, f"it has not happened within {PATIENCE} s"
        time.sleep(0.005)
