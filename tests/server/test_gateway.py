"""The gateway of a real server: the official client of OpenAI, and tritonclient beside it."""

import http.client
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from threading import Semaphore
from typing import Any

import openai
import psutil
import pytest
from piccard.gateway_keys import add_key, list_keys
from piccard_canary.sticky import position
from piccard_contract.home import version_owner
from piccard_contract.policy import read_policy
from piccard_gateway.deadlines import ENOUGH
from piccard_server import RunningServer, make_scripted_home, wait_for
from short_calls import answers_gateway
from triton_calls import GrpcStream

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
MESSAGES: Any = [{"role": "user", "content": "a b c"}]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    service = make_scripted_home(tmp_path_factory.mktemp("home"))
    running = RunningServer(service.home, "--gateway")
    try:
        running.wait_ready()
        wait_for(lambda: answers_gateway(running), 60, "the gateway")
        yield running
    finally:
        running.stop()


def client(server: RunningServer, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://{server.gateway}/v1", api_key=key, max_retries=0, timeout=60)


def script(**settings: Any) -> dict[str, Any]:
    return {"extensions": {"script": {"delay_s": 0.0, **settings}}}


def idle(server: RunningServer) -> bool:
    sections = [server.section(version_owner(version)) for version in (1, 2)]
    return all(found is not None and found.data["running"] + found.data["waiting"] == 0 for found in sections)


def test_a_chat_whole_and_streamed(gateway: RunningServer) -> None:
    ask = client(gateway).chat.completions
    more = script(tokens=3, text="one two")
    answer = ask.with_raw_response.create(
        model="deepseek", messages=MESSAGES, extra_body=more, extra_headers={"X-Canary": "true"}
    )
    assert (answer.headers["x-served-version"], answer.headers["x-route-reason"]) == ("2", "header")
    whole = answer.parse()
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 3
    stream = ask.create(
        model="deepseek", messages=MESSAGES, stream=True, stream_options={"include_usage": True}, extra_body=more
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )


def test_reasoning_is_told_apart_whole_and_streamed(gateway: RunningServer) -> None:
    ask = client(gateway).chat.completions
    # A token has at most seven bytes, and the text begins anew at its end.
    more = script(tokens=9, text="<think> why </think> since")
    message = ask.create(model="deepseek", messages=MESSAGES, extra_body=more).choices[0].message
    told = message.model_dump()
    assert told["reasoning_content"].strip() == "why", told
    assert told["content"].strip().startswith("since"), told
    deltas = [
        chunk.choices[0].delta.model_dump()
        for chunk in ask.create(model="deepseek", messages=MESSAGES, stream=True, extra_body=more)
        if chunk.choices
    ]
    for key in ("reasoning_content", "content"):
        assert "".join(delta.get(key) or "" for delta in deltas) == told[key]


def test_a_suffix_is_refused_where_no_tokenizer_has_gaps(gateway: RunningServer) -> None:
    with pytest.raises(openai.UnprocessableEntityError, match="leave suffix out") as raised:
        client(gateway).completions.create(model="deepseek", prompt="a", suffix="b", max_tokens=1)
    assert raised.value.param == "suffix"


def test_completions_choices_and_log_probabilities(gateway: RunningServer) -> None:
    answer = client(gateway).completions.create(
        model="deepseek", prompt="a b", n=2, logprobs=1, echo=True, max_tokens=4, extra_body=script(tokens=9)
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert choice.text.startswith("a b")
        assert choice.finish_reason == "length"
        assert choice.logprobs is not None
        assert "".join(choice.logprobs.tokens or []) == choice.text
    chat = client(gateway).chat.completions.create(
        model="deepseek", messages=MESSAGES, logprobs=True, top_logprobs=1, extra_body=script(tokens=2)
    )
    assert chat.choices[0].logprobs is not None
    assert len(chat.choices[0].logprobs.content or []) == 2


def test_errors_have_their_class(gateway: RunningServer) -> None:
    ask = client(gateway).chat.completions
    with pytest.raises(openai.NotFoundError):
        ask.create(model="other", messages=MESSAGES)
    with pytest.raises(openai.UnprocessableEntityError, match="response_format"):
        ask.create(model="deepseek", messages=MESSAGES, response_format={"type": "json_object"})
    with pytest.raises(openai.BadRequestError):
        ask.create(model="deepseek", messages=MESSAGES, max_tokens=10**9)
    with pytest.raises(openai.RateLimitError) as refused:
        ask.create(model="deepseek", messages=MESSAGES, extra_body=script(fail_at=0, error="OVERLOADED"))
    assert refused.value.response.headers["retry-after"]
    stream = ask.create(
        model="deepseek", messages=MESSAGES, stream=True, extra_body=script(fail_at=2, error="INTERNAL", tokens=9)
    )
    with pytest.raises(openai.APIError):
        list(stream)


def test_sessions_stay_and_requests_keep_their_ids(gateway: RunningServer) -> None:
    ask = client(gateway).completions.with_raw_response.create
    salt = read_policy(gateway.service.policy_file).salt
    names = [f"s{number}" for number in range(40)]
    for name in names:
        answer = ask(
            model="deepseek",
            prompt="a",
            max_tokens=9,
            extra_headers={"X-Session-Id": name, "X-Request-Id": f"of-{name}", "traceparent": TRACE},
            extra_body=script(tokens=2),
        )
        expected = "2" if position(salt, f"x-session-id:{name}") < 0.1 else "1"
        assert (answer.headers["x-served-version"], answer.headers["x-route-reason"]) == (expected, "sticky")
        assert answer.headers["x-request-id"] == f"of-{name}"

    def logged() -> set[str]:
        return {json.loads(line)["id"] for line in gateway.service.request_log.read_text().splitlines()}

    wait_for(lambda: {f"of-{name}" for name in names} <= logged(), 60, "the lines of the log")


def test_who_takes_too_long_is_answered_504_and_short_ones_pass(gateway: RunningServer) -> None:
    """The deadline follows what first tokens took of late, ten seconds at least; what missed it is cancelled."""
    ask = client(gateway).completions.create
    late, soon = script(tokens=2, first_delay_s=600.0), script(tokens=2)
    # So many that the recent ones count.
    for _ in range(ENOUGH):
        ask(model="deepseek", prompt="a", max_tokens=9, extra_body=soon)
    with ThreadPoolExecutor(4) as pool:
        hanging = [
            pool.submit(ask, model="deepseek", prompt="a", max_tokens=9, stream=stream, extra_body=late)
            for stream in (False, True, False, True)
        ]
        for _ in range(8):
            assert ask(model="deepseek", prompt="a", max_tokens=9, extra_body=soon).choices[0].text == " a a"
        for request in hanging:
            with pytest.raises(openai.InternalServerError) as refused:
                request.result(120)
            assert refused.value.status_code == 504
            assert refused.value.code == "deadline_exceeded"
    wait_for(lambda: idle(gateway), 60, "the generations to end")


def test_tritonclient_gets_the_same_beside_it(gateway: RunningServer) -> None:
    more = script(tokens=4)
    told = client(gateway).completions.create(model="deepseek", prompt="a b", max_tokens=9, extra_body=more)
    with GrpcStream(gateway.grpc) as stream:
        stream.send(
            "deepseek",
            text_input="a b",
            stream=True,
            sampling_parameters={"max_tokens": 9},
            extensions=more["extensions"],
        )
        text = "".join(response["text_output"][0] for response in stream.responses())
    assert told.choices[0].text == text


@pytest.mark.parametrize("late", [False, True])
def test_a_client_that_goes_away_ends_its_generation(gateway: RunningServer, late: bool) -> None:
    """`late`: before its first token, when the token that cancels it has been announced alone."""
    more = script(tokens=30_000, **({"first_delay_s": 600.0} if late else {"delay_s": 0.01}))
    asking = client(gateway).with_options(timeout=3600)
    if late:
        with pytest.raises(openai.APITimeoutError):
            client(gateway).with_options(timeout=2).completions.create(
                model="deepseek", prompt="a", stream=True, max_tokens=30_000, extra_body=more
            )
    else:
        stream = asking.completions.create(
            model="deepseek", prompt="a", stream=True, max_tokens=30_000, extra_body=more
        )
        next(stream)
        stream.close()
    wait_for(lambda: idle(gateway), 60, "the generation to end")


def test_status_names_its_address(gateway: RunningServer) -> None:
    assert f"gateway http://{gateway.gateway}/v1" in gateway.piccard("status").stdout


def test_bodies_of_every_size_pass_the_limit_of_headers(gateway: RunningServer) -> None:
    """A body that comes with its headers in one piece, or whose last piece is large, is no header."""
    with closing(http.client.HTTPConnection(gateway.gateway, timeout=60)) as connection:
        for size in (10, 30_000, 40_000, 70_000, 200_000, 1_000_000):
            body = {"model": "deepseek", "prompt": "a " * (size // 2), "max_tokens": 1, **script(tokens=1)}
            connection.request("POST", "/v1/completions", json.dumps(body))
            answer = connection.getresponse()
            told = json.loads(answer.read())
            # Those that are longer than the context are refused for that alone.
            assert answer.status == 200 or told["error"]["code"] == "context_length_exceeded", (size, told)


def test_headers_are_bounded_on_a_kept_connection(gateway: RunningServer) -> None:
    with closing(http.client.HTTPConnection(gateway.gateway, timeout=60)) as connection:
        connection.request("GET", "/health")
        assert connection.getresponse().read()
        connection.putrequest("GET", "/health")
        # More than is read at once, so that it has to be counted before the last of it is there.
        for number in range(40):
            connection.putheader(f"X-{number}", "v" * 30_000)
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.endheaders()
        assert connection.getresponse().status == 431


@pytest.mark.parametrize("request_line", [b"GARBAGE", b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5"])
def test_what_is_no_http_is_told_as_everything_else(gateway: RunningServer, request_line: bytes) -> None:
    host, port = gateway.gateway.split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(request_line + b"\r\n\r\n")
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert (answer.status, json.loads(answer.read())["error"]["code"]) == (400, "invalid_http")


def test_many_requests_share_few_streams_of_the_server(gateway: RunningServer) -> None:
    """One after the other, headers of each its own."""
    ask = client(gateway).completions.with_raw_response.create

    def one(number: int) -> tuple[str, str]:
        wish = "true" if number % 2 else "false"
        answer = ask(
            model="deepseek",
            prompt=f"n{number}",
            max_tokens=9,
            extra_headers={"X-Canary": wish, "X-Request-Id": f"id-{number}"},
            extra_body=script(tokens=2),
        )
        assert answer.parse().choices[0].text.startswith(f" n{number}")
        return answer.headers["x-served-version"], answer.headers["x-request-id"]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, range(64))) == [(str(1 + n % 2), f"id-{n}") for n in range(64)]


def test_the_next_request_after_the_server_dies(fresh_server: Callable[..., RunningServer]) -> None:
    server = fresh_server(options=("--gateway",))
    wait_for(lambda: answers_gateway(server), 60, "the gateway")
    assert answered(server)
    before = server.server_pid()
    os.kill(before, signal.SIGKILL)
    wait_for(lambda: server.server_pid() not in (0, before), 120, "the next server")
    wait_for(lambda: answered(server), 120, "an answer")
    assert all(answered(server) for _ in range(5))


def answered(server: RunningServer) -> bool:
    try:
        told = client(server).completions.create(
            model="deepseek", prompt="a", max_tokens=9, extra_body=script(tokens=2), timeout=60
        )
    except (openai.APIStatusError, openai.APIConnectionError):
        return False
    return told.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_streams_in_flight_are_whole_at_the_end_of_the_service(
    fresh_server: Callable[..., RunningServer], number: int
) -> None:
    server = fresh_server(options=("--gateway",))
    wait_for(lambda: answers_gateway(server), 60, "the gateway")
    streams, tokens = 8, 60

    def stream(_: int) -> tuple[int, str | None]:
        events = client(server).completions.create(
            model="deepseek", prompt="a", stream=True, max_tokens=1000, extra_body=script(tokens=tokens, delay_s=0.03)
        )
        said, finish = 0, None
        for number, event in enumerate(events):
            said += len(event.choices[0].text.split())
            finish = event.choices[0].finish_reason or finish
            if number == 0:
                begun.release()
        return said, finish

    begun = Semaphore(0)
    # One request that is over leaves a stream that nobody uses, which must hold up nothing.
    assert answered(server)
    with ThreadPoolExecutor(streams) as pool:
        running = [pool.submit(stream, number) for number in range(streams)]
        for _ in range(streams):
            assert begun.acquire(timeout=60)
        assert server.stop(number=number) == 0
        assert [found.result(60) for found in running] == [(tokens, "stop")] * streams


def test_what_runs_beyond_the_exit_timeout_is_told_so_and_holds_up_nothing(
    fresh_server: Callable[..., RunningServer],
) -> None:
    server = fresh_server(options=("--gateway", "--exit-timeout=2"))
    wait_for(lambda: answers_gateway(server), 60, "the gateway")
    ask = client(server).completions.create
    more = script(tokens=30_000, delay_s=0.05)
    events = ask(model="deepseek", prompt="a", stream=True, max_tokens=30_000, extra_body=more)
    next(events)
    with ThreadPoolExecutor(2) as pool:
        rest = pool.submit(lambda: list(events))
        whole = pool.submit(lambda: ask(model="deepseek", prompt="b", max_tokens=30_000, extra_body=more))
        wait_for(lambda: server.in_flight(1) + server.in_flight(2) == 2, 60, "both requests")
        assert server.stop() == 0
        with pytest.raises(openai.APIError, match="the service ends") as cut:
            rest.result(60)
        assert cut.value.body["code"] == "unavailable"
        with pytest.raises(openai.InternalServerError, match="the service ends") as refused:
            whole.result(60)
        assert refused.value.status_code == 503


def test_keys_open_and_a_gateway_that_dies_is_started_again(gateway: RunningServer) -> None:
    key = add_key(gateway.home, "me")
    with pytest.raises(openai.AuthenticationError):
        client(gateway).models.list()
    assert [model.id for model in client(gateway, key).models.list()] == ["deepseek"]

    # Each change acts on the next request: of another service, of one request a minute, and revoked.
    def ask(with_key: str) -> Any:
        more = script(tokens=2)
        return client(gateway, with_key).completions.create(model="deepseek", prompt="a", max_tokens=9, extra_body=more)

    with pytest.raises(openai.PermissionDeniedError):
        ask(add_key(gateway.home, "other", services=["another"]))
    rare = add_key(gateway.home, "rare", rate=1)
    assert ask(rare).choices[0].finish_reason == "stop"
    with pytest.raises(openai.RateLimitError) as limited:
        ask(rare)
    assert limited.value.code == "rate_limit_exceeded"
    assert 1 <= int(limited.value.response.headers["retry-after"]) <= 60
    gateway.piccard("key", "revoke", next(one["id"] for one in list_keys(gateway.home) if one["name"] == "rare"))
    with pytest.raises(openai.AuthenticationError):
        ask(rare)

    (process,) = [
        child
        for child in psutil.Process(gateway.process.pid).children()
        if "piccard_gateway" in " ".join(child.cmdline())
    ]
    os.kill(process.pid, signal.SIGKILL)
    wait_for(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, 60, "its end")
    wait_for(lambda: answers_gateway(gateway), 60, "the next gateway")
    assert gateway.get("readyz")[1]["gateway"]["given_up"] == ""
    wait_for(lambda: gateway.metric("piccard_revivals_total", owner="gateway") == 1, 60, "the count")
    assert [model.id for model in client(gateway, key).models.list()] == ["deepseek"]
