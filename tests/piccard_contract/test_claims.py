"""Who may name a tenant."""

from pathlib import Path

from piccard_contract.claims import ClaimsCheck
from piccard_contract.request import GatewayClaims

CLAIMS = GatewayClaims(tenant="acme", priority=3)


def test_only_the_secret_of_this_start_counts(tmp_path: Path) -> None:
    path = tmp_path / "gateway.secret"
    check = ClaimsCheck(path)
    assert check.believed(None) is None
    assert check.believed(CLAIMS.sign(b"one")) is None

    path.write_bytes(b"one\n")
    signed = CLAIMS.sign(b"one")
    assert check.believed(signed) == signed
    assert check.believed(CLAIMS) is None
    assert check.believed(signed.model_copy(update={"tenant": "other"})) is None

    path.write_bytes(b"two\n")
    assert check.believed(signed) is None
    assert check.believed(CLAIMS.sign(b"two")) is not None


def test_an_empty_secret_signs_nothing(tmp_path: Path) -> None:
    (tmp_path / "gateway.secret").write_bytes(b"")

    assert ClaimsCheck(tmp_path / "gateway.secret").believed(CLAIMS.sign(b"")) is None
