"""What routers count of finished requests, and what admission settles by it."""

from pathlib import Path
from typing import Any

import pytest
from canary_fakes import Play, Scene
from hypothesis import given
from hypothesis import strategies as st
from piccard_canary.completions import MOST_TENANTS, Completions, Settlements
from piccard_canary.router import Router, RouterSettings
from piccard_contract.claims import ClaimsCheck
from piccard_contract.errors import ErrorCode
from piccard_contract.live_state import MAX_PAYLOAD, Section
from piccard_contract.reports import RouterReport, tenant_key
from piccard_contract.request import Charge, GatewayClaims, GenerateRequest, RequestExtensions
from piccard_contract.routing import RouteKeys
from piccard_contract.sampling import SamplingParams

A, B = tenant_key("a"), tenant_key("b")


def section(completions: Completions, owner: str = "router", pid: int = 1) -> Section:
    """As it comes back from the state file."""
    told = RouterReport(completions=completions.totals()).model_dump_json()
    return Section(owner, pid, 0.0, True, RouterReport.model_validate_json(told).model_dump(mode="json"))


def finished(*requests: tuple[str, int, int]) -> Completions:
    """Tenant, tokens that were taken, tokens that it came to."""
    made = Completions()
    for tenant, taken, used in requests:
        made.add(tenant, Charge(tokens=taken), used)
    return made


def test_the_difference_is_given_back_once() -> None:
    settlements = Settlements([])
    router = finished(("a", 100, 30), ("b", 50, 60))
    assert settlements.take([section(router)]) == {A: 70, B: -10}
    assert settlements.take([section(router)]) == {}
    router.add("a", Charge(tokens=10), 10)
    router.add("a", Charge(tokens=10), 0)
    assert settlements.take([section(router)]) == {A: 10}


def test_both_routers_count() -> None:
    both = [section(finished(("a", 9, 1))), section(finished(("a", 5, 0)), "router_unary", 2)]
    assert Settlements([]).take(both) == {A: 13}


def test_a_router_that_comes_after_another_counts_anew() -> None:
    settlements = Settlements([])
    settlements.take([section(finished(("a", 100, 30)))])
    assert settlements.take([section(finished(("a", 100, 40)), pid=2)]) == {A: 60}


def test_what_a_router_had_counted_before_is_not_ours() -> None:
    router = finished(("a", 100, 30))
    settlements = Settlements([section(router)])
    router.add("a", Charge(tokens=8), 1)
    assert settlements.take([section(router)]) == {A: 7}


def test_requests_without_a_charge_are_nobodys() -> None:
    router = Completions()
    router.add("a", None, 50)
    assert router.totals() == {}


def test_an_older_router_settles_nothing() -> None:
    assert Settlements([]).take([Section("router", 1, 0.0, True, {"in_flight": {}})]) == {}


def test_tenants_are_bounded_and_the_last_ones_stay() -> None:
    router = Completions()
    for number in range(3 * MOST_TENANTS):
        router.add("界" * 100 + str(number), Charge(tokens=10**12), 10**12)
    last = tenant_key("界" * 100 + str(3 * MOST_TENANTS - 1))
    assert len(router.totals()) == MOST_TENANTS
    assert last in router.totals()
    assert len(RouterReport(completions=router.totals()).model_dump_json()) < MAX_PAYLOAD / 2


def test_a_tenant_that_was_forgotten_meanwhile_is_counted_from_nothing() -> None:
    settlements = Settlements([])
    settlements.take([section(finished(("a", 100, 30)))])
    assert settlements.take([section(finished(("a", 10, 3)))]) == {A: 7}


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 1000), st.integers(0, 1000), st.booleans())))
def test_however_often_one_looks_the_sum_is_the_same(requests: list[tuple[str, int, int, bool]]) -> None:
    router, settlements = Completions(), Settlements([])
    sums = {A: 0, B: 0}
    for tenant, taken, used, look in requests:
        router.add(tenant, Charge(tokens=taken), used)
        if look:
            for key, tokens in settlements.take([section(router)]).items():
                sums[key] += tokens
    for key, tokens in settlements.take([section(router)]).items():
        sums[key] += tokens
    for name, key in (("a", A), ("b", B)):
        assert sums[key] == sum(taken - used for tenant, taken, used, _ in requests if tenant == name)


def request(**changes: Any) -> GenerateRequest:
    """A request for stable that 100 tokens were taken for, 40 of them for its prompt."""
    sampling = SamplingParams(temperature=0, max_tokens=60)
    settings = {"id": "r", "text": "a", "stream": True, "charge": Charge(tokens=100, prompt=40), "sampling": sampling}
    return GenerateRequest(**(settings | changes))


@pytest.mark.parametrize(
    ("play", "used"),
    [
        # The version counts seven tokens of the prompt.
        (Play(tokens=5), 12),
        (Play(fail_at=0), 0),
        (Play(fail_at=0, error=ErrorCode.OVERLOADED), 0),
        (Play(fail_at=0, error=ErrorCode.CANCELLED), 40),
        (Play(tokens=5, fail_at=3), 43),
        (Play(tokens=5, fail_at=3, error=ErrorCode.CANCELLED), 43),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_a_router_counts_what_a_request_came_to(play: Play, used: int, stream: bool) -> None:
    scene = Scene({1: play}, canary=None)
    scene.run(request(stream=stream))
    assert scene.around.completions.totals() == {tenant_key(""): (100, used)}


def test_a_stream_that_another_version_ends_is_counted_once() -> None:
    scene = Scene({1: Play(tokens=5), 2: Play(tokens=5, fail_at=2)})
    scene.run(request(route=RouteKeys(canary="true")))
    assert scene.around.completions.totals() == {tenant_key(""): (100, 12)}


def test_choices_that_broke_off_are_not_given_back() -> None:
    """Nobody knows how far each of them was."""
    scene = Scene({1: Play(tokens=5, fail_at=2, choices=2)}, canary=None)
    scene.run(request(sampling=SamplingParams(n=2, max_tokens=30)))
    assert scene.around.completions.totals() == {tenant_key(""): (100, 100)}


def test_a_request_that_no_version_was_found_for_costs_nothing() -> None:
    scene = Scene({1: Play()}, canary=None, stable=7)
    scene.run(request())
    assert scene.around.completions.totals() == {tenant_key(""): (100, 0)}


def test_the_tenant_is_the_one_that_the_gateway_vouched_for(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"key")
    scene = Scene({1: Play(tokens=5)}, canary=None)
    scene.router = Router(
        scene.around,
        policy=lambda: scene.policy,
        claims=ClaimsCheck(tmp_path / "secret"),
        settings=RouterSettings(streams=True),
    )
    for secret, keys in ((b"key", RouteKeys()), (b"other", RouteKeys()), (b"key", RouteKeys(version=9))):
        claims = GatewayClaims(tenant="a").sign(secret)
        scene.run(request(extensions=RequestExtensions(gateway=claims), route=keys))
    assert scene.around.completions.totals() == {A: (200, 12), tenant_key(""): (100, 12)}
