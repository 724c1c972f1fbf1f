"""Random weights of DeepSeek-V2-Lite's shape as a Hugging Face folder, made on the device and written in parallel.

Reading this module needs no torch: whether the folder is whole is asked before any process with a GPU is started.
"""

import json
import os
import queue
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from math import prod, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Its tokenizer stands in for the model's own: nothing that is measured is detokenised.
TOKENIZER = Path(__file__).parents[2] / "assets" / "demo"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 << 29
WRITERS = 4
_PIECE = 1 << 28


def v2_lite(layers: int = 27) -> dict[str, Any]:
    """config.json of DeepSeek-V2-Lite, with fewer layers where asked."""
    return {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 100000,
        "eos_token_id": 100001,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 10944,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": 1408,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": layers,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "greedy",
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "v_head_dim": 128,
        "vocab_size": 102400,
    }


def tiny(layers: int = 3) -> dict[str, Any]:
    """The same architecture at a size for trials on a CPU."""
    return v2_lite(layers) | {
        "bos_token_id": 0,
        "eos_token_id": 1,
        "hidden_size": 64,
        "intermediate_size": 96,
        "kv_lora_rank": 32,
        "moe_intermediate_size": 32,
        "n_routed_experts": 16,
        "num_attention_heads": 4,
        "num_experts_per_tok": 3,
        "num_key_value_heads": 4,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "vocab_size": 2560,
    }


SHAPES = {"v2-lite": v2_lite, "tiny": tiny}


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor on disk; std None is a norm's weight, uniform in 0.5 to 1.5."""

    name: str
    shape: tuple[int, ...]
    std: float | None

    @property
    def count(self) -> int:
        return prod(self.shape)


def entries(config: dict[str, Any]) -> Iterator[Entry]:
    """All tensors of a model without query compression, by their names in DeepSeek's files.

    Embedding rows have unit variance and projections keep it; what is added to the residual is smaller by
    sqrt(2 * layers), so that the residual stays of order one and each token's own part in it large. Experts are then
    chosen about evenly, by the row's own token.
    """
    hidden, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
    rank, rotary, nope = config["kv_lora_rank"], config["qk_rope_head_dim"], config["qk_nope_head_dim"]
    inner, shared = config["moe_intermediate_size"], config["n_shared_experts"]

    def matrix(name: str, rows: int, columns: int, *, out: bool = False) -> Entry:
        return Entry(f"{name}.weight", (rows, columns), columns**-0.5 / (sqrt(2 * layers) if out else 1.0))

    def mlp(name: str, width: int) -> Iterator[Entry]:
        yield matrix(f"{name}.gate_proj", width, hidden)
        yield matrix(f"{name}.up_proj", width, hidden)
        yield matrix(f"{name}.down_proj", hidden, width, out=True)

    yield Entry("model.embed_tokens.weight", (config["vocab_size"], hidden), 1.0)
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        yield Entry(f"{prefix}.input_layernorm.weight", (hidden,), None)
        yield Entry(f"{prefix}.post_attention_layernorm.weight", (hidden,), None)
        attention = f"{prefix}.self_attn"
        yield matrix(f"{attention}.q_proj", heads * (nope + rotary), hidden)
        yield matrix(f"{attention}.kv_a_proj_with_mqa", rank + rotary, hidden)
        yield Entry(f"{attention}.kv_a_layernorm.weight", (rank,), None)
        yield matrix(f"{attention}.kv_b_proj", heads * (nope + config["v_head_dim"]), rank)
        yield matrix(f"{attention}.o_proj", hidden, heads * config["v_head_dim"], out=True)
        if layer < config["first_k_dense_replace"]:
            yield from mlp(f"{prefix}.mlp", config["intermediate_size"])
            continue
        yield matrix(f"{prefix}.mlp.gate", config["n_routed_experts"], hidden)
        for expert in range(config["n_routed_experts"]):
            yield from mlp(f"{prefix}.mlp.experts.{expert}", inner)
        yield from mlp(f"{prefix}.mlp.shared_experts", shared * inner)
    yield Entry("model.norm.weight", (hidden,), None)
    yield matrix("lm_head", config["vocab_size"], hidden)


def ensure(folder: Path, config: dict[str, Any], *, seed: int, device: "torch.device") -> bool:
    """Make the folder unless it is there and whole; returns whether it was made."""
    if is_whole(folder, config, seed):
        return False
    if folder.exists() and not (folder / "config.json").exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} holds something else than a checkpoint; name another folder")
    make(folder, config, seed=seed, device=device)
    return True


