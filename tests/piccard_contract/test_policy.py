"""policy.yaml is read strictly and written back the same."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from piccard_contract.policy import Deadlines, FallbackPolicy, Pin, Policy, PolicyError, parse_policy, read_policy

seconds = st.floats(0.001, 3600)
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
