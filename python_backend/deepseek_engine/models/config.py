"""A checkpoint's config.json, read into typed settings."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from deepseek_engine.models.errors import CheckpointError

T = TypeVar("T", int, float, bool, str)

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Which rotary frequencies a model was trained with; the names are those of config.json."""

    rope_type: str = "default"
    rope_theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    truncate: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What every family has."""

    architecture: str
    """The class name of config.json's `architectures`, or its model_type where that is absent."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    """Tokens, prompt and output together; what YaRN stretches to is counted in."""
    rms_norm_eps: float
    rope: RopeConfig
    attention_bias: bool
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """Those of config.json and generation_config.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig(ModelConfig):
    """Llama, Qwen2 and Qwen3."""

    num_key_value_heads: int
    head_dim: int
    qkv_bias: bool
    """Bias on q, k and v; attention_bias is the output projection's here."""
    qk_norm: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekConfig(ModelConfig):
    """DeepSeek V2 and V3: latent attention and mixture of experts."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    n_routed_experts: int
    """0 for a model whose layers are all dense."""
    n_shared_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    first_k_dense_replace: int
    moe_layer_freq: int
    topk_method: str
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    """Followed for V2 as DeepSeek's own code does, though transformers ignores it there; no V2 checkpoint sets it."""
    routed_scaling_factor: float

    def is_moe(self, layer: int) -> bool:
        sparse = layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0
        return self.n_routed_experts > 0 and sparse


