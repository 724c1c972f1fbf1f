"""Reference pages made from the contract's tables: docs/errors.md, interface.md, lifecycle.md, metrics.md and
settings.md.

`python -m piccard_contract.reference docs` writes them; a test holds them equal to the tables.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable
from enum import StrEnum
from pathlib import Path

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from piccard_contract.errors import ERROR_KINDS
from piccard_contract.gateway_file import AdaptiveDeadlines, GatewayFile, GatewayLimits
from piccard_contract.lifecycle import LOADED_STATES, MOVE_CAUSES, SERVING_STATES, STATE_MEANINGS
from piccard_contract.metrics import METRICS
from piccard_contract.policy import (
    AdmissionLimits,
    BreakerLimits,
    Deadlines,
    FallbackLimits,
    Pin,
    Policy,
    ShadowTraffic,
    TokenLimit,
)
from piccard_contract.request import RequestExtensions
from piccard_contract.routing import ROUTE_REASON_MEANINGS
from piccard_contract.sampling import SamplingParams
from piccard_contract.tensors import ADDED_INPUTS, ADDED_OUTPUTS, VLLM_INPUTS, VLLM_OUTPUTS, TensorSpec
from piccard_contract.unserved import UNSERVED
from piccard_contract.version_file import CacheSettings, VersionFile

_NOTICE = "<!-- Made by `python -m piccard_contract.reference docs`; edit the tables in contract/ instead. -->"

OUTPUT_DETAILS = {
    "usage": "{prompt_tokens, completion_tokens, cached_tokens}; in the last response",
    "finish_reasons": "why each choice ended, whether or not finish_reason was asked for; in the last response",
    "token_counts": "with n > 1, how many of token_ids belong to each choice",
    "stop_reasons": "a choice's stop string or stop token id, where one ended it",
    "reasoning": "with separate_reasoning, new text within <think>, one a choice",
    "prompt_logprobs": "with the sampling parameter prompt_logprobs, once",
    "route": "after a fallback or resume: the first decision and the attempts that failed, with their codes",
    "cancelled": "answer of a cancel: whether a generation was found and ended",
}


ENTRY_POINTS = {
    "unary gRPC on `deepseek_unary`": "the gRPC status of the table, the head in its details",
    "HTTP `/infer` on `deepseek_unary`": 'the HTTP status of the table, the head in the body\'s `"error"`',
    "gRPC stream on `deepseek`": "the stream stays open; the response's `error_message` holds the head and no status",
    "HTTP `/generate` on `deepseek`": '400 for every code, the head in the body\'s `"error"`',
    "HTTP `/generate_stream` on `deepseek`": "before the first event 400 for every code; later the status is 200"
    ' already, and an event holds `"error"` with the head',
    "gRPC stream or `/generate*` on `deepseek_llm`, a version called itself": "a response like any other, under OK or"
    ' 200: the output `status` holds the code and the message (`{"code": "OK"}` in the last response of a request'
    " that went well), so look there and ask for it where you name outputs",
}

TRITON_REFUSALS = (
    "Some requests never reach a model of the service, and Triton's own words have no head: a tensor of an unknown"
    " name, of the wrong type or shape; a body that is not JSON; a model or model version that does not exist. They"
    " come as INVALID_ARGUMENT or 400, and NOT_FOUND, 404 or 400 for what does not exist. `/generate` answers 500 for a"
    " body that is not JSON and for a tensor whose JSON type is wrong (`text_input` that is no string, `messages` that"
    " is no string of JSON), and 400 for a parameter that is a list, an object or null: send those in"
    " `sampling_parameters`. It answers 200 with an `error` where `stream` is true. A gRPC call with a method that a"
    " model does not offer is UNIMPLEMENTED (`infer` on `deepseek`); HTTP `/infer` there answers 501."
)


def interface_page() -> str:
    """docs/interface.md: tensors, sampling parameters, keys of `extensions` and `details`, route reasons."""
    return _page(
        "Interface",
        "The models `deepseek` (gRPC stream, `/generate`, `/generate_stream`) and `deepseek_unary` (unary gRPC, HTTP"
        " `/infer`) take and give these tensors. The first group is that of Triton's vLLM backend.",
        ("Inputs of Triton's vLLM backend", _tensor_table(VLLM_INPUTS)),
        ("Inputs added", _tensor_table(ADDED_INPUTS) + "\n\n" + _CHAT_EXAMPLE),
        ("Outputs of Triton's vLLM backend", _tensor_table(VLLM_OUTPUTS)),
        ("Outputs added", _tensor_table(ADDED_OUTPUTS)),
        ("Sampling parameters", _sampling_section()),
        ("vLLM's parameters that are not served", _unserved_section()),
        ("Input `extensions`", _model_table(RequestExtensions)),
        ("Output `details`", _table(("key", "meaning"), ((f"`{k}`", v) for k, v in OUTPUT_DETAILS.items()))),
        ("Routing", _routing_section()),
        ("Timeouts", _TIMEOUTS),
        ("Cancelling", _CANCELLING),
        ("What differs from Triton's vLLM backend", _DIFFERENCES),
    )


def errors_page() -> str:
    """docs/errors.md: the closed list of codes, and what each entry point can tell of them."""
    rows = (
        (f"`{code}`", kind.fault, kind.grpc, str(kind.http), str(kind.gateway), kind.meaning)
        for code, kind in ERROR_KINDS.items()
    )
    return _page(
        "Errors",
        "Every error text holds a head that programs can read: `[CODE version=N retry_after=S] sentence`. `version` is"
        " the version that failed and `retry_after` the seconds after which another try may succeed; either may be"
        " missing. Triton puts words of its own before it (`in ensemble 'deepseek', ...`), so look for the head, as"
        " `piccard_contract.errors.parse_error` does. The list is closed.",
        (
            "Codes",
            "A client's fault stays what it is wherever it is tried. A server's fault may be met by another version"
            " before the client sees it (`fallback_policy`).\n\n"
            + _table(("code", "fault", "unary gRPC", "HTTP `/infer`", "gateway", "meaning"), rows),
        ),
        ("What an entry point can tell", _table(("entry point", "what a client sees"), ENTRY_POINTS.items())),
        ("What Triton refuses itself", TRITON_REFUSALS),
    )


def lifecycle_page() -> str:
    """docs/lifecycle.md: the states of a version and the moves between them."""
    states = (
        (f"`{state}`", _yes(state in LOADED_STATES), _yes(state in SERVING_STATES), meaning)
        for state, meaning in STATE_MEANINGS.items()
    )
    moves = ((f"`{start}`", f"`{to}`", cause) for (start, to), cause in MOVE_CAUSES.items())
    diagram = ["```mermaid", "stateDiagram-v2", "    [*] --> staged"]
    diagram += [f"    {start} --> {to}" for start, to in MOVE_CAUSES]
    diagram += ["    retired --> [*]", "```"]
    return _page(
        "Life of a version",
        "`state.json` holds the state of every version and is the truth about it; the link, the policy, the"
        " configuration on disk and what the server has loaded follow it. A command writes the state first. One that"
        " was ended in between is finished by the next start of `piccard serve` or by `piccard doctor --repair`.",
        ("States", _table(("state", "loaded", "gets requests", "meaning"), states)),
        ("Moves", "No version makes any other move.\n\n" + _table(("from", "to", "made by"), moves)),
        ("Diagram", "\n".join(diagram)),
    )


def metrics_page() -> str:
    """docs/metrics.md: every metric of a service."""
    rows = (
        (f"`{spec.name}`", spec.kind, ", ".join(spec.labels), spec.help, spec.writer)
        for spec in sorted(METRICS, key=lambda spec: spec.name)
    )
    return _page(
        "Metrics",
        "Triton's `/metrics` carries these beside its own `nv_*`. A histogram `x` comes as the counters `x_bucket`"
        " (label `le`), `x_sum` and `x_count`, which `histogram_quantile` reads as usual.",
        ("Families", _table(("name", "kind", "labels", "meaning", "counted by"), rows)),
    )


def settings_page() -> str:
    """docs/settings.md: policy.yaml, version.yaml and gateway.yaml."""
    return _page(
        "Settings",
        "A service's `policy.yaml` may be edited at any time: a change acts on the next request (new header"
        " names on `/infer` and gRPC after the next start, since Triton fixes then what it forwards), and a broken edit"
        " leaves the last good one in use and says so in `piccard status`. A version's `version.yaml` is written by"
        " `piccard publish` and never changes. A home's `state/gateway.yaml` is not there until you write it; it may be"
        " edited at any time too, and a broken edit is told in `state/logs/gateway.log`.",
        ("policy.yaml", _model_table(Policy)),
        ("policy.yaml, `fallback_budget`", _model_table(FallbackLimits) + _BREAKER),
        ("policy.yaml, `breaker`", _model_table(BreakerLimits) + _BREAKER),
        ("policy.yaml, `shadow`", _model_table(ShadowTraffic) + _SHADOW),
        ("policy.yaml, `deadlines`", _model_table(Deadlines)),
        ("policy.yaml, `pin`", _model_table(Pin)),
        ("policy.yaml, `admission`", _model_table(AdmissionLimits) + _ADMISSION),
        ("policy.yaml, `admission.each` and every value of `admission.tenants`", _model_table(TokenLimit)),
        ("version.yaml", _model_table(VersionFile)),
        ("version.yaml, `cache`", _model_table(CacheSettings)),
        ("gateway.yaml", _model_table(GatewayFile)),
        ("gateway.yaml, `limits`", _model_table(GatewayLimits)),
        ("gateway.yaml, `deadlines`", _model_table(AdaptiveDeadlines)),
    )


_CHAT_EXAMPLE = """On `/generate*` a tensor that holds JSON is a string, so its quotes are escaped:

    curl -s localhost:8000/v2/models/deepseek/generate \\
      -d '{"messages": "[{\\"role\\": \\"user\\", \\"content\\": \\"Hi\\"}]", "max_tokens": 24}'

