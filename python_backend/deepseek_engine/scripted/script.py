"""What a scripted version plays: the JSON of `extensions.script`."""

from typing import Any

from piccard_contract.errors import ErrorCode, RequestError
from piccard_contract.validation import explain
from pydantic import BaseModel, ConfigDict, Field, ValidationError


class Script(BaseModel):
    """One scripted generation. Positions count tokens of the whole output, those generated elsewhere included.

    Attributes:
        tokens: where the text ends by itself, with finish reason stop.
        delay_s: seconds between tokens.
        first_delay_s: seconds before the first token.
        fail_at: the request fails with `error` instead of giving token number `fail_at`; 0 is before the first.
        die_at: the process kills itself (SIGKILL) there.
        hang_at: nothing more comes from there on, until the request is aborted.
        stick_at: the engine itself never ends the step there, and nobody gets anything any more.
        break_at: memory runs out there outside of any request, which breaks the engine.
        lose_at: a step ends there as one does whose kernel has lost the GPU's context.
        error: code of `fail_at`.
        text: the words that are repeated; None repeats those of the prompt.
        tag: every token ends in @ and the version's number; words are cut to make room.
        versions: further settings for single versions, by number.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    tokens: int = Field(default=20, ge=1)
    delay_s: float = Field(default=0.01, ge=0.0, le=3600.0)
    first_delay_s: float = Field(default=0.0, ge=0.0, le=3600.0)
    fail_at: int | None = Field(default=None, ge=0)
    die_at: int | None = Field(default=None, ge=0)
    hang_at: int | None = Field(default=None, ge=0)
    stick_at: int | None = Field(default=None, ge=0)
    break_at: int | None = Field(default=None, ge=0)
    lose_at: int | None = Field(default=None, ge=0)
    error: ErrorCode = ErrorCode.INTERNAL
    text: str | None = None
    tag: bool = False
    versions: dict[int, dict[str, Any]] = Field(default_factory=dict)


def script_for(settings: dict[str, Any] | None, version: int) -> Script:
    """The script of a request as `version` plays it.

    Raises:
        RequestError: INVALID_VALUE with the key that is wrong.
    """
    try:
        script = Script.model_validate(settings or {})
        overrides = script.versions.get(version)
        return script if not overrides else Script.model_validate({**(settings or {}), **overrides, "versions": {}})
    except ValidationError as error:
        raise RequestError(ErrorCode.INVALID_VALUE, f"extensions.script: {explain(error)}") from error
