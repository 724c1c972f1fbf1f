"""Failures as OpenAI's API tells them."""

import math
from dataclasses import dataclass

from piccard_contract.errors import ErrorCode, RequestError, kind_of

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    499: "cancelled_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


@dataclass(slots=True)
class ApiError(Exception):
    """A failure with its HTTP status.

    Attributes:
        code: for programs, in small letters.
        param: the parameter that is wrong.
        retry_after: seconds after which another try may succeed.
        version: the version that failed.
    """

    status: int
    code: str
    message: str
    param: str | None = None
    retry_after: float | None = None
    version: int | None = None

    def body(self) -> dict[str, object]:
        """OpenAI's error object."""
        kind = _TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Retry-After in whole seconds, never too few, and the version that failed."""
        headers = []
        if self.retry_after is not None:
            headers.append((b"retry-after", str(max(1, math.ceil(self.retry_after))).encode()))
        elif self.status == 429:
            headers.append((b"retry-after", b"1"))
        if self.version is not None:
            headers.append((b"x-served-version", str(self.version).encode()))
        return headers


def api_error(error: RequestError, param: str | None = None) -> ApiError:
    """What a code of the closed list is at the gateway."""
    return ApiError(
        kind_of(error.code).gateway, error.code.lower(), error.message, param, error.retry_after, error.version
    )


def refused(code: ErrorCode, message: str, param: str | None = None) -> ApiError:
    """A refusal of the gateway's own, under a code of the closed list."""
    return api_error(RequestError(code, message), param)
