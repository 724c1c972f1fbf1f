"""Random inputs that an operator takes, in odd sizes, and what its torch reference makes of them."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from deepseek_engine.batch import Batch
from deepseek_engine.kernels import moe_gate
from deepseek_engine.kernels.attention_plan import attention_plan
from deepseek_engine.kernels.int4_gemm import dequantized
from deepseek_engine.kernels.linear import linear
from deepseek_engine.kernels.mla_attention import mla_attention
from deepseek_engine.kernels.moe_experts import grouped_experts
from deepseek_engine.kernels.paged_attention import paged_attention
from deepseek_engine.kernels.rms_norm import rms_norm
from deepseek_engine.kernels.rope import interleaving, rope_table, rotate_pairs_, rotations
from deepseek_engine.kernels.swiglu import swiglu
from deepseek_engine.models.config import RopeConfig
from deepseek_engine.models.rope_frequencies import rope_frequencies
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(slots=True)
class Case:
    """One node's inputs and attributes, and its outputs by the reference, float32 where they are floats.

    Attributes:
        dtype: of the activations.
    """

    name: str
    dtype: torch.dtype
    inputs: dict[str, Tensor]
    attributes: dict[str, Any]
    expected: dict[str, Tensor] = field(default_factory=dict)

    @property
    def outputs(self) -> list[str]:
        return list(self.expected)


def make_case(name: str, seed: int, dtype: torch.dtype | None = None) -> Case:
    """A case of an operator: the same for the same seed. `dtype` fixes that of the activations."""
    draw = Draw(random.Random(f"{name} {seed}"), dtype)
    return _MAKERS[name](draw)


class Draw:
    """Random choices of one case."""

    def __init__(self, rng: random.Random, dtype: torch.dtype | None) -> None:
        self.rng = rng
        self.generator = torch.Generator().manual_seed(rng.getrandbits(60))
        self.dtype = dtype or rng.choice(FLOATS)

    def size(self, low: int, high: int) -> int:
        """Small sizes are as likely as large ones."""
        return self.rng.randint(low, self.rng.randint(low, high))

    def flip(self) -> bool:
        return self.rng.random() < 0.5

    def weights(self) -> torch.dtype:
        return self.rng.choice(FLOATS)

    def normal(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=self.generator) * scale).to(dtype or self.dtype)

    def uniform(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return (torch.rand(shape, generator=self.generator) + 0.5).to(dtype or self.dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator, dtype=dtype)


def _rms_norm(draw: Draw) -> Case:
    rows, heads, width = draw.size(1, 9), draw.size(1, 5), draw.size(1, 300)
    columns = draw.size(1, width) if draw.flip() else width
    inputs = {"x": draw.normal(rows, heads * width), "weight": draw.uniform(columns, dtype=draw.dtype)}
    total = inputs["x"]
    if draw.flip():
        inputs["residual"] = draw.normal(rows, heads * width)
        total = total + inputs["residual"]
    by_head = total.view(rows, heads, width)
    normed = rms_norm(by_head[..., :columns].contiguous(), inputs["weight"], 1e-5)
    y = torch.cat((normed, by_head[..., columns:]), dim=-1).flatten(1)
    expected = {"y": y, "sum": total} if draw.flip() else {"y": y}
    return Case("DeepSeekRMSNorm", draw.dtype, inputs, {"epsilon": 1e-5, "num_heads": heads}, expected)


def _rotary_embedding(draw: Draw) -> Case:
    rows, heads, pairs = draw.size(1, 9), draw.size(1, 4), draw.size(1, 40)
    kept, positions = draw.size(0, 17), draw.integers(0, 9000, rows)
    yarn = RopeConfig("yarn", factor=40.0, original_max_position_embeddings=4096)
    inv_freq = rope_frequencies(yarn if draw.flip() else RopeConfig(), 2 * pairs)
    x = draw.normal(rows, heads * (kept + 2 * pairs))
    scale = draw.rng.choice((1.0, 1.2))
    interleaved = draw.flip()
    rotation = rotations(positions, inv_freq, scale)
    turned = _turned(x.float().view(rows, heads, -1), kept, rotation, interleaved=interleaved)
    attributes = {"num_heads": heads, "interleaved": int(interleaved), "scale": scale}
    inputs = {"x": x, "positions": positions, "inv_freq": inv_freq}
    return Case("DeepSeekRotaryEmbedding", draw.dtype, inputs, attributes, {"y": turned.flatten(1)})


def _turned(x: Tensor, kept: int, rotation: Tensor, *, interleaved: bool) -> Tensor:
    """float32 rows of heads [T, heads, width] with all columns but the first `kept` rotated, in their places."""
    turned, width = x.clone(), x.shape[-1] - kept
    order = kept + (torch.arange(width) if interleaved else interleaving(width))
    turned[..., order] = rotate_pairs_(turned[..., order].contiguous(), rotation)
    return turned


def _normed(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Float32, of a weight of any type: rounded to x's type before it is multiplied by it."""
    return rms_norm(x, torch.ones_like(x[0]), epsilon).float() * weight.float()


