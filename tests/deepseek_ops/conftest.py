"""Time for the tests that may wait for the compiler."""

from pathlib import Path

import pytest

BUILD_SECONDS = 1500
"""Far above what building the library takes on a busy machine."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(BUILD_SECONDS))
