"""The Triton adapter over a fake of triton_python_backend_utils, so that it is tested without a server."""

import importlib
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from deepseek_engine.kernels.dispatch import DISPATCH
from piccard_contract.home import Service, version_owner
from piccard_contract.live_state import LiveState
from piccard_contract.operators import read_operators
from piccard_contract.process_lock import is_held
from piccard_contract.tensors import OUTPUT_SPECS
from piccard_contract.version_file import VersionFile

FINAL = 1


class Tensor:
    """As pb_utils.Tensor."""

    def __init__(self, name: str, array: np.ndarray[Any, Any]) -> None:
        self._name = name
        self._array = array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray[Any, Any]:
        return self._array


class InferenceResponse:
    """As pb_utils.InferenceResponse."""

    def __init__(self, output_tensors: list[Tensor]) -> None:
        self.outputs = {tensor.name(): tensor.as_numpy() for tensor in output_tensors}


class Sender:
    """As the response sender of a decoupled request."""

    def __init__(self) -> None:
        self.responses: list[dict[str, np.ndarray[Any, Any]]] = []
        self.ended = threading.Event()
        self.gone = False

    def send(self, response: InferenceResponse, flags: int = 0) -> None:
        assert not self.ended.is_set()
        self.responses.append(response.outputs)
        if flags == FINAL:
            self.ended.set()

    def is_cancelled(self) -> bool:
        # The server frees what this asks with the final response.
        assert not self.ended.is_set()
        return self.gone


class Request:
    """As pb_utils.InferenceRequest."""

    def __init__(self, parameters: Any = "{}", **inputs: Any) -> None:
        self.sender = Sender()
        self._parameters = parameters
        self._inputs = [Tensor(name, np.array(value)) for name, value in inputs.items()]

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def parameters(self) -> Any:
        return self._parameters

    def request_id(self) -> str:
        return "a"

    def requested_output_names(self) -> list[str]:
        return list(OUTPUT_SPECS)

    def get_response_sender(self) -> Sender:
        return self.sender


def text(value: str) -> np.ndarray[Any, Any]:
    return np.array([value.encode()], dtype=np.object_)


@pytest.fixture
def server_model(monkeypatch: pytest.MonkeyPatch, models_keep_sockets: None) -> Iterator[ModuleType]:
    fake = ModuleType("triton_python_backend_utils")
    fake.Tensor = Tensor  # type: ignore[attr-defined]
    fake.InferenceResponse = InferenceResponse  # type: ignore[attr-defined]
    fake.TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    monkeypatch.delitem(sys.modules, "deepseek_engine.server_model", raising=False)
    yield importlib.import_module("deepseek_engine.server_model")
    sys.modules.pop("deepseek_engine.server_model", None)


def arguments(home: Path, **settings: Any) -> dict[str, str]:
    service = Service(home)
    folder = service.version_folder(3)
    folder.mkdir(parents=True)
    settings = {"label": "v1", "checkpoint": "scripted", "runner": "scripted", **settings}
    (folder / "version.yaml").write_text(VersionFile.model_validate(settings).dump())
    return {"model_repository": str(service.llm_folder), "model_version": "3", "model_name": service.llm}


@pytest.fixture
def model(server_model: ModuleType, tmp_path: Path) -> Iterator[Any]:
    model = server_model.VersionModel()
    model.initialize(arguments(tmp_path))
    yield model
    model.finalize()


def report(home: Path) -> dict[str, Any]:
    service = Service(home)
    section = LiveState(service.live_state, service.run_folder).read(version_owner(3))
    assert section is not None
    return section.data


def run(model: Any, request: Request) -> list[dict[str, np.ndarray[Any, Any]]]:
    assert model.execute([request]) is None
    assert request.sender.ended.wait(60)
    return request.sender.responses


def test_tensors_have_the_types_of_the_contract(model: Any) -> None:
    (response,) = run(
        model,
        Request(
            text_input=text("one two"),
            return_num_input_tokens=[True],
            return_cumulative_logprob=[True],
            sampling_parameters=text('{"max_tokens": 2}'),
        ),
    )
    assert response["text_output"].tolist() == [b"one two one two"]
    assert response["token_ids"].dtype == np.int64
    assert response["num_input_tokens"].dtype == np.uint32
    assert response["cumulative_logprob"].dtype == np.float32
    assert response["served_version"].tolist() == [3]


