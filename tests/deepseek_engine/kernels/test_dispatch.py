import logging
import subprocess
import sys

import pytest
from deepseek_engine.kernels.dispatch import Dispatch
from deepseek_engine.kernels.variants import Kernel, Table, Variant

TABLE = Table(
    Kernel("scale", "module:function", {"x": "*T"}, ("BLOCK",)),
    (Variant("scale", "small", {"BLOCK": 64}, when={"width": (1, 64)}),),
)


def test_a_gpu_gets_the_row_that_fits() -> None:
    dispatch = Dispatch()
    choice = dispatch.choose(TABLE, 90, "bf16", {"width": 64})
    assert choice.variant is TABLE.variants[0]
    assert dispatch.choices["scale"] is choice
    assert not dispatch.fallbacks


def test_a_cpu_runs_the_reference_and_that_is_no_fallback() -> None:
    dispatch = Dispatch()
    assert dispatch.choose(TABLE, None, "fp32", {"width": 64}).variant is None
    assert not dispatch.fallbacks


def test_a_fallback_is_counted_each_time_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    dispatch = Dispatch()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            choice = dispatch.choose(TABLE, 90, "bf16", {"width": 65})
    assert choice.variant is None
    assert "sm_90, bf16, width 65" in choice.reason
    assert list(dispatch.fallbacks.values()) == [3]
    assert len(caplog.records) == 1


def test_choosing_needs_no_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import deepseek_engine.kernels.dispatch, deepseek_engine.kernels.variants\n"
        "import deepseek_engine.models, deepseek_engine.runners.torch\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
