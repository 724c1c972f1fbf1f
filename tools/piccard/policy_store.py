"""policy.yaml written: single keys change and the operator's comments stay."""

import json
import re
import secrets
from typing import Any

from piccard_contract.home import Service
from piccard_contract.live_state import LiveState, LiveStateError
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
        raise OperationError(f"{service.policy_file} is missing; `piccard canary off` writes it anew") from None
    except (OSError, PolicyError) as error:
        told = str(error).removeprefix("policy.yaml: ").removeprefix("policy.yaml ")
        raise OperationError(
            f"{service.policy_file}: {told}; mend it, or `piccard canary off` writes it anew"
        ) from error


def mend_policy(service: Service) -> str:
    """Make a policy.yaml that is missing or broken usable, so that no edit stands in the way of a rollback.

    What is written is the policy in use, as admission published it last, or the default one. Broken text is kept beside
    it, in policy.yaml.broken.

    Returns:
        A sentence for people; empty where nothing was wrong.
    """
    try:
        load_policy(service)
        return ""
    except OperationError as error:
        trouble = " ".join(str(error).partition("; mend it")[0].partition("; `piccard")[0].split())
    try:
        text = service.policy_file.read_bytes()
    except FileNotFoundError:
        kept = ""
    else:
        broken = service.policy_file.with_suffix(".yaml.broken")
        broken.write_bytes(text)
        kept = f"; what it held is in {broken}"
    write_policy(service, policy_in_use(service))
    return f"{trouble}: the policy that was in use was written in its place{kept}"


def policy_in_use(service: Service) -> Policy:
    """The policy that the service goes by, as its admission published it last; else the default one."""
    if not service.live_state.exists():
        return Policy()
    try:
        live = LiveState(service.live_state, service.run_folder)
    except LiveStateError:
        return Policy()
    try:
        sections = [section for section in live.sections("admission") if section.data.get("policy")]
    finally:
        live.close()
    if not sections:
        return Policy()
    newest = max(sections, key=lambda section: (section.alive, section.updated_at))
    return Policy.model_validate(newest.data["policy"])


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
        ValueError: the policy has no such key, or the key takes no such value.
    """
    wanted = Policy.model_validate(load_policy(service).model_dump() | values)
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