@pytest.mark.parametrize("as_json", [True, False])
def test_parameters_are_read_as_json_and_as_a_mapping(model: Any, as_json: bool) -> None:
    parameters = {"max_tokens": 1, "X-Request-Id": "mine"}
    (response,) = run(model, Request(json.dumps(parameters) if as_json else parameters, text_input=text("a b c")))
    assert len(response["token_ids"]) == 1


def test_ids_keep_their_64_bits(model: Any) -> None:
    big = 2**56 + 5
    (response,) = run(model, Request(input_ids=np.array([big]), sampling_parameters=text('{"logprobs": 0}')))
    assert json.loads(response["status"][0])["code"] == "OK"


def test_what_execute_cannot_read_ends_the_request(model: Any) -> None:
    (response,) = run(model, Request("{not json", text_input=text("a")))
    assert json.loads(response["status"][0])["code"] == "INTERNAL"
    assert run(model, Request(text_input=text("a")))


def test_a_client_that_leaves_is_noticed_and_never_asked_after_its_end(model: Any) -> None:
    request = Request(text_input=text("a"), extensions=text('{"script": {"hang_at": 0}}'))
    model.execute([request])
    request.sender.gone = True
    assert request.sender.ended.wait(60)
    assert json.loads(request.sender.responses[-1]["status"][0])["code"] == "CANCELLED"


def test_its_section_and_lock_tell_its_life(server_model: ModuleType, tmp_path: Path) -> None:
    model = server_model.VersionModel()
    model.initialize(arguments(tmp_path, max_model_len=100))
    lock = Service(tmp_path).process_lock(version_owner(3))
    assert is_held(lock)
    told = report(tmp_path)
    assert (told["phase"], told["label"], told["max_model_len"], told["progress"]) == ("ready", "v1", 100, 1.0)
    assert {name for name, _, _ in told["samples"]} >= {"piccard_generated_tokens_total", "piccard_sequences_running"}
    run(model, Request(text_input=text("a"), sampling_parameters=text('{"max_tokens": 5}')))
    model.finalize()
    assert not is_held(lock)
    assert report(tmp_path)["tokens_generated"] == 5


def test_what_serves_the_operators_is_told_while_it_lives(
    server_model: ModuleType, tmp_path: Path, checkpoint: Path
) -> None:
    # A server's process has one version; this one may have chosen kernels for other tests.
    for kept in (DISPATCH.served, DISPATCH.choices, DISPATCH.fallbacks):
        kept.clear()
    model = server_model.VersionModel()
    model.initialize(arguments(tmp_path, runner="torch", checkpoint=str(checkpoint), memory="64MiB", device="cpu"))
    path = Service(tmp_path).operators_file(3)
    told = read_operators(path)
    assert told is not None
    assert (told.version, told.pid, told.device, told.precision, told.runner) == (
        3,
        os.getpid(),
        "cpu",
        "float32",
        "torch",
    )
    assert {use.operator for use in told.operators} >= {"linear", "rms_norm", "mla_attention", "moe_experts"}
    assert {use.implementation for use in told.operators} == {"torch reference"}
    assert 0 < told.fused_operators < told.step_operators
    assert not told.fallbacks
    samples = {name: value for name, _, value in report(tmp_path)["samples"]}
    assert samples["piccard_operators_fused_share"] == told.fused_share
    assert "piccard_operator_fallbacks_total" not in samples
    model.finalize()
    assert not path.exists()


def test_a_version_that_cannot_be_opened_raises_and_says_why(server_model: ModuleType, tmp_path: Path) -> None:
    model = server_model.VersionModel()
    with pytest.raises(ValueError, match="nowhere"):
        model.initialize(arguments(tmp_path, runner="torch", checkpoint="nowhere"))
    told = report(tmp_path)
    assert told["phase"] == "failed"
    assert "nowhere" in told["reason"]
    assert not is_held(Service(tmp_path).process_lock(version_owner(3)))


def test_a_lost_device_ends_the_process_with_a_status_and_a_line_in_the_log(
    server_model: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    statuses: list[int] = []
    ended = threading.Event()

    def end(status: int) -> None:
        statuses.append(status)
        ended.set()

    monkeypatch.setattr(server_model.os, "_exit", end)
    model = server_model.VersionModel()
    model.initialize(arguments(tmp_path))
    request = Request(text_input=text("a"), extensions=text('{"script": {"lose_at": 2}}'))
    model.execute([request])
    assert request.sender.ended.wait(60)
    assert ended.wait(60)
    status = json.loads(request.sender.responses[-1]["status"][0])
    assert "illegal memory access" in status["message"]
    assert statuses == [server_model.FATAL_STATUS]
    assert "version 3 ends with status 70" in caplog.text
    model.finalize()
