"""Single operators of com.deepseek in ONNX Runtime beside the torch references that the engine runs on a CPU.

    python benchmarks/custom_ops.py --rounds 30 --threads 1

Shapes are the demo checkpoint's. Both sides take turns in one run; times are medians in microseconds of the whole call,
so that an operator's holds the runtime's own cost of a call, which a model pays once a step. Weights are bfloat16
initialisers on one side, and packed as the engine packs them on the other. Operators of four bits, as int4 exports
have them, take turns with those of bfloat16 instead.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import torch
from deepseek_engine.batch import Batch
from deepseek_engine.kernels import moe_gate
from deepseek_engine.kernels.attention_plan import attention_plan
from deepseek_engine.kernels.linear import linear, packed
from deepseek_engine.kernels.mla_attention import mla_attention
from deepseek_engine.kernels.moe_experts import DenseExperts, moe_experts
from deepseek_engine.kernels.rms_norm import rms_norm
from deepseek_ops.build import build
from deepseek_ops.exporter.int4 import PackedInt4, pack_int4
from deepseek_ops.exporter.weight_format import Int4Format
from one_node import OneNode
from torch import Tensor

Call = Callable[[], object]
HIDDEN, VOCABULARY, EXPERTS, INNER, TOP_K = 256, 2048, 16, 48, 4
HEADS, NOPE, ROPE, VALUE, RANK, BLOCK = 4, 32, 16, 32, 64, 16
LIBRARY = build()
INT4 = Int4Format()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{'operator':<34}{'rows':>5}{'operator us':>13}{'torch us':>10}{'ratio':>8}")
    for rows in (1, 8):
        for name, make in CASES.items():
            operator, reference = make(rows, options.threads)
            ours, theirs = alternate(operator, reference, options.rounds)
            print(f"{name:<34}{rows:>5}{ours * 1e6:>13.1f}{theirs * 1e6:>10.1f}{theirs / ours:>8.2f}")


def alternate(first: Call, second: Call, rounds: int) -> tuple[float, float]:
    """Median seconds of either, the two taking turns."""
    seconds: list[list[float]] = [[], []]
    for call in (first, second):
        for _ in range(5):
            call()
    for _ in range(rounds):
        for index, call in enumerate((first, second)):
            start = time.perf_counter()
            for _ in range(10):
                call()
            seconds[index].append((time.perf_counter() - start) / 10)
    return statistics.median(seconds[0]), statistics.median(seconds[1])


def bound(node: OneNode, inputs: dict[str, Tensor]) -> Call:
    """A call of the node with everything bound once."""
    binding = node.bind(inputs)[0]
    return lambda: node.session.run_with_iobinding(binding)


def product(outputs: int, columns: int) -> Callable[[int, int], tuple[Call, Call]]:
    def make(rows: int, threads: int) -> tuple[Call, Call]:
        x, weight = torch.randn(rows, columns), torch.randn(outputs, columns).bfloat16()
        inputs = {"x": x, "weight": weight}
        node = OneNode(LIBRARY, "DeepSeekMatMul", inputs, constant=["weight"], threads=threads)
        form = packed(weight.float().t().contiguous())
        return bound(node, inputs), lambda: linear(x, form)

    return make


def packed_product(outputs: int, columns: int) -> Callable[[int, int], tuple[Call, Call]]:
    """Weights of four bits beside bfloat16 ones, both of them operators."""

    def make(rows: int, threads: int) -> tuple[Call, Call]:
        inputs = {"x": torch.randn(rows, columns), **int4(torch.randn(outputs, columns).bfloat16(), "")}
        constant = [name for name in inputs if name != "x"]
        node = OneNode(LIBRARY, "DeepSeekMatMulInt4", inputs, INT4.attributes, constant=constant, threads=threads)
        plain = {"x": inputs["x"], "weight": torch.randn(outputs, columns).bfloat16()}
        reference = OneNode(LIBRARY, "DeepSeekMatMul", plain, constant=["weight"], threads=threads)
        return bound(node, inputs), bound(reference, plain)

    return make


def int4(weight: Tensor, name: str) -> dict[str, Tensor]:
    """A weight's inputs; `name` is the parameter's, "" for that of a product."""
    parts = [pack_int4(each, INT4.group_size) for each in (weight if weight.dim() == 3 else weight.unsqueeze(0))]
    stacked = PackedInt4.stacked(parts) if weight.dim() == 3 else parts[0]
    prefix = f"{name}_" if name else ""
    return {name or "weight": stacked.q, f"{prefix}scales": stacked.scales, f"{prefix}zeros": stacked.zeros}


def norm(rows: int, threads: int) -> tuple[Call, Call]:
    x, weight = torch.randn(rows, HIDDEN), torch.rand(HIDDEN)
    inputs = {"x": x, "weight": weight}
    node = OneNode(LIBRARY, "DeepSeekRMSNorm", inputs, constant=["weight"], threads=threads)
    return bound(node, inputs), lambda: rms_norm(x, weight, 1e-6)


def gate(rows: int, threads: int) -> tuple[Call, Call]:
    inputs = {
        "x": torch.randn(rows, HIDDEN),
        "weight": torch.randn(EXPERTS, HIDDEN) * HIDDEN**-0.5,
        "bias": torch.randn(EXPERTS),
    }
    attributes = {"topk_method": "noaux_tc", "num_experts_per_tok": TOP_K, "n_group": 4, "topk_group": 2}
    node = OneNode(LIBRARY, "DeepSeekMoEGate", inputs, attributes, constant=["weight"], threads=threads)
    options = {"top_k": TOP_K, "groups": 4, "topk_groups": 2, "normalize": False, "scaling": 1.0}
    return bound(node, inputs), lambda: moe_gate.noaux_tc(inputs["x"] @ inputs["weight"].t(), inputs["bias"], **options)


def experts(rows: int, threads: int) -> tuple[Call, Call]:
    inputs, gate_up, down = routed(rows)
    inputs |= {"gate_up": gate_up[:-1], "down": down[:-1], "shared_gate_up": gate_up[-1], "shared_down": down[-1]}
    stacked, lowered = gate_up.float().permute(2, 0, 1).contiguous(), down.float().transpose(1, 2).contiguous()
    dense = DenseExperts.packed(stacked, lowered, 1, TOP_K)
    x, residual, weights, chosen = (inputs[name] for name in ("x", "residual", "weights", "experts"))
    return moe("DeepSeekMoE", inputs, {}, threads), lambda: moe_experts(
        x, residual, weights, chosen, stacked, lowered, 1, dense
    )


def packed_experts(rows: int, threads: int) -> tuple[Call, Call]:
    """Weights of four bits beside bfloat16 ones, both of them operators."""
    inputs, gate_up, down = routed(rows)
    weights = {"gate_up": gate_up[:-1], "down": down[:-1], "shared_gate_up": gate_up[-1], "shared_down": down[-1]}
    packed_inputs = dict(inputs)
    for name, weight in weights.items():
        packed_inputs |= int4(weight, name)
    call = moe("DeepSeekMoEInt4", packed_inputs, INT4.attributes, threads)
    return call, moe("DeepSeekMoE", {**inputs, **weights}, {}, threads)


def routed(rows: int) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Rows with their experts, and the weights of these, the shared one last."""
    inputs = {"x": torch.randn(rows, HIDDEN), "residual": torch.randn(rows, HIDDEN), "weights": torch.rand(rows, TOP_K)}
    inputs["experts"] = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(rows)]).int()
    gate_up = (torch.randn(EXPERTS + 1, 2 * INNER, HIDDEN) / 16).bfloat16()
    down = (torch.randn(EXPERTS + 1, HIDDEN, INNER) / 7).bfloat16()
    return inputs, gate_up, down


