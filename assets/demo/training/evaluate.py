"""Held-out figures: perplexity, bits per byte, how even the experts' use is, and how often the MTP layer is right.

    python -m training.evaluate CHECKPOINT CORPUS.jsonl [SPLIT]

measures an exported checkpoint through transformers.
"""

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from training import corpus, vocabulary
from training.model import Model

WINDOW, STRIDE = 2048, 1024

Predict = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Likelihood:
    """Nats over a split. Every token has at least ``STRIDE`` tokens before it, or its whole document."""

    nats: float
    tokens: int
    bytes: int

    @property
    def loss(self) -> float:
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.bytes


def document_windows(ids: list[int]) -> Iterator[tuple[list[int], int]]:
    """Yield overlapping windows of ``ids`` and how many of each window's last predictions count."""
    seen = 1
    for start in range(0, max(1, len(ids) - STRIDE), STRIDE):
        window = ids[start : start + WINDOW]
        yield window, start + len(window) - seen
        seen = start + len(window)


@torch.inference_mode()
def likelihood(predict: Predict, tokenizer: Tokenizer, texts: list[str], device: str) -> Likelihood:
    """Measure ``predict``, ids [1, tokens] -> logits [1, tokens, vocabulary], on whole documents."""
    bos = vocabulary.token_id(tokenizer, vocabulary.BOS)
    nats, tokens = 0.0, 0
    for text in texts:
        ids = [bos, *tokenizer.encode(text, add_special_tokens=False).ids]
        for window, counted in document_windows(ids):
            row = torch.tensor([window], device=device)
            logits = predict(row[:, :-1])[0, -counted:].float()
            nats += F.cross_entropy(logits, row[0, -counted:], reduction="sum").item()
            tokens += counted
    return Likelihood(nats, tokens, sum(len(text.encode()) for text in texts))


@dataclass(frozen=True, slots=True)
class Inside:
    """What only the training form shows: expert shares and the MTP layer's agreement with the main model."""

    variances: list[float]
    largest: list[float]
    mtp_agreement: float


@torch.inference_mode()
def inside(model: Model, tokenizer: Tokenizer, texts: list[str], device: str) -> Inside:
    """Measure a training model on whole documents.

    ``variances``: by MoE layer, the MTP layer last, the variance over the experts of the load divided by the mean
    load; ``largest``: the greatest such load; ``mtp_agreement``: share of positions where the MTP layer's first
    choice for the token after next is the main model's.
    """
    bos = vocabulary.token_id(tokenizer, vocabulary.BOS)
    total = torch.zeros((), device=device)
    agreed, positions = 0, 0
    for text in texts:
        ids = [bos, *tokenizer.encode(text, add_special_tokens=False).ids]
        for start in range(0, len(ids), WINDOW):
            row = torch.tensor([ids[start : start + WINDOW]], device=device)
            if row.shape[1] < 3:
                continue
            hidden, loads = model.hidden_states(row)
            ahead, load = model.mtp_states(hidden[:, :-1], row[:, 1:])
            total = total + torch.stack([*loads, load])
            agreed += int((model.lm_head(ahead).argmax(-1) == model.lm_head(hidden[:, 1:]).argmax(-1)).sum())
            positions += row.shape[1] - 1
    relative = total / total.mean(-1, keepdim=True)
    variances = relative.var(-1, correction=0).tolist()
    return Inside(variances, relative.amax(-1).tolist(), agreed / positions)


def main() -> None:
    from transformers import AutoModelForCausalLM

    folder, documents = Path(sys.argv[1]), corpus.read(Path(sys.argv[2]))
    split = sys.argv[3] if len(sys.argv) > 3 else "test"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.to(device)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [document.text for document in documents if document.split == split]
    found = likelihood(lambda ids: model(ids).logits, tokenizer, texts, device)
    print(f"{split}: loss {found.loss:.4f}, perplexity {found.perplexity:.3f}, bits per byte {found.bits_per_byte:.4f}")


if __name__ == "__main__":
    main()
