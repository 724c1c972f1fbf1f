"""How much of a text one token can cover, so that a text that is far too long is known as such without encoding it."""

import json
from collections.abc import Iterator
from typing import Any

import tokenizers


def longest_token(core: tokenizers.Tokenizer) -> int | None:
    """The most bytes of UTF-8 that one token covers; None where nothing of the kind can be said.

    It can for byte-level BPE over unchanged text, which DeepSeek's tokenizers are: every byte of the text belongs to
    exactly one token, whose letters stand for a byte each. Normalizers, white space that is dropped and unknown tokens
    that swallow words break that.
    """
    settings = json.loads(core.to_str())
    model = settings["model"]
    lossless = (
        model["type"] == "BPE"
        and not model.get("unk_token")
        and not model.get("continuing_subword_prefix")
        and not model.get("end_of_word_suffix")
        and not any(_parts(settings["normalizer"], "normalizers"))
        and _is_byte_level(list(_parts(settings["pre_tokenizer"], "pretokenizers")))
        and not any(token["lstrip"] or token["rstrip"] for token in settings["added_tokens"])
    )
    if not lossless:
        return None
    added = max((len(token["content"].encode()) for token in settings["added_tokens"]), default=1)
    return max(added, max(map(len, core.get_vocab(with_added_tokens=False)), default=1))


def _is_byte_level(parts: list[dict[str, Any]]) -> bool:
    kinds = {part["type"] for part in parts}
    removed = any(part.get("behavior") == "Removed" for part in parts)
    return "ByteLevel" in kinds and kinds <= {"ByteLevel", "Split", "Digits"} and not removed


def _parts(setting: dict[str, Any] | None, key: str) -> Iterator[dict[str, Any]]:
    if setting is None:
        return
    if setting["type"] == "Sequence":
        for part in setting[key]:
            yield from _parts(part, key)
    else:
        yield setting
