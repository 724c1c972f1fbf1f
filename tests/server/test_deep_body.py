"""A body that ends server 2.51, whose JSON parser is recursive: what is left of it is a restart."""

import http.client
from collections.abc import Callable
from contextlib import suppress

import pytest
from entry_points import ENTRY_POINTS
from piccard_server import RunningServer, wait_for


@pytest.mark.timeout(600)
def test_a_server_outlives_or_comes_back_after_deep_json(fresh_server: Callable[..., RunningServer]) -> None:
    server = fresh_server(versions=1)
    before = server.server_pid()
    connection = http.client.HTTPConnection(server.http, timeout=60)
    answered = False
    with suppress(OSError, http.client.HTTPException):
        connection.request("POST", "/v2/models/deepseek/generate", b'{"text_input": ' + b"[" * 2**20)
        answered = connection.getresponse().status >= 400
    connection.close()

    # Newer servers answer.
    if not answered:
        wait_for(lambda: server.server_pid() not in (0, before), 240, "another server")
        server.wait_ready(240)
    good = {"text_input": "a b", "sampling_parameters": {"max_tokens": 2}}
    assert ENTRY_POINTS["http_infer"](server, {}, {}, good).text == "a b a b"
