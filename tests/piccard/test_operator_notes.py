"""What `doctor` and `status --verbose` tell of the operators of running versions."""

import io
import json
import os
import subprocess
from collections.abc import Callable, Iterator

import pytest
from operations import operation_of
from piccard.doctor import notes
from piccard.operator_notes import live_operators, operator_notes
from piccard.operator_table import print_operators
from piccard.status import status
from piccard_contract.home import Service, version_owner
from piccard_contract.live_state import LiveState
from piccard_contract.operators import FusionUse, OperatorsReport, OperatorUse, write_operators
from piccard_contract.process_lock import ProcessLock
from rich.console import Console

Piccard = Callable[..., "subprocess.CompletedProcess[str]"]
ONE_BY_ONE = "the device is a CPU: operators run one by one in torch"
NO_KERNELS = "LlamaForCausalLM has no device kernels: operators run one by one in torch"


def on_kernels(**changes: object) -> OperatorsReport:
    """Of a version on a GPU as it should be."""
    known = {
        "version": 1,
        "pid": os.getpid(),
        "device": "cuda:0",
        "precision": "bfloat16",
        "runner": "torch",
        "operators": [OperatorUse(operator="mla_decode", implementation="[wide]", reason="row [wide] fits", choices=4)],
        "fusions": [
            FusionUse(name="the step in a graph", operators=8, applies=True, reason="within limits"),
            FusionUse(name="the gate", operators=0, applies=False, cause="model", reason="it has no such operators"),
        ],
        "step_operators": 8,
        "fused_operators": 6,
        "graphs": True,
        "replays": 1203,
    }
    return OperatorsReport.model_validate(known | changes)


def falling_back() -> OperatorsReport:
    known = {"implementation": "torch reference", "reason": NO_KERNELS, "choices": 3, "fallback": True}
    costs = {"rms_norm": 812.4, "rope": None}
    uses = [
        OperatorUse.model_validate({"operator": name, "microseconds": cost} | known) for name, cost in costs.items()
    ]
    fusions = [
        FusionUse(name=name, operators=2, applies=False, cause="model", reason=NO_KERNELS) for name in ("one", "other")
    ]
    return on_kernels(operators=uses, fusions=fusions, graphs=False, fused_operators=0, fallbacks={"rms_norm": 77})


def test_a_version_on_its_kernels_is_one_sentence() -> None:
    assert list(operator_notes(on_kernels())) == [
        "version 1 on cuda:0 (bfloat16): operators: 1 by device kernels; 75 % of a decode step's operators are inside"
        " fused launches; steps run from CUDA graphs (1203 so far)"
    ]


def test_an_exports_operators_are_told_apart_from_the_engines() -> None:
    export = OperatorUse(operator="DeepSeekMoE", implementation="ONNX Runtime", reason="26 of the export's nodes")
    kernel = OperatorUse(operator="sample", implementation="[wide]", reason="row [wide] fits", choices=4)
    (told,) = operator_notes(on_kernels(operators=[export, kernel], runner="onnxruntime"))
    assert "operators: 1 by ONNX Runtime, 1 by device kernels; 75 %" in told


def test_steps_without_a_graph_and_late_work_are_told() -> None:
    told = list(operator_notes(on_kernels(ungraphed={"longer than the graphs": 7}, captures=1, compilations=2)))
    assert "(1203 so far; kernel by kernel: 7 longer than the graphs)" in told[0]
    assert "1 graphs were captured and 2 kernels compiled since the warm-up" in told[1]


def test_a_fallback_is_told_with_its_cause_and_cost() -> None:
    whole, fallback, unfused = operator_notes(falling_back())
    assert "2 by torch references" in whole
    assert "rms_norm (812 µs of a step, 77 steps), rope (not measured, 0 steps)" in fallback
    assert NO_KERNELS in fallback
    assert f"not fused: one, other: {NO_KERNELS}" in unfused


def test_what_nothing_serves_is_told() -> None:
    use = OperatorUse(operator="mla_decode", implementation="nothing", reason="no row fits sm_90, bf16, page 7")
    whole, failed = operator_notes(on_kernels(operators=[use]))
    assert "by device kernels" not in whole
    assert failed.endswith("steps failed, since nothing serves mla_decode: no row fits sm_90, bf16, page 7")


def test_on_a_cpu_nothing_is_amiss() -> None:
    uses = [OperatorUse(operator="rope", implementation="torch reference", reason=ONE_BY_ONE)]
    fusions = [FusionUse(name="one", operators=2, applies=False, cause="device", reason=ONE_BY_ONE)]
    report = on_kernels(device="cpu", operators=uses, fusions=fusions, graphs=False)
    (told,) = operator_notes(report)
    assert "1 by torch references" in told


@pytest.fixture
def living(service: Service) -> Iterator[Service]:
    """A home whose version 1 this process is."""
    lock = ProcessLock(service.process_lock(version_owner(1)))
    lock.acquire()
    state = LiveState(service.live_state, service.run_folder)
    for number in (1, 2):
        state.writer(version_owner(number)).publish({"version": number, "phase": "ready"})
    yield service
    state.close()
    lock.release()


def test_only_what_a_living_process_wrote_counts(living: Service) -> None:
    assert live_operators(living) == {}
    write_operators(living.operators_file(1), on_kernels())
    # Version 2 was killed, and left its file.
    write_operators(living.operators_file(2), on_kernels(version=2))
    assert live_operators(living) == {1: on_kernels()}
    write_operators(living.operators_file(1), on_kernels(pid=os.getpid() + 1))
    assert live_operators(living) == {}
    living.operators_file(1).write_text("{")
    assert live_operators(living) == {}


def test_doctor_and_status_tell_it(living: Service, piccard: Piccard) -> None:
    write_operators(living.operators_file(1), on_kernels())
    assert [note for note in notes(operation_of(living)) if "MPS" not in note] == list(operator_notes(on_kernels()))
    assert all("operators" not in version for version in status(operation_of(living))["versions"])
    first, second = status(operation_of(living), verbose=True)["versions"]
    assert (first["operators"]["fused_share"], second["operators"]) == (0.75, None)
    json.dumps(first)
    text = io.StringIO()
    console = Console(file=text, width=160)
    print_operators({"versions": [first, second]}, console)
    for part in (
        "version 1 on cuda:0",
        "75 %",
        "mla_decode",
        "[wide]",
        "row [wide] fits",
        "no: model",
        "within limits",
    ):
        assert part in text.getvalue()
    assert "version 2" not in text.getvalue()


def test_a_state_file_that_is_none_is_told(service: Service) -> None:
    service.live_state.write_bytes(b"something else")
    assert any("cannot be told" in note for note in notes(operation_of(service)))


def test_the_command_line_has_both(service: Service, piccard: Piccard) -> None:
    told = json.loads(piccard(service.home, "doctor", "--json", check=False).stdout)["after"]["notes"]
    assert not [note for note in told if "MPS" not in note]
    assert "stable ->" in piccard(service.home, "status", "--verbose").stdout
    found = json.loads(piccard(service.home, "status", "--verbose", "--json").stdout)
    assert found["versions"][0]["operators"] is None