def is_whole(folder: Path, config: dict[str, Any], seed: int) -> bool:
    """Whether the folder holds these very weights: the index is written last and names shape, seed and sizes."""
    try:
        index = json.loads((folder / INDEX).read_text())
        sizes = index["metadata"]["sizes"]
        same = index["metadata"]["seed"] == seed and json.loads((folder / "config.json").read_text()) == config
        return same and all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError):
        return False


def make(
    folder: Path, config: dict[str, Any], *, seed: int, device: "torch.device", shard_bytes: int = SHARD_BYTES
) -> None:
    """Write config, tokenizer, shards and index. A shard is written while the next ones are made.

    bfloat16 always. The same seed gives the same weights on devices of one kind.
    """
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    (folder / INDEX).unlink(missing_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in TOKENIZER_FILES:
        shutil.copy(TOKENIZER / name, folder / name)
    shards = list(_shards(config, shard_bytes))
    largest = max(sum(entry.count for entry in shard) for shard in shards)
    pinned = device.type == "cuda"
    free: queue.Queue[torch.Tensor] = queue.Queue()
    for _ in range(min(WRITERS, len(shards))):
        free.put(torch.empty(largest, dtype=torch.bfloat16, pin_memory=pinned))
    values = torch.empty(largest, dtype=torch.bfloat16, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    names = [f"model-{place + 1:05}-of-{len(shards):05}.safetensors" for place in range(len(shards))]
    with ThreadPoolExecutor(WRITERS) as pool:
        written = []
        for name, shard in zip(names, shards, strict=True):
            count = _fill(values, shard, generator)
            buffer = free.get()
            buffer[:count].copy_(values[:count])
            written.append(pool.submit(_write, folder / name, shard, buffer, count, free))
        sizes = [each.result() for each in written]
    index = {
        "metadata": {
            "total_size": 2 * sum(entry.count for entry in entries(config)),
            "seed": seed,
            "sizes": dict(zip(names, sizes, strict=True)),
        },
        "weight_map": {entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard},
    }
    whole = folder / f"{INDEX}.part"
    whole.write_text(json.dumps(index, indent=1) + "\n")
    os.replace(whole, folder / INDEX)


def _shards(config: dict[str, Any], limit: int) -> Iterator[list[Entry]]:
    """Entries in order, cut so that a shard has at most `limit` bytes, or one entry."""
    shard: list[Entry] = []
    size = 0
    for entry in entries(config):
        if shard and size + 2 * entry.count > limit:
            yield shard
            shard, size = [], 0
        shard.append(entry)
        size += 2 * entry.count
    yield shard


def _fill(values: "torch.Tensor", shard: list[Entry], generator: "torch.Generator") -> int:
    """Put a shard's random values into `values`, back to back; returns how many they are."""
    count = sum(entry.count for entry in shard)
    values[:count].normal_(generator=generator)
    start = 0
    for entry in shard:
        part = values[start : start + entry.count]
        if entry.std is None:
            part.uniform_(0.5, 1.5, generator=generator)
        elif entry.std != 1.0:
            part.mul_(entry.std)
        start += entry.count
    return count


def header(shard: list[Entry]) -> bytes:
    """The beginning of a safetensors file: the header's length, and the header padded to 8 bytes."""
    stops = list(accumulate(2 * entry.count for entry in shard))
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for entry, start, stop in zip(shard, [0, *stops], stops, strict=False):
        table[entry.name] = {"dtype": "BF16", "shape": list(entry.shape), "data_offsets": [start, stop]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write(
    path: Path, shard: list[Entry], buffer: "torch.Tensor", count: int, free: "queue.Queue[torch.Tensor]"
) -> int:
    """Write a shard's file from its values, give the buffer back, and return the file's size.

    The library's own writer copies every tensor once more while it holds Python's lock.
    """
    import torch

    try:
        data = buffer[:count].view(torch.uint8).numpy().data
        with path.open("wb", buffering=0) as file:
            file.write(header(shard))
            place = 0
            while place < len(data):
                place += file.write(data[place : place + _PIECE])
            return file.tell()
    finally:
        free.put(buffer)


def read_through(folder: Path) -> int:
    """Read all shards once, so that they are in the page cache; returns their bytes."""
    with ThreadPoolExecutor(WRITERS) as pool:
        return sum(pool.map(_read, sorted(folder.glob("*.safetensors"))))


def _read(path: Path) -> int:
    piece, total = bytearray(1 << 24), 0
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            total += count
    return total
