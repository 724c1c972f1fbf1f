"""What the open ports refuse without the admin key, on both protocols, and that the server then serves on."""

import base64
import http.client
import json
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from entry_points import ENTRY_POINTS
from piccard.keys import admin_key_path, read_secret
from piccard_contract.request import GatewayClaims
from piccard_server import RunningServer, wait_for
from short_calls import answers_http
from triton_calls import grpc_stream
from tritonclient.grpc import service_pb2, service_pb2_grpc

KEY_HEADER = "admin-key"

# A model that would run on the server's machine if it were loaded.
EVIL = b"import os\nos.mkdir('/tmp/piccard-evil')\n"

# method, path and body of everything that changes or reads what only operators may.
HTTP_DOORS: dict[str, tuple[str, str, Any]] = {
    "index": ("POST", "/v2/repository/index", {}),
    "load with files": (
        "POST",
        "/v2/repository/models/evil/load",
        {"parameters": {"config": '{"backend": "python"}', "file:1/model.py": base64.b64encode(EVIL).decode()}},
    ),
    "load": ("POST", "/v2/repository/models/deepseek_llm/load", {}),
    "unload": ("POST", "/v2/repository/models/deepseek_llm/unload", {}),
    "system memory": ("GET", "/v2/systemsharedmemory/status", None),
    "register system memory": (
        "POST",
        "/v2/systemsharedmemory/region/door/register",
        {"key": "/door", "offset": 0, "byte_size": 8},
    ),
    "unregister system memory": ("POST", "/v2/systemsharedmemory/unregister", {}),
    "CUDA memory": ("GET", "/v2/cudasharedmemory/status", None),
    "register CUDA memory": (
        "POST",
        "/v2/cudasharedmemory/region/door/register",
        {"raw_handle": {"b64": base64.b64encode(b"x" * 64).decode()}, "device_id": 0, "byte_size": 8},
    ),
    "unregister CUDA memory": ("POST", "/v2/cudasharedmemory/unregister", {}),
    "trace": ("GET", "/v2/trace/setting", None),
    "change trace": ("POST", "/v2/trace/setting", {"trace_file": "/tmp/piccard-evil", "trace_level": ["TIMESTAMPS"]}),
    "trace of a model": ("GET", "/v2/models/deepseek/trace/setting", None),
    "change trace of a model": ("POST", "/v2/models/deepseek/trace/setting", {"trace_level": ["TIMESTAMPS"]}),
    "log": ("GET", "/v2/logging", None),
    "change log": ("POST", "/v2/logging", {"log_file": "/tmp/piccard-evil"}),
}

# Doors that are opened with the key and leave nothing changed.
HARMLESS = ("index", "system memory", "CUDA memory", "trace", "log")

# The same doors under other spellings; whatever they answer, they do not open.
SPELLINGS = (
    "/v2//repository/index",
    "/v2/repository/index/",
    "//v2/repository/index",
    "/v2/./repository/index",
    "/v2/x/../repository/index",
    "/V2/repository/index",
    "/v2/repository%2Findex",
    "/v2/%72epository/index",
    "/v2/repository/index?admin-key=",
    "/v2/repository/index;",
)

WRONG_KEYS: dict[str, dict[str, str]] = {
    "no key": {},
    "a wrong key": {KEY_HEADER: "wrong"},
    "an empty key": {KEY_HEADER: ""},
}

