"""What each process of a service publishes in its section of the state file."""

import hashlib
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

# (metric, labels, value), as prometheus_client's samples.
Samples = list[tuple[str, dict[str, str], float]]

# Bytes of text that count as a token until a version has read its first prompt.
BYTES_PER_TOKEN = 4.0


def tenant_key(tenant: str) -> str:
    """A tenant as sections name it: as long for a long name as for a short one."""
    return hashlib.sha256(tenant.encode()).hexdigest()[:16]


class _Report(BaseModel):
    # A reader may be older than the writer.
    model_config = ConfigDict(extra="ignore")


class VersionReport(_Report):
    """Section `version-N`.

    Attributes:
        phase: loading until the engine can take requests; failed carries `reason`; ending once the server has told the
            process to end, after its last request.
        started_at: Unix time of the process's start.
        code_hash: of the engine's code that it runs, whatever version.yaml says.
        tokenizer_hash, template_hash: SHA-256; a stream is resumed only between versions where both agree.
        running, waiting: sequences.
        load: 0 to 1, how full it is of sequences, cache and queue, whichever is fullest; None where it does not tell.
        bytes_per_token: of text, measured; an estimate of tokens from bytes.
        busy: whether the engine is at work, in a step or with a request that comes or goes.
        beats: grows whenever the engine gets on: with every step and, where the runner can tell, every layer of one.
    """

    version: int
    label: str = ""
    phase: Literal["loading", "ready", "failed", "ending"] = "loading"
    reason: str = ""
    progress: float = 0.0
    started_at: float = 0.0
    runner: str = ""
    profile: str = ""
    device: str = ""
    linked: bool = False
    code_hash: str = ""
    tokenizer_hash: str = ""
    template_hash: str = ""
    max_model_len: int = 0
    vocab_size: int = 0
    running: int = 0
    waiting: int = 0
    load: float | None = None
    free_blocks: int = 0
    total_blocks: int = 0
    preemptions: int = 0
    tokens_generated: int = 0
    bytes_per_token: float = BYTES_PER_TOKEN
    busy: bool = False
    beats: int = 0
    samples: Samples = Field(default_factory=list)


class BreakerReport(_Report):
    """The breaker of one version, as one router sees it.

    Attributes:
        pid: the version's process that it is about.
        open: whether it is open or half open, and since when: `turned_at` is seconds of CLOCK_MONOTONIC.
        state: closed, open or half_open.
        requests, errors: of the policy's window, met by this router while it was closed.
        passed: probes of this router that went well since it opened.
    """

    pid: int
    open: bool = False
    turned_at: float = 0.0
    state: str = "closed"
    requests: int = 0
    errors: int = 0
    passed: int = 0


class ShadowReport(_Report):
    """What came of the requests that were mirrored to one version.

    Attributes:
        pairs: requests that two versions answered.
        compared: of these, those whose versions count tokens alike.
        agreed: of these, those whose tokens were all the same.
        first_differences: positions of the first token that differed, of the last ones that did.
    """

    pairs: int = 0
    compared: int = 0
    agreed: int = 0
    first_differences: list[int] = Field(default_factory=list)


class RouterReport(_Report):
    """Sections `router` and `router_unary`: requests in flight by version, and metrics.

    Attributes:
        code_hash: of the ensemble's code that it runs.
        breakers: by version.
        shadows: by the version that requests were mirrored to, since the router's start.
        taken_over: requests in the window of the policy's fallback_budget, and those that were taken over.
        completions: by tenant (`tenant_key`), the tokens that admission took for requests that are over, and those that
            they came to. Of the tenants that were heard of last.
    """

    code_hash: str = ""
    completions: dict[str, tuple[int, int]] = Field(default_factory=dict)
    in_flight: dict[int, int] = Field(default_factory=dict)
    breakers: dict[int, BreakerReport] = Field(default_factory=dict)
    shadows: dict[int, ShadowReport] = Field(default_factory=dict)
    taken_over: tuple[int, int] = (0, 0)
    samples: Samples = Field(default_factory=list)


class AdmissionReport(_Report):
    """Section `admission`.

    Attributes:
        policy: the policy in use, as policy.yaml would hold it.
        policy_error: why the last edit of policy.yaml is not in use.
        code_hash: of the ensemble's code that it runs.
    """

    code_hash: str = ""
    policy: dict[str, Any] = Field(default_factory=dict)
    policy_error: str = ""
    samples: Samples = Field(default_factory=list)


class SupervisorReport(_Report):
    """Section `supervisor`: where the server listens, what was revived.

    Attributes:
        revivals: how often each process was started again, by `service/owner`.
        next_start: Unix time at which a dead process is started again, by `service/owner`.
        given_up: why nobody starts a process any more.
    """

    http: str = ""
    grpc: str = ""
    metrics: str = ""
    server_pid: int = 0
    revivals: dict[str, int] = Field(default_factory=dict)
    next_start: dict[str, float] = Field(default_factory=dict)
    given_up: dict[str, str] = Field(default_factory=dict)
    samples: Samples = Field(default_factory=list)
    details: dict[str, Any] = Field(default_factory=dict)
