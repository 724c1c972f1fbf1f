"""Buckets of all tenants and of each: who is refused, with what, and who is not."""

from dataclasses import dataclass, field

import pytest
from canary_fakes import HandClock
from hypothesis import given
from hypothesis import strategies as st
from piccard_canary.counters import Counters
from piccard_canary.token_cost import Outlook
from piccard_canary.token_limits import MOST_TENANTS, TokenLimits
from piccard_contract.claims import OWN_TENANT
from piccard_contract.errors import ErrorCode, RequestError
from piccard_contract.policy import AdmissionLimits, TokenLimit
from piccard_contract.reports import tenant_key
from piccard_contract.request import GenerateRequest
from piccard_contract.sampling import SamplingParams

EACH = AdmissionLimits(each=TokenLimit(tokens_per_second=100, burst=1000))
BOTH = AdmissionLimits(tokens_per_second=150, burst=1500, each=TokenLimit(tokens_per_second=100, burst=1000))


@dataclass
class Desk:
    """Limits with a clock and a load that stand still until they are told."""

    limits: AdmissionLimits
    load: float = 1.0
    clock: HandClock = field(default_factory=HandClock)

    def __post_init__(self) -> None:
        self.counters = Counters("deepseek", "admission")
        self.buckets = TokenLimits(lambda: self.limits, lambda: Outlook(self.load), self.counters, self.clock)

    def ask(self, tenant: str, tokens: int) -> RequestError | None:
        """Why a request of so many tokens, one of them the prompt's, is refused; None where it is not."""
        sampling = SamplingParams(max_tokens=tokens - 1)
        try:
            self.buckets.charge(tenant, GenerateRequest(id="r", input_ids=[1], sampling=sampling))
        except RequestError as error:
            return error
        return None

    def flood(self, tenant: str, tokens: int = 100) -> int:
        """How many requests are admitted until one is refused."""
        admitted = 0
        while self.ask(tenant, tokens) is None:
            admitted += 1
        return admitted

    def told(self, name: str, **labels: str) -> float:
        samples = self.counters.samples()
        return sum(value for found, its, value in samples if found == name and labels.items() <= its.items())


def test_nobody_is_limited_by_default() -> None:
    desk = Desk(AdmissionLimits())
    request = GenerateRequest(id="r", text="a", sampling=SamplingParams(max_tokens=10**9))
    assert all(desk.buckets.charge("a", request) is None for _ in range(100))


def test_a_flood_is_refused_with_the_time_until_its_tokens_are_there() -> None:
    desk = Desk(EACH)
    assert desk.flood("a") == 10
    error = desk.ask("a", 100)
    assert error is not None
    assert (error.code, error.retry_after) == (ErrorCode.OVERLOADED, 1.25)
    assert "tenant has 0 of 1000" in error.message
    desk.clock.now += 1.24
    assert desk.ask("a", 100) is not None
    desk.clock.now += 0.01
    assert desk.ask("a", 100) is None


def test_one_tenants_flood_leaves_the_others_what_they_have() -> None:
    desk = Desk(EACH)
    desk.flood("a")
    assert desk.flood("b") == 10
    assert desk.flood("") == 10


def test_the_bucket_of_all_is_short_for_everybody() -> None:
    desk = Desk(BOTH)
    assert desk.flood("a") == 10
    assert desk.flood("b") == 5
    error = desk.ask("c", 100)
    assert error is not None
    assert "all tenants together" in error.message
    assert desk.told("piccard_token_refusals_total", bucket="tenant") == 1
    assert desk.told("piccard_token_refusals_total", bucket="all") == 2


def test_a_refused_request_takes_nothing_from_either_bucket() -> None:
    desk = Desk(BOTH)
    desk.flood("a")
    for _ in range(100):
        assert desk.ask("a", 100) is not None
    assert desk.flood("b") == 5
    # The bucket of all is empty, and what b has of its own is still there when that has filled up.
    for _ in range(100):
        assert desk.ask("b", 100) is not None
    desk.clock.now += 1000
    assert desk.ask("b", 1000) is None


def test_the_longer_wait_is_told() -> None:
    desk = Desk(BOTH)
    desk.flood("a")
    desk.flood("b")
    error = desk.ask("a", 1000)
    assert error is not None
    # 1000 / 80 of its own, and 1000 / 120 of all.
    assert error.retry_after == 12.5


@pytest.mark.parametrize("limits", [EACH, AdmissionLimits(tokens_per_second=100, burst=1000)])
def test_what_can_never_be_there_is_refused_without_a_retry(limits: AdmissionLimits) -> None:
    desk = Desk(limits)
    error = desk.ask("a", 1501)
    assert error is not None
    assert (error.code, error.retry_after) == (ErrorCode.REQUEST_TOO_LARGE, None)
    assert "never more than 1500" in error.message
    # Less load makes room for this one.
    error = desk.ask("a", 1500)
    assert error is not None
    assert error.code is ErrorCode.OVERLOADED
    assert error.retry_after is not None
    desk.load = 0.0
    desk.buckets.follow()
    desk.clock.now += error.retry_after
    assert desk.ask("a", 1500) is None


