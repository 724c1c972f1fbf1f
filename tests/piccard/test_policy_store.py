"""Single keys of policy.yaml change and everything else stays."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from piccard.errors import OperationError
from piccard.policy_store import load_policy, mend_policy, update_policy
from piccard_contract.home import Service
from piccard_contract.live_state import LiveState
from piccard_contract.policy import Policy
from piccard_contract.reports import AdmissionReport

COMMENTED = """\
# Ours since the incident of May.
schema: 1
canary: 2   # the quick one
traffic_ratio: 0.1
deadlines:
  first_token: 20  # seconds
  between_tokens: 5
sticky_keys: [X-Session-Id]
salt: "abc"
"""


def test_comments_and_other_keys_stay(service: Service) -> None:
    service.policy_file.write_text(COMMENTED)
    update_policy(service, canary=3, traffic_ratio=0.25)
    expected = COMMENTED.replace("canary: 2 ", "canary: 3 ").replace("ratio: 0.1", "ratio: 0.25")
    assert service.policy_file.read_text() == expected


def test_missing_key_is_added(service: Service) -> None:
    service.policy_file.write_text("traffic_ratio: 0.5\n")
    update_policy(service, canary=2, salt="x: y # z")
    policy = load_policy(service)
    assert (policy.canary, policy.traffic_ratio, policy.salt) == (2, 0.5, "x: y # z")


def test_a_mapping_is_set_as_plain_values(service: Service, recwarn: pytest.WarningsRecorder) -> None:
    update_policy(service, deadlines={"first_token": 7.0, "between_tokens": 3.0}, fallback_policy="both")
    policy = load_policy(service)
    assert (policy.deadlines.first_token, policy.fallback_policy) == (7.0, "both")
    assert not recwarn.list


@pytest.mark.parametrize("values", [{"traffic_ratio": 2.0}, {"deadlines": {"last_token": 1.0}}, {"ratio": 0.5}])
def test_what_a_key_does_not_take_is_refused(service: Service, values: dict[str, object]) -> None:
    before = service.policy_file.read_text()
    with pytest.raises(ValueError, match="validation error"):
        update_policy(service, **values)
    assert service.policy_file.read_text() == before


def test_mapping_on_one_line_is_written_anew(service: Service) -> None:
    service.policy_file.write_text("{traffic_ratio: 0.5, canary: 2, header: X-Beta}\n")
    update_policy(service, canary=None, traffic_ratio=0.0)
    policy = load_policy(service)
    assert (policy.canary, policy.traffic_ratio, policy.header) == (None, 0.0, "X-Beta")


def test_broken_policy_is_told_and_left(service: Service) -> None:
    service.policy_file.write_text("traffic_ratio: 3\n")
    with pytest.raises(OperationError, match="traffic_ratio"):
        update_policy(service, canary=None)
    assert service.policy_file.read_text() == "traffic_ratio: 3\n"


@given(st.none() | st.integers(1, 10**17), st.floats(0, 1), st.text(max_size=40))
def test_any_value_is_read_back(tmp_path_factory: pytest.TempPathFactory, canary: int, ratio: float, salt: str) -> None:
    service = Service(tmp_path_factory.mktemp("policy"))
    service.policy_file.parent.mkdir(parents=True)
    service.policy_file.write_text(COMMENTED)
    update_policy(service, canary=canary, traffic_ratio=ratio, salt=salt)
    policy = load_policy(service)
    assert (policy.canary, policy.traffic_ratio, policy.salt) == (canary, ratio, salt)
    assert policy.deadlines.first_token == 20


@pytest.mark.parametrize("text", [None, "traffic_ratio: 5\n", "a: [\n", "- 1\n"])
def test_what_cannot_be_used_gives_way_to_the_policy_in_use(service: Service, text: str | None) -> None:
    in_use = Policy(canary=2, traffic_ratio=0.5, header="X-Beta")
    live = LiveState(service.live_state, service.run_folder)
    live.writer("admission").publish(AdmissionReport(policy=in_use.model_dump(mode="json", by_alias=True)).model_dump())
    live.close()
    if text is None:
        service.policy_file.unlink()
    else:
        service.policy_file.write_text(text)

    assert "written in its place" in mend_policy(service)
    assert load_policy(service) == in_use
    broken = service.policy_file.with_suffix(".yaml.broken")
    assert (broken.read_text() if broken.exists() else None) == text


def test_without_a_policy_in_use_there_is_no_canary(service: Service) -> None:
    service.policy_file.write_text("traffic_ratio: 5\n")
    mend_policy(service)
    assert load_policy(service) == Policy()


def test_a_good_policy_is_left_alone(service: Service) -> None:
    before = service.policy_file.read_text()
    assert mend_policy(service) == ""
    assert service.policy_file.read_text() == before
