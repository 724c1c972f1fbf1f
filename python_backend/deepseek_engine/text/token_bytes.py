"""What each token adds to a text, as bytes.

With bytes rather than text a character that is spread over several tokens joins by itself, and a stream costs one
table look-up a token whatever its length.
"""

import re

import tokenizers

from deepseek_engine.text.errors import TokenizerError
from deepseek_engine.text.tokenizer_parts import parts_of

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

# A token's text depends on its neighbours in the other decoders (CTC drops repeats, BPEDecoder looks for the end).
_STREAMABLE = {"ByteLevel", "Metaspace", "WordPiece", "ByteFallback", "Fuse", "Strip", "Replace"}


def _byte_level_alphabet() -> dict[str, int]:
    """Byte-level BPE's letters: printable Latin-1 bytes stand for themselves, the n-th other byte is chr(256 + n)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF_LETTER = _byte_level_alphabet()


class TokenBytes(dict[int, bytes]):
    """Maps a token id to the bytes it adds after other tokens; filled as ids are asked for.

    Hidden ids and ids that no token has add nothing, as in `tokenizers`' decode.

    Args:
        core: the tokenizer.
        hidden: ids that are left out, e.g. the special ones.

    Raises:
        TokenizerError: the decoder of tokenizer.json cannot be streamed.
    """

    def __init__(self, core: tokenizers.Tokenizer, hidden: frozenset[int] = frozenset()) -> None:
        super().__init__()
        self._core = core
        self._hidden = hidden
        parts = list(parts_of(core.decoder))
        types = {part["type"] for part in parts}
        self._byte_level = "ByteLevel" in types
        self.byte_fallback = "ByteFallback" in types
        unstreamable = types - (_STREAMABLE if not self._byte_level else {"ByteLevel", "Fuse"})
        if unstreamable or any(part.get("stop", 0) for part in parts if part["type"] == "Strip"):
            raise TokenizerError(
                f"tokenizer.json has a decoder made of {', '.join(sorted(types))}, whose text cannot be streamed; "
                "use a byte-level, Metaspace or Llama-style decoder"
            )
        self._anchor = None if self._byte_level else self._find_anchor()

    @property
    def first_differs(self) -> bool:
        """Whether a token may add other bytes at the start of a text (a leading space is dropped) than later on."""
        return not self._byte_level

    def first(self, token_id: int) -> bytes | None:
        """The bytes at the start of a text; None for a hidden or unknown token, which leaves the start to come."""
        token = self._visible(token_id)
        if token is None:
            return None
        if self._byte_level:
            return self[token_id]
        text = self._core.decode([token_id], skip_special_tokens=False)
        return self._raw_byte(token) if text == "\ufffd" and self._raw_byte(token) else text.encode()

    def __missing__(self, token_id: int) -> bytes:
        token = self._visible(token_id)
        piece = b"" if token is None else self._later(token_id, token)
        self[token_id] = piece
        return piece

    def _visible(self, token_id: int) -> str | None:
        return None if token_id in self._hidden else self._core.id_to_token(token_id)

    def _later(self, token_id: int, token: str) -> bytes:
        if self._byte_level:
            return self._from_letters(token)
        if raw := self._raw_byte(token):
            return raw
        if self._anchor is None:
            return self._core.decode([token_id], skip_special_tokens=False).encode()
        before = self._core.decode([self._anchor], skip_special_tokens=False)
        return self._core.decode([self._anchor, token_id], skip_special_tokens=False)[len(before) :].encode()

    @staticmethod
    def _from_letters(token: str) -> bytes:
        try:
            return bytes([_BYTE_OF_LETTER[letter] for letter in token])
        except KeyError:
            # An added token is kept as it is written where it has a letter outside the alphabet, as `tokenizers` does.
            return token.encode()

    def _raw_byte(self, token: str) -> bytes:
        """The byte that a byte-fallback token such as <0xE4> stands for; empty for every other token."""
        match = _BYTE_TOKEN.fullmatch(token) if self.byte_fallback else None
        return bytes.fromhex(match[1]) if match else b""

    def _find_anchor(self) -> int | None:
        """An ordinary token to decode others after, so that they are not taken for the start of a text."""
        for token, token_id in sorted(self._core.get_vocab(with_added_tokens=False).items()):
            if token.lstrip("\u2581").isalnum() and token.isascii() | token.startswith("\u2581"):
                return token_id
        return None
