"""Trains the demo model and writes its checkpoint.

    python -m training.train --corpus CORPUS.jsonl --tokenizer tokenizer.json --out FOLDER

One GPU; the whole step is captured in a CUDA graph. ``--device cpu --epochs 1 --steps 20`` is a smoke run.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor, nn
from training import corpus, evaluate, export, vocabulary
from training.model import Model
from training.optimiser import AdamW, Muon
from training.packing import Batches, Packer
from training.shape import Shape

WARMUP_STEPS = 100
# As V3's report: the MTP loss weighs 0.3, and 0.1 once most tokens are seen; the bias speed is 0.001.
MTP_WEIGHTS = (0.3, 0.1)
MTP_SWITCH = 0.67
BIAS_SPEED = 1e-3
# The router's temperature moves over this share of the steps, then holds.
ANNEALED = 0.7


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the demo model.")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint and of figures.json")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--steps", type=int, default=0, help="stop after this many steps, for a smoke run")
    parser.add_argument("--long-epochs", type=int, default=6, help="how many of them, the last, have long windows")
    parser.add_argument("--window", type=int, default=2048, help="tokens of one row")
    parser.add_argument("--long-window", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=32768, help="tokens a step")
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--cooldown", type=float, default=0.7, help="share of the steps that the rate falls to zero in")
    parser.add_argument("--decay", type=float, default=1.0)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--temperature", type=float, nargs=2, default=(2.0, 0.8), metavar=("FIRST", "LAST"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--report-every", type=int, default=200)
    return parser.parse_args()


class Schedule:
    """Everything that changes with the step, as device scalars that a captured graph reads."""

    def __init__(self, options: argparse.Namespace, steps: int) -> None:
        self.options, self.steps = options, steps
        self.rate, self.mtp_weight, self.bias_speed = (torch.zeros((), device=options.device) for _ in range(3))

    def rate_at(self, step: int) -> float:
        """Linear warm-up, a plateau, and a linear fall to zero."""
        left = (self.steps - step) / self.steps
        return self.options.rate * min(1.0, (step + 1) / WARMUP_STEPS, left / self.options.cooldown)

    def temperature_at(self, step: int) -> float:
        """Half a cosine from the first to the last temperature."""
        first, last = self.options.temperature
        done = min(1.0, step / (self.steps * ANNEALED))
        return last + (first - last) * (1 + math.cos(math.pi * done)) / 2

    def set(self, step: int, model: Model) -> None:
        """Fill the scalars for ``step``."""
        self.rate.fill_(self.rate_at(step))
        self.mtp_weight.fill_(MTP_WEIGHTS[step >= MTP_SWITCH * self.steps])
        self.bias_speed.fill_(BIAS_SPEED * min(1.0, 2 * (1 - step / self.steps)))
        model.temperature.fill_(self.temperature_at(step))


def is_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether Muon trains a parameter: matrices inside layers, but not the gates."""
    return parameter.dim() > 1 and not name.startswith(("embed_tokens", "lm_head")) and ".gate.weight" not in name


class Trainer:
    """One training step over a model, plain on the CPU, compiled and captured on a GPU."""

    def __init__(self, model: Model, schedule: Schedule, decay: float, bos: int) -> None:
        self.model, self.schedule, self.bos = model, schedule, bos
        named = list(model.named_parameters())
        self.muon = Muon([parameter for name, parameter in named if is_matrix(name, parameter)], decay)
        self.adamw = AdamW([parameter for name, parameter in named if not is_matrix(name, parameter)], decay)
        self.losses = torch.zeros(2, device=schedule.rate.device)
        self.replays: dict[int, tuple[Tensor, Callable[[], None]]] = {}

    def step(self, ids: Tensor) -> None:
        """Train on ids [rows, window + 2]; the main and MTP losses are left in ``losses``."""
        for parameter in self.model.parameters():
            parameter.grad = None
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda):
            main, ahead, loads = self.model.losses(ids, self.bos)
            (main + self.schedule.mtp_weight * ahead).backward()
        self.muon.step(self.schedule.rate)
        self.adamw.step(self.schedule.rate)
        self.balance(loads)
        self.losses.copy_(torch.stack((main.detach(), ahead.detach())))

    @torch.no_grad()
    def balance(self, loads: Tensor) -> None:
        """Raise the bias of every expert below its layer's mean load and lower the others', by the bias speed."""
        signs = (loads.mean(-1, keepdim=True) - loads).sign()
        for gate, sign in zip(self.model.gates(), signs, strict=True):
            gate.e_score_correction_bias += sign * self.schedule.bias_speed

    def capture(self, rows: int, window: int) -> None:
        """Record the step for one batch shape. Rates are zero meanwhile, so no parameter moves."""
        ids = torch.randint(3, 1000, (rows, window + 2), device="cuda")
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.step(ids)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step(ids)
        self.replays[window] = (ids, graph.replay)
        self.muon.reset()
        self.adamw.reset()

    def train(self, batch: NDArray[np.uint16]) -> None:
        """Train on one batch of the packer's."""
        ids = torch.from_numpy(batch.astype(np.int64))
        captured = self.replays.get(batch.shape[1] - 2)
        if captured is None:
            self.step(ids)
            return
        static, replay = captured
        static.copy_(ids.pin_memory(), non_blocking=True)
        replay()


