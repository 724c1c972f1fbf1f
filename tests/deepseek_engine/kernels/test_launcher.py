"""What a launch checks and records, without a GPU to launch on."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter launches nothing", allow_module_level=True)

from deepseek_engine.kernels import launcher
from deepseek_engine.kernels.launcher import LaunchError, launch, recording
from deepseek_engine.kernels.rms_norm_triton import RMS_NORM
from deepseek_engine.kernels.step_inputs_triton import APPLY_EDITS, EMBED, apply_edits
from deepseek_engine.kernels.swiglu_triton import SWIGLU
from deepseek_engine.kernels.variants import AMPERE, HOPPER, Table


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Callable[[Table, str], None]:
    """Launches a table's first row on a device that is not there; what would be compiled is an error."""

    def refuse(*arguments: object) -> None:
        raise AssertionError("a kernel was compiled")

    monkeypatch.setattr(launcher, "_compile", refuse)

    def start(table: Table, dtype: str = "bf16") -> None:
        monkeypatch.setattr(launcher, "_checked", lambda kernel, arguments: ([], dtype, 7))
        launch(table.kernel, table.variants[0], (1, 1, 1), {})

    return start


def test_rows_are_recorded_once_in_their_order_and_nothing_runs(pretended: Callable[..., None]) -> None:
    before = launcher.compilations()
    with recording() as rows:
        for table, dtype in ((EMBED, "bf16"), (APPLY_EDITS, "bf16"), (EMBED, "bf16"), (EMBED, "fp16")):
            pretended(table, dtype)
    named = [(kernel.name, variant.name, dtype) for kernel, variant, dtype in rows]
    assert named == [
        ("embed", "block1024", "bf16"),
        ("apply_edits", "block512", "bf16"),
        ("embed", "block1024", "fp16"),
    ]
    assert launcher.compilations() == before


def test_launches_after_it_are_launches_again(pretended: Callable[..., None]) -> None:
    with pytest.raises(ZeroDivisionError), recording():
        raise ZeroDivisionError
    with pytest.raises(AssertionError, match="a kernel was compiled"):
        pretended(EMBED)


def test_an_empty_grid_is_neither_launched_nor_recorded() -> None:
    with recording() as rows:
        launch(EMBED.kernel, EMBED.variants[0], (0, 1, 1), {})
    assert not rows


def test_tensors_that_are_on_no_gpu_are_refused_by_name() -> None:
    row = APPLY_EDITS.variants[0]
    numbers = torch.zeros(4, dtype=torch.int32)
    arguments: dict[str, Any] = {"target_ptr": numbers, "index_ptr": numbers, "value_ptr": numbers, "count": 4}
    with pytest.raises(LaunchError, match="apply_edits runs on one CUDA device: target_ptr is on cpu"):
        launch(APPLY_EDITS.kernel, row, (1, 1, 1), arguments)


@pytest.mark.parametrize("table", [APPLY_EDITS, SWIGLU, RMS_NORM], ids=lambda table: table.kernel.name)
def test_a_kernel_is_chained_where_the_architecture_can(table: Table) -> None:
    kernel, row = table.kernel, table.variants[0]
    for architecture, chained in ((AMPERE, False), (HOPPER, kernel.chained)):
        assert launcher.options(kernel, row, architecture)["launch_pdl"] == chained
        assert launcher.constants_of(kernel, row, architecture).get("CHAINED", 0) == chained


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_card_what_is_recorded_is_not_run() -> None:
    target = torch.zeros(4, dtype=torch.int32, device="cuda")
    places = torch.arange(4, dtype=torch.int32, device="cuda")
    before = launcher.compilations()
    with recording() as rows:
        apply_edits(target, places, places)
    assert [kernel.name for kernel, _, _ in rows] == ["apply_edits"]
    assert target.tolist() == [0] * 4
    assert launcher.compilations() == before
    apply_edits(target, places, places)
    assert target.tolist() == [0, 1, 2, 3]
