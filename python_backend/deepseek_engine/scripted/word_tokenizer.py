"""A tokenizer without a vocabulary file: a token id is the word itself."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from piccard_contract.errors import ErrorCode, RequestError

from deepseek_engine.text.chat_template import ChatTemplate

# Bytes of text that one id holds, behind a leading byte 1 that keeps zeros: ids stay below 2**57.
BYTES_PER_TOKEN = 7
VOCAB_SIZE = 2 << (8 * BYTES_PER_TOKEN)
END_OF_TEXT = 0

_END_TEXT = "</s>"
_WORD = re.compile(rb"\s*\S+|\s+")
_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


class WordBytes:
    """The bytes that each token adds to a text; as `deepseek_engine.text.token_bytes`, without a table."""

    byte_fallback = False
    first_differs = False

    def __init__(self, *, skip_special_tokens: bool) -> None:
        self._end = b"" if skip_special_tokens else _END_TEXT.encode()

    def __getitem__(self, token_id: int) -> bytes:
        if token_id == END_OF_TEXT:
            return self._end
        if token_id < 256:
            return bytes([token_id])
        packed = token_id.to_bytes((token_id.bit_length() + 7) // 8, "big")
        # Ids that no text encodes to are legal input too: they read as their number.
        return packed[1:] if packed[0] == 1 else b" #%d" % token_id


class WordTokenizer:
    """Text to ids and back, a word with the white space before it a token.

    A word of more than seven bytes takes several tokens, which may cut a UTF-8 character. Every id of the vocabulary
    decodes by itself, so two processes agree on a text without sharing anything.
    """

    bos_token_id: int | None = None
    eos_token_id: int | None = END_OF_TEXT
    eos_token_ids = (END_OF_TEXT,)
    vocab_size = VOCAB_SIZE

    def __init__(self) -> None:
        self.chat_template = ChatTemplate({"default": _TEMPLATE}, {})
        self._shown = WordBytes(skip_special_tokens=True)
        self._all = WordBytes(skip_special_tokens=False)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; there is no bos to add."""
        words = _WORD.findall(text.encode())
        return [
            int.from_bytes(b"\1" + word[start : start + BYTES_PER_TOKEN], "big")
            for word in words
            for start in range(0, len(word), BYTES_PER_TOKEN)
        ]

    def fewest_tokens(self, text: str) -> int:
        """A number of tokens that `text` has at least, told without encoding it."""
        return -(-len(text.encode()) // BYTES_PER_TOKEN)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids, with replacement characters where they are not UTF-8."""
        pieces = self.token_bytes(skip_special_tokens=skip_special_tokens)
        return b"".join([pieces[token_id] for token_id in ids]).decode("utf-8", "replace")

    def check_ids(self, ids: Iterable[Any], vocab_size: int | None = None) -> list[int]:
        """The ids as a list. Raises RequestError INVALID_TOKEN for one that is not in the vocabulary."""
        size = self.vocab_size if vocab_size is None else vocab_size
        checked = [int(token_id) for token_id in ids]
        for position, token_id in enumerate(checked):
            if not 0 <= token_id < size:
                raise RequestError(
                    ErrorCode.INVALID_TOKEN,
                    f"Token {position} is {token_id}; the vocabulary has ids 0 to {size - 1}.",
                )
        return checked

    def token_text(self, token_id: int) -> str:
        """Text of one token by itself."""
        return self._all[token_id].decode("utf-8", "replace")

    def token_bytes(self, *, skip_special_tokens: bool = True) -> WordBytes:
        """The bytes that each token adds to a text."""
        return self._shown if skip_special_tokens else self._all

    def hash(self) -> str:
        """Equal in all scripted versions, which may resume each other's streams."""
        return "scripted-words-1"

    def template_hash(self) -> str:
        """sha256, in hex, of the chat template."""
        return self.chat_template.hash()
