"""The bytes that a decoding step must read, and which experts its rows really chose."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from deepseek_engine.models.config import DeepseekConfig
from torch import Tensor


def expected_touched(experts: int, top_k: int, rows: int) -> float:
    """Experts that `rows` rows touch if each takes top_k of them by lot."""
    return experts * (1.0 - (1.0 - top_k / experts) ** rows)


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Bytes of one decoding step, each weight once; latent cache and embedding rows by sequence."""

    attention: float
    dense: float
    shared: float
    gate: float
    norms: float
    lm_head: float
    embedding: float
    experts: float
    latent: float

    @property
    def total(self) -> float:
        return float(sum(asdict(self).values()))


def step_bytes(
    config: DeepseekConfig, *, rows: int, context: float, touched: float, itemsize: int = 2, cache_itemsize: int = 2
) -> StepBytes:
    """What `rows` sequences must read for one token each.

    Args:
        context: tokens that each attends to.
        touched: routed experts that the step reads, summed over the layers.
        itemsize, cache_itemsize: bytes of a weight on disk and of a value of the cache.
    """
    hidden, heads, rank, rotary = (
        config.hidden_size,
        config.num_attention_heads,
        config.kv_lora_rank,
        config.qk_rope_head_dim,
    )
    layers = config.num_hidden_layers
    sparse = sum(config.is_moe(layer) for layer in range(layers))
    query, q_rank = heads * (config.qk_nope_head_dim + rotary), config.q_lora_rank
    attention = q_rank * (hidden + query) if q_rank else hidden * query
    attention += hidden * (rank + rotary)
    attention += rank * heads * (config.qk_nope_head_dim + config.v_head_dim)
    attention += heads * config.v_head_dim * hidden
    expert = 3 * hidden * config.moe_intermediate_size
    return StepBytes(
        attention=itemsize * layers * attention,
        dense=itemsize * (layers - sparse) * 3 * hidden * config.intermediate_size,
        shared=itemsize * sparse * config.n_shared_experts * expert,
        gate=itemsize * sparse * config.n_routed_experts * hidden,
        norms=itemsize * (layers * (2 * hidden + rank + (q_rank or 0)) + hidden),
        lm_head=itemsize * config.vocab_size * hidden,
        embedding=itemsize * rows * hidden,
        experts=itemsize * touched * expert,
        latent=cache_itemsize * rows * context * layers * (rank + rotary),
    )


class Routing:
    """Counts the experts that steps chose, by layer; what a model calls as `on_experts`.

    Args:
        experts: routed ones; other ids (shared experts, -1 for padding) are left out.
    """

    def __init__(self, experts: int) -> None:
        self._experts = experts
        self._calls: dict[int, list[Tensor]] = {}

    def __call__(self, layer: int, experts: Tensor) -> None:
        """experts: int [T, top_k], or with further ids."""
        ids = experts.flatten().long()
        ids = ids[(ids >= 0) & (ids < self._experts)]
        self._calls.setdefault(layer, []).append(torch.bincount(ids, minlength=self._experts))

    def __bool__(self) -> bool:
        return bool(self._calls)

    @property
    def touched(self) -> dict[int, float]:
        """Layer to the experts that a step touched, a mean over the steps."""
        return {
            layer: float(torch.stack(counts).count_nonzero(dim=1).float().mean())
            for layer, counts in sorted(self._calls.items())
        }

    def report(self, top_k: int, rows: int) -> dict[str, Any]:
        """Touched experts by layer against the expectation, and how often each expert was chosen in each layer."""
        touched, expected = self.touched, expected_touched(self._experts, top_k, rows)
        return {
            "touched_sum": sum(touched.values()),
            "touched_mean": sum(touched.values()) / max(len(touched), 1),
            "expected": expected,
            "touched_over_expected": sum(touched.values()) / max(len(touched), 1) / expected,
            "least_layer_over_expected": min(touched.values(), default=0.0) / expected,
            "steps": max(map(len, self._calls.values()), default=0),
            "histogram": {layer: torch.stack(counts).sum(0).tolist() for layer, counts in sorted(self._calls.items())},
        }
