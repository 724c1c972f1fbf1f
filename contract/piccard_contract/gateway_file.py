"""gateway.yaml: limits and deadlines of the OpenAI-compatible gateway of a home."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from piccard_contract.validation import explain
from piccard_contract.yaml_text import YamlTextError, load_yaml

Factor = Annotated[float, Field(gt=0, le=100)]


class GatewayFileError(ValueError):
    """A gateway.yaml that cannot be used; the message names the key and what it takes."""


class GatewayLimits(BaseModel):
    """What a request may cost before it is read.

    Attributes:
        body_bytes: of a request's body.
        header_bytes: of a request's line and headers; counts from the gateway's next start.
        messages: of a chat.
        read_seconds: for a request to arrive, line, headers and body.
        requests: at once; one more is refused with 429.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    body_bytes: int = Field(default=4 * 2**20, strict=True, ge=1024, le=2**30)
    header_bytes: int = Field(default=32 * 2**10, strict=True, ge=1024, le=2**20)
    messages: int = Field(default=1024, strict=True, ge=1)
    read_seconds: float = Field(default=10.0, strict=True, gt=0, le=3600)
    requests: int = Field(default=1024, strict=True, ge=1)


class AdaptiveDeadlines(BaseModel):
    """How long a first token is waited for: base x length of the prompt x what recent first tokens took.

    Attributes:
        enabled: without it, the deadlines of policy.yaml alone count.
        base: multiple of the recent percentile that a request may take.
        percentile: of the recent times, each for a prompt of no length.
        length_bytes: a prompt of so many bytes more may take once more as long.
        floor: seconds that every request gets.
        daily: 24 factors, one an hour of the day in UTC; null for none.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    enabled: bool = Field(default=True, strict=True)
    base: float = Field(default=10.0, strict=True, ge=1, le=1000)
    percentile: float = Field(default=0.95, strict=True, gt=0, lt=1)
    length_bytes: int = Field(default=4096, strict=True, ge=1)
    floor: float = Field(default=10.0, strict=True, gt=0, le=3600)
    daily: list[Factor] | None = Field(default=None, min_length=24, max_length=24)


class GatewayFile(BaseModel):
    """A home's gateway.yaml; it may be edited at any time.

    Attributes:
        schema_version: of this file.
        limits: what a request may cost before it is read.
        deadlines: how long a first token is waited for.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    schema_version: Literal[1] = Field(default=1, alias="schema")
    limits: GatewayLimits = Field(default_factory=GatewayLimits)
    deadlines: AdaptiveDeadlines = Field(default_factory=AdaptiveDeadlines)


def read_gateway_file(path: Path) -> GatewayFile:
    """Read gateway.yaml at `path`; the defaults where there is none.

    Raises:
        GatewayFileError: with the key that is wrong and what it takes.
        OSError: it cannot be read.
    """
    try:
        data: Any = load_yaml(path.read_bytes())
    except FileNotFoundError:
        return GatewayFile()
    except YamlTextError as error:
        raise GatewayFileError(f"gateway.yaml is not YAML: {error}") from error
    if not isinstance(data, dict):
        raise GatewayFileError("gateway.yaml must be a mapping of keys such as limits")
    try:
        return GatewayFile.model_validate(data)
    except ValidationError as error:
        raise GatewayFileError(f"gateway.yaml: {explain(error)}") from error
