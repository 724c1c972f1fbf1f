"""What a request says about where it wants to go, and why it went where it did."""

from enum import StrEnum

from pydantic import BaseModel, ConfigDict


class RouteReason(StrEnum):
    """Why a version served a request; the closed list of the output route_reason."""

    PIN = "pin"
    HEADER = "header"
    STICKY = "sticky"
    RATIO = "ratio"
    STABLE = "stable"
    CANARY_UNAVAILABLE = "canary_unavailable"
    BREAKER_OPEN = "breaker_open"
    FALLBACK = "fallback"
    RESUMED = "resumed"
    DIRECT = "direct"


ROUTE_REASON_MEANINGS: dict[RouteReason, str] = {
    RouteReason.PIN: "the request named the version",
    RouteReason.HEADER: "the canary header said true, always, false or never",
    RouteReason.STICKY: "the hash of the session or user against the traffic ratio",
    RouteReason.RATIO: "chance against the traffic ratio",
    RouteReason.STABLE: "no canary is set",
    RouteReason.CANARY_UNAVAILABLE: "the canary was chosen but is not loaded",
    RouteReason.BREAKER_OPEN: "the chosen version fails its requests, so that its breaker keeps them from it",
    RouteReason.FALLBACK: "another version failed before its first token, or stable is not loaded",
    RouteReason.RESUMED: "another version failed after its first token, and this one went on",
    RouteReason.DIRECT: "the version was called itself, without a router",
}


class RouteKeys(BaseModel):
    """What the decision looks at, taken from headers, metadata and JSON keys (names fold case).

    Attributes:
        version: the pin, a version's number.
        canary: the value of the canary header as sent.
        sticky: the first sticky key that is present.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: int | None = None
    canary: str | None = None
    sticky: str | None = None
