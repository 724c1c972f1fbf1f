"""Pydantic's errors as one sentence that says what to change."""

import difflib
from collections.abc import Iterable

from pydantic import ValidationError


def closest(name: str, known: Iterable[str]) -> str:
    """` Did you mean 'X'?` where a known name resembles `name`, else nothing."""
    found = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.6)
    return f" Did you mean {found[0]!r}?" if found else ""


def explain(error: ValidationError) -> str:
    """The first problem of a validation, with the path of the key and what it takes."""
    first = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        return f"unknown key {where!r}"
    value = repr(first["input"])
    shown = value if len(value) <= 60 else value[:57] + "..."
    if not where:
        return message
    return f"{where}: {message} (got {shown})"
