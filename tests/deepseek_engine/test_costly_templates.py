"""A checkpoint whose chat template attacks costs its own chats an error, and no other request anything."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from deepseek_engine.scripted.version import open_scripted
from deepseek_engine.text import ChatTemplate
from deepseek_engine.version_server import VersionServer
from patience import wait_until
from piccard_contract.version_file import VersionFile

ATTACKS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'x' * 10 ** 10 }}",
    "{{ ''.__class__.__mro__ }}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
]


class Reply:
    """Keeps the responses of one request."""

    def __init__(self) -> None:
        self.responses: list[dict[str, list[Any]]] = []
        self.ended = threading.Event()

    def send(self, outputs: dict[str, list[Any]], *, final: bool) -> None:
        self.responses.append(outputs)
        if final:
            self.ended.set()

    def is_cancelled(self) -> bool:
        return False


def ask(server: VersionServer, **inputs: Any) -> Reply:
    reply = Reply()
    tensors = {name: [json.dumps(v) if isinstance(v, dict | list) else v] for name, v in inputs.items()}
    server.take(tensors, {}, request_id="a", reply=reply)
    return reply


@pytest.fixture(params=ATTACKS, ids=range(len(ATTACKS)))
def server(request: pytest.FixtureRequest) -> Iterator[VersionServer]:
    file = VersionFile.model_validate({"label": "v1", "checkpoint": "scripted", "runner": "scripted"})
    version = open_scripted(file, number=3)
    version.tokenizer.chat_template = ChatTemplate({"default": request.param}, {})
    server = VersionServer(version, number=3, on_fatal=lambda: None)
    server.start()
    yield server
    server.stop()


def test_others_go_on(server: VersionServer) -> None:
    other = ask(
        server,
        text_input="a b",
        stream=True,
        sampling_parameters={"max_tokens": 30_000},
        extensions={"script": {"tokens": 30_000, "delay_s": 0.01}},
    )
    wait_until(lambda: len(other.responses) > 2)

    attacked = [ask(server, messages=[{"role": "user", "content": "hi"}]) for _ in range(2)]

    heard = len(other.responses)
    wait_until(lambda: len(other.responses) > heard + 5)
    for reply in attacked:
        assert reply.ended.wait(100)
        assert json.loads(reply.responses[-1]["status"][0])["code"] == "UNSUPPORTED"
    last = ask(server, text_input="a b", sampling_parameters={"max_tokens": 2})
    assert last.ended.wait(60)
    assert last.responses[-1]["text_output"] == ["a b a b"]
    assert not other.ended.is_set()
