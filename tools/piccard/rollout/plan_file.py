"""A rollout's plan from a file and from the command line."""

from pathlib import Path
from typing import Any

from piccard_canary.rollout.plan import Plan
from piccard_contract.validation import explain
from piccard_contract.yaml_text import YamlTextError, load_yaml
from pydantic import ValidationError

from piccard.errors import OperationError


def read_plan(path: Path | None, given: dict[str, Any]) -> Plan:
    """The plan of a YAML file, or the default one; what is given on the command line counts before it.

    Args:
        given: values by key; None is not given.

    Raises:
        OperationError: the file cannot be read, or a value is none; with the key and what it takes.
    """
    data: Any = {}
    if path is not None:
        try:
            data = load_yaml(path.read_bytes()) or {}
        except (OSError, YamlTextError) as error:
            raise OperationError(f"--plan: {path} cannot be read ({error})", exit_code=2) from error
        if not isinstance(data, dict):
            raise OperationError(f"--plan: {path} must be a mapping of keys such as interval: 600", exit_code=2)
    try:
        return Plan.model_validate(data | {key: value for key, value in given.items() if value is not None})
    except ValidationError as error:
        raise OperationError(f"the plan: {explain(error)}", exit_code=2) from error


def shares(text: str | None) -> list[float] | None:
    """`0.05,0.5,1` as numbers; None where nothing was given.

    Raises:
        OperationError: a part is no number.
    """
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise OperationError(f"--steps and --gates take shares such as 0.05,0.5,1, not {text!a}", exit_code=2) from None
