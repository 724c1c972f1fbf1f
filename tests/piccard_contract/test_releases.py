"""Processes of different releases talk to each other: what a newer one adds, an older one passes over.

A snapshot keeps the contract that it was published with, so a router meets older and newer ones. The rules are in
docs/compatibility.md; what stands here in words is what the first release sends, and has to be read for ever.
"""

import json

from piccard_contract.errors import ErrorCode
from piccard_contract.reports import RouterReport, VersionReport
from piccard_contract.request import GenerateRequest, parse_request, request_inputs
from piccard_contract.response import parse_response

ATTEMPT = {"cancel_token": "2.x", "tenant": "t", "priority": 1, "router": "router", "process": 7}
ENDED = {
    "text_output": ["b"],
    "token_ids": [2],
    "status": ['{"code": "OK"}'],
    "details": [
        '{"usage": {"prompt_tokens": 1, "completion_tokens": 2, "cached_tokens": 0}, "finish_reasons": ["stop"]}'
    ],
}


def asked(**attempt: object) -> GenerateRequest:
    extensions = {"attempt": {**ATTEMPT, **attempt}, "coalesce_ms": 5}
    inputs = {"text_input": ["a"], "stream": [True], "extensions": [json.dumps(extensions)]}
    return parse_request(inputs, {}, request_id="r")


def test_a_version_passes_over_what_a_newer_router_says_of_an_attempt() -> None:
    assert asked(trace="00-1", deadline=3.5) == asked()
    assert asked().extensions.attempt is not None


def test_a_router_sends_an_older_version_nothing_that_the_client_did_not_ask_for() -> None:
    inputs = request_inputs(GenerateRequest(id="r", text="a", stream=True))
    assert inputs == {"stream": [True], "sampling_parameters": ["{}"], "extensions": ["{}"], "text_input": ["a"]}


def test_a_router_reads_what_the_first_release_sends() -> None:
    answer = parse_response(ENDED)
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (2, "stop")


def test_a_router_passes_over_what_a_newer_version_tells() -> None:
    details = json.loads(ENDED["details"][0])
    details["usage"]["reasoning_tokens"] = 9
    details["energy_joules"] = 3
    answer = parse_response({**ENDED, "details": [json.dumps(details)]})
    assert answer.usage == parse_response(ENDED).usage
    assert answer.details == {"energy_joules": 3}


def test_a_failure_that_is_not_known_is_an_internal_one_with_its_words() -> None:
    status = {"code": "LICENCE_EXPIRED", "message": "buy another", "retry_after": 2.0, "help": "https://example.org"}
    error = parse_response({"text_output": [""], "status": [json.dumps(status)]}).error
    assert error is not None
    assert (error.code, error.message, error.retry_after) == (ErrorCode.INTERNAL, "buy another", 2.0)


def test_reports_pass_over_what_is_new() -> None:
    known = VersionReport(version=1, phase="ready").model_dump()
    assert VersionReport.model_validate({**known, "temperature": 70}) == VersionReport(version=1, phase="ready")
    # What an older process does not tell has its default.
    assert RouterReport.model_validate({"in_flight": {"1": 2}}).code_hash == ""