The answer's arrays of one element are scalars there, as in everything that `/generate*` answers."""

_TIMEOUTS = """Give every call a timeout: of a stream between two responses, and of any other for the whole answer.
Where a router or admission dies, or a version that is called itself, Triton tells the clients of the requests in its
hands nothing at all, or that a stub process is not healthy. After either, send the request again: new ones are
answered within seconds ([how many](operations.md#when-a-process-dies)), and none of them depends on what was lost. A
stream of one choice may also be sent with the `token_ids` that it has so far as `output_ids`, which generates the rest
alone."""

_CANCELLING = """Through the ensembles nobody sees a client leave: a closed stream, a call that timed out and gRPC's own
cancel leave the generation running until its last token, or until the policy's `abandoned_limit` ends it (see
[settings](settings.md)). So whoever leaves early, or a front door that sees its client leave, sends back the
`cancel_token` of the newest response that held one. Any entry point of the service takes it:

    curl -s localhost:8000/v2/models/deepseek/generate -d '{"extensions": "{\\"cancel\\": \\"TOKEN\\"}"}'

- `details` of the answer holds `{"cancelled": true}` where a generation was found and ended, which is then told
  CANCELLED; false where it was over already, or never was. It may be sent again.
- The token comes with the first response of each version: a stream that another version takes over gets a new
  one.
- Before the first token of a stream there is none, unless `extensions` holds `{"announce": true}`: then an
  empty response with the token comes within a tenth of a second, if no token has come by then. Without `stream`
  it comes with the answer, so bound such a request by `max_tokens`, or stream.
- A version that is called itself (`deepseek_llm`) sees a gRPC stream end, and a `/generate_stream` that is
  closed after its first event; `/generate` is never seen to be closed."""

