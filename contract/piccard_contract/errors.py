"""The closed list of error codes and the head that carries one through Triton's error strings.

Triton keeps a status on some entry points only, and BLS turns every code into INTERNAL, so the code travels in the
message itself: `[CODE version=N retry_after=S] sentence`. docs/errors.md is made from this table.
"""

import re
from dataclasses import dataclass
from enum import StrEnum


class ErrorCode(StrEnum):
    """What went wrong, for programs. The list is closed: a new failure gets one of these or extends this table."""

    MISSING_INPUT = "MISSING_INPUT"
    CONFLICTING_INPUTS = "CONFLICTING_INPUTS"
    INVALID_JSON = "INVALID_JSON"
    INVALID_ENCODING = "INVALID_ENCODING"
    UNKNOWN_PARAMETER = "UNKNOWN_PARAMETER"
    INVALID_VALUE = "INVALID_VALUE"
    CONTEXT_LENGTH_EXCEEDED = "CONTEXT_LENGTH_EXCEEDED"
    INVALID_TOKEN = "INVALID_TOKEN"
    REQUEST_TOO_LARGE = "REQUEST_TOO_LARGE"
    VERSION_NOT_FOUND = "VERSION_NOT_FOUND"
    UNSUPPORTED = "UNSUPPORTED"
    CANCELLED = "CANCELLED"
    OVERLOADED = "OVERLOADED"
    UNAVAILABLE = "UNAVAILABLE"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    VERSION_DIED = "VERSION_DIED"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    NUMERICAL_ERROR = "NUMERICAL_ERROR"
    RESUME_IMPOSSIBLE = "RESUME_IMPOSSIBLE"
    INTERNAL = "INTERNAL"


class Fault(StrEnum):
    """Who has to change something. A version is never changed for the client's fault."""

    CLIENT = "client"
    SERVER = "server"


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """How one code is told.

    Attributes:
        fault: whose it is; only a server's fault may fall back to another version.
        triton: name of the `TritonError` code that the router raises, which unary gRPC and HTTP /infer keep.
        grpc: status of unary gRPC.
        http: status of HTTP /infer.
        gateway: status of the OpenAI-compatible gateway.
        meaning: one sentence for docs/errors.md.
    """

    fault: Fault
    triton: str
    grpc: str
    http: int
    gateway: int
    meaning: str


def _client(triton: str, grpc: str, http: int, gateway: int, meaning: str) -> ErrorKind:
    return ErrorKind(Fault.CLIENT, triton, grpc, http, gateway, meaning)


def _bad(gateway: int, meaning: str) -> ErrorKind:
    return _client("INVALID_ARG", "INVALID_ARGUMENT", 400, gateway, meaning)


def _server(triton: str, grpc: str, http: int, gateway: int, meaning: str) -> ErrorKind:
    return ErrorKind(Fault.SERVER, triton, grpc, http, gateway, meaning)


