"""The secrets of a home, each in a file that its owner alone reads."""

import os
import secrets
import stat
from pathlib import Path

from piccard_contract.claims import OWN_TENANT
from piccard_contract.home import Service
from piccard_contract.request import GatewayClaims

from piccard.durable_file import write_durably

ADMIN_KEY_FILE = "admin.key"
SECRET_MODE = 0o600


def admin_key_path(home: Path) -> Path:
    """The key that controls the models of a home's server."""
    return Service(home).keys_folder / ADMIN_KEY_FILE


def make_secret(path: Path) -> str:
    """A new random secret at `path`, readable by its owner alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.parent.chmod(0o700)
    secret = secrets.token_urlsafe(32)
    write_durably(path, secret + "\n", SECRET_MODE)
    return secret


def read_secret(path: Path) -> str:
    """The secret at `path`, made where it is missing."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return make_secret(path)


def own_claims(service: Service, priority: int = 0) -> GatewayClaims | None:
    """What the service's own requests are signed with, so that no tenant pays for them and none keeps them out.

    Args:
        priority: lower goes first; callers have 0 unless the gateway says otherwise.

    None where no server has made the secret, or it cannot be read: such a request counts as nobody's.
    """
    try:
        secret = service.gateway_secret.read_bytes().strip()
    except OSError:
        return None
    return GatewayClaims(tenant=OWN_TENANT, priority=priority).sign(secret) if secret else None


def secret_problem(path: Path) -> str | None:
    """Why the file at `path` does not keep its secret, or None."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    if stat.S_IMODE(status.st_mode) & 0o077:
        return f"{path} can be read by others"
    if status.st_uid != os.getuid():
        return f"{path} belongs to another user"
    return None