_DIFFERENCES = """- `image`, `embedding_request` and `lora_name` are refused with UNSUPPORTED, as are the parameters
  listed above.
- A sampling parameter that is sent in `sampling_parameters` and also as a request parameter is refused with
  INVALID_VALUE; different ones may come by both ways, and all count. The vLLM backend ignores all request
  parameters where the tensor is sent.
- A parameter of an unknown name is refused with UNKNOWN_PARAMETER and not passed over.
- A response of a stream may hold several tokens when the machine is busy
  ([why](decisions/0012-responses-have-a-budget.md)), so count `token_ids` and not responses.
- A failure is an error of Triton with a head that programs can read, see [errors](errors.md). Only a version
  that is called itself (`deepseek_llm`) tells it as data, in the output `status` of a response under OK."""

_ADMISSION = """

    admission:
      tokens_per_second: 20000
      burst: 60000
      each: {tokens_per_second: 2000, burst: 8000}
      tenants:
        research: {tokens_per_second: 8000, burst: 30000}

What a request costs and how it is refused: [operations](operations.md#limits-of-tokens)."""

_BREAKER = "\n\nWhat they do: [operations](operations.md#a-version-that-fails)."

_SHADOW = "\n\nHow it is compared: [rollouts](rollout.md#shadow-mode)."

