"""policy.yaml is read strictly and written back the same."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from piccard_contract.live_state import MAX_PAYLOAD
from piccard_contract.policy import (
    AdmissionLimits,
    Deadlines,
    FallbackPolicy,
    Pin,
    Policy,
    PolicyError,
    TokenLimit,
    parse_policy,
    read_policy,
)
from piccard_contract.reports import AdmissionReport
from pydantic import ValidationError

seconds = st.floats(0.001, 3600)
rates, bursts = st.floats(1, 1e9), st.none() | st.floats(1, 1e9)
limits = st.just(TokenLimit()) | st.builds(TokenLimit, tokens_per_second=rates, burst=bursts)
policies = st.builds(
    Policy,
    canary=st.none() | st.integers(1, 10**18 - 1),
    traffic_ratio=st.floats(0, 1),
    header=st.sampled_from(["X-Canary", "x-lane"]),
    sticky_keys=st.lists(st.sampled_from(["X-Session-Id", "user", "X-Team"]), max_size=3),
    salt=st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20),
    pin=st.builds(Pin, allowed=st.booleans()),
    fallback_policy=st.sampled_from(FallbackPolicy),
    deadlines=st.builds(Deadlines, first_token=seconds, between_tokens=seconds),
    admission=st.builds(
        AdmissionLimits,
        tokens_per_second=rates,
        burst=bursts,
        each=limits,
        tenants=st.dictionaries(st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20), limits),
    ),
    abandoned_limit=seconds,
)


@given(policies)
def test_dump_round_trip(policy: Policy) -> None:
    assert parse_policy(policy.dump()) == policy


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "must be a mapping"),
        ("- 1", "must be a mapping"),
        ("{", "not YAML"),
        ("traffic: 0.1", "unknown key 'traffic'"),
        ("traffic_ratio: 1.1", "traffic_ratio"),
        ("traffic_ratio: -0.1", "traffic_ratio"),
        ("traffic_ratio: .nan", "traffic_ratio"),
        # YAML 1.1 reads these as true, which is not 1.
        ("traffic_ratio: yes", "traffic_ratio"),
        ("canary: on", "canary"),
        ("canary: 0", "canary"),
        ("canary: '2'", "canary"),
        ("schema: 2", "schema"),
        ("header: 'X Canary'", "header"),
        ("header: temperature", "parameter of requests"),
        ("sticky_keys: ['a b']", "not a header name"),
        ('sticky_keys: ["abc\\n"]', "not a header name"),
        ("sticky_keys: [version]", "parameter of requests"),
        ("sticky_keys: [x-canary]", "both header and sticky key"),
        ("fallback_policy: sometimes", "fallback_policy"),
        ("deadlines: {first_token: 0}", "deadlines.first_token"),
        ("deadlines: {last_token: 1}", "deadlines.last_token"),
        ("abandoned_limit: .inf", "abandoned_limit"),
        ("pin: {allowed: 3}", "pin.allowed"),
        ("admission: {tokens_per_second: 0}", "admission.tokens_per_second"),
        ("admission: {tokens_per_second: yes}", "admission.tokens_per_second"),
        ("admission: {tokens_per_second: .inf}", "admission.tokens_per_second"),
        ("admission: {tokens_per_second: 5, burst: 0}", "admission.burst"),
        ("admission: {burst: 5}", "burst needs tokens_per_second"),
        ("admission: {each: {burst: 5}}", "burst needs tokens_per_second"),
        ("admission: {rate: 5}", "admission.rate"),
        ("admission: {each: {tenants: {}}}", "admission.each.tenants"),
        ("admission: {tenants: {a: {rate: 1}}}", "admission.tenants.a.rate"),
        ('admission: {tenants: {"@piccard": {}}}', "never limited"),
    ],
)
def test_refused_with_the_key(text: str, told: str) -> None:
    with pytest.raises(PolicyError, match=told):
        parse_policy(text)


def test_keys_left_out_take_their_defaults() -> None:
    assert parse_policy("canary: 2\ntraffic_ratio: 0.1\n") == Policy(canary=2, traffic_ratio=0.1)


def test_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(Policy(canary=3).dump(), encoding="utf-8")

    assert read_policy(path).canary == 3
    with pytest.raises(FileNotFoundError):
        read_policy(tmp_path / "none.yaml")


def test_each_tenant_has_its_own_limit_or_that_of_each() -> None:
    admission = parse_policy(
        "admission: {each: {tokens_per_second: 5}, tenants: {a: {tokens_per_second: 9}}}"
    ).admission
    assert [admission.of(name).tokens_per_second for name in ("a", "b", "")] == [9, 5, 5]
    assert not admission.off


@pytest.mark.parametrize(
    ("text", "off"),
    [
        ("{}", True),
        ("{tenants: {a: {}}}", True),
        ("{tokens_per_second: 1}", False),
        ("{tenants: {a: {tokens_per_second: 1}}}", False),
    ],
)
def test_limits_are_off_where_nobody_has_one(text: str, off: bool) -> None:
    assert parse_policy(f"admission: {text}").admission.off is off


def test_the_largest_limits_fit_the_section_that_tells_them() -> None:
    limit = TokenLimit(tokens_per_second=123456789.12345679, burst=987654321.1234568)
    names = ["界" * 9 + f"{number:03}" for number in range(256)]
    policy = Policy(admission=AdmissionLimits(tenants=dict.fromkeys(names, limit)))
    report = AdmissionReport(policy=policy.model_dump(mode="json", by_alias=True))
    assert len(json.dumps(report.model_dump(), separators=(",", ":"))) < MAX_PAYLOAD * 0.75
    with pytest.raises(ValidationError, match="name fewer, or shorter ones"):
        AdmissionLimits(tenants=dict.fromkeys((name + "界" for name in names), limit))
    with pytest.raises(ValidationError, match="at most 256"):
        AdmissionLimits(tenants=dict.fromkeys(map(str, range(257)), limit))
