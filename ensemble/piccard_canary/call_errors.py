"""What Triton says when a call of a version fails, as an error of the closed list."""

from piccard_contract.errors import ErrorCode, RequestError, parse_error

from piccard_canary.decision import RETRY_AFTER

# Parts of Triton's sentences, in small letters. BLS turns every status into INTERNAL, so only the text tells.
_DEAD = ("not healthy", "stub process")
_GONE = ("unknown model", "is not found", "not ready", "unavailable", "no longer available", "not available")


def call_error(text: str, version: int) -> RequestError:
    """The failure that `text` tells of: the server could not bring a call to `version`."""
    known = parse_error(text)
    if known is not None:
        return known.at(version)
    lower = text.lower()
    if any(part in lower for part in _DEAD):
        return RequestError(ErrorCode.VERSION_DIED, f"version {version} died; retry", version=version)
    if any(part in lower for part in _GONE):
        return RequestError(
            ErrorCode.UNAVAILABLE, f"version {version} is not loaded; retry", version=version, retry_after=RETRY_AFTER
        )
    return RequestError(ErrorCode.INTERNAL, f"version {version} could not be called: {text[:500]}", version=version)