PAGES: dict[str, Callable[[], str]] = {
    "errors.md": errors_page,
    "interface.md": interface_page,
    "lifecycle.md": lifecycle_page,
    "metrics.md": metrics_page,
    "settings.md": settings_page,
}


def _page(title: str, opening: str, *sections: tuple[str, str]) -> str:
    parts = [f"# {title}", _NOTICE, opening]
    for heading, body in sections:
        parts += [f"## {heading}", body]
    return "\n\n".join(parts) + "\n"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _tensor_table(specs: tuple[TensorSpec, ...]) -> str:
    rows = ((f"`{spec.name}`", spec.datatype, str(list(spec.dims)), spec.meaning) for spec in specs)
    return _table(("name", "type", "shape", "meaning"), rows)


def _sampling_section() -> str:
    return (
        "As a JSON object in `sampling_parameters`, or, as with the vLLM backend, as request parameters (JSON keys of"
        " `/generate`). Numbers may be sent as strings. Triton takes no list, object or null as a parameter, so those"
        " work within `sampling_parameters` only, which is a string that holds JSON.\n\n" + _model_table(SamplingParams)
    )


def _unserved_section() -> str:
    return (
        "vLLM, or its Triton backend, has these or had them. They are refused with UNSUPPORTED; null counts as left"
        " out.\n\n" + _table(("key", "why, or what to use instead"), ((f"`{k}`", v) for k, v in UNSERVED.items()))
    )


def _routing_section() -> str:
    reasons = _table(
        ("route_reason", "the version served because"), ((f"`{k}`", v) for k, v in ROUTE_REASON_MEANINGS.items())
    )
    return (
        "Checked in this order: the parameter `version`; the header `X-Canary` (`true` or `always`, `false` or"
        " `never`); the first sticky key (`X-Session-Id`, then `user`); the traffic ratio. Letter case of names does"
        " not matter. HTTP `/infer`, unary gRPC and gRPC streams take them as headers or metadata, which belong to a"
        " whole gRPC stream. Triton does not forward headers of `/generate` and `/generate_stream`: there the same"
        ' names are keys of the JSON body, such as `{"text_input": "...", "X-Canary": "true"}`, and headers are'
        " ignored. gRPC takes metadata in lower case only: `x-canary`. Any other value of `X-Canary` counts as none."
        " The `model_version` of Triton's protocol is the ensemble's and always 1: a version of the model is named"
        " by the parameter `version`.\n\n" + reasons
    )


def _model_table(model: type[BaseModel]) -> str:
    meanings = _attributes(model.__doc__ or "")
    rows = []
    for name, field in model.model_fields.items():
        key = field.alias or name
        rows.append(
            (
                f"`{key}`",
                _default(field.get_default(call_default_factory=True)),
                _range(field.annotation, field.metadata),
                meanings[name],
            )
        )
    return _table(("key", "default", "range", "meaning"), rows)


def _default(value: object) -> str:
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, BaseModel):
        return "see its keys" if type(value).model_fields else ""
    if value is None or isinstance(value, bool):
        return f"`{json.dumps(value)}`"
    return f"`{value}`" if value != "" else "empty"


def _range(annotation: object, metadata: list[object]) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return ", ".join(annotation)
    return ", ".join(
        f"{sign} {getattr(item, name)}" for item in metadata for name, sign in signs.items() if hasattr(item, name)
    )


def _attributes(docstring: str) -> dict[str, str]:
    """The meanings in a docstring's `Attributes:` section; `a, b: text` names two."""
    found: dict[str, str] = {}
    _, _, section = docstring.partition("Attributes:")
    for match in re.finditer(r"^ {8}(\w[\w, ]*): (.*(?:\n {12}.*)*)", section, re.MULTILINE):
        meaning = " ".join(match[2].split())
        found.update({name.strip(): meaning for name in match[1].split(",")})
    return found


def main(folder: Path) -> None:
    """Write every page into `folder`."""
    for name, page in PAGES.items():
        (folder / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
