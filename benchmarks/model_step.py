"""Milliseconds a decoding step: our model against transformers', on one checkpoint, in one run.

    python benchmarks/model_step.py [--checkpoint FOLDER] [--batch 1 8] [--context 128] [--steps 100] [--threads N]

A step runs one token for every row of the batch, over `context` tokens of cache, and makes its logits; nothing is
sampled. The two sides take turns step by step, so that whatever else the machine does falls on both, and medians are
compared. Without --checkpoint, a random one of DeepSeek-V3's architecture and of the demo checkpoint's size is made.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from deepseek_engine.batch import Batch
from deepseek_engine.cache_spec import Cache
from deepseek_engine.models import Model, load_model
from transformers import AutoModelForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM, PreTrainedModel

BLOCK_SIZE = 16


def main() -> None:
    arguments = parse_arguments()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.checkpoint or random_checkpoint(Path(scratch))
        model = load_model(folder, dtype=torch.float32)
        oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        parameters = sum(parameter.numel() for parameter in oracle.parameters())
        print(f"{model.config.architecture}, {parameters / 1e6:.1f} M parameters, {torch.get_num_threads()} threads")
        print(f"{'batch':>5} {'context':>7} {'ours ms':>8} {'hf ms':>8} {'ratio':>6} {'difference':>10}")
        for rows in arguments.batch:
            compare(model, oracle, rows, arguments.context, arguments.steps)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, help="a Hugging Face folder; default: a random one is made")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="rows a step")
    parser.add_argument("--context", type=int, default=128, help="tokens in the cache when the steps begin")
    parser.add_argument("--steps", type=int, default=100, help="steps that are timed")
    parser.add_argument("--threads", type=int, help="of torch; default: its own choice")
    return parser.parse_args()


def random_checkpoint(folder: Path) -> Path:
    """DeepSeek-V3's architecture at the size of the demo checkpoint."""
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=768,
        moe_intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=96,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        n_routed_experts=16,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        max_position_embeddings=4096,
    )
    DeepseekV3ForCausalLM(config).save_pretrained(folder)
    return folder


@torch.inference_mode()
def compare(model: Model, oracle: PreTrainedModel, rows: int, context: int, steps: int) -> None:
    """Prefill both, then time alternate steps of each; prints one line."""
    prompt = torch.randint(2, model.config.vocab_size, (rows, context))
    tokens = torch.randint(2, model.config.vocab_size, (steps, rows))
    length = context + steps
    tables = torch.arange(rows * blocks(length)).view(rows, -1)
    cache = model.cache_spec().allocate(tables.numel(), BLOCK_SIZE)
    model.forward(batch(prompt, 0, tables), cache)
    past = oracle(prompt, use_cache=True).past_key_values

    ours, theirs, difference = [], [], 0.0
    for step in range(steps):
        seconds, logits = timed(our_step, model, cache, tokens[step], context + step, tables)
        ours.append(seconds)
        seconds, expected = timed(their_step, oracle, past, tokens[step])
        theirs.append(seconds)
        difference = max(difference, float((logits - expected).abs().max()))
    our_ms, their_ms = (statistics.median(times) * 1e3 for times in (ours, theirs))
    print(f"{rows:5} {context:7} {our_ms:8.2f} {their_ms:8.2f} {their_ms / our_ms:6.2f} {difference:10.1e}")


def our_step(model: Model, cache: Cache, tokens: torch.Tensor, position: int, tables: torch.Tensor) -> torch.Tensor:
    return model.logits(model.forward(batch(tokens.unsqueeze(-1), position, tables), cache))


def their_step(oracle: PreTrainedModel, past: object, tokens: torch.Tensor) -> torch.Tensor:
    return oracle(tokens.unsqueeze(-1), past_key_values=past, use_cache=True).logits[:, -1]


def batch(token_ids: torch.Tensor, start: int, tables: torch.Tensor) -> Batch:
    """Rows of equal length, all at position `start`."""
    rows, count = token_ids.shape
    positions = torch.arange(start, start + count).expand(rows, -1)
    slots = tables.gather(1, positions // BLOCK_SIZE) * BLOCK_SIZE + positions % BLOCK_SIZE
    return Batch(
        token_ids=token_ids.flatten(),
        positions=positions.flatten(),
        slots=slots.flatten(),
        query_starts=list(range(0, rows * count + 1, count)),
        context_lengths=[start + count] * rows,
        block_tables=tables,
        block_size=BLOCK_SIZE,
    )


def blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE)


def timed(run: Callable[..., torch.Tensor], *arguments: object) -> tuple[float, torch.Tensor]:
    begin = time.perf_counter()
    result = run(*arguments)
    return time.perf_counter() - begin, result


if __name__ == "__main__":
    main()
