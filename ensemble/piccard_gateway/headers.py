"""Headers of a request that say where it goes, as parameters of the request to the ensemble.

As such Triton hands metadata on too, but those belong to a whole gRPC stream.
"""

from collections.abc import Iterable, Mapping

from piccard_contract.errors import ErrorCode
from piccard_contract.request import MAX_ID_LENGTH

from piccard_gateway.errors import refused

REQUEST_ID = "x-request-id"
PRIORITY = "x-priority"
TRACE_PARENT = "traceparent"

_MAX_LENGTH = 1024


def routing_parameters(headers: Mapping[str, str], routing: Iterable[str], request_id: str) -> dict[str, str]:
    """What the router is told, names in small letters.

    Args:
        headers: of the request; letter case of names does not matter.
        routing: names of the policy: its header and sticky keys.

    Raises:
        ApiError: a value that no header of gRPC could carry.
    """
    found = {REQUEST_ID: request_id}
    for name in (*routing, "x-user", TRACE_PARENT):
        value = headers.get(name)
        if value:
            found[name.lower()] = _checked(name, value)
    return found


def request_id_of(headers: Mapping[str, str], made: str) -> str:
    """The client's id of the request, else `made`.

    Raises:
        ApiError: it is too long or not printable.
    """
    sent = headers.get(REQUEST_ID)
    if not sent:
        return made
    if len(sent) > MAX_ID_LENGTH:
        raise refused(ErrorCode.INVALID_VALUE, f"X-Request-Id has {len(sent)} characters, the limit is {MAX_ID_LENGTH}")
    return _checked("X-Request-Id", sent)


def priority_of(headers: Mapping[str, str]) -> int | None:
    """The header X-Priority, None where there is none; lower goes first.

    Raises:
        ApiError: it is no whole number from -100 to 100.
    """
    sent = headers.get(PRIORITY)
    if not sent:
        return None
    try:
        value = int(sent) if len(sent) <= 4 and sent.isascii() else 101
    except ValueError:
        value = 101
    if not -100 <= value <= 100:
        raise refused(ErrorCode.INVALID_VALUE, "X-Priority takes a whole number from -100 to 100")
    return value


def _checked(name: str, value: str) -> str:
    if len(value) > _MAX_LENGTH or not (value.isascii() and value.isprintable()):
        raise refused(ErrorCode.INVALID_VALUE, f"{name} takes up to {_MAX_LENGTH} printable ASCII characters")
    return value
