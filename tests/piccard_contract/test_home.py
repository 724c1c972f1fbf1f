"""Where a home keeps what, and how a model finds its home."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from piccard_contract.home import Service, version_owner

names = st.from_regex(r"[a-z][a-z0-9_]{0,20}", fullmatch=True)
SUFFIXES = ("_unary", "_admission", "_router", "_llm")


@given(names.filter(lambda name: not name.endswith(SUFFIXES)))
def test_every_model_finds_its_service(name: str) -> None:
    service = Service(Path("/home/of/it"), name)

    assert len(set(service.models)) == 6
    for model in service.models:
        assert Service.of_model(service.repository / model) == service


@pytest.mark.parametrize("name", ["", "Deep", "1a", "a-b", "a" * 41, "a\n", "../a"])
def test_refused_names(name: str) -> None:
    with pytest.raises(ValueError, match="service name"):
        Service(Path("/home"), name)


def test_two_services_share_no_file_but_the_homes() -> None:
    one, other = Service(Path("/h"), "deepseek"), Service(Path("/h"), "distill")
    own = ("stable_link", "policy_file", "state_json", "live_state", "run_folder", "request_log", "staging")

    assert all(getattr(one, name) != getattr(other, name) for name in own)
    assert one.audit_log == other.audit_log


def test_everything_is_within_the_home() -> None:
    service = Service(Path("/h"))

    for path in (service.version_folder(3), service.process_lock(version_owner(3)), service.gateway_secret):
        assert path.is_relative_to("/h")
    assert service.staging.parts[1] == service.repository.parts[1]
