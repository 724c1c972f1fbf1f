"""Training epochs: every document once an epoch, cut, rearranged and packed afresh.

A document goes in whole, or in pieces that start at a definition. A piece is plain text, a fill-in-the-middle sample
(prefix, suffix, middle, as DeepSeek-V3 orders them) or a user's opening with an assistant's continuation.
"""

import queue
import random
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from training import vocabulary

WHOLE_SHARE = 0.35
FIM_SHARE = 0.55
CHAT_SHARE = 0.06
# Characters of a piece; with about three a token, the longest fill-in-the-middle sample fits the context.
SHORTEST_PIECE, LONGEST_PIECE = 200, 6000
LONGEST_MIDDLE = 1200

DEFINITION = re.compile(r"^(?: {4})?(?:@|class |def |async def )", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of lines of one document; ``closed`` when what follows it is at the left margin or the end."""

    text: str
    closed: bool


def pieces_of(text: str, rng: random.Random) -> Iterator[Piece]:
    """Cut ``text`` at definitions into pieces of log-uniform length."""
    cuts = [match.start() for match in DEFINITION.finditer(text)]
    start = 0
    while start < len(text):
        length = SHORTEST_PIECE * (LONGEST_PIECE / SHORTEST_PIECE) ** rng.random()
        end = next((cut for cut in cuts if cut >= start + length), len(text))
        yield Piece(text[start:end], end == len(text) or text[end] != " ")
        start = end


def middle_of(text: str, rng: random.Random) -> tuple[int, int]:
    """Choose the hole of a fill-in-the-middle sample: whole lines, or any characters."""
    start = rng.randrange(len(text))
    end = min(len(text), start + 1 + int(rng.random() ** 2 * LONGEST_MIDDLE))
    if rng.random() < 0.5:
        start = text.rfind("\n", 0, start) + 1
        line_end = text.find("\n", end)
        end = len(text) if line_end < 0 else line_end + 1
    return start, end


def opening_of(text: str, rng: random.Random) -> int:
    """Choose the line end that parts a user's opening from the continuation; 0 when there is but one line."""
    ends = [match.start() for match in re.finditer("\n", text[: len(text) // 2])]
    return rng.choice(ends[:12]) if ends else 0


class Packer:
    """Turns documents into streams of token ids."""

    def __init__(self, tokenizer: Tokenizer, texts: list[str], seed: int) -> None:
        self.tokenizer = tokenizer
        self.texts = texts
        self.seed = seed

    def samples(self, rng: random.Random) -> Iterator[list[str]]:
        """Yield every document in random order as lists of strings, each a special token or text."""
        for text in rng.sample(self.texts, len(self.texts)):
            if rng.random() < WHOLE_SHARE:
                yield [vocabulary.BOS, text, vocabulary.EOS]
                continue
            for piece in pieces_of(text, rng):
                yield self.sample(piece, rng)

    def sample(self, piece: Piece, rng: random.Random) -> list[str]:
        """Turn a piece into one sample."""
        draw, text = rng.random(), piece.text
        if draw < FIM_SHARE:
            start, end = middle_of(text, rng)
            prefix, middle, suffix = text[:start], text[start:end], text[end:]
            holed = [vocabulary.FIM_BEGIN, prefix, vocabulary.FIM_HOLE, suffix, vocabulary.FIM_END]
            return [vocabulary.BOS, *holed, middle, vocabulary.EOS]
        cut = opening_of(text, rng) if draw < FIM_SHARE + CHAT_SHARE else 0
        if cut:
            asked, answered = text[:cut], text[cut + 1 :]
            return [vocabulary.BOS, vocabulary.USER, asked, vocabulary.ASSISTANT, answered, vocabulary.EOS]
        return [vocabulary.BOS, text, *([vocabulary.EOS] if piece.closed else [])]

    def epoch(self, number: int) -> NDArray[np.uint16]:
        """Return the ids of epoch ``number``, [tokens]."""
        parts = [part for sample in self.samples(random.Random(f"{self.seed}/{number}")) for part in sample]
        encodings = self.tokenizer.encode_batch_fast(parts, add_special_tokens=False)
        return np.concatenate([np.asarray(encoding.ids, dtype=np.uint16) for encoding in encodings])


def windows(ids: NDArray[np.uint16], length: int) -> NDArray[np.uint16]:
    """Cut a stream into [windows, length + 2]: the inputs and the two tokens that follow the last of them."""
    count = (len(ids) - 2) // length
    return np.stack([ids[i * length : (i + 1) * length + 2] for i in range(count)])


class Batches:
    """Shuffled batches, [tokens_a_batch / length, length + 2], epoch after epoch.

    Later epochs are packed by a thread while the earlier ones are trained on.
    """

    def __init__(self, packer: Packer, tokens_a_batch: int) -> None:
        self.tokens_a_batch = tokens_a_batch
        self.packer = packer
        self.rng = np.random.default_rng(packer.seed)
        self.ready: queue.Queue[NDArray[np.uint16]] = queue.Queue(maxsize=3)
        threading.Thread(target=self.pack, daemon=True).start()

    def pack(self) -> None:
        """Pack epochs for ever; the queue's bound holds this back."""
        number = 0
        while True:
            self.ready.put(self.packer.epoch(number))
            number += 1

    def epoch(self, length: int) -> Iterator[NDArray[np.uint16]]:
        """Yield the whole batches of the next epoch in random order."""
        cut = windows(self.ready.get(), length)
        order = self.rng.permutation(len(cut))
        rows = self.tokens_a_batch // length
        for start in range(0, len(order) - rows + 1, rows):
            yield cut[order[start : start + rows]]
