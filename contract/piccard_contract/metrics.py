"""The metrics of a service: names, labels and buckets, as data. docs/metrics.md is made from this table.

Each process counts in a registry of its own (prometheus_client) and publishes the samples in its section of the
state file; admission adds them up into Triton's /metrics. Triton's Python histograms can only observe single values,
so a histogram travels as its counters: `_bucket` with the label le, `_sum` and `_count`.
"""

from dataclasses import dataclass
from typing import Literal

LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TOKEN_BUCKETS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 4096.0)
GAP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0)


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric family.

    Attributes:
        name: without the suffixes that its kind adds.
        writer: which processes count it.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    help: str
    writer: Literal["router", "version", "admission", "supervisor"]
    buckets: tuple[float, ...] = ()


METRICS: tuple[MetricSpec, ...] = (
    MetricSpec(
        "piccard_requests_total",
        "counter",
        ("service", "version", "reason"),
        "Requests by version and reason.",
        "router",
    ),
    MetricSpec("piccard_errors_total", "counter", ("service", "version", "code"), "Failed requests by code.", "router"),
    MetricSpec(
        "piccard_attempt_failures_total",
        "counter",
        ("service", "version", "code"),
        "Attempts that a version failed, whether or not another took over.",
        "router",
    ),
    MetricSpec(
        "piccard_fallbacks_total",
        "counter",
        ("service", "version", "code"),
        "Requests taken from a version before their first token.",
        "router",
    ),
    MetricSpec(
        "piccard_resumes_total",
        "counter",
        ("service", "version", "code"),
        "Streams taken from a version after their first token.",
        "router",
    ),
    MetricSpec(
        "piccard_fallback_refusals_total",
        "counter",
        ("service", "version"),
        "Requests that were not taken over from a version: stable or previous was busy, and the fallback budget spent.",
        "router",
    ),
    MetricSpec(
        "piccard_breaker_open",
        "gauge",
        ("service", "version"),
        "Routers that keep requests from a version: its breaker is open or half open.",
        "router",
    ),
    MetricSpec(
        "piccard_breaker_opens_total",
        "counter",
        ("service", "version", "cause"),
        "Openings of a version's breaker: consecutive_errors, error_share, or a probe that failed.",
        "router",
    ),
    MetricSpec(
        "piccard_breaker_probes_total",
        "counter",
        ("service", "version", "outcome"),
        "Requests that tried a version while its breaker was half open: passed, failed, or void (nobody's fault).",
        "router",
    ),
    MetricSpec(
        "piccard_shadow_requests_total",
        "counter",
        ("service", "version", "outcome"),
        "Requests to be mirrored to a version: pair (both answered), failed (it did not), cancelled (by the policy, or"
        " since the client was not answered by one version), dropped (not sent, for load, number or balance).",
        "router",
    ),
    MetricSpec(
        "piccard_shadow_pairs_total",
        "counter",
        ("service", "version", "tokens"),
        "Pairs by whether all tokens agree: agree, differ, uncompared (tokenizers differ).",
        "router",
    ),
    MetricSpec(
        "piccard_shadow_first_difference_tokens",
        "histogram",
        ("service", "version"),
        "Position of the first token that differs in a pair.",
        "router",
        TOKEN_BUCKETS,
    ),
    MetricSpec("piccard_shadow_in_flight", "gauge", ("service", "version"), "Mirrored requests in flight.", "router"),
    MetricSpec("piccard_cancels_total", "counter", ("service", "version"), "Requests that were cancelled.", "router"),
    MetricSpec(
        "piccard_first_token_seconds",
        "histogram",
        ("service", "version"),
        "From the router's receipt to the first token.",
        "router",
        LATENCY_BUCKETS,
    ),
    MetricSpec(
        "piccard_inter_token_seconds",
        "histogram",
        ("service", "version"),
        "Between tokens: the time between two responses over the tokens of the second.",
        "router",
        GAP_BUCKETS,
    ),
    MetricSpec(
        "piccard_request_seconds", "histogram", ("service", "version"), "Whole requests.", "router", LATENCY_BUCKETS
    ),
    MetricSpec("piccard_in_flight", "gauge", ("service", "version"), "Calls of a version in flight.", "router"),
    MetricSpec(
        "piccard_blocked_attempts",
        "gauge",
        ("service", "version"),
        "Calls that were given up and whose thread still waits for a dead or stuck version.",
        "router",
    ),
    MetricSpec(
        "piccard_refusals_total", "counter", ("service", "code"), "Requests that admission refused.", "admission"
    ),
    MetricSpec(
        "piccard_token_refusals_total",
        "counter",
        ("service", "bucket"),
        "Requests that were refused for want of tokens, by the bucket that had too few: all, or tenant.",
        "admission",
    ),
    MetricSpec(
        "piccard_token_bucket_level",
        "gauge",
        ("service",),
        "Tokens in the bucket of all tenants together; below 0 where more came of requests than was expected.",
        "admission",
    ),
    MetricSpec(
        "piccard_token_bucket_capacity",
        "gauge",
        ("service",),
        "Tokens that this bucket holds at the present load; 0 where there is none.",
        "admission",
    ),
    MetricSpec(
        "piccard_token_bucket_load",
        "gauge",
        ("service",),
        "Load of the versions that buckets follow, 0 to 1; 0 where there are no buckets.",
        "admission",
    ),
    MetricSpec(
        "piccard_unsigned_claims_total",
        "counter",
        ("service",),
        "Requests whose tenant and priority were ignored for want of the gateway's signature.",
        "admission",
    ),
    MetricSpec(
        "piccard_direct_unsigned_claims_total",
        "counter",
        ("service", "version"),
        "The same of requests that a version was sent without admission and router.",
        "version",
    ),
    MetricSpec("piccard_prompt_tokens_total", "counter", ("service", "version"), "Tokens of prompts.", "version"),
    MetricSpec("piccard_generated_tokens_total", "counter", ("service", "version"), "Tokens generated.", "version"),
    MetricSpec(
        "piccard_cached_tokens_total", "counter", ("service", "version"), "Prompt tokens found in the cache.", "version"
    ),
    MetricSpec("piccard_preemptions_total", "counter", ("service", "version"), "Preempted sequences.", "version"),
    MetricSpec("piccard_sequences_running", "gauge", ("service", "version"), "Sequences that run.", "version"),
    MetricSpec("piccard_sequences_waiting", "gauge", ("service", "version"), "Sequences that wait.", "version"),
    MetricSpec("piccard_cache_blocks_free", "gauge", ("service", "version"), "Free blocks of the cache.", "version"),
    MetricSpec("piccard_cache_blocks", "gauge", ("service", "version"), "Blocks of the cache.", "version"),
    MetricSpec(
        "piccard_cache_pressure",
        "gauge",
        ("service", "version"),
        "How full the cache is: 0, or 1, 2, 3 from 80, 90, 95 % of its blocks in use.",
        "version",
    ),
    MetricSpec(
        "piccard_engine_refusals_total",
        "counter",
        ("service", "version"),
        "Requests that the engine did not take, since queue or cache were full, or gave up in the queue.",
        "version",
    ),
    MetricSpec(
        "piccard_operator_fallbacks_total",
        "counter",
        ("service", "version", "operator", "cause"),
        "Steps in which an operator ran its torch reference on a GPU, by cause.",
        "version",
    ),
    MetricSpec(
        "piccard_operator_fallback_seconds",
        "gauge",
        ("service", "version", "operator"),
        "What such an operator takes of a step at batch 1, measured once on the GPU, in the warm-up.",
        "version",
    ),
    MetricSpec(
        "piccard_operators_fused_share",
        "gauge",
        ("service", "version"),
        "Share of a decode step's operators that are inside fused launches, 0 to 1.",
        "version",
    ),
    MetricSpec(
        "piccard_graph_replays_total",
        "counter",
        ("service", "version"),
        "CUDA graphs run since the warm-up.",
        "version",
    ),
    MetricSpec(
        "piccard_graph_captures_total",
        "counter",
        ("service", "version"),
        "CUDA graphs captured since the warm-up; each one delays a step, and none is expected.",
        "version",
    ),
    MetricSpec(
        "piccard_kernel_compilations_total",
        "counter",
        ("service", "version"),
        "Kernels compiled, or loaded from Triton's cache, since the warm-up; as captures.",
        "version",
    ),
    MetricSpec(
        "piccard_ungraphed_steps_total",
        "counter",
        ("service", "version", "cause"),
        "Steps, or their heads, that were launched kernel by kernel where graphs are in use, by cause.",
        "version",
    ),
    MetricSpec(
        "piccard_revivals_total",
        "counter",
        ("service", "owner", "cause"),
        "Starts of a process (`version-2`, `router`) that died, or was ended since its engine was stuck.",
        "supervisor",
    ),
    MetricSpec(
        "piccard_given_up",
        "gauge",
        ("service", "owner"),
        "1 while a process is dead and not started any more, after too many starts that were no use.",
        "supervisor",
    ),
    MetricSpec(
        "piccard_rollout_verdict",
        "gauge",
        ("service", "version", "metric", "verdict"),
        "1 for what the last look at a rollout says of a metric of the canary: pass, fail or inconclusive; else 0.",
        "supervisor",
    ),
    MetricSpec(
        "piccard_rollout_figure",
        "gauge",
        ("service", "version", "metric"),
        "What a rollout compares, of canary and stable: a share of requests, a median in seconds (_p99: that quantile),"
        " median tokens a second, or mean log-probability of golden prompts; 0 where no rollout is under way.",
        "supervisor",
    ),
)

METRIC_SPECS = {spec.name: spec for spec in METRICS}