def test_a_bucket_that_nobody_uses_knows_how_the_load_was() -> None:
    desk = Desk(EACH)
    desk.flood("a")
    desk.load = 0.5
    desk.buckets.follow()
    desk.clock.now += 5
    desk.load = 1.0
    desk.buckets.follow()
    desk.clock.now += 1
    # 5 s at 120 and 1 s at 80.
    assert desk.flood("a", 10) == 68


def test_the_service_itself_is_not_limited() -> None:
    desk = Desk(BOTH)
    desk.flood("a")
    desk.flood("b")
    assert all(desk.ask(OWN_TENANT, 10**6) is None for _ in range(10))
    assert desk.ask(OWN_TENANT[1:], 100) is not None


def test_tenants_of_their_own() -> None:
    rich, free = TokenLimit(tokens_per_second=100, burst=5000), TokenLimit()
    desk = Desk(AdmissionLimits(each=EACH.each, tenants={"rich": rich, "free": free}))
    assert desk.flood("rich") == 50
    assert desk.flood("poor") == 10
    assert all(desk.ask("free", 10**6) is None for _ in range(10))


def test_a_burst_is_ten_seconds_by_default() -> None:
    assert Desk(AdmissionLimits(tokens_per_second=7)).flood("a", 2) == 35


def test_what_is_settled_comes_back_to_both_buckets() -> None:
    desk = Desk(BOTH)
    desk.flood("a")
    desk.flood("b")
    desk.buckets.settle({tenant_key("a"): 300, tenant_key("gone"): 100})
    assert desk.flood("a") == 3
    assert desk.ask("c", 100) is None
    desk.buckets.settle({tenant_key("a"): -500})
    error = desk.ask("a", 100)
    assert error is not None
    assert "-500 of 1000" in error.message
    assert error.retry_after == 7.5


def test_other_limits_act_on_the_next_request() -> None:
    desk = Desk(EACH)
    desk.flood("a")
    desk.limits = AdmissionLimits(each=TokenLimit(tokens_per_second=1000, burst=1000))
    error = desk.ask("a", 100)
    assert error is not None
    assert error.retry_after == 0.13
    desk.limits = AdmissionLimits()
    assert desk.ask("a", 10**6) is None
    desk.buckets.follow()
    desk.limits = EACH
    assert desk.flood("a") == 10


def test_level_load_and_capacity_are_metrics() -> None:
    desk = Desk(BOTH)
    desk.ask("a", 300)
    desk.buckets.follow()
    names = ("level", "capacity", "load")
    assert [desk.told(f"piccard_token_bucket_{name}") for name in names] == [1200, 1500, 1]
    desk.limits = AdmissionLimits()
    desk.buckets.follow()
    assert [desk.told(f"piccard_token_bucket_{name}") for name in names] == [0, 0, 0]


def test_buckets_are_bounded() -> None:
    desk = Desk(EACH)
    desk.flood("busy")
    for number in range(MOST_TENANTS + 10):
        assert desk.ask(f"t{number}", 2) is None
        desk.ask("busy", 100)
    assert desk.ask("busy", 100) is not None
    assert len(desk.buckets._tenants) == MOST_TENANTS


events = st.lists(
    st.tuples(st.sampled_from(["flood", "calm"]), st.integers(2, 1200), st.floats(0, 20), st.floats(0, 1)), max_size=40
)


@given(events)
def test_a_flood_costs_another_tenant_nothing_but_what_is_common(
    course: list[tuple[str, int, float, float]],
) -> None:
    """`calm` is refused by its own bucket exactly when it would be without the flood."""
    both, alone = Desk(EACH), Desk(EACH)
    for tenant, tokens, seconds, load in course:
        for desk in (both, alone):
            desk.clock.now += seconds
            desk.load = load
            desk.buckets.follow()
        refused = both.ask(tenant, tokens)
        if tenant == "flood":
            both.flood("flood")
            continue
        expected = alone.ask(tenant, tokens)
        assert (refused is None) == (expected is None)
        assert refused is None or expected is None or refused.retry_after == expected.retry_after


@given(events)
def test_all_tenants_together_take_no_more_than_the_bucket_of_all_had(
    course: list[tuple[str, int, float, float]],
) -> None:
    desk = Desk(BOTH)
    taken, seconds_passed = 0, 0.0
    for tenant, tokens, seconds, load in course:
        desk.clock.now += seconds
        seconds_passed += seconds
        desk.load = load
        desk.buckets.follow()
        if desk.ask(tenant, tokens) is None:
            taken += tokens
    assert taken <= 1.5 * 1500 + 1.2 * 150 * seconds_passed + 1e-3