def _swiglu(draw: Draw) -> Case:
    gate_up = draw.normal(draw.size(1, 9), 2 * draw.size(1, 200), scale=3.0)
    return Case("DeepSeekSwiGLU", draw.dtype, {"gate_up": gate_up}, {}, {"y": swiglu(gate_up.float())})


def _product_inputs(draw: Draw, columns: int, outputs: int, dtype: torch.dtype) -> dict[str, Tensor]:
    rows = draw.rng.choice((1, 2, 3, 4, 7, 8, 13, 60))
    inputs = {"x": draw.normal(rows, columns, scale=columns**-0.5)}
    if draw.flip():
        inputs["bias"] = draw.normal(outputs, dtype=dtype)
    if draw.flip():
        inputs["residual"] = draw.normal(rows, outputs)
    return inputs


def _add_norm(draw: Draw, inputs: dict[str, Tensor]) -> dict[str, float]:
    """A norm of the rows, or none; returns its attribute."""
    if draw.flip():
        return {}
    columns = inputs["x"].shape[1]
    inputs["norm"] = draw.uniform(columns, dtype=draw.weights()) * columns**-0.5
    return {"epsilon": 1e-5}


def _product(inputs: Mapping[str, Tensor], weight: Tensor) -> Tensor:
    bias = inputs["bias"].float() if "bias" in inputs else None
    x = inputs["x"]
    if "norm" in inputs:
        x = _normed(x, inputs["norm"], 1e-5).to(x.dtype)
    y = linear(x.float(), weight.float().t(), bias)
    return y + inputs["residual"].float() if "residual" in inputs else y


def _matmul(draw: Draw) -> Case:
    columns, outputs, dtype = draw.rng.choice((draw.size(1, 70), draw.size(1, 2300))), draw.size(1, 300), draw.weights()
    inputs = _product_inputs(draw, columns, outputs, dtype)
    inputs["weight"] = draw.normal(outputs, columns, dtype=dtype)
    attributes = _add_norm(draw, inputs)
    return Case("DeepSeekMatMul", draw.dtype, inputs, attributes, {"y": _product(inputs, inputs["weight"])})


def _logits(draw: Draw) -> Case:
    case = _matmul(draw)
    inputs = {name: case.inputs[name] for name in ("x", "weight")}
    return Case("DeepSeekLogits", draw.dtype, inputs, {}, {"logits": _product(inputs, inputs["weight"])})


