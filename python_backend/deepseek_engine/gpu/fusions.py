"""Which operators of a step are one launch on a GPU, and what is in the way where they are not.

As data, so that a version can tell it; the code that fuses is that of `gpu` and `kernels`. Nothing here imports triton.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from deepseek_engine.kernels.dispatch import DTYPES_ON_GPU
from deepseek_engine.kernels.variants import ARCHITECTURES, nearest_architecture
from deepseek_engine.models.config import DeepseekConfig, LlamaConfig, ModelConfig

Cause = Literal["device", "dtype", "model", "runner", "memory space", "side effects"]

NORM = "residual addition and norm"
INPUTS = "products of one input"
CACHE = "norms, rotation and cache write of attention"
GATE = "scores, choice and weights of the gate, with the shared experts"
EXPERTS = "products of the experts with SiLU·up"
DENSE = "SiLU·up of dense layers"
COMBINE = "weighted sum of the experts"
DOWN = "down product of the experts with their weighted sum"
SAMPLE = "logits to token on the device"
LOGPROBS = "log-probabilities with the sampling"
GRAPH = "the whole step in a CUDA graph"
HEAD_WIDTHS = range(16, 129, 16)
"""Of grouped heads: what the rows of the kernels' tables are declared for."""
_OF_THE_MODEL = (NORM, INPUTS, CACHE, GATE, EXPERTS, DENSE, COMBINE, DOWN)
FUSIONS = (*_OF_THE_MODEL, SAMPLE, LOGPROBS, GRAPH)

_LIMITS = {
    INPUTS: "their weights are stored as one",
    NORM: "the first norm of a step has nothing to add",
    DENSE: "with one row it is within the product, else a launch after the library's",
    GRAPH: "steps longer than the largest graph are launched kernel by kernel, which keeps the device busy meanwhile",
}


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why a model's operators run one by one."""

    cause: Cause
    reason: str


APART = Obstacle("runner", "each is a node of its own in the export")
_NEVER = {
    DOWN: Obstacle(
        "side effects",
        "several tiles would add to one token's row, in an order that changes its bits; with few tokens one program"
        " does both",
    ),
    LOGPROBS: Obstacle(
        "memory space",
        "they leave for the host's memory, and are gathered beside the graph where a request asks for them",
    ),
}
"""Of models that run on device kernels."""
NOT_IN_USE = Obstacle("runner", "the runner for device kernels is not in use: operators run one by one in torch")


@dataclass(frozen=True, slots=True)
class Fusion:
    """One fusion for one model and device.

    Attributes:
        operators: of a decode step of several rows, those that are in it.
        obstacle: what is in the way; None where it applies.
        limits: where it applies, within what.
    """

    name: str
    operators: int
    obstacle: Obstacle | None
    limits: str = ""


def kernel_obstacle(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, capability: int | None
) -> Obstacle | None:
    """What keeps a model off the device kernels, or None: then `gpu.decoder` and `runners.cuda` can run it.

    Args:
        capability: of the device, 90 for 9.0; None where it is no GPU.
    """
    if device.type != "cuda" or capability is None:
        where = "a CPU" if device.type == "cpu" else f"of type {device.type}"
        return Obstacle("device", f"the device is {where}: operators run one by one in torch")
    if (reason := heads_not_taken(config)) is not None:
        return Obstacle("model", f"{reason}: operators run one by one in torch")
    if nearest_architecture(capability) is None:
        known = ", ".join(f"sm_{architecture}" for architecture in ARCHITECTURES)
        return Obstacle("device", f"no kernel has rows for sm_{capability}, only for {known} and their minor versions")
    if dtype not in DTYPES_ON_GPU:
        return Obstacle(
            "dtype", f"no kernel takes {str(dtype).removeprefix('torch.')}; publish with --precision bfloat16"
        )
    return None


def heads_not_taken(config: ModelConfig) -> str | None:
    """Why no attention kernel takes a model, or None where one does."""
    if not isinstance(config, LlamaConfig) or config.head_dim in HEAD_WIDTHS:
        return None
    return (
        f"the device kernels take heads of {HEAD_WIDTHS[0]} to {HEAD_WIDTHS[-1]} elements in steps of "
        f"{HEAD_WIDTHS.step}, not of {config.head_dim}"
    )


