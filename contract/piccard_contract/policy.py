"""policy.yaml: how a service's traffic is split, and what happens when a version fails."""

import json
import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from piccard_contract.claims import OWN_TENANT
from piccard_contract.request import PIN_PARAMETER, USER_PARAMETER
from piccard_contract.sampling import SamplingParams
from piccard_contract.validation import explain
from piccard_contract.yaml_text import YamlTextError, load_yaml

HEADER_NAME = r"^[A-Za-z0-9][A-Za-z0-9-]{0,63}$"

TenantName = Annotated[str, Field(max_length=128)]

# Bytes of the names of tenants with a limit of their own: admission publishes the policy in its section.
MAX_TENANT_BYTES = 16 * 1024


# Names that mean something else in a request.
_PARAMETERS = frozenset(SamplingParams.model_fields) | {PIN_PARAMETER, USER_PARAMETER}


class PolicyError(ValueError):
    """A policy.yaml that cannot be used; the message names the key and what it takes."""


class FallbackPolicy(StrEnum):
    """Which version may take over a request of which.

    CANARY_TO_STABLE is the chain of what was proven before: from the canary to stable, and from stable to previous.
    """

    CANARY_TO_STABLE = "canary_to_stable"
    BOTH = "both"
    NONE = "none"


class Deadlines(BaseModel):
    """Seconds that are waited for a version before it is given up: an attempt by the router, its process by the
    supervisor.

    Attributes:
        first_token: from the start of the attempt to its first token.
        between_tokens: between two tokens.
        step: that the engine is at work without getting on by a step or a layer of one, or that its process publishes
            nothing: it hangs, and its process is ended and started again. A long prompt is no hang, for its layers end.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    first_token: float = Field(default=60.0, strict=True, gt=0, le=3600)
    between_tokens: float = Field(default=30.0, strict=True, gt=0, le=3600)
    step: float = Field(default=30.0, strict=True, ge=2, le=3600)


class Pin(BaseModel):
    """Whether clients may name the version.

    Attributes:
        allowed: whether the parameter `version` is obeyed; else a request with it is refused.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    allowed: bool = True


class TokenLimit(BaseModel):
    """A bucket of tokens, of prompts and of what is generated.

    Attributes:
        tokens_per_second: that it gains: 1.2 times as many while the versions' load is at most 0.7, 0.8 times as many
            above; null for no limit.
        burst: that it holds at full load, half as many again without load; null for what ten seconds bring.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    tokens_per_second: float | None = Field(default=None, strict=True, ge=1, le=10**9)
    burst: float | None = Field(default=None, strict=True, ge=1, le=10**9)

    @model_validator(mode="after")
    def _has_rate(self) -> "TokenLimit":
        if self.burst is not None and self.tokens_per_second is None:
            raise ValueError("burst needs tokens_per_second beside it")
        return self

    @property
    def limited(self) -> bool:
        """Whether there is a bucket at all."""
        return self.tokens_per_second is not None


class AdmissionLimits(TokenLimit):
    """How many tokens may be asked for: by all tenants together, and by each.

    Attributes:
        tokens_per_second: that the bucket of all together gains: 1.2 times as many while the versions' load is at most
            0.7, 0.8 times as many above; null for no limit.
        burst: that it holds at full load, half as many again without load; null for what ten seconds bring.
        each: the bucket of every tenant that is not named in tenants; requests that no gateway vouched for are one
            tenant's, whose name is empty.
        tenants: tenant -> its own bucket; 256 at most.
    """

    each: TokenLimit = Field(default_factory=TokenLimit)
    tenants: dict[TenantName, TokenLimit] = Field(default_factory=dict, max_length=256)

    @field_validator("tenants")
    @classmethod
    def _can_be_told(cls, value: dict[str, TokenLimit]) -> dict[str, TokenLimit]:
        if OWN_TENANT in value:
            raise ValueError(f"{OWN_TENANT!r} is the service itself, which is never limited; leave it out")
        size = len(json.dumps(list(value)))
        if size > MAX_TENANT_BYTES:
            raise ValueError(f"the names take {size} bytes of JSON, of {MAX_TENANT_BYTES}; name fewer, or shorter ones")
        return value

    @property
    def off(self) -> bool:
        """Whether nobody is limited."""
        return not (self.limited or self.each.limited or any(limit.limited for limit in self.tenants.values()))

    def of(self, tenant: str) -> TokenLimit:
        """The limit of one tenant."""
        return self.tenants.get(tenant, self.each)


class BreakerLimits(BaseModel):
    """When a version that fails its requests is kept from them, where another one may serve them, and for how long.

    Attributes:
        consecutive_errors: that open the breaker, of one router; null for none.
        error_share: of the requests in the window that opens it, all routers together; null for none.
        min_requests: in the window, below which their share says nothing.
        window: seconds.
        open_for: seconds in which it gets no request; then it is half open and gets one at a time.
        probes: of these in a row that must go well until it is closed.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    consecutive_errors: int | None = Field(default=5, strict=True, ge=1, le=10**6)
    error_share: float | None = Field(default=0.5, strict=True, gt=0, le=1)
    min_requests: int = Field(default=20, strict=True, ge=1, le=10**6)
    window: float = Field(default=30.0, strict=True, ge=1, le=3600)
    open_for: float = Field(default=10.0, strict=True, ge=0.1, le=3600)
    probes: int = Field(default=3, strict=True, ge=1, le=1000)

    @property
    def off(self) -> bool:
        """Whether nothing opens it."""
        return self.consecutive_errors is None and self.error_share is None