ERROR_KINDS: dict[ErrorCode, ErrorKind] = {
    ErrorCode.MISSING_INPUT: _bad(400, "None of text_input, messages and input_ids was given, or it is empty."),
    ErrorCode.CONFLICTING_INPUTS: _bad(400, "More than one of text_input, messages and input_ids was given."),
    ErrorCode.INVALID_JSON: _bad(400, "A tensor that holds JSON does not parse, or is not of the expected shape."),
    ErrorCode.INVALID_ENCODING: _bad(400, "A text is not valid UTF-8."),
    ErrorCode.UNKNOWN_PARAMETER: _bad(400, "A parameter or key is not one of those the service knows."),
    ErrorCode.INVALID_VALUE: _bad(400, "A parameter has the wrong type or is out of its range."),
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: _bad(400, "Prompt plus max_tokens is more than the version's context."),
    ErrorCode.INVALID_TOKEN: _bad(400, "A token id is not in the version's vocabulary."),
    ErrorCode.REQUEST_TOO_LARGE: _bad(
        413, "The request is larger than the service reads, or than its tenant may ever ask for at once."
    ),
    ErrorCode.VERSION_NOT_FOUND: _client("NOT_FOUND", "NOT_FOUND", 404, 404, "The pinned version is not loaded."),
    ErrorCode.UNSUPPORTED: _client("UNSUPPORTED", "UNIMPLEMENTED", 501, 422, "The version cannot do what is asked."),
    ErrorCode.CANCELLED: _client(
        "CANCELLED", "CANCELLED", 499, 499, "The request was cancelled by its token or its client."
    ),
    ErrorCode.OVERLOADED: _server("UNAVAILABLE", "UNAVAILABLE", 503, 429, "The service is full; retry later."),
    ErrorCode.UNAVAILABLE: _server("UNAVAILABLE", "UNAVAILABLE", 503, 503, "No version that may serve this is loaded."),
    ErrorCode.DEADLINE_EXCEEDED: _server("UNAVAILABLE", "UNAVAILABLE", 503, 504, "A deadline of the policy passed."),
    ErrorCode.VERSION_DIED: _server("UNAVAILABLE", "UNAVAILABLE", 503, 503, "The version's process died."),
    ErrorCode.OUT_OF_MEMORY: _server("UNAVAILABLE", "UNAVAILABLE", 503, 503, "The version ran out of memory."),
    ErrorCode.NUMERICAL_ERROR: _server(
        "INTERNAL", "INTERNAL", 500, 500, "The model produced logits that are not numbers."
    ),
    ErrorCode.RESUME_IMPOSSIBLE: _server(
        "UNAVAILABLE",
        "UNAVAILABLE",
        503,
        503,
        "The stream failed after its first token and no other version can go on.",
    ),
    ErrorCode.INTERNAL: _server("INTERNAL", "INTERNAL", 500, 500, "A defect of the service; the log has the details."),
}


def kind_of(code: ErrorCode) -> ErrorKind:
    """How `code` is told; every code has a kind."""
    return ERROR_KINDS[code]


class RequestError(Exception):
    """A failure of one request, as data.

    Args:
        code: one of the closed list.
        message: a sentence that says what to change. Newlines are folded into spaces.
        retry_after: seconds after which a retry may succeed, or None.
        version: the version that failed, or None where none was reached.
    """

    def __init__(
        self, code: ErrorCode, message: str, *, retry_after: float | None = None, version: int | None = None
    ) -> None:
        self.code = code
        self.message = " ".join(message.split())
        self.retry_after = retry_after
        self.version = version
        super().__init__(self.head())

    def head(self) -> str:
        """`[CODE version=N retry_after=S] sentence`; absent parts are left out."""
        parts = [self.code.value]
        if self.version is not None:
            parts.append(f"version={self.version}")
        if self.retry_after is not None:
            parts.append(f"retry_after={self.retry_after:g}")
        return f"[{' '.join(parts)}] {self.message}"

    def at(self, version: int) -> "RequestError":
        """The same failure, told of `version`."""
        return RequestError(self.code, self.message, retry_after=self.retry_after, version=version)


_HEAD = re.compile(
    r"\[(?P<code>[A-Z_]+)"
    r"(?: version=(?P<version>\d{1,18}))?"
    r"(?: retry_after=(?P<retry_after>\d+(?:\.\d+)?(?:e[+-]?\d+)?))?"
    # The sentence is looked at, not taken, so that what only resembles a head hides none after it.
    r"\](?= ?(?P<message>.*))",
    re.DOTALL,
)


def parse_error(text: str) -> RequestError | None:
    """Find the head in an error text as a client sees it, prefixes of Triton before it included.

    Returns None where there is no head or its code is not of the closed list.
    """
    for match in _HEAD.finditer(text):
        if match["code"] in ErrorCode.__members__:
            return RequestError(
                ErrorCode(match["code"]),
                match["message"],
                retry_after=float(match["retry_after"]) if match["retry_after"] else None,
                version=int(match["version"]) if match["version"] else None,
            )
    return None
