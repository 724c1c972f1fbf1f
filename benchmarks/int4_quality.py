"""How far an int4 export's logits are from those of the checkpoint's own weights, and how much smaller it is.

    python benchmarks/int4_quality.py [CHECKPOINT] [--text FILE ...] [--tokens 256] [--group-sizes 32 64 128]

Both models read the first tokens of every text in one go. The float side is the torch engine in float32; the int4 side
is the exported model in ONNX Runtime. The texts are, unless given, modules of Python's standard library that the demo
checkpoint was not trained on. KL is of the int4 model's distribution from the float one's, in nats a token.
"""

import argparse
import graphlib
import heapq
import json
import queue
import sched
import sys
import tempfile
import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import torch
import torch.nn.functional as F
from deepseek_engine.models import Model, load_model
from deepseek_engine.runners.onnxruntime import OnnxModel
from deepseek_ops.build import build
from deepseek_ops.exporter.export import export
from deepseek_ops.exporter.weight_format import Int4Format
from paged_sequences import chunked_logits
from tokenizers import Tokenizer
from torch import Tensor

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "int4_quality.json"
HELD_OUT = (heapq, queue, sched, textwrap, graphlib)


@dataclass(frozen=True, slots=True)
class Quality:
    """One export. `loss` is in nats a token of the texts, as `float_loss` of the float model."""

    group_size: int
    megabytes: float
    mean_kl: float
    worst_twentieth_kl: float
    top_1_agreement: float
    loss: float


def main() -> None:
    options = parse_arguments()
    model = load_model(options.checkpoint, dtype=torch.float32)
    rows = token_rows(options.checkpoint, options.text, options.tokens)
    expected = logits_of(model, rows)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        plain = megabytes(export(options.checkpoint, scratch / "plain"))
        found = [measure(options.checkpoint, scratch, model, rows, expected, size) for size in options.group_sizes]
    report = {
        "checkpoint": options.checkpoint.name,
        "tokens": sum(len(row) - 1 for row in rows),
        "plain_megabytes": plain,
        "float_loss": loss(expected, rows),
        "int4": [asdict(quality) for quality in found],
    }
    print(f"{report['tokens']} tokens, plain {plain:.2f} MB, loss {report['float_loss']:.4f}")
    print(f"{'group':>5}{'MB':>8}{'mean KL':>10}{'worst 5 %':>11}{'top 1':>8}{'loss':>8}")
    for each in found:
        print(
            f"{each.group_size:>5}{each.megabytes:>8.2f}{each.mean_kl:>10.4f}{each.worst_twentieth_kl:>11.4f}"
            f"{each.top_1_agreement:>8.1%}{each.loss:>8.4f}"
        )
    options.output.write_text(json.dumps(report, indent=2) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path, nargs="?", default=ROOT / "assets" / "demo")
    parser.add_argument("--text", type=Path, nargs="+", default=[Path(module.__file__ or "") for module in HELD_OUT])
    parser.add_argument("--tokens", type=int, default=256, help="of each text")
    parser.add_argument("--group-sizes", type=int, nargs="+", default=[32, 64, 128])
    parser.add_argument("--output", type=Path, default=RESULTS, help="JSON report")
    return parser.parse_args()


def token_rows(checkpoint: Path, texts: list[Path], tokens: int) -> list[list[int]]:
    """The first token ids of every text, behind the token that begins one."""
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    begin = json.loads((checkpoint / "config.json").read_text())["bos_token_id"]
    encoded = (tokenizer.encode(text.read_text(encoding="utf-8"), add_special_tokens=False) for text in texts)
    return [[begin, *each.ids[:tokens]] for each in encoded]


def logits_of(model: Model, rows: list[list[int]]) -> Tensor:
    """What the model says of every token but the texts' first: float32 [tokens, vocabulary]."""
    return torch.cat([chunked_logits(model, row, len(row))[:-1] for row in rows])


def measure(
    checkpoint: Path, scratch: Path, model: Model, rows: list[list[int]], expected: Tensor, group_size: int
) -> Quality:
    folder = export(checkpoint, scratch / f"int4_{group_size}", format=Int4Format(group_size))
    got = logits_of(OnnxModel(folder, build(), model.config, threads=1), rows)
    kl = F.kl_div(got.log_softmax(-1), expected.log_softmax(-1), log_target=True, reduction="none").sum(-1)
    return Quality(
        group_size=group_size,
        megabytes=megabytes(folder),
        mean_kl=float(kl.mean()),
        worst_twentieth_kl=float(kl.quantile(0.95)),
        top_1_agreement=float((got.argmax(-1) == expected.argmax(-1)).float().mean()),
        loss=loss(got, rows),
    )


def megabytes(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.iterdir()) / 1e6


def loss(logits: Tensor, rows: list[list[int]]) -> float:
    targets = torch.tensor([token for row in rows for token in row[1:]])
    return float(F.cross_entropy(logits, targets))


if __name__ == "__main__":
    main()
