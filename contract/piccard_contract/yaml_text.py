"""YAML of files that people edit."""

from typing import Any

import yaml

# Dates, numbers and tags that are none, and a nesting that is too deep, come out of PyYAML as errors of Python.
_ERRORS = (yaml.YAMLError, ValueError, ArithmeticError, TypeError, LookupError, AttributeError, RecursionError)


class YamlTextError(ValueError):
    """A text that is no YAML; the message says why."""


def load_yaml(content: bytes | str) -> Any:
    """What a file's content says.

    Raises:
        YamlTextError: it is no YAML in UTF-8.
    """
    try:
        return yaml.safe_load(content.decode("utf-8") if isinstance(content, bytes) else content)
    except _ERRORS as error:
        raise YamlTextError(str(error)) from error