def capability_of(device: torch.device) -> int | None:
    """The device's compute capability, 90 for 9.0; None where it is no GPU."""
    if device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def fusions(
    config: ModelConfig,
    obstacle: Obstacle | None,
    *,
    graphs: Obstacle | None = None,
    exported: Mapping[str, int] | None = None,
) -> list[Fusion]:
    """Every fusion for a model.

    Args:
        obstacle: what keeps the model off the device kernels; of an export, what is not in it.
        graphs: what keeps its steps off CUDA graphs.
        exported: of an export, the operators that share a node with others, each as often as it does.
    """
    inside = step_operators(config)
    found = []
    for name in FUSIONS:
        if name == GRAPH:
            own = Counter({operator: count for (operator, _), count in inside.items()})
        else:
            own = Counter({operator: count for (operator, of), count in inside.items() if of == name})
        if exported is not None and name in _OF_THE_MODEL and own:
            found.append(_exported(name, own, exported))
            continue
        # Weights are stored side by side wherever the engine's own models run.
        hindrance = None if name == INPUTS else obstacle
        hindrance = hindrance or _NEVER.get(name) or (graphs if name == GRAPH else None)
        if hindrance is None and not own:
            hindrance = Obstacle("model", "the model has no such operators")
        found.append(Fusion(name, own.total(), hindrance, "" if hindrance else _LIMITS.get(name, "")))
    return found


def _exported(name: str, own: Counter[str], exported: Mapping[str, int]) -> Fusion:
    """One of an export, whose nodes tell."""
    shared = Counter({operator: min(count, exported.get(operator, 0)) for operator, count in own.items()}).total()
    if not shared:
        return Fusion(name, own.total(), _NEVER.get(name, APART))
    if shared == own.total():
        # There SiLU·up is a launch for any number of rows.
        return Fusion(name, shared, None, "" if name == DENSE else _LIMITS.get(name, ""))
    return Fusion(name, shared, None, f"{own.total() - shared} more are nodes of their own in the export")


def fused_operators(found: list[Fusion]) -> int:
    """Operators of a decode step that are inside fused launches. A graph fuses none: it launches them at once."""
    return sum(fusion.operators for fusion in found if fusion.obstacle is None and fusion.name != GRAPH)


def step_operators(config: ModelConfig) -> Counter[tuple[str, str]]:
    """(operator, the fusion it belongs to or "") of a decode step of several rows, each as often as a step has it.

    Operators are those of the models' formulas (`models`), so that families compare; a product counts once.
    """
    layers = config.num_hidden_layers
    found: Counter[tuple[str, str]] = Counter()

    def add(count: int, fusion: str, *names: str) -> None:
        for name in names:
            if count:
                found[name, fusion] += count

    add(1, "", "embedding", "first norm", "lm_head")
    # After attention and after the feed-forward; the last is the norm before the head.
    add(2 * layers, NORM, "residual addition", "norm")
    if isinstance(config, DeepseekConfig):
        _add_latent(add, config)
    else:
        add(layers, INPUTS, "q_proj", "k_proj", "v_proj")
        add(layers, CACHE, "rotation of queries", "rotation of keys", "cache write")
        if isinstance(config, LlamaConfig) and config.qk_norm:
            add(layers, CACHE, "norm of queries", "norm of keys")
        add(layers, "", "attention", "o_proj")
        _add_dense(add, layers)
    add(1, SAMPLE, "penalties", "biases and masks", "temperature", "softmax", "top-k, top-p and min-p", "draw")
    return found


class _Add(Protocol):
    def __call__(self, count: int, fusion: str, *names: str) -> None: ...


def _add_latent(add: _Add, config: DeepseekConfig) -> None:
    layers = config.num_hidden_layers
    sparse = sum(config.is_moe(layer) for layer in range(layers))
    add(layers, INPUTS, "q_proj", "kv_a_proj")
    add(layers if config.q_lora_rank else 0, "", "norm of the query's latent", "q_b_proj")
    add(layers, CACHE, "latent norm", "rotation of queries", "rotation of the key", "cache write")
    add(layers, "", "queries into the latent's space", "attention", "values out of it", "o_proj")
    _add_dense(add, layers - sparse)
    add(sparse, "", "gate's logits")
    add(sparse, DOWN, "down product of the experts")
    add(sparse, GATE, "scores", "top-k", "weights")
    add(sparse if config.topk_method != "greedy" else 0, GATE, "choice of groups")
    add(sparse, EXPERTS, "gate product of the experts", "up product of the experts", "SiLU", "SiLU times up")
    add(sparse, COMBINE, "weighting", "sum over the experts")
    if config.n_shared_experts:
        add(sparse, GATE, "shared experts among the choices")
        add(sparse, COMBINE, "addition of the shared experts")


def _add_dense(add: _Add, layers: int) -> None:
    add(layers, INPUTS, "gate product", "up product")
    add(layers, DENSE, "SiLU of dense layers", "SiLU times up of dense layers")
    add(layers, "", "down product")
