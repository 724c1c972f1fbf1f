"""A gateway over a generator with knobs."""

from pathlib import Path

import pytest
from gateway_fakes import FakeGateway, FakeGenerator, make_gateway


@pytest.fixture
def generator() -> FakeGenerator:
    return FakeGenerator()


@pytest.fixture
def gateway(tmp_path: Path, generator: FakeGenerator) -> FakeGateway:
    return make_gateway(tmp_path, generator)