GRPC_DOORS: dict[str, tuple[str, Any]] = {
    "index": ("RepositoryIndex", service_pb2.RepositoryIndexRequest()),
    "load with files": (
        "RepositoryModelLoad",
        service_pb2.RepositoryModelLoadRequest(
            model_name="evil",
            parameters={
                "config": service_pb2.ModelRepositoryParameter(string_param='{"backend": "python"}'),
                "file:1/model.py": service_pb2.ModelRepositoryParameter(bytes_param=EVIL),
            },
        ),
    ),
    "load": ("RepositoryModelLoad", service_pb2.RepositoryModelLoadRequest(model_name="deepseek_llm")),
    "unload": ("RepositoryModelUnload", service_pb2.RepositoryModelUnloadRequest(model_name="deepseek_llm")),
    "system memory": ("SystemSharedMemoryStatus", service_pb2.SystemSharedMemoryStatusRequest()),
    "register system memory": (
        "SystemSharedMemoryRegister",
        service_pb2.SystemSharedMemoryRegisterRequest(name="door", key="/door", byte_size=8),
    ),
    "unregister system memory": ("SystemSharedMemoryUnregister", service_pb2.SystemSharedMemoryUnregisterRequest()),
    "CUDA memory": ("CudaSharedMemoryStatus", service_pb2.CudaSharedMemoryStatusRequest()),
    "register CUDA memory": (
        "CudaSharedMemoryRegister",
        service_pb2.CudaSharedMemoryRegisterRequest(name="door", raw_handle=b"x" * 64, byte_size=8),
    ),
    "unregister CUDA memory": ("CudaSharedMemoryUnregister", service_pb2.CudaSharedMemoryUnregisterRequest()),
    # Reading and changing are one method; a request without settings reads.
    "trace": ("TraceSetting", service_pb2.TraceSettingRequest()),
    "change trace": (
        "TraceSetting",
        service_pb2.TraceSettingRequest(
            settings={"trace_level": service_pb2.TraceSettingRequest.SettingValue(value=["TIMESTAMPS"])}
        ),
    ),
    "change trace of a model": (
        "TraceSetting",
        service_pb2.TraceSettingRequest(
            model_name="deepseek",
            settings={"trace_level": service_pb2.TraceSettingRequest.SettingValue(value=["TIMESTAMPS"])},
        ),
    ),
    "log": ("LogSettings", service_pb2.LogSettingsRequest()),
    "change log": (
        "LogSettings",
        service_pb2.LogSettingsRequest(
            settings={"log_file": service_pb2.LogSettingsRequest.SettingValue(string_param="/tmp/piccard-evil")}
        ),
    ),
}


def http_call(server: RunningServer, door: tuple[str, str, Any], headers: dict[str, str]) -> tuple[int, str]:
    method, path, body = door
    connection = http.client.HTTPConnection(server.http, timeout=30)
    try:
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def grpc_call(server: RunningServer, door: tuple[str, Any], headers: dict[str, str]) -> Any:
    method, request = door
    metadata = [(f"triton-grpc-protocol-{name}", value) for name, value in headers.items()]
    with grpc.insecure_channel(server.grpc) as channel:
        call = getattr(service_pb2_grpc.GRPCInferenceServiceStub(channel), method)
        return call(request, metadata=metadata, timeout=30)


@pytest.fixture
def admin_key(server: RunningServer) -> dict[str, str]:
    return {KEY_HEADER: read_secret(admin_key_path(server.home))}


@pytest.fixture(autouse=True)
def still_serves(server: RunningServer) -> Iterator[None]:
    yield
    assert answers_http(server)
    with server.control() as control:
        assert control.ready_versions(server.service.llm) == [1, 2]


@pytest.mark.parametrize("keys", WRONG_KEYS)
def test_doors_are_closed_over_http(server: RunningServer, keys: str) -> None:
    answers = {name: http_call(server, door, WRONG_KEYS[keys]) for name, door in HTTP_DOORS.items()}

    assert {name: status for name, (status, _) in answers.items()} == dict.fromkeys(HTTP_DOORS, 403)
    assert all("restricted" in text for _, text in answers.values())


@pytest.mark.parametrize("keys", WRONG_KEYS)
def test_doors_are_closed_over_grpc(server: RunningServer, keys: str) -> None:
    for name, door in GRPC_DOORS.items():
        with pytest.raises(grpc.RpcError) as refused:
            grpc_call(server, door, WRONG_KEYS[keys])
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE, name
        assert "restricted" in refused.value.details(), name


def test_no_other_spelling_opens_a_door(server: RunningServer) -> None:
    for path in SPELLINGS:
        for method in ("POST", "GET"):
            status, text = http_call(server, (method, path, {}), {})
            assert status >= 400, path
            assert "READY" not in text, path


def test_a_door_opens_with_the_key(server: RunningServer, admin_key: dict[str, str]) -> None:
    for name in HARMLESS:
        assert http_call(server, HTTP_DOORS[name], admin_key)[0] == 200, name
        grpc_call(server, GRPC_DOORS[name], admin_key)


def test_the_key_is_no_headers_of_a_request(server: RunningServer, admin_key: dict[str, str]) -> None:
    """It opens the doors and is not handed to models, which would refuse a parameter that they do not know."""
    inputs = {"text_input": "a b", "sampling_parameters": {"max_tokens": 2}}
    for entry in ("http_infer", "grpc_unary", "grpc_stream"):
        assert ENTRY_POINTS[entry](server, admin_key, {}, inputs).code == "OK", entry


