"""Incremental detokeniser of one choice."""

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepseek_engine.text.tokenizer import Tokenizer


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\ufffd" * (error.end - error.start), error.end


# The byte-fallback decoder writes a replacement character for every malformed byte; byte-level decoding writes one for
# every maximal malformed part, which is what Python's "replace" does.
codecs.register_error("replace_each_byte", _replace_each_byte)


class Detokenizer:
    """Turns token ids into text as they come, in constant time a token.

    Everything pushed, then flushed, is `tokenizer.decode` of all ids. Where a tokenizer falls back to bytes that holds
    for well-formed text; a malformed run costs only its own bytes, while `decode` would take back whole characters.

    Args:
        tokenizer: whose ids these are.
        skip_special_tokens: leave special tokens out of the text.
        prefix_ids: ids before the first one pushed, whose text is not returned again. A character begun there is
            returned whole once it is complete, since nothing of it can have been returned before.
    """

    def __init__(
        self, tokenizer: "Tokenizer", *, skip_special_tokens: bool = True, prefix_ids: Sequence[int] = ()
    ) -> None:
        self._pieces = tokenizer.token_bytes(skip_special_tokens=skip_special_tokens)
        errors = "replace_each_byte" if self._pieces.byte_fallback else "replace"
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors)
        self._at_start = self._pieces.first_differs
        if prefix_ids:
            self.push(prefix_ids)

    def push(self, ids: Sequence[int]) -> str:
        """Text that is final after `ids`; the bytes of an unfinished character are held back."""
        pieces = self._pieces
        if self._at_start:
            return self._push_start(ids)
        # One token a step is what nearly every call brings.
        return self._utf8.decode(pieces[ids[0]] if len(ids) == 1 else b"".join([pieces[token_id] for token_id in ids]))

    def flush(self) -> str:
        """Text at the end: replacement characters for an unfinished character, else nothing."""
        return self._utf8.decode(b"", final=True)

    def _push_start(self, ids: Sequence[int]) -> str:
        for position, token_id in enumerate(ids):
            piece = self._pieces.first(token_id)
            if piece is not None:
                self._at_start = False
                return self._utf8.decode(piece) + self.push(ids[position + 1 :])
        return ""
