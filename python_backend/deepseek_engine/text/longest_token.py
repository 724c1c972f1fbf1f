"""How much of a text one token can cover, so that a text that is far too long is known as such without encoding it."""

from typing import Any

import tokenizers

from deepseek_engine.text.tokenizer_parts import parts_of


def longest_token(core: tokenizers.Tokenizer) -> int | None:
    """The most bytes of UTF-8 that one token covers; None where nothing of the kind can be said.

    It can for byte-level BPE over unchanged text, which DeepSeek's tokenizers are: every byte of the text belongs to
    exactly one token, whose letters stand for a byte each. Normalizers, white space that is dropped and unknown tokens
    that swallow words break that.
    """
    model, added_tokens = core.model, core.get_added_tokens_decoder().values()
    lossless = (
        isinstance(model, tokenizers.models.BPE)
        and not model.unk_token
        and not model.continuing_subword_prefix
        and not model.end_of_word_suffix
        and not any(parts_of(core.normalizer))
        and _is_byte_level(list(parts_of(core.pre_tokenizer)))
        and not any(token.lstrip or token.rstrip for token in added_tokens)
    )
    if not lossless:
        return None
    added = max((len(token.content.encode()) for token in added_tokens), default=1)
    return max(added, max(map(len, core.get_vocab(with_added_tokens=False)), default=1))


def _is_byte_level(parts: list[dict[str, Any]]) -> bool:
    kinds = {part["type"] for part in parts}
    removed = any(part.get("behavior") == "Removed" for part in parts)
    return "ByteLevel" in kinds and kinds <= {"ByteLevel", "Split", "Digits"} and not removed