def test_operators_have_the_key(server: RunningServer) -> None:
    assert "version" in server.piccard("status").stdout
    server.piccard("canary", "off")
    server.piccard("canary", "set", "--version=2", "--ratio=0.1")


# Claims of a tenant.


def asked(claims: GatewayClaims) -> dict[str, Any]:
    return {
        "text_input": "a b",
        "sampling_parameters": {"max_tokens": 2},
        "extensions": {"gateway": claims.model_dump()},
    }


def tenants(server: RunningServer) -> list[str]:
    """The tenant of every request in the request log."""
    log = server.service.request_log
    lines = log.read_text().splitlines() if log.exists() else []
    return [json.loads(line)["tenant"] for line in lines]


@pytest.fixture
def claims(server: RunningServer) -> dict[str, GatewayClaims]:
    secret = read_secret(server.service.gateway_secret).encode()
    acme = GatewayClaims(tenant="acme", priority=7)
    signed = acme.sign(secret)
    return {
        "unsigned": acme,
        "forged": acme.model_copy(update={"signature": "0" * 64}),
        "not ASCII": acme.model_copy(update={"signature": "é" * 64}),
        "of an earlier start": acme.sign(b"the secret of an earlier start"),
        "of another tenant": signed.model_copy(update={"tenant": "other"}),
        "of another priority": signed.model_copy(update={"priority": 8}),
    }


@pytest.mark.parametrize("entry", ["http_infer", "grpc_unary", "grpc_stream", "generate"])
def test_claims_without_the_gateways_signature_are_ignored_and_counted(
    server: RunningServer, claims: dict[str, GatewayClaims], entry: str
) -> None:
    name = "piccard_unsigned_claims_total"
    before = server.metric(name)
    for kind, told in claims.items():
        assert ENTRY_POINTS[entry](server, {}, {}, asked(told)).code == "OK", kind

    wait_for(lambda: server.metric(name) >= before + len(claims), 60, "the count")
    assert server.metric(name) == before + len(claims)
    assert not {"acme", "other"} & set(tenants(server))


def test_claims_that_the_gateway_signed_are_believed(server: RunningServer) -> None:
    name = "piccard_unsigned_claims_total"
    before = server.metric(name)
    signed = GatewayClaims(tenant="trusted", priority=7).sign(read_secret(server.service.gateway_secret).encode())

    assert ENTRY_POINTS["http_infer"](server, {}, {}, asked(signed)).code == "OK"

    wait_for(lambda: "trusted" in tenants(server), 60, "the log")
    assert server.metric(name) == before


def test_a_version_called_itself_believes_no_claims_either(
    server: RunningServer, claims: dict[str, GatewayClaims]
) -> None:
    name = "piccard_direct_unsigned_claims_total"
    before = server.metric(name, version="1")
    for told in claims.values():
        forged = {"cancel_token": f"1.{'x' * 32}", **told.model_dump()}
        for extensions in ({"attempt": forged}, {"gateway": told.model_dump()}):
            inputs = {**asked(told), "extensions": extensions}
            responses = grpc_stream(server.grpc, server.service.llm, version="1", **inputs)
            assert "".join(response["text_output"][0] for response in responses).endswith("a b")

    wait_for(lambda: server.metric(name, version="1") >= before + 2 * len(claims), 60, "the count")
    assert server.metric(name, version="1") == before + 2 * len(claims)


def test_a_new_start_has_a_new_secret_and_the_same_key(fresh_server: Any) -> None:
    server: RunningServer = fresh_server(versions=1)
    secret, key = read_secret(server.service.gateway_secret), read_secret(admin_key_path(server.home))
    for path in (server.service.gateway_secret, admin_key_path(server.home)):
        assert path.stat().st_mode & 0o777 == 0o600
    assert server.stop() == 0
    again = RunningServer(server.home).wait_ready()
    try:
        assert read_secret(again.service.gateway_secret) != secret
        assert read_secret(admin_key_path(server.home)) == key
        replayed = GatewayClaims(tenant="acme").sign(secret.encode())
        assert ENTRY_POINTS["http_infer"](again, {}, {}, asked(replayed)).code == "OK"
        wait_for(lambda: again.metric("piccard_unsigned_claims_total") == 1, 60, "the count")
    finally:
        again.stop()