class FallbackLimits(BaseModel):
    """How much of the traffic stable, or previous, takes over from others while it is busy itself.

    Attributes:
        ratio: share of all requests in the window that may come to stable or previous instead of the version that they
            were meant for; null for no bound.
        min_per_second: of them that are free whatever their share.
        window: seconds.
        load: of the one that takes over, 0 to 1, below which all are taken.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    ratio: float | None = Field(default=0.2, strict=True, ge=0, le=1)
    min_per_second: float = Field(default=1.0, strict=True, ge=0, le=10**6)
    window: float = Field(default=10.0, strict=True, ge=1, le=3600)
    load: float = Field(default=0.8, strict=True, ge=0, le=1)


class ShadowTraffic(BaseModel):
    """A share of the requests that another version answers too, unheard, to be compared.

    Attributes:
        ratio: share of the requests of one choice that other versions serve, 0 to 1; 0 mirrors none and cancels those
            under way. The supervisor's own are never mirrored.
        version: that they are mirrored to; null for the canary.
        max_in_flight: mirrored requests that one router has in flight at most.
        load: of either version, 0 to 1, from which on none is sent; nor is one while the second version has as many
            requests of the router in flight as the first, so that both are met at equal load.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    ratio: float = Field(default=0.0, strict=True, ge=0, le=1)
    version: int | None = Field(default=None, strict=True, ge=1, lt=10**18)
    max_in_flight: int = Field(default=16, strict=True, ge=1, le=1024)
    load: float = Field(default=0.7, strict=True, gt=0, le=1)


class Policy(BaseModel):
    """One service's policy. Numbers are strict, for YAML reads yes and on as true, which would pass as 1.

    Attributes:
        schema_version: of this file.
        canary: the canary's version, or null for no canary.
        traffic_ratio: share of the traffic that goes to the canary, 0 to 1.
        header: name of the header that sends a request to the canary or keeps it from it.
        sticky_keys: headers whose value keeps a caller on one side, the first that is present.
        salt: mixed into the hash of the sticky key; new with each rollout.
        pin: whether clients may name a version.
        fallback_policy: which version may take over a failed request of which; with canary_to_stable previous takes
            over those of stable too, with both the canary as well, after previous.
        fallback_budget: how many requests stable and previous take over while they are busy.
        breaker: when a version that fails is kept from requests.
        shadow: share of the requests that another version answers too, unheard; none by default.
        deadlines: seconds that a version is waited for.
        admission: how many tokens may be asked for; nobody is limited by default.
        abandoned_limit: seconds after which a stream ends whatever happens: through an ensemble nobody
            can see that a client went away, so this bounds what an abandoned stream costs.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    schema_version: Literal[1] = Field(default=1, alias="schema")
    canary: int | None = Field(default=None, strict=True, ge=1, lt=10**18)
    traffic_ratio: float = Field(default=0.0, strict=True, ge=0.0, le=1.0)
    header: str = Field(default="X-Canary", pattern=HEADER_NAME)
    sticky_keys: list[str] = Field(default_factory=lambda: ["X-Session-Id", "user"], max_length=8)
    salt: str = Field(default="", max_length=128)
    pin: Pin = Field(default_factory=Pin)
    fallback_policy: FallbackPolicy = FallbackPolicy.CANARY_TO_STABLE
    fallback_budget: FallbackLimits = Field(default_factory=FallbackLimits)
    breaker: BreakerLimits = Field(default_factory=BreakerLimits)
    shadow: ShadowTraffic = Field(default_factory=ShadowTraffic)
    deadlines: Deadlines = Field(default_factory=Deadlines)
    admission: AdmissionLimits = Field(default_factory=AdmissionLimits)
    abandoned_limit: float = Field(default=1800.0, strict=True, gt=0, allow_inf_nan=False)

    @field_validator("header")
    @classmethod
    def _is_header(cls, value: str) -> str:
        if value.lower() in _PARAMETERS:
            raise ValueError(f"{value!r} is a parameter of requests; take another name")
        return value

    @field_validator("sticky_keys")
    @classmethod
    def _are_headers(cls, value: list[str]) -> list[str]:
        for name in value:
            if not re.fullmatch(HEADER_NAME, name) or name.endswith("\n"):
                raise ValueError(f"{name!r} is not a header name (letters, digits and hyphens)")
            if name.lower() in _PARAMETERS - {USER_PARAMETER}:
                raise ValueError(f"{name!r} is a parameter of requests; take another name")
        return value

    @model_validator(mode="after")
    def _names_differ(self) -> "Policy":
        if self.header.lower() in {name.lower() for name in self.sticky_keys}:
            raise ValueError(f"{self.header!r} is both header and sticky key; it can be one of them")
        return self

    @property
    def shadow_version(self) -> int | None:
        """The version that requests are mirrored to, None where none are."""
        if self.shadow.ratio == 0:
            return None
        return self.canary if self.shadow.version is None else self.shadow.version

    def dump(self) -> str:
        """The policy as YAML, every key written out."""
        data = self.model_dump(mode="json", by_alias=True)
        return yaml.safe_dump(data, sort_keys=False, allow_unicode=True)


def parse_policy(text: bytes | str) -> Policy:
    """Read a policy from YAML.

    Raises:
        PolicyError: with the key that is wrong and what it takes.
    """
    try:
        data: Any = load_yaml(text)
    except YamlTextError as error:
        raise PolicyError(f"policy.yaml is not YAML: {error}") from error
    if not isinstance(data, dict):
        raise PolicyError("policy.yaml must be a mapping of keys such as traffic_ratio: 0.05")
    try:
        return Policy.model_validate(data)
    except ValidationError as error:
        raise PolicyError(f"policy.yaml: {explain(error)}") from error


def read_policy(path: Path) -> Policy:
    """Read policy.yaml at `path`; OSError where it cannot be read, PolicyError where it is wrong."""
    return parse_policy(path.read_bytes())