def _packed_int4(
    draw: Draw, inputs: dict[str, Tensor], name: str, *shape: int, group: int, dtype: torch.dtype, scale: float
) -> Tensor:
    """Adds a random weight [..., columns] to the inputs; returns what it stands for."""
    *rows, columns = shape
    prefix, groups = "" if name == "weight" else f"{name}_", -(-columns // group)
    q = inputs[name] = draw.integers(0, 256, *rows, -(-columns // 2), dtype=torch.uint8)
    scales = inputs[f"{prefix}scales"] = draw.uniform(*rows, groups, dtype=dtype) * scale
    zeros = None
    if draw.flip():
        zeros = inputs[f"{prefix}zeros"] = draw.integers(0, 16, *rows, groups, dtype=torch.uint8)
    return dequantized(q, scales, zeros, columns, group)


def _matmul_int4(draw: Draw) -> Case:
    columns, outputs, dtype = draw.size(1, 1500), draw.size(1, 90), draw.weights()
    group = draw.rng.choice((8, 24, 32, 64, 128))
    inputs = _product_inputs(draw, columns, outputs, dtype)
    weight = _packed_int4(draw, inputs, "weight", outputs, columns, group=group, dtype=dtype, scale=0.2)
    attributes = {"group_size": group, **_add_norm(draw, inputs)}
    return Case("DeepSeekMatMulInt4", draw.dtype, inputs, attributes, {"y": _product(inputs, weight)})


def _matmul_fp8_block(draw: Draw) -> Case:
    columns, outputs, dtype = draw.size(1, 600), draw.size(1, 300), draw.weights()
    rows, width = draw.rng.choice((128, 7)), draw.rng.choice((128, 13))
    inputs = _product_inputs(draw, columns, outputs, dtype)
    # What is beyond the largest number becomes that in some releases of torch, and no number in others.
    values = draw.normal(outputs, columns, dtype=torch.float32, scale=100.0).clamp(-448.0, 448.0)
    weight = values.to(torch.float8_e4m3fn)
    inputs["weight"] = weight.view(torch.uint8) if draw.flip() else weight
    inputs["scale_inv"] = draw.uniform(-(-outputs // rows), -(-columns // width), dtype=torch.float32) * 0.01
    scale = inputs["scale_inv"].repeat_interleave(rows, 0)[:outputs].repeat_interleave(width, 1)[:, :columns]
    attributes = {"block_rows": rows, "block_columns": width}
    expected = {"y": _product(inputs, weight.float() * scale)}
    return Case("DeepSeekMatMulFp8Block", draw.dtype, inputs, attributes, expected)


@dataclass(slots=True)
class PagedStep:
    """A step of several sequences over a cache with blocks in shuffled order."""

    block_size: int
    blocks: int
    tables: Tensor
    starts: list[int]
    lengths: list[int]
    positions: Tensor
    slots: Tensor

    @property
    def rows(self) -> int:
        return self.starts[-1]

    def inputs(self) -> dict[str, Tensor]:
        return {
            "block_tables": self.tables,
            "query_starts": torch.tensor(self.starts),
            "context_lengths": torch.tensor(self.lengths),
        }

    def batch(self) -> Batch:
        """For the references."""
        return Batch(
            token_ids=torch.zeros(self.rows, dtype=torch.int64),
            positions=self.positions,
            slots=self.slots,
            query_starts=self.starts,
            context_lengths=self.lengths,
            block_tables=self.tables.clamp(min=0),
            block_size=self.block_size,
        )


def paged_step(draw: Draw) -> PagedStep:
    """Sequences of one new token, of chunks, and of whole prompts."""
    block_size = draw.rng.choice((1, 16, 32))
    counts = [draw.rng.choice((1, 1, draw.size(1, 90))) for _ in range(draw.size(1, 4))]
    lengths = [count + draw.rng.choice((0, draw.size(0, 90))) for count in counts]
    used = [-(-length // block_size) for length in lengths]
    blocks = sum(used) + draw.size(1, 3)
    order = draw.rng.sample(range(blocks), blocks)
    # Places that no sequence uses hold what is no block.
    tables = torch.full((len(counts), max(used) + draw.size(0, 2)), -1)
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        own = [order.pop() for _ in range(used[row])]
        tables[row, : len(own)] = torch.tensor(own)
        fresh = range(length - count, length)
        positions += fresh
        slots += [own[p // block_size] * block_size + p % block_size for p in fresh]
        starts.append(starts[-1] + count)
    return PagedStep(block_size, blocks, tables, starts, lengths, torch.tensor(positions), torch.tensor(slots))


def _written(cache: Tensor, entries: Tensor, slots: Tensor) -> Tensor:
    written = cache.flatten(0, 1).clone()
    written[slots] = entries.to(cache.dtype)
    return written


def _mla_paged_attention(draw: Draw) -> Case:
    heads, nope, rope, value = draw.size(1, 20), draw.size(1, 40), 2 * draw.size(1, 12), draw.size(1, 40)
    rank, step = draw.size(1, 70), paged_step(draw)
    cache = draw.normal(step.blocks, step.block_size, rank + rope, dtype=draw.weights())
    inputs = {
        "q": draw.normal(step.rows, heads * (nope + rope)),
        "entries": draw.normal(step.rows, rank + rope),
        "cache": cache,
        "kv_b": draw.normal(heads * (nope + value), rank, dtype=draw.weights(), scale=rank**-0.5),
        **step.inputs(),
    }
    scale = float(nope + rope) ** -0.5
    attributes = {
        "num_heads": heads,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": value,
        "scale": scale,
    }
    q, entries = inputs["q"].float().view(step.rows, heads, nope + rope), inputs["entries"]
    if draw.flip():
        q, entries = _prepared(draw, inputs, attributes, q, rank, step.positions)
    latents = _written(cache, entries, step.slots)
    plan = attention_plan(step.batch(), torch.float32)
    kv_b = inputs["kv_b"].float().view(heads, nope + value, rank)
    y = mla_attention(q, latents.float(), kv_b, plan, scale, nope)
    expected = {"y": y, "cache_out": latents.view_as(cache)}
    return Case("DeepSeekMLAPagedAttention", draw.dtype, inputs, attributes, expected)


def _prepared(
    draw: Draw, inputs: dict[str, Tensor], attributes: dict[str, Any], q: Tensor, rank: int, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Adds what the operator normalises and rotates by; returns queries and entries as it then has them."""
    kept, rope, interleaved = attributes["qk_nope_head_dim"], attributes["qk_rope_head_dim"], draw.flip()
    inv_freq, epsilon = rope_frequencies(RopeConfig(), rope), 1e-5
    inputs["positions"] = positions
    inputs["rotations"] = rope_table(inv_freq, 1.1, int(positions.max()) + draw.size(1, 5))
    inputs["latent_norm"] = draw.uniform(rank, dtype=draw.weights())
    attributes |= {"latent_epsilon": epsilon, "interleaved": int(interleaved)}
    entries, rotation = inputs["entries"], rotations(positions, inv_freq, 1.1)
    normed = torch.cat((_normed(entries[:, :rank], inputs["latent_norm"], epsilon), entries[:, rank:].float()), dim=-1)
    turned = _turned(normed.unsqueeze(1), rank, rotation, interleaved=interleaved).squeeze(1)
    return _turned(q, kept, rotation, interleaved=interleaved), turned


def _paged_attention(draw: Draw) -> Case:
    groups, shared, width, step = draw.size(1, 4), draw.size(1, 5), draw.size(1, 70), paged_step(draw)
    caches = [
        draw.normal(step.blocks, step.block_size, groups * width, dtype=dtype)
        for dtype in [draw.weights()]
        for _ in "kv"
    ]
    inputs = {
        "q": draw.normal(step.rows, groups * shared * width),
        "k": draw.normal(step.rows, groups * width),
        "v": draw.normal(step.rows, groups * width),
        "key_cache": caches[0],
        "value_cache": caches[1],
        **step.inputs(),
    }
    keys, values = _written(caches[0], inputs["k"], step.slots), _written(caches[1], inputs["v"], step.slots)
    plan = attention_plan(step.batch(), torch.float32)
    q = inputs["q"].float().view(step.rows, groups * shared, width)
    y = paged_attention(q, keys.float(), values.float(), plan, width**-0.5)
    attributes = {
        "num_heads": groups * shared,
        "num_key_value_heads": groups,
        "head_dim": width,
        "scale": width**-0.5,
    }
    expected = {
        "y": y,
        "key_cache_out": keys.view_as(caches[0]),
        "value_cache_out": values.view_as(caches[1]),
    }
    return Case("DeepSeekPagedAttention", draw.dtype, inputs, attributes, expected)


def _moe_gate(draw: Draw) -> Case:
    method = draw.rng.choice(("greedy", "group_limited_greedy", "noaux_tc"))
    groups = 1 if method == "greedy" else draw.size(1, 8)
    width, kept = draw.size(2, 40), draw.size(1, groups)
    top_k, normalize, scaling = draw.size(1, min(8, width * kept)), draw.flip(), draw.rng.choice((1.0, 2.5))
    rows, hidden, shared = draw.size(1, 9), draw.size(1, 70), draw.size(0, 2)
    inputs = {
        "x": draw.normal(rows, hidden, scale=hidden**-0.5),
        "weight": draw.normal(groups * width, hidden, dtype=draw.weights(), scale=2.0),
    }
    logits = inputs["x"].float() @ inputs["weight"].float().t()
    options = {"top_k": top_k, "normalize": normalize, "scaling": scaling}
    if method == "greedy":
        weights, experts = moe_gate.greedy(logits, **options)
    elif method == "group_limited_greedy":
        weights, experts = moe_gate.group_limited_greedy(logits, groups=groups, topk_groups=kept, **options)
    else:
        bias = inputs["bias"] = draw.normal(groups * width, dtype=torch.float32, scale=0.5)
        weights, experts = moe_gate.noaux_tc(logits, bias, groups=groups, topk_groups=kept, **options)
    attributes = {
        "topk_method": method,
        "num_experts_per_tok": top_k,
        "n_group": groups,
        "topk_group": kept,
        "norm_topk_prob": int(normalize),
        "routed_scaling_factor": scaling,
        "n_shared_experts": shared,
    }
    weights = torch.cat((weights, torch.ones(rows, shared)), dim=1)
    experts = torch.cat((experts, torch.arange(groups * width, groups * width + shared).expand(rows, -1)), dim=1)
    if draw.flip():
        slots = inputs["slots"] = draw.integers(-1, 3, rows)
        experts[slots < 0] = -1
    return Case("DeepSeekMoEGate", draw.dtype, inputs, attributes, {"weights": weights, "experts": experts.int()})


def _routed_rows(draw: Draw, hidden: int, count: int) -> dict[str, Tensor]:
    rows, top_k = draw.size(1, 40), draw.size(1, min(count, 6))
    inputs = {
        "x": draw.normal(rows, hidden),
        "weights": draw.uniform(rows, top_k, dtype=torch.float32),
        "experts": torch.stack([torch.tensor(draw.rng.sample(range(count), top_k)) for _ in range(rows)]).int(),
    }
    if draw.flip():
        # Of padding; any choice may be none.
        inputs["experts"][draw.rng.randrange(rows)] = -1
    if draw.flip():
        inputs["residual"] = draw.normal(rows, hidden)
    return inputs


def _mixed(inputs: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> Tensor:
    """The experts' reference; `weights` are those of the operator, whatever `inputs` holds them as."""
    x, experts = inputs["x"].float(), inputs["experts"]
    y = grouped_experts(
        x,
        inputs["residual"].float() if "residual" in inputs else torch.zeros_like(x),
        inputs["weights"].where(experts >= 0, 0.0),
        experts.clamp(min=0).long(),
        weights["gate_up"].float().permute(2, 0, 1).contiguous(),
        weights["down"].float().transpose(1, 2).contiguous(),
        0,
    )
    if "shared_down" in weights:
        y = y + swiglu(x @ weights["shared_gate_up"].float().t()) @ weights["shared_down"].float().t()
    return y


def _expert_shapes(draw: Draw, hidden: int, count: int) -> dict[str, tuple[int, ...]]:
    inner, wide = draw.size(1, 90), draw.size(1, 60)
    shapes: dict[str, tuple[int, ...]] = {"gate_up": (count, 2 * inner, hidden), "down": (count, hidden, inner)}
    if draw.flip():
        shapes |= {"shared_gate_up": (2 * wide, hidden), "shared_down": (hidden, wide)}
    return shapes


def _moe(draw: Draw) -> Case:
    hidden, count, dtype = draw.size(1, 130), draw.size(1, 17), draw.weights()
    inputs = _routed_rows(draw, hidden, count)
    for name, shape in _expert_shapes(draw, hidden, count).items():
        inputs[name] = draw.normal(*shape, dtype=dtype, scale=shape[-1] ** -0.5)
    return Case("DeepSeekMoE", draw.dtype, inputs, {}, {"y": _mixed(inputs, inputs)})


def _moe_int4(draw: Draw) -> Case:
    hidden, count, dtype = draw.size(1, 300), draw.size(1, 9), draw.weights()
    group = draw.rng.choice((8, 24, 32, 64))
    inputs = _routed_rows(draw, hidden, count)
    weights = {
        name: _packed_int4(draw, inputs, name, *shape, group=group, dtype=dtype, scale=0.15 * shape[-1] ** -0.5)
        for name, shape in _expert_shapes(draw, hidden, count).items()
    }
    return Case("DeepSeekMoEInt4", draw.dtype, inputs, {"group_size": group}, {"y": _mixed(inputs, weights)})


_MAKERS: dict[str, Callable[[Draw], Case]] = {
    "DeepSeekRMSNorm": _rms_norm,
    "DeepSeekRotaryEmbedding": _rotary_embedding,
    "DeepSeekSwiGLU": _swiglu,
    "DeepSeekMatMul": _matmul,
    "DeepSeekLogits": _logits,
    "DeepSeekMatMulInt4": _matmul_int4,
    "DeepSeekMatMulFp8Block": _matmul_fp8_block,
    "DeepSeekMLAPagedAttention": _mla_paged_attention,
    "DeepSeekPagedAttention": _paged_attention,
    "DeepSeekMoEGate": _moe_gate,
    "DeepSeekMoE": _moe,
    "DeepSeekMoEInt4": _moe_int4,
}
