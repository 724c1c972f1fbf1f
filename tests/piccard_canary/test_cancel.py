"""Cancel tokens, and calls that hang on a version without hanging anybody else."""

import threading

import pytest
from canary_fakes import PlayedVersions
from hypothesis import given
from hypothesis import strategies as st
from patience import wait_until
from piccard_canary.cancel import CancelDesk, mint_token, token_version


@given(st.integers(1, 10**18 - 1))
def test_a_token_names_its_version(version: int) -> None:
    assert token_version(mint_token(version)) == version


def test_tokens_are_never_the_same() -> None:
    assert len({mint_token(1) for _ in range(100)}) == 100


@given(st.text(max_size=40))
def test_any_text_is_a_token_or_none(text: str) -> None:
    found = token_version(text)

    assert found is None or text.startswith(f"{found}.")


@pytest.mark.parametrize("token", ["", "1", "1.", "1.short", "01." + "a" * 32, "x." + "a" * 32, "1." + "a" * 32 + "\n"])
def test_no_tokens(token: str) -> None:
    assert token_version(token) is None


def test_an_answer_is_told() -> None:
    versions = PlayedVersions({})
    versions.cancelled = lambda version, token: token == "yes"
    desk = CancelDesk(versions, print)

    assert desk.ask(2, "yes", timeout=60)
    assert not desk.ask(2, "no", timeout=60)
    assert versions.cancels == [(2, "yes"), (2, "no")]


def test_each_is_posted_also_where_no_call_reaches_the_version() -> None:
    versions, posted, release = PlayedVersions({}), list[str](), threading.Event()
    versions.cancelled = lambda version, token: release.wait(60)
    desk = CancelDesk(versions, print, limit=1, board=posted.append)
    desk.post(2, "hangs")
    desk.post(2, "finds no thread")
    assert posted == ["hangs", "finds no thread"]
    assert desk.dropped == 1
    release.set()


def test_a_failed_call_is_logged() -> None:
    versions = PlayedVersions({})

    def fail(version: int, token: str) -> bool:
        raise OSError("broken pipe")

    versions.cancelled = fail
    logged: list[str] = []

    assert not CancelDesk(versions, logged.append).ask(2, "token", timeout=60)
    assert "broken pipe" in logged[0]


def test_calls_that_hang_are_bounded() -> None:
    versions = PlayedVersions({})
    release = threading.Event()

    def hang(version: int, token: str) -> bool:
        return version == 1 or release.wait(60)

    versions.cancelled = hang
    desk = CancelDesk(versions, print, limit=2)
    for _ in range(3):
        desk.post(2, "token")
    assert desk.dropped == 1
    # With no thread left it says no at once.
    assert not desk.ask(1, "token", timeout=60)

    release.set()
    wait_until(lambda: desk.ask(1, "token", timeout=60))