@dataclass(frozen=True, slots=True)
class Fields:
    """The keys of a JSON object, with errors that name the file."""

    path: Path
    values: dict[str, Any] = field(repr=False)

    @classmethod
    def read(cls, path: Path) -> "Fields":
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(
                f"{path} is missing: give the folder of a Hugging Face checkpoint, with config.json in it"
            ) from None
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path} cannot be read as JSON ({error}): copy it again from the checkpoint's source"
            ) from error
        if not isinstance(values, dict):
            raise CheckpointError(f"{path} must hold a JSON object, not a {type(values).__name__}")
        return cls(path, values)

    def get(self, name: str, kind: type[T], default: T) -> T:
        """The key's value, or `default` where it is absent or null."""
        value = self.values.get(name)
        if value is None:
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.error(name, f"must be a {kind.__name__}, not {value!r}")
        return value

    def need(self, name: str, kind: type[T]) -> T:
        if self.values.get(name) is None:
            raise self.error(name, "is missing")
        return self.get(name, kind, kind())

    def size(self, name: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self.need(name, int) if default is None else self.get(name, int, default)
        if value < 1:
            raise self.error(name, f"must be at least 1, not {value}")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """None, one id or a list of them."""
        value = self.values.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(each, int) and not isinstance(each, bool) for each in ids):
            raise self.error(name, f"must be a token id or a list of them, not {value!r}")
        return tuple(ids)

    def error(self, name: str, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {name!r} {problem}: correct it, or copy the file again")


def llama_config(
    fields: Fields, architecture: str, *, qkv_bias: bool | None = None, qk_norm: bool = False
) -> LlamaConfig:
    """qkv_bias None: as attention_bias says. Raises CheckpointError."""
    _refuse_sliding_window(fields)
    heads = fields.size("num_attention_heads")
    key_value_heads = fields.size("num_key_value_heads", heads)
    if heads % key_value_heads:
        raise fields.error(
            "num_key_value_heads", f"must divide num_attention_heads ({heads}), not be {key_value_heads}"
        )
    head_dim = fields.size("head_dim", fields.size("hidden_size") // heads)
    common = _common(fields, architecture)
    if qkv_bias is None:
        qkv_bias = common["attention_bias"]
    elif not qk_norm:
        # Qwen2 has the bias on q, k and v alone, whatever the key says.
        common["attention_bias"] = False
    _require_even(fields, "head_dim", head_dim)
    return LlamaConfig(
        **common, num_key_value_heads=key_value_heads, head_dim=head_dim, qkv_bias=bool(qkv_bias), qk_norm=qk_norm
    )


def deepseek_config(fields: Fields, architecture: str, *, topk_method: str, norm_topk_prob: bool) -> DeepseekConfig:
    """topk_method and norm_topk_prob are the family's defaults. Raises CheckpointError."""
    if not fields.get("rope_interleave", bool, True):
        raise fields.error("rope_interleave", "is false, and only rotary weights in interleaved pairs are supported")
    config = DeepseekConfig(
        **_common(fields, architecture),
        q_lora_rank=fields.get("q_lora_rank", int, 0) or None,
        kv_lora_rank=fields.size("kv_lora_rank"),
        qk_nope_head_dim=fields.size("qk_nope_head_dim"),
        qk_rope_head_dim=fields.size("qk_rope_head_dim"),
        v_head_dim=fields.size("v_head_dim"),
        n_routed_experts=fields.get("n_routed_experts", int, 0),
        n_shared_experts=fields.get("n_shared_experts", int, 0),
        num_experts_per_tok=fields.get("num_experts_per_tok", int, 1),
        moe_intermediate_size=fields.size("moe_intermediate_size", 1),
        first_k_dense_replace=fields.get("first_k_dense_replace", int, 0),
        moe_layer_freq=fields.size("moe_layer_freq", 1),
        # Early V2 configurations spell it without its second "e".
        topk_method=fields.get("topk_method", str, topk_method).replace("gready", "greedy"),
        n_group=fields.get("n_group", int, 1),
        topk_group=fields.get("topk_group", int, 1),
        norm_topk_prob=fields.get("norm_topk_prob", bool, norm_topk_prob),
        routed_scaling_factor=fields.get("routed_scaling_factor", float, 1.0),
    )
    _check_gate(fields, config)
    for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"):
        _require_even(fields, name, getattr(config, name) or 0)
    return config


def _common(fields: Fields, architecture: str) -> dict[str, Any]:
    activation = fields.get("hidden_act", str, "silu")
    if activation != "silu":
        raise fields.error("hidden_act", f"is {activation!r}, and only 'silu' is supported")
    if fields.get("mlp_bias", bool, False):
        raise fields.error("mlp_bias", "is true, and feed-forward layers with a bias are not supported")
    rope = _rope(fields)
    positions = fields.size("max_position_embeddings")
    if rope.rope_type == "yarn":
        positions = max(positions, int(rope.factor * rope.original_max_position_embeddings))
    return {
        "architecture": architecture,
        "vocab_size": fields.size("vocab_size"),
        "hidden_size": fields.size("hidden_size"),
        "intermediate_size": fields.size("intermediate_size"),
        "num_hidden_layers": fields.size("num_hidden_layers"),
        "num_attention_heads": fields.size("num_attention_heads"),
        "max_position_embeddings": positions,
        "rms_norm_eps": fields.get("rms_norm_eps", float, 1e-6),
        "rope": rope,
        "attention_bias": fields.get("attention_bias", bool, False),
        "tie_word_embeddings": fields.get("tie_word_embeddings", bool, False),
        "bos_token_id": next(iter(fields.token_ids("bos_token_id")), None),
        "eos_token_ids": _eos_token_ids(fields),
    }


def _eos_token_ids(fields: Fields) -> tuple[int, ...]:
    ids = list(fields.token_ids("eos_token_id"))
    generation = fields.path.with_name("generation_config.json")
    if generation.exists():
        ids += Fields.read(generation).token_ids("eos_token_id")
    return tuple(dict.fromkeys(ids))


def _rope(fields: Fields) -> RopeConfig:
    """Transformers 5 writes `rope_parameters`; before it, `rope_scaling` stood beside `rope_theta`."""
    key = "rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters"
    raw = fields.values.get(key) or {}
    if not isinstance(raw, dict) or any(isinstance(value, dict) for value in raw.values()):
        raise fields.error(key, "must be one object for all layers")
    values = Fields(fields.path, raw)
    rope_type = values.get("rope_type", str, values.get("type", str, "default"))
    if rope_type not in ROPE_TYPES:
        raise fields.error(key, f"asks for rope type {rope_type!r}, and only {', '.join(ROPE_TYPES)} are supported")
    partial = values.get("partial_rotary_factor", float, fields.get("partial_rotary_factor", float, 1.0))
    if partial != 1.0:
        raise fields.error("partial_rotary_factor", f"is {partial}, and only 1.0 is supported")
    original = values.get("original_max_position_embeddings", int, fields.size("max_position_embeddings"))
    factor = 1.0
    if rope_type != "default":
        factor = values.get("factor", float, fields.size("max_position_embeddings") / original)
    return RopeConfig(
        rope_type=rope_type,
        rope_theta=values.get("rope_theta", float, fields.get("rope_theta", float, 10000.0)),
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=values.get("beta_fast", float, 32.0),
        beta_slow=values.get("beta_slow", float, 1.0),
        mscale=values.get("mscale", float, 0.0),
        mscale_all_dim=values.get("mscale_all_dim", float, 0.0),
        attention_factor=raw.get("attention_factor") and values.need("attention_factor", float),
        low_freq_factor=values.get("low_freq_factor", float, 1.0),
        high_freq_factor=values.get("high_freq_factor", float, 4.0),
        truncate=values.get("truncate", bool, True),
    )


def _check_gate(fields: Fields, config: DeepseekConfig) -> None:
    methods = ("greedy", "group_limited_greedy", "noaux_tc")
    if config.topk_method not in methods:
        raise fields.error("topk_method", f"is {config.topk_method!r}, and only {', '.join(methods)} are supported")
    experts, groups = config.n_routed_experts, config.n_group
    if not experts:
        return
    if groups < 1 or experts % groups:
        raise fields.error("n_group", f"must divide n_routed_experts ({experts}), not be {groups}")
    if config.topk_method == "noaux_tc" and groups > 1 and experts // groups < 2:
        raise fields.error("n_group", f"must leave at least two of {experts} experts a group, not be {groups}")
    if not 1 <= config.topk_group <= groups:
        raise fields.error("topk_group", f"must be from 1 to n_group ({groups}), not {config.topk_group}")
    grouped = config.topk_method != "greedy"
    eligible = experts // groups * config.topk_group if grouped else experts
    if not 1 <= config.num_experts_per_tok <= eligible:
        raise fields.error("num_experts_per_tok", f"must be from 1 to {eligible}, not {config.num_experts_per_tok}")


def _require_even(fields: Fields, name: str, value: int) -> None:
    if value % 2:
        raise fields.error(name, f"must be even, since rotary embedding turns pairs, not {value}")


def _refuse_sliding_window(fields: Fields) -> None:
    window = fields.get("sliding_window", int, 0)
    layers = fields.get("max_window_layers", int, 0)
    if (
        fields.get("use_sliding_window", bool, False)
        and 0 < window < fields.size("max_position_embeddings")
        and layers < fields.size("num_hidden_layers")
    ):
        raise fields.error("use_sliding_window", "is true, and sliding-window attention is not supported")
