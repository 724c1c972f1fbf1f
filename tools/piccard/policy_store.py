"""policy.yaml written: single keys change and the operator's comments stay."""

import json
import re
import secrets
from typing import Any

from piccard_contract.home import Service
from piccard_contract.policy import Policy, PolicyError, parse_policy, read_policy

from piccard.durable_file import write_durably
from piccard.errors import OperationError


def load_policy(service: Service) -> Policy:
    """The policy of `service`.

    Raises:
        OperationError: it is missing or broken.
    """
    try:
        return read_policy(service.policy_file)
    except FileNotFoundError:
        raise OperationError(f"{service.policy_file} is missing; run `piccard doctor --repair`") from None
    except (OSError, PolicyError) as error:
        raise OperationError(f"{service.policy_file}: {error}") from error


def new_salt() -> str:
    """A salt for the next rollout, so that it reaches other callers than the last."""
    return secrets.token_urlsafe(12)


def write_policy(service: Service, policy: Policy) -> None:
    """Write a policy anew, every key written out."""
    service.policy_file.parent.mkdir(parents=True, exist_ok=True)
    write_durably(service.policy_file, policy.dump())


def update_policy(service: Service, **values: Any) -> None:
    """Set top-level keys of policy.yaml to plain values; every other line stays as it is.

    Raises:
        OperationError: the file is missing or broken.
    """
    wanted = load_policy(service).model_copy(update=values)
    text = service.policy_file.read_text(encoding="utf-8")
    for key, value in values.items():
        line = f"{key}: {json.dumps(value)}"
        text, count = re.subn(rf"^{key}:[^\n#]*?(?=[ \t]*(#[^\n]*)?$)", lambda _: line, text, flags=re.MULTILINE)  # noqa: B023
        if count == 0:
            text = text.rstrip("\n") + f"\n{line}\n"
    try:
        edited = parse_policy(text)
    except PolicyError:
        edited = None
    # YAML has more ways to write a mapping than one key a line; those are written anew.
    write_durably(service.policy_file, text if edited == wanted else wanted.dump())
