"""Random inputs for the operators on CUDA, and what float64 makes of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from deepseek_engine.kernels import moe_gate
from deepseek_engine.kernels.fp8_block_gemm import fp8_block_linear
from deepseek_engine.kernels.int4_gemm import dequantized, int4_linear
from deepseek_engine.kernels.mla_decode_triton import MAX_QUERIES
from deepseek_engine.kernels.rms_norm import rms_norm
from deepseek_engine.kernels.rope import rope_table
from deepseek_engine.kernels.swiglu import swiglu
from torch import Tensor


@dataclass(slots=True)
class CudaCase:
    """One node on CUDA.

    Attributes:
        expected: outputs in float64; integers are to be equal.
        constant: inputs that are initialisers.
        host: inputs that stay in the host's memory.
        roundings: of the result to the dtype and of what it is made of, for the tolerance.
        rows: rows of outputs that count; padded ones hold anything.
        captured: whether a CUDA graph may hold it; a step that reads a prompt is refused there.
    """

    name: str
    operator: str
    dtype: torch.dtype
    inputs: dict[str, Tensor]
    attributes: dict[str, Any]
    expected: dict[str, Tensor]
    constant: list[str] = field(default_factory=list)
    host: tuple[str, ...] = ("host_batch",)
    roundings: float = 1.5
    rows: int | None = None
    captured: bool = True

    def on(self, device: torch.device) -> "dict[str, Tensor]":
        """The inputs there, copied."""
        return {k: v.clone() if k in self.host else v.clone().to(device) for k, v in self.inputs.items()}

    def errors(self, outputs: dict[str, Tensor]) -> dict[str, float]:
        """Relative error of each output, by norms; infinite where integers differ."""
        found = {}
        for name, expected in self.expected.items():
            got = outputs[name].cpu()
            if self.rows is not None and got.shape[0] == expected.shape[0] and not name.endswith("cache_out"):
                got, expected = got[: self.rows], expected[: self.rows]
            if not got.is_floating_point():
                found[name] = 0.0 if torch.equal(got.long(), expected.long()) else float("inf")
                continue
            error = (got.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30)
            found[name] = float(error) if torch.isfinite(error) else float("inf")
        return found

    def tolerance(self) -> float:
        return self.roundings * {torch.bfloat16: 4e-3, torch.float16: 5e-4}[self.dtype]


class Numbers:
    """Random tensors of a dtype."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        return (torch.randn(shape, generator=self.generator) * scale).to(dtype or self.dtype)

    def uniform(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return (torch.rand(shape, generator=self.generator) + 0.5).to(dtype or self.dtype)

    def permutation(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self.generator)


Maker = Callable[[Numbers], CudaCase]


def norm_case(rows: int, width: int, *, residual: bool, sums: bool, heads: int = 1) -> Maker:
    def make(numbers: Numbers) -> CudaCase:
        inputs = {"x": numbers.normal(rows, heads * width), "weight": numbers.uniform(width)}
        total = inputs["x"]
        if residual:
            inputs["residual"] = numbers.normal(rows, heads * width)
            total = (total.double() + inputs["residual"].double()).to(numbers.dtype)
        y = rms_norm(total.view(rows, heads, width).double(), inputs["weight"].double(), 1e-5).flatten(1)
        expected = {"y": y, "sum": total.double()} if sums else {"y": y}
        name = f"norm{rows}x{heads}x{width}{'+residual' if residual else ''}"
        attributes = {"epsilon": 1e-5, "num_heads": heads}
        return CudaCase(name, "DeepSeekRMSNorm", numbers.dtype, inputs, attributes, expected, ["weight"])

    return make


def swiglu_case(rows: int, width: int) -> Maker:
    def make(numbers: Numbers) -> CudaCase:
        x = numbers.normal(rows, 2 * width, scale=2.0)
        expected = {"y": swiglu(x.double())}
        return CudaCase(f"swiglu{rows}x{width}", "DeepSeekSwiGLU", numbers.dtype, {"gate_up": x}, {}, expected)

    return make


def rotary_case(rows: int, heads: int, width: int, pairs: int, *, interleaved: bool) -> Maker:
    def make(numbers: Numbers) -> CudaCase:
        positions = torch.randint(0, 160_000, (rows,), generator=numbers.generator)
        inv_freq = 1e4 ** -(torch.arange(pairs) / pairs)
        inputs = {"x": numbers.normal(rows, heads * width), "positions": positions, "inv_freq": inv_freq}
        x = inputs["x"].double().unflatten(1, (heads, width))
        angles = (positions[:, None] * inv_freq).double()
        table = torch.cat((angles.cos(), angles.sin()), 1) * 1.25
        kept = width - 2 * pairs
        y = torch.cat((x[..., :kept], _rotated(x[..., kept:], table, interleaved)), -1).flatten(1)
        attributes = {"num_heads": heads, "interleaved": int(interleaved), "scale": 1.25}
        name = f"rotary{rows}x{heads}x{width}_{pairs}{'pairs' if interleaved else 'halves'}"
        return CudaCase(name, "DeepSeekRotaryEmbedding", numbers.dtype, inputs, attributes, {"y": y}, ["inv_freq"])

    return make


def product_case(
    rows: int, depth: int, columns: int, *, bias: bool = False, residual: bool = False, operator: str = "DeepSeekMatMul"
) -> Maker:
    def make(numbers: Numbers) -> CudaCase:
        inputs = {"x": numbers.normal(rows, depth), "weight": numbers.normal(columns, depth, scale=depth**-0.5)}
        y = inputs["x"].double() @ inputs["weight"].double().t()
        if bias:
            inputs["bias"] = numbers.normal(columns)
            y = y + inputs["bias"].double()
        if residual:
            inputs["residual"] = numbers.normal(rows, columns)
            y = y + inputs["residual"].double()
        added = ("+bias" if bias else "") + ("+residual" if residual else "")
        output = "logits" if operator == "DeepSeekLogits" else "y"
        return CudaCase(
            f"{operator.removeprefix('DeepSeek').lower()}{rows}x{depth}x{columns}{added}",
            operator,
            numbers.dtype,
            inputs,
            {},
            {output: y},
            ["weight"] if rows % 2 else [],
            roundings=2.5 if bias and residual else 1.5,
        )

    return make


def packed_int4(numbers: Numbers, rows: tuple[int, ...], depth: int, group_size: int) -> dict[str, Tensor]:
    """A weight [*rows, depth] of four bits: weight, scales and zeros."""
    groups = -(-depth // group_size)
    options: dict[str, Any] = {"generator": numbers.generator, "dtype": torch.uint8}
    return {
        "weight": torch.randint(0, 256, (*rows, -(-depth // 2)), **options),
        "scales": numbers.uniform(*rows, groups) * (0.2 * depth**-0.5),
        "zeros": torch.randint(0, 16, (*rows, groups), **options),
    }


def int4_case(
    rows: int,
    depth: int,
    columns: int,
    group_size: int = 32,
    *,
    bias: bool = False,
    residual: bool = False,
    zeros: bool = True,
) -> Maker:
    def make(numbers: Numbers) -> CudaCase:
        inputs = {"x": numbers.normal(rows, depth), **packed_int4(numbers, (columns,), depth, group_size)}
        if not zeros:
            del inputs["zeros"]
        if bias:
            inputs["bias"] = numbers.normal(columns)
        if residual:
            inputs["residual"] = numbers.normal(rows, columns)
        wide = {name: inputs[name].double() for name in ("bias", "residual") if name in inputs}
        y = int4_linear(
            inputs["x"].double(), inputs["weight"], inputs["scales"], inputs.get("zeros"), group_size, **wide
        )
        added = "".join(f"+{name}" for name in wide) + ("" if zeros else "-zeros")
        return CudaCase(
            f"int4_{rows}x{depth}x{columns}by{group_size}{added}",
            "DeepSeekMatMulInt4",
            numbers.dtype,
            inputs,
            {"group_size": group_size},
            {"y": y},
            [name for name in ("weight", "scales", "zeros") if name in inputs and rows % 2],
            # A weight is rounded to the dtype, too.
            roundings=2.5,
        )

    return make


def fp8_case(
    rows: int,
    depth: int,
    columns: int,
    block: tuple[int, int] = (128, 128),
    *,
    bias: bool = False,
    residual: bool = False,
) -> Maker:
    def make(numbers: Numbers) -> CudaCase:
        inputs = {"x": numbers.normal(rows, depth)}
        inputs["weight"] = numbers.normal(columns, depth, scale=60.0, dtype=torch.float32).to(torch.float8_e4m3fn)
        if rows % 3:
            inputs["weight"] = inputs["weight"].view(torch.uint8)
        blocks = (-(-columns // block[0]), -(-depth // block[1]))
        inputs["scale_inv"] = numbers.uniform(*blocks, dtype=torch.float32) * (0.01 * depth**-0.5)
        if bias:
            inputs["bias"] = numbers.normal(columns)
        if residual:
            inputs["residual"] = numbers.normal(rows, columns)
        wide = {name: inputs[name].double() for name in ("bias", "residual") if name in inputs}
        y = fp8_block_linear(inputs["x"].double(), inputs["weight"], inputs["scale_inv"], block, **wide)
        return CudaCase(
            f"fp8_{rows}x{depth}x{columns}by{block[0]}x{block[1]}{''.join(f'+{name}' for name in wide)}",
            "DeepSeekMatMulFp8Block",
            numbers.dtype,
            inputs,
            {"block_rows": block[0], "block_columns": block[1]},
            {"y": y},
            ["weight", "scale_inv"] if rows % 2 else [],
            # Unpacked for many rows, a weight is rounded to the dtype, too.
            roundings=2.5,
        )

    return make


def embedding_case(rows: int, width: int) -> Maker:
    def make(numbers: Numbers) -> CudaCase:
        table, last = numbers.normal(40, width), torch.randint(0, 40, (9,), generator=numbers.generator)
        tokens = torch.randint(0, 40, (rows,), generator=numbers.generator)
        sources = torch.randint(-1, 9, (rows,), generator=numbers.generator, dtype=torch.int32)
        wanted = torch.where(sources >= 0, last[sources.clamp(min=0).long()], tokens)
        inputs = {"token_ids": tokens, "table": table, "sources": sources, "last_tokens": last}
        expected = {"y": table[wanted].double()}
        return CudaCase(f"embedding{rows}x{width}", "DeepSeekEmbedding", numbers.dtype, inputs, {}, expected, ["table"])

    return make


@dataclass(frozen=True, slots=True)
class Gate:
    """A model's gate."""

    method: str
    experts: int
    groups: int
    kept: int
    top_k: int
    shared: int
    normalize: bool
    scaling: float = 1.0


GATES = {
    "v2_lite": Gate("greedy", 64, 1, 1, 6, 2, False),
    "v2": Gate("group_limited_greedy", 160, 8, 3, 6, 2, False, 16.0),
    "v3": Gate("noaux_tc", 256, 8, 4, 8, 1, True, 2.5),
    "demo": Gate("noaux_tc", 16, 4, 2, 4, 1, True, 2.5),
    "small_v2_lite": Gate("greedy", 16, 1, 1, 4, 2, False),
    "small_v2": Gate("group_limited_greedy", 16, 4, 2, 4, 2, False, 4.0),
}


def gate_case(model: str, rows: int, hidden: int, *, padded: int = 0) -> Maker:
    gate = GATES[model]

    def make(numbers: Numbers) -> CudaCase:
        x = numbers.normal(rows, hidden)
        weight = numbers.normal(gate.experts, hidden, scale=2 * hidden**-0.5, dtype=torch.float32)
        inputs = {"x": x, "weight": weight}
        logits = (x.double() @ weight.double().t()).float()
        options: dict[str, Any] = {"top_k": gate.top_k, "normalize": gate.normalize, "scaling": gate.scaling}
        if gate.method == "greedy":
            weights, experts = moe_gate.greedy(logits, **options)
        elif gate.method == "group_limited_greedy":
            weights, experts = moe_gate.group_limited_greedy(
                logits, groups=gate.groups, topk_groups=gate.kept, **options
            )
        else:
            inputs["bias"] = numbers.normal(gate.experts, scale=0.1, dtype=torch.float32)
            weights, experts = moe_gate.noaux_tc(
                logits, inputs["bias"], groups=gate.groups, topk_groups=gate.kept, **options
            )
        # Of any order in the reference; the best by the score that was chosen with comes first.
        order = experts.argsort(-1)
        weights, experts = weights.gather(-1, order), experts.gather(-1, order)
        shared = torch.arange(gate.experts, gate.experts + gate.shared).expand(rows, -1)
        experts = torch.cat((experts, shared), 1)
        weights = torch.cat((weights, torch.ones(rows, gate.shared)), 1)
        if padded:
            inputs["slots"] = torch.arange(rows)
            inputs["slots"][-padded:] = -1
            experts[-padded:] = -1
        attributes = {
            "topk_method": gate.method,
            "num_experts_per_tok": gate.top_k,
            "n_group": gate.groups,
            "topk_group": gate.kept,
            "norm_topk_prob": int(gate.normalize),
            "routed_scaling_factor": gate.scaling,
            "n_shared_experts": gate.shared,
        }
        expected = {"weights": weights.double(), "experts": experts}
        name = f"gate_{model}_{rows}x{hidden}"
        return CudaCase(
            name, "DeepSeekMoEGate", numbers.dtype, inputs, attributes, expected, ["weight"], rows=rows - padded
        )

    return make


def sorted_choices(outputs: dict[str, Tensor], top_k: int) -> dict[str, Tensor]:
    """A gate's outputs with each row's routed choices in the order of their experts."""
    experts, weights = outputs["experts"].cpu(), outputs["weights"].cpu()
    order = experts[:, :top_k].argsort(-1)
    return {
        "experts": torch.cat((experts[:, :top_k].gather(-1, order), experts[:, top_k:]), 1),
        "weights": torch.cat((weights[:, :top_k].gather(-1, order), weights[:, top_k:]), 1),
    }


def experts_case(rows: int, hidden: int, inner: int, experts: int, top_k: int, *, skipped: int = 0) -> Maker:
    def make(numbers: Numbers) -> CudaCase:
        x = numbers.normal(rows, hidden)
        gate_up = numbers.normal(experts, 2 * inner, hidden, scale=hidden**-0.5)
        down = numbers.normal(experts, hidden, inner, scale=inner**-0.5)
        weights = numbers.uniform(rows, top_k, dtype=torch.float32)
        chosen = torch.stack([numbers.permutation(experts)[:top_k] for _ in range(rows)]).int()
        if skipped:
            chosen[-skipped:] = -1
        y = torch.zeros(rows, hidden, dtype=torch.float64)
        for t in range(rows):
            for k in range(top_k):
                if chosen[t, k] >= 0:
                    active = (
                        swiglu((gate_up[chosen[t, k]].double() @ x[t].double())[None])[0].to(numbers.dtype).double()
                    )
                    y[t] += weights[t, k].double() * (down[chosen[t, k]].double() @ active)
        inputs = {"x": x, "weights": weights, "experts": chosen, "gate_up": gate_up, "down": down}
        return CudaCase(
            f"experts{rows}x{hidden}x{inner}",
            "DeepSeekMoE",
            numbers.dtype,
            inputs,
            {},
            {"y": y},
            ["gate_up", "down"],
            roundings=3,
        )

    return make


def experts_int4_case(
    rows: int,
    hidden: int,
    inner: int,
    experts: int,
    top_k: int,
    group_size: int = 32,
    *,
    skipped: int = 0,
    zeros: bool = True,
) -> Maker:
    def make(numbers: Numbers) -> CudaCase:
        """The case of the experts that the packed ones stand for, with these in their place."""
        case = experts_case(rows, hidden, inner, experts, top_k, skipped=skipped)(numbers)
        for name, outputs, depth in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
            packed = packed_int4(numbers, (experts, outputs), depth, group_size)
            if not zeros:
                del packed["zeros"]
            case.inputs[name] = packed["weight"]
            case.inputs |= {f"{name}_{part}": packed[part] for part in ("scales", "zeros") if part in packed}
        case.expected = {"y": _packed_experts(case.inputs, hidden, inner, group_size)}
        case.name = f"experts_int4_{rows}x{hidden}x{inner}by{group_size}{'' if zeros else '-zeros'}"
        case.operator = "DeepSeekMoEInt4"
        case.attributes = {"group_size": group_size}
        case.constant = [name for name in case.inputs if name.startswith(("gate_up", "down"))]
        case.roundings = 4
        return case

    return make


def _packed_experts(inputs: dict[str, Tensor], hidden: int, inner: int, group_size: int) -> Tensor:
    gate_up, down = (
        dequantized(inputs[name], inputs[f"{name}_scales"], inputs.get(f"{name}_zeros"), depth, group_size).double()
        for name, depth in (("gate_up", hidden), ("down", inner))
    )
    x = inputs["x"]
    y = torch.zeros(x.shape, dtype=torch.float64)
    for t, choices in enumerate(inputs["experts"].tolist()):
        for k, expert in enumerate(choices):
            if expert >= 0:
                active = swiglu((gate_up[expert] @ x[t].double())[None])[0].to(x.dtype).double()
                y[t] += inputs["weights"][t, k].double() * (down[expert] @ active)
    return y


@dataclass(frozen=True, slots=True)
class Heads:
    """A model's latent attention."""

    count: int
    nope: int
    rope: int
    v: int
    rank: int


V2_LITE, V3 = Heads(16, 128, 64, 128, 512), Heads(128, 128, 64, 128, 512)
DEMO, SMALL = Heads(4, 32, 16, 32, 64), Heads(4, 16, 16, 24, 32)


def attention_case(
    heads: Heads,
    sequences: Sequence[tuple[int, int]],
    *,
    page: int = 64,
    interleaved: bool = True,
    padded: int = 0,
    planned: bool = False,
) -> Maker:
    """`sequences`: rows and entries of each. `padded` sequences and rows follow."""

    def make(numbers: Numbers) -> CudaCase:
        dtype, width, entry = numbers.dtype, heads.nope + heads.rope, heads.rank + heads.rope
        step = _paged_step(numbers, sequences, page, padded)
        total, blocks = step["positions"].shape[0], step.pop("blocks").item()
        inputs = {
            "q": numbers.normal(total, heads.count * width),
            "entries": numbers.normal(total, entry),
            "cache": numbers.normal(blocks, page, entry),
            "kv_b": numbers.normal(heads.count * (heads.nope + heads.v), heads.rank, scale=heads.rank**-0.5),
            **step,
            "rotations": _rotations(heads.rope, step["positions"]),
            "latent_norm": numbers.uniform(heads.rank),
        }
        scale = 0.8 * width**-0.5
        expected = _attended(heads, inputs, sequences, page, interleaved, scale, dtype)
        attributes = {
            "num_heads": heads.count,
            "qk_nope_head_dim": heads.nope,
            "qk_rope_head_dim": heads.rope,
            "v_head_dim": heads.v,
            "scale": scale,
            "latent_epsilon": 1e-6,
            "interleaved": int(interleaved),
        }
        name = f"attention_{heads.count}x{heads.rank}_" + "_".join(f"{rows}of{n}" for rows, n in sequences[:4])
        return CudaCase(
            name,
            "DeepSeekMLAPagedAttention",
            dtype,
            inputs,
            attributes,
            expected,
            ["kv_b"],
            roundings=4,
            rows=sum(rows for rows, _ in sequences),
            captured=all(rows <= MAX_QUERIES for rows, _ in sequences),
        )

    return make


def _paged_step(numbers: Numbers, sequences: Sequence[tuple[int, int]], page: int, padded: int) -> dict[str, Tensor]:
    """The batch inputs, over blocks and seats in shuffled order; `blocks`: how many there are."""
    count = len(sequences)
    used = [-(-entries // page) for _, entries in sequences]
    order = numbers.permutation(sum(used) + 2).tolist()
    seats = numbers.permutation(count + 2).tolist()
    # Places that no sequence uses hold what is no block.
    tables = torch.full((count + 2, max(used) + 1), 2**30, dtype=torch.int32)
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    for sequence, (rows, entries) in enumerate(sequences):
        own = [order.pop() for _ in range(used[sequence])]
        tables[seats[sequence], : len(own)] = torch.tensor(own)
        fresh = range(entries - rows, entries)
        positions += fresh
        slots += [own[p // page] * page + p % page for p in fresh]
        starts.append(starts[-1] + rows)
    return {
        "blocks": torch.tensor(sum(used) + 2),
        "block_tables": tables,
        "query_starts": torch.tensor(starts + [starts[-1]] * padded, dtype=torch.int32),
        "context_lengths": torch.tensor([n for _, n in sequences] + [0] * padded, dtype=torch.int32),
        "table_rows": torch.tensor(seats[:count] + [0] * padded, dtype=torch.int32),
        "positions": torch.tensor(positions + [0] * padded),
        "slots": torch.tensor(slots + [-1] * padded),
        "host_batch": torch.tensor([*sequences, *[(1, 1)] * padded], dtype=torch.int32),
    }


def _rotations(width: int, positions: Tensor) -> Tensor:
    return rope_table(1e4 ** -(torch.arange(width // 2) * 2 / width), 1.1, 4 + int(positions.max()))


def _rotated(x: Tensor, table: Tensor, interleaved: bool) -> Tensor:
    """x float64 [T, .., R] by the rows of table [T, R]."""
    half = x.shape[-1] // 2
    shape = (x.shape[0], *[1] * (x.dim() - 2), half)
    cos, sin = table[:, :half].double().view(shape), table[:, half:].double().view(shape)
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    turned = a * cos - b * sin, a * sin + b * cos
    return torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)


def _attended(
    heads: Heads,
    inputs: dict[str, Tensor],
    sequences: Sequence[tuple[int, int]],
    page: int,
    interleaved: bool,
    scale: float,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    rank, positions = heads.rank, inputs["positions"]
    table = inputs["rotations"][positions]
    latents = rms_norm(inputs["entries"][:, :rank].double(), inputs["latent_norm"].double(), 1e-6)
    keys = _rotated(inputs["entries"][:, rank:].double(), table, interleaved)
    cache = inputs["cache"].clone()
    plane, real = cache.view(-1, rank + heads.rope), inputs["slots"] >= 0
    plane[inputs["slots"][real]] = torch.cat((latents, keys), 1)[real].to(dtype)
    q = inputs["q"].double().unflatten(1, (heads.count, heads.nope + heads.rope))
    q_pe = _rotated(q[..., heads.nope :], table, interleaved).to(dtype).double()
    kv_b = inputs["kv_b"].double().view(heads.count, heads.nope + heads.v, rank)
    y = torch.zeros(q.shape[0], heads.count, heads.v, dtype=torch.float64)
    first = 0
    for sequence, (rows, entries) in enumerate(sequences):
        blocks = inputs["block_tables"][int(inputs["table_rows"][sequence]), : -(-entries // page)].long()
        own = cache[blocks].view(-1, rank + heads.rope)[:entries].double()
        kv = torch.einsum("nc,hdc->nhd", own[:, :rank], kv_b)
        part = slice(first, first + rows)
        scores = torch.einsum("thd,nhd->htn", q[part, :, : heads.nope], kv[..., : heads.nope])
        scores = (scores + torch.einsum("thd,nd->htn", q_pe[part], own[:, rank:])) * scale
        hidden = torch.arange(entries)[None] > torch.arange(entries - rows, entries)[:, None]
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        y[part] = torch.einsum("htn,nhd->thd", weights, kv[..., heads.nope :])
        first += rows
    return {"y": y.flatten(1), "cache_out": cache.double()}


@dataclass(frozen=True, slots=True)
class Groups:
    """A model's grouped attention."""

    heads: int
    key_heads: int
    width: int
    normed: bool = False


def grouped_case(
    model: Groups, sequences: Sequence[tuple[int, int]], *, page: int = 64, interleaved: bool = False, padded: int = 0
) -> Maker:
    """`sequences`: rows and entries of each. `padded` sequences and rows follow."""

    def make(numbers: Numbers) -> CudaCase:
        step = _paged_step(numbers, sequences, page, padded)
        total, width = step["positions"].shape[0], model.width
        blocks = step.pop("blocks").item()
        inputs = {
            "q": numbers.normal(total, model.heads * width),
            "k": numbers.normal(total, model.key_heads * width),
            "v": numbers.normal(total, model.key_heads * width),
            "key_cache": numbers.normal(blocks, page, model.key_heads * width),
            "value_cache": numbers.normal(blocks, page, model.key_heads * width),
            **step,
            "rotations": _rotations(width, step["positions"]),
        }
        if model.normed:
            inputs |= {"q_norm": numbers.uniform(width), "k_norm": numbers.uniform(width)}
        scale = width**-0.5
        table = inputs["rotations"][inputs["positions"]]
        q, k = (
            _rotated(_normed(inputs, name, width), table, interleaved).to(numbers.dtype).double() for name in ("q", "k")
        )
        keys, values = inputs["key_cache"].clone(), inputs["value_cache"].clone()
        real = inputs["slots"] >= 0
        for cache, entries in ((keys, k.flatten(1)), (values, inputs["v"])):
            cache.view(-1, model.key_heads * width)[inputs["slots"][real]] = entries[real].to(numbers.dtype)
        y = torch.zeros(total, model.heads, width, dtype=torch.float64)
        first, shared = 0, model.heads // model.key_heads
        for sequence, (rows, entries) in enumerate(sequences):
            own = inputs["block_tables"][int(inputs["table_rows"][sequence]), : -(-entries // page)].long()
            key, value = (
                cache[own].view(-1, model.key_heads, width)[:entries].double().repeat_interleave(shared, 1)
                for cache in (keys, values)
            )
            part = slice(first, first + rows)
            scores = torch.einsum("thd,nhd->htn", q[part], key) * scale
            hidden = torch.arange(entries)[None] > torch.arange(entries - rows, entries)[:, None]
            y[part] = torch.einsum("htn,nhd->thd", scores.masked_fill(hidden, float("-inf")).softmax(-1), value)
            first += rows
        return CudaCase(
            f"grouped_{model.heads}over{model.key_heads}x{width}_" + "_".join(f"{r}of{n}" for r, n in sequences[:4]),
            "DeepSeekPagedAttention",
            numbers.dtype,
            inputs,
            {
                "num_heads": model.heads,
                "num_key_value_heads": model.key_heads,
                "head_dim": width,
                "scale": scale,
                "norm_epsilon": 1e-6,
                "interleaved": int(interleaved),
            },
            {"y": y.flatten(1), "key_cache_out": keys.double(), "value_cache_out": values.double()},
            roundings=4,
            rows=sum(rows for rows, _ in sequences),
        )

    return make


def _normed(inputs: dict[str, Tensor], name: str, width: int) -> Tensor:
    x = inputs[name].double().unflatten(1, (-1, width))
    return rms_norm(x, inputs[f"{name}_norm"].double(), 1e-6) if f"{name}_norm" in inputs else x


def run_case(node: Any, case: CudaCase, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The outputs of a node that was made for the case, in the order in which errors are told."""
    outputs: dict[str, Tensor] = node.run(inputs)
    return sorted_choices(outputs, case.attributes["num_experts_per_tok"]) if "experts" in outputs else outputs


SMALL_CASES: tuple[Maker, ...] = (
    norm_case(3, 64, residual=False, sums=False),
    norm_case(2, 1032, residual=True, sums=True),
    norm_case(2, 64, residual=True, sums=False),
    norm_case(2, 40, residual=False, sums=True, heads=3),
    swiglu_case(3, 104),
    rotary_case(5, 3, 48, 16, interleaved=True),
    rotary_case(2, 17, 21, 5, interleaved=False),
    product_case(1, 72, 50),
    product_case(1, 2056, 20, bias=True),
    product_case(1, 64, 24, residual=True),
    product_case(1, 64, 24, bias=True, residual=True),
    product_case(5, 64, 24),
    product_case(5, 64, 24, bias=True),
    product_case(4, 64, 24, bias=True, residual=True),
    product_case(1, 64, 24, operator="DeepSeekLogits"),
    product_case(6, 64, 24, operator="DeepSeekLogits"),
    int4_case(1, 96, 22),
    int4_case(1, 256, 9, 128, bias=True, residual=True),
    int4_case(3, 64, 40, residual=True, zeros=False),
    int4_case(1, 37, 10, 8, bias=True),
    int4_case(2, 72, 20, 24, residual=True),
    int4_case(21, 96, 24, bias=True),
    int4_case(2, 64, 7),
    int4_case(65, 64, 50, residual=True, bias=True),
    fp8_case(1, 160, 135),
    fp8_case(2, 272, 40, (128, 256), bias=True, residual=True),
    fp8_case(3, 160, 140, residual=True),
    fp8_case(4, 37, 10, (7, 13), bias=True),
    fp8_case(65, 64, 50, bias=True),
    embedding_case(5, 40),
    gate_case("small_v2_lite", 3, 64),
    gate_case("small_v2", 5, 64, padded=2),
    gate_case("demo", 2, 96),
    experts_case(1, 64, 32, 8, 3),
    experts_case(2, 64, 48, 8, 3, skipped=1),
    experts_case(5, 64, 32, 8, 3, skipped=2),
    experts_case(40, 64, 32, 4, 2),
    experts_int4_case(1, 64, 32, 8, 3),
    experts_int4_case(5, 128, 64, 8, 3, 64, skipped=2),
    experts_int4_case(40, 64, 32, 4, 2, zeros=False),
    attention_case(SMALL, [(1, 5)], page=16),
    attention_case(SMALL, [(1, 70), (1, 1), (1, 33)], page=16, padded=1),
    attention_case(SMALL, [(3, 40), (8, 8), (1, 64)], page=64, interleaved=False),
    attention_case(DEMO, [(1, 90), (1, 17)], page=64),
    attention_case(SMALL, [(9, 9)], page=16),
    attention_case(SMALL, [(1, 33), (2, 20), (12, 40), (1, 5), (20, 20)], page=16, interleaved=False),
    grouped_case(Groups(4, 2, 32), [(1, 5), (1, 40)], page=16, padded=1),
    grouped_case(Groups(4, 2, 64), [(3, 70), (8, 8)], interleaved=True),
    grouped_case(Groups(4, 4, 48, normed=True), [(1, 33), (12, 40), (20, 20)], page=16),
)
"""What the interpreter gets through."""

WIDE_CASES: tuple[Maker, ...] = (
    norm_case(7, 2048, residual=True, sums=True),
    norm_case(5, 7168, residual=False, sums=False),
    swiglu_case(9, 10944),
    rotary_case(100, 16, 192, 32, interleaved=True),
    rotary_case(9, 32, 128, 64, interleaved=False),
    product_case(1, 2048, 3072),
    product_case(8, 2048, 576),
    product_case(33, 1408, 2048, residual=True),
    product_case(1, 2048, 20480, operator="DeepSeekLogits"),
    product_case(9, 2048, 10240, operator="DeepSeekLogits"),
    *(int4_case(rows, 2048, 3072) for rows in (1, 2, 8, 40, 200)),
    int4_case(1, 10944, 2048, residual=True),
    int4_case(16, 10944, 2048, 64, bias=True),
    int4_case(5, 2048, 9000, 128),
    *(fp8_case(rows, 2048, 3072) for rows in (1, 2, 8, 40, 200)),
    fp8_case(1, 7168, 2112, residual=True),
    fp8_case(16, 10944, 2048, bias=True),
    fp8_case(5, 2048, 9000),
    embedding_case(100, 2048),
    gate_case("v2_lite", 1, 2048),
    gate_case("v2_lite", 70, 2048, padded=3),
    gate_case("v2", 9, 5120),
    gate_case("v3", 400, 7168),
    experts_case(1, 2048, 1408, 12, 8),
    experts_case(2, 2048, 1408, 12, 8),
    experts_case(8, 2048, 1408, 12, 8, skipped=2),
    experts_case(200, 512, 256, 16, 6),
    *(experts_int4_case(rows, 2048, 1408, 12, 8) for rows in (1, 2, 8)),
    experts_int4_case(200, 512, 256, 16, 6, 128),
    attention_case(V2_LITE, [(1, 1000)]),
    attention_case(V2_LITE, [(1, 1), (1, 4096), (1, 64), (1, 777)], padded=4),
    attention_case(V2_LITE, [(8, 900), (3, 3), (1, 65)], page=32),
    attention_case(V3, [(1, 500), (1, 2000)]),
    attention_case(V2_LITE, [(1, 300), (4, 90), (700, 900), (130, 130)]),
    attention_case(V2_LITE, [(20, 33000)]),
    grouped_case(Groups(32, 8, 128), [(1, 1000), (1, 64), (1, 3)], padded=5),
    grouped_case(Groups(28, 4, 128, normed=True), [(1, 500), (4, 90), (300, 700)]),
)
"""DeepSeek's own sizes, for a GPU."""
