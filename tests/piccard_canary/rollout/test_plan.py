"""Plans that cannot be followed are refused with what to change."""

from typing import Any

import pytest
from piccard_canary.rollout.plan import Plan, default_metrics
from pydantic import ValidationError


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"steps": [0.5]}, "the last step must be 1.0"),
        ({"steps": [1.0]}, "one below it"),
        ({"steps": [0.5, 0.2, 1.0]}, "that rise"),
        ({"steps": [0.0, 1.0]}, "shares of the traffic over 0"),
        ({"steps": [0.5, 1.5]}, "that rise|last step"),
        ({"gates": [0.3]}, r"gates name no step: \[0.3\]"),
        ({"interval": 10, "look": 15}, "look must not be longer"),
        ({"interval": 0}, "greater than 0"),
        ({"error_budget": 0.7}, "less than 0.5"),
        ({"metrics": {"errrors": default_metrics()["errors"]}}, "'errrors' is no metric"),
        ({"metrics": {"errors": default_metrics()["token_gap"]}}, "errors is a proportion, not a latency"),
        ({"metrics": {"token_gap": {"kind": "latency", "budget": 0.1, "least": 0.1, "margin": 1.2, "proved_from": 0}}},
         "factors of the time"),
        ({"metrics": {"token_rate": {"kind": "throughput", "budget": 0.1, "least": 1.1, "margin": 0.9,
                                     "proved_from": 0}}}, "factors of the time"),
        ({"metrics": {"errors": {"kind": "proportion", "budget": 1.1, "least": 0.1, "margin": 0.2, "proved_from": 0}}},
         "less than or equal to 1"),
        ({"stepps": [1.0]}, "Extra inputs"),
    ],
)  # fmt: skip
def test_bad_plans(values: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        Plan.model_validate(values)


def test_a_metric_that_is_named_keeps_the_others() -> None:
    loose = default_metrics()["errors"].model_copy(update={"margin": 0.05})
    plan = Plan(metrics={"errors": loose})
    assert plan.metrics == default_metrics() | {"errors": loose}
    assert Plan.model_validate_json(plan.model_dump_json()) == plan


def test_the_default_metrics_share_the_whole_error_budget() -> None:
    plan = Plan(error_budget=0.02)
    assert sum(plan.chance(name) for name in plan.metrics) == pytest.approx(0.02)
    assert plan.chance("errors") == pytest.approx(0.007)


def test_more_than_the_whole_budget_is_scaled_down() -> None:
    """As where a plan was written before there were as many metrics."""
    seven = {"errors", "truncated", "fallback", "first_token", "token_gap", "first_token_p99", "token_gap_p99"}
    rules = {name: default_metrics()[name].model_copy(update={"budget": 1 / 7}) for name in seven}
    plan = Plan.model_validate_json(Plan(metrics=rules).model_dump_json(include={"metrics": seven}))
    assert sum(plan.chance(name) for name in plan.metrics) == pytest.approx(plan.error_budget)
    assert plan.chance("token_rate") == pytest.approx(plan.error_budget * 0.05 / 1.1)


def test_a_budget_that_is_left_is_not_spent() -> None:
    few = {name: rule.model_copy(update={"budget": 0.01}) for name, rule in default_metrics().items()}
    assert Plan(metrics=few).chance("errors") == pytest.approx(0.0001)