def moe(operator: str, inputs: dict[str, Tensor], attributes: Mapping[str, int], threads: int) -> Call:
    constant = [name for name in inputs if name not in ("x", "residual", "weights", "experts")]
    return bound(OneNode(LIBRARY, operator, inputs, attributes, constant=constant, threads=threads), inputs)


def attention(context: int) -> Callable[[int, int], tuple[Call, Call]]:
    def make(rows: int, threads: int) -> tuple[Call, Call]:
        blocks = context // BLOCK
        tables = torch.randperm(rows * blocks).view(rows, blocks)
        starts, lengths = list(range(rows + 1)), [context] * rows
        positions = torch.full((rows,), context - 1)
        slots = tables[:, -1] * BLOCK + (context - 1) % BLOCK
        batch = Batch(positions, positions, slots, starts, lengths, tables, BLOCK)
        q, entries = torch.randn(rows, HEADS * (NOPE + ROPE)), torch.randn(rows, RANK + ROPE)
        kv_b = (torch.randn(HEADS * (NOPE + VALUE), RANK) / 8).bfloat16()
        cache = torch.randn(rows * blocks, BLOCK, RANK + ROPE)
        inputs = {"q": q, "entries": entries, "cache": cache, "kv_b": kv_b, "block_tables": tables}
        inputs |= {"query_starts": torch.tensor(starts), "context_lengths": torch.tensor(lengths)}
        scale = float(NOPE + ROPE) ** -0.5
        sizes = {"num_heads": HEADS, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": VALUE}
        node = OneNode(
            LIBRARY, "DeepSeekMLAPagedAttention", inputs, {**sizes, "scale": scale}, constant=["kv_b"], threads=threads
        )
        plan, wide = attention_plan(batch, torch.float32), kv_b.float().view(HEADS, NOPE + VALUE, RANK)

        def reference() -> Tensor:
            latents = cache.flatten(0, 1).index_copy_(0, plan.slots, entries)
            return mla_attention(q.view(rows, HEADS, -1), latents, wide, plan, scale, NOPE)

        return bound(node, inputs), reference

    return make


CASES: dict[str, Callable[[int, int], tuple[Call, Call]]] = {
    "RMSNorm 256": norm,
    "MatMul 256 x 96": product(96, HIDDEN),
    "MatMul 256 x 2048 (dense layer)": product(2048, HIDDEN),
    "MatMul 1024 x 256": product(HIDDEN, 1024),
    "MatMul 2048 x 2816 (V2-Lite expert)": product(2816, 2048),
    "MatMulInt4 256 x 2048, by bf16": packed_product(2048, HIDDEN),
    "MatMulInt4 2048 x 2816, by bf16": packed_product(2816, 2048),
    "MLAPagedAttention, 192 entries": attention(192),
    "MLAPagedAttention, 2048 entries": attention(2048),
    "MoEGate 4 of 16": gate,
    "MoE 4 of 16 x 48, one shared": experts,
    "MoEInt4 of the same, by bf16": packed_experts,
}

if __name__ == "__main__":
    with torch.inference_mode():
        main()
