"""What the components of a tokenizer are made of."""

import json
from collections.abc import Iterator
from typing import Any


def parts_of(component: Any) -> Iterator[dict[str, Any]]:
    """The settings of a component of a `tokenizers.Tokenizer` as in tokenizer.json, those within sequences apart.

    Args:
        component: a normalizer, pre-tokenizer or decoder; None has no parts.
    """
    if component is not None:
        yield from _parts(json.loads(component.__getstate__()))


def _parts(setting: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if setting["type"] != "Sequence":
        yield setting
        return
    # Normalizers, pre-tokenizers and decoders each call their list by their own name.
    for part in next(value for value in setting.values() if isinstance(value, list)):
        yield from _parts(part)
