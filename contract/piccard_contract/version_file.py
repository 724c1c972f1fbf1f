"""version.yaml: what a version is made of. It never changes after publication.

Keys for what comes later (parallelism, speculative decoding, adapters) are here from the first day with the one
value that is legal yet, so that a version published today reads the same tomorrow.
"""

import unicodedata
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from piccard_contract.validation import explain
from piccard_contract.yaml_text import YamlTextError, load_yaml

SCHEMA = 1
# Pydantic's patterns are Rust's, where $ is the very end: a trailing newline does not match.
AMOUNT = r"^[1-9][0-9]*(\.[0-9]+)?(MiB|GiB|TiB)$"
LABEL = r"^[A-Za-z0-9][A-Za-z0-9._+-]{0,63}$"


class VersionFileError(ValueError):
    """A version.yaml that cannot be used; the message names the key and what it takes."""


class Runner(StrEnum):
    """What executes a step. `scripted` is the double for fault tests: no model, a scripted text."""

    TORCH = "torch"
    ONNXRUNTIME = "onnxruntime"
    SCRIPTED = "scripted"


class Profile(StrEnum):
    """Named engine settings (deepseek_engine.profiles)."""

    BALANCED = "balanced"
    LATENCY = "latency"
    THROUGHPUT = "throughput"


class Precision(StrEnum):
    """Type of weights and activations; auto is float32 on a CPU and bfloat16 on a GPU."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class CacheDtype(StrEnum):
    """Type of the key-value cache; auto is that of the activations."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CacheSettings(_Part):
    """The paged cache.

    Attributes:
        dtype: type of its values; auto is that of the activations.
        block: tokens a block; null takes the profile's.
    """

    dtype: CacheDtype = CacheDtype.AUTO
    block: Literal[16, 32, 64] | None = None


class Parallel(_Part):
    """Ranks of tensor and expert parallelism."""

    tp: Literal[1] = 1
    ep: Literal[1] = 1


class Hashes(_Part):
    """SHA-256 of what the version was published with, as hex; None where there is no such part."""

    code: str | None = None
    weights: str | None = None
    tokenizer: str | None = None
    template: str | None = None
    export: str | None = None
    ops_library: str | None = None


class VersionFile(BaseModel):
    """One version.

    Attributes:
        schema_version: of this file.
        label: a name for people, such as v1.1.0; one line of letters, digits and . _ + -.
        checkpoint: folder of a Hugging Face checkpoint, absolute or relative to the home.
        runner: what executes a step.
        export: folder that `piccard export` wrote of the checkpoint, for runner onnxruntime; absolute or relative to
            the home.
        ops_library: path of the custom-op library, for runner onnxruntime; absolute or relative to the home.
        profile: named engine settings.
        precision: type of weights and activations; auto is float32 on a CPU and bfloat16 on a GPU.
        device: cpu, cuda or cuda:N; auto takes a GPU where there is one, and a CPU for runner onnxruntime.
        memory: share of the device's memory (0 to 1, a number) or an amount such as 8GiB for weights and cache;
            null takes the device's default.
        max_model_len: context in tokens; null takes the checkpoint's.
        batch_invariant: on a GPU, whether a request's logits are the same bits whatever else is in its steps, at the
            price of slower ones.
        cache: the paged cache.
        parallel: ranks of tensor and expert parallelism.
        speculative: none is the only value yet.
        adapters: none yet.
        linked: whether the installed engine runs it, instead of a snapshot in the version's folder.
        hashes: SHA-256 of code, weights, tokenizer, template, export and op library at publication.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    schema_version: Literal[1] = Field(default=1, alias="schema")
    label: str = Field(pattern=LABEL)
    checkpoint: str = Field(min_length=1)
    runner: Runner = Runner.TORCH
    export: str | None = None
    ops_library: str | None = None
    profile: Profile = Profile.BALANCED
    precision: Precision = Precision.AUTO
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:[0-9]+)?)$")
    memory: Annotated[float, Field(strict=True, gt=0.0, le=1.0)] | Annotated[str, Field(pattern=AMOUNT)] | None = None
    max_model_len: int | None = Field(default=None, ge=1)
    batch_invariant: bool = False
    cache: CacheSettings = Field(default_factory=CacheSettings)
    parallel: Parallel = Field(default_factory=Parallel)
    speculative: Literal["none"] = "none"
    adapters: list[str] = Field(default_factory=list, max_length=0)
    linked: bool = False
    hashes: Hashes = Field(default_factory=Hashes)

    @field_validator("checkpoint", "export", "ops_library")
    @classmethod
    def _stays(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if any(unicodedata.category(letter) in ("Cc", "Zl", "Zp") for letter in value):
            raise ValueError("a path has no control characters")
        path = PurePosixPath(value)
        if not path.is_absolute() and ".." in path.parts:
            raise ValueError("a path that is relative to the home does not leave it; name it absolutely")
        return value

    def dump(self) -> str:
        """The version as YAML, every key written out."""
        return yaml.safe_dump(self.model_dump(mode="json", by_alias=True), sort_keys=False, allow_unicode=True)


def parse_version_file(text: bytes | str) -> VersionFile:
    """Read a version from YAML.

    Raises:
        VersionFileError: with the key that is wrong and what it takes; a newer schema is named as such.
    """
    try:
        data: Any = load_yaml(text)
    except YamlTextError as error:
        raise VersionFileError(f"version.yaml is not YAML: {error}") from error
    if not isinstance(data, dict):
        raise VersionFileError("version.yaml must be a mapping with schema, label and checkpoint")
    schema = data.get("schema", SCHEMA)
    if isinstance(schema, int) and schema > SCHEMA:
        raise VersionFileError(
            f"version.yaml has schema {schema}, this Piccard reads up to {SCHEMA}; install a newer one"
        )
    try:
        return VersionFile.model_validate(data)
    except ValidationError as error:
        raise VersionFileError(f"version.yaml: {explain(error)}") from error


def read_version_file(folder: Path) -> VersionFile:
    """Read `folder`/version.yaml; OSError where it cannot be read, VersionFileError where it is wrong."""
    return parse_version_file((folder / "version.yaml").read_bytes())