def batches(options: argparse.Namespace, source: Batches) -> Iterator[NDArray[np.uint16]]:
    """Yield the batches of all epochs, short windows first."""
    for epoch in range(options.epochs):
        is_long = epoch >= options.epochs - options.long_epochs
        yield from source.epoch(options.long_window if is_long else options.window)


def measure(model: Model, tokenizer: Tokenizer, texts: list[str], device: str) -> dict[str, object]:
    """Measure a split as the README reports it."""
    model.eval()

    def predict(ids: Tensor) -> Tensor:
        return model.lm_head(model.hidden_states(ids)[0])

    # Windows of many lengths: not worth compiling.
    with torch.compiler.set_stance("force_eager"):
        found = evaluate.likelihood(predict, tokenizer, texts, device)
        inner = evaluate.inside(model, tokenizer, texts, device)
    model.train()
    return {
        "loss": found.loss,
        "perplexity": found.perplexity,
        "bits_per_byte": found.bits_per_byte,
        "expert_load_variance": inner.variances,
        "expert_load_largest": inner.largest,
        "mtp_agreement": inner.mtp_agreement,
    }


def train(
    options: argparse.Namespace, tokenizer: Tokenizer, texts: dict[str, list[str]]
) -> tuple[Model, dict[str, object]]:
    """Train and return the model and the run's figures."""
    torch.manual_seed(options.seed)
    device = options.device
    model = Model(Shape(), options.dropout).to(device)
    packer = Packer(tokenizer, texts["train"], options.seed)
    tokens_an_epoch = len(packer.epoch(-1))
    steps = options.steps or int(options.epochs * tokens_an_epoch / options.tokens)
    schedule = Schedule(options, steps)
    trainer = Trainer(model, schedule, options.decay, vocabulary.token_id(tokenizer, vocabulary.BOS))
    started = time.monotonic()
    if device == "cuda":
        for layer in [*model.layers, model.mtp]:
            layer.compile(dynamic=False)
        model.cross_entropy = torch.compile(model.cross_entropy, dynamic=False)  # type: ignore[method-assign]
        for window in {options.window, options.long_window} if options.long_epochs else {options.window}:
            trainer.capture(options.tokens // window, window)
    ready = time.monotonic()
    print(f"{sum(p.numel() for p in model.parameters())} parameters, {tokens_an_epoch} tokens an epoch, {steps} steps")
    print(f"ready after {ready - started:.0f} s", flush=True)
    losses = torch.zeros(2, device=device)
    step = 0
    for step, batch in enumerate(batches(options, Batches(packer, options.tokens))):
        if step == steps:
            break
        schedule.set(step, model)
        trainer.train(batch)
        losses.lerp_(trainer.losses, 1 / min(step + 1, 100))
        if (step + 1) % options.report_every == 0:
            main, ahead = losses.tolist()
            rate = (step + 1) * options.tokens / (time.monotonic() - ready)
            print(f"step {step + 1} loss {main:.4f} mtp {ahead:.4f} {rate / 1e6:.2f} M tokens/s", flush=True)
    main, ahead = losses.tolist()
    figures: dict[str, object] = {
        "options": {name: value for name, value in vars(options).items() if not isinstance(value, Path)},
        "shape": asdict(model.shape),
        "steps": min(step + 1, steps),
        "tokens_an_epoch": tokens_an_epoch,
        "seconds": time.monotonic() - ready,
        "train_loss": main,
        "train_mtp_loss": ahead,
    }
    return model, figures


def main() -> None:
    options = arguments()
    tokenizer = Tokenizer.from_file(str(options.tokenizer))
    documents = corpus.read(options.corpus)
    texts = {split: [d.text for d in documents if d.split == split] for split in ("train", "valid", "test")}
    model, figures = train(options, tokenizer, texts)
    for split in ("valid", "test"):
        figures[split] = measured = measure(model, tokenizer, texts[split], options.device)
        print(split, json.dumps(measured))
    export.write(model, options.out)
    (options.out / "figures.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
