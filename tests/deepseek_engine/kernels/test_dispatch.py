import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from deepseek_engine.kernels import dispatch as module
from deepseek_engine.kernels.dispatch import Dispatch, NoVariantError, require
from deepseek_engine.kernels.variants import Kernel, Table, Variant
from piccard_contract.operators import NOTHING, REFERENCE

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


@pytest.mark.parametrize(
    ("capability", "dtype", "width", "cause"),
    [(90, "bf16", 65, "no row for the shape"), (75, "bf16", 64, "no rows for sm_75"), (90, "fp32", 64, "fp32")],
)
def test_causes_of_fallbacks_name_no_shape(capability: int, dtype: str, width: int, cause: str) -> None:
    dispatch = Dispatch()
    for more in range(5):
        dispatch.choose(TABLE, capability, dtype, {"width": width + 100 * more if width > 64 else width})
    ((operator, told),) = dispatch.fallbacks
    assert operator == "scale"
    assert cause in told
    assert dispatch.served["scale", REFERENCE].fallback


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[Dispatch]:
    """A dispatch of its own for `require`, on a card of capability 90."""
    fresh = Dispatch()
    monkeypatch.setattr(module, "DISPATCH", fresh)
    monkeypatch.setattr(module, "_capability", lambda device: 90)
    monkeypatch.setattr(module, "_dtype_name", lambda dtype: "bf16")
    module._chosen.cache_clear()
    yield fresh
    module._chosen.cache_clear()


def test_what_is_required_is_recorded_once_a_shape(own: Dispatch) -> None:
    like = torch.empty(0)
    for width in (3, 3, 64, 3, 64):
        assert require(TABLE, like, {"width": width}) is TABLE.variants[0]
    served = own.served["scale", "small"]
    assert (served.choices, served.reason, served.fallback) == (2, "row small fits sm_90, bf16, width 3", False)
    assert own.choices["scale"].reason == "row small fits sm_90, bf16, width 64"
    assert own.revision == 1
    assert not own.fallbacks


def test_what_nothing_serves_is_told_and_is_no_fallback(own: Dispatch) -> None:
    for _ in range(2):
        with pytest.raises(NoVariantError, match="kernel scale: no row fits sm_90, bf16, width 65"):
            require(TABLE, torch.empty(0), {"width": 65})
    assert own.served["scale", NOTHING].choices == 1
    assert not own.fallbacks
