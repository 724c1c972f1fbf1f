"""What a newer server brings is used, and an older one is not asked for it: all models over doubles of both."""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_pb_utils import NewIterator, Request, fake_pb_utils
from patience import wait_until
from piccard.model_config import model_configs
from piccard.state_store import StateStore
from piccard_contract.capabilities import cancel_of, response_parameters
from piccard_contract.lifecycle import VersionState
from piccard_contract.tensors import ADMITTED, OUTPUT_SPECS
from piccard_server import make_scripted_home

MODULES = ("triton_python_backend_utils", "deepseek_engine.server_model", "piccard_canary.server_model")


class Models:
    """Admission, router and version 1 of a service in this process.

    Args:
        newer: whether the server is a newer one.
    """

    def __init__(self, home: Path, *, newer: bool) -> None:
        self.service = make_scripted_home(home, versions=1)
        self._called: dict[tuple[str, int], Any] = {}
        self.pb_utils: Any = fake_pb_utils(newer=newer, models=self._called)
        self._saved = {name: sys.modules.pop(name, None) for name in MODULES}
        sys.modules[MODULES[0]] = self.pb_utils
        engine, canary = (importlib.import_module(name) for name in MODULES[1:])
        self.version = self._start(engine.VersionModel(), self.service.llm)
        self._called[self.service.llm, 1] = self.version
        self.admission = self._start(canary.AdmissionModel(), self.service.admission)
        self.router = self._start(canary.RouterModel(), self.service.router)

    def _start(self, model: Any, name: str) -> Any:
        model.initialize(
            {
                "model_repository": str(self.service.repository / name),
                "model_version": "1",
                "model_name": name,
                "model_config": json.dumps(model_configs(self.service)[name]),
            }
        )
        return model

    def ask(
        self, *, outputs: list[str] | None = None, parameters: dict[str, Any] | None = None, **inputs: Any
    ) -> Request:
        """A request on its way through admission and router."""
        (admitted,) = self.admission.execute([Request(tensors(**inputs), [ADMITTED.name], parameters)])
        assert not admitted.has_error(), admitted.error().message()
        (tensor,) = admitted.output_tensors()
        request = Request({ADMITTED.name: tensor.as_numpy()}, outputs or list(OUTPUT_SPECS))
        self.router.execute([request])
        return request

    def close(self) -> None:
        for model in (self.router, self.admission, self.version):
            model.finalize()
        for name, module in self._saved.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


def tensors(**inputs: Any) -> dict[str, np.ndarray[Any, Any]]:
    made = {}
    for name, value in inputs.items():
        if isinstance(value, bool):
            made[name] = np.array([value])
        else:
            text = value if isinstance(value, str) else json.dumps(value)
            made[name] = np.array([text.encode()], dtype=np.object_)
    return made


@pytest.fixture(params=[False, True], ids=["24.10", "newer"])
def newer(request: pytest.FixtureRequest) -> bool:
    found: bool = request.param
    return found


@pytest.fixture
def models(tmp_path: Path, newer: bool, models_keep_sockets: None) -> Iterator[Models]:
    made = Models(tmp_path / "home", newer=newer)
    try:
        wait_until(made.router.is_ready)
        yield made
    finally:
        made.close()


def responses(request: Request) -> list[Any]:
    """All responses of a request."""
    found, final = [], False
    while not final:
        response, final = request.sender.responses.get(timeout=60)
        if response is not None:
            found.append(response)
    return found


def parameters(response: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(response.parameters())
    return found


def text_of(found: list[Any]) -> str:
    texts = [t.as_numpy()[0] for r in found for t in r.output_tensors() if t.name() == "text_output"]
    return "".join(text.decode() if isinstance(text, bytes) else text for text in texts)


def test_what_there_is_is_found_on_what_the_server_hands_out(models: Models, newer: bool) -> None:
    assert response_parameters(models.pb_utils) is newer
    responses(models.ask(text_input="a"))
    assert (cancel_of(models.pb_utils.calls[-1]) is not None) is newer
    assert cancel_of(None) is None


def test_a_stream_is_the_same_on_both(models: Models, newer: bool) -> None:
    found = responses(models.ask(text_input="a b", stream=True, sampling_parameters={"max_tokens": 4}))

    assert text_of(found) == " a b a b"
    assert models.pb_utils.errors == []
    if newer:
        told = [parameters(response) for response in found]
        assert told[0] == told[-1] == {"served_version": 1, "route_reason": "stable"}
    else:
        assert not hasattr(found[0], "parameters")


def test_parameters_reach_those_who_did_not_ask_for_the_tensors(models: Models, newer: bool) -> None:
    (response,) = responses(models.ask(text_input="a b", outputs=["text_output"]))

    assert [tensor.name() for tensor in response.output_tensors()] == ["text_output"]
    if newer:
        assert parameters(response) == {"served_version": 1, "route_reason": "stable"}


def test_a_version_called_itself_tells_the_same(models: Models, newer: bool) -> None:
    request = Request(tensors(text_input="a b"), ["text_output"])
    models.version.execute([request])
    (response,) = responses(request)

    if newer:
        assert parameters(response) == {"served_version": 1, "route_reason": "direct"}


def test_a_cancel_reaches_the_call_itself_where_that_can_be(models: Models, newer: bool) -> None:
    script = {"tokens": 5, "delay_s": 0.0, "hang_at": 2}
    running = models.ask(text_input="a", stream=True, extensions={"script": script})
    first, _ = running.sender.responses.get(timeout=60)
    token = next(t.as_numpy()[0] for t in first.output_tensors() if t.name() == "cancel_token")
    call = models.pb_utils.calls[-1]

    (answer,) = responses(models.ask(extensions={"cancel": token.decode() if isinstance(token, bytes) else token}))

    details = next(t.as_numpy()[0] for t in answer.output_tensors() if t.name() == "details")
    assert json.loads(details)["cancelled"] is True
    assert "CANCELLED" in responses(running)[-1].error().message()
    if newer:
        assert isinstance(call, NewIterator)
        assert call.cancels > 0
    # Calls that are over are not held.
    wait_until(lambda: not models.router._client._calls)


def test_a_version_says_whether_its_engine_runs(models: Models) -> None:
    assert models.version.is_ready() is True
    models.version._server.stop()
    assert models.version.is_ready() is False


def test_a_router_is_ready_while_any_version_can_serve(models: Models) -> None:
    models.service.stable_link.unlink()
    assert models.router.is_ready() is True
    # What names a version is served without a stable one, and the rest is told so.
    pinned = responses(models.ask(parameters={"version": 1}, text_input="a b", sampling_parameters={"max_tokens": 2}))
    assert text_of(pinned) == "a b a b"
    (refused,) = responses(models.ask(text_input="a"))
    assert "[UNAVAILABLE" in refused.error().message()

    store = StateStore(models.service)
    before = store.read()
    with store.change() as state:
        state.move(1, VersionState.FAILED, "it shall not serve")
    wait_until(lambda: models.router.is_ready() is False)
    store.write(before)
    wait_until(lambda: models.router.is_ready() is True)
