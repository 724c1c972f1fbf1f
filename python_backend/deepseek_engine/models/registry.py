"""Which model a checkpoint is."""

from collections.abc import Callable
from functools import partial

from deepseek_engine.models.config import (
    DeepseekConfig,
    Fields,
    LlamaConfig,
    ModelConfig,
    deepseek_config,
    llama_config,
)
from deepseek_engine.models.decoder import Decoder
from deepseek_engine.models.deepseek import load_deepseek
from deepseek_engine.models.errors import CheckpointError
from deepseek_engine.models.llama import load_llama
from deepseek_engine.models.weights import Checkpoint

ConfigReader = Callable[[Fields, str], ModelConfig]

CONFIGS: dict[str, ConfigReader] = {
    "DeepseekV2ForCausalLM": partial(deepseek_config, topk_method="greedy", norm_topk_prob=False),
    "DeepseekV3ForCausalLM": partial(deepseek_config, topk_method="noaux_tc", norm_topk_prob=True),
    "LlamaForCausalLM": llama_config,
    "Qwen2ForCausalLM": partial(llama_config, qkv_bias=True),
    "Qwen3ForCausalLM": partial(llama_config, qk_norm=True),
}
MODEL_TYPES = {
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def read_model_config(fields: Fields) -> ModelConfig:
    """The settings of the family that `architectures`, or else `model_type`, names. Raises CheckpointError."""
    _refuse_quantization(fields)
    architecture = _architecture(fields)
    return CONFIGS[architecture](fields, architecture)


def build_model(config: ModelConfig, checkpoint: Checkpoint) -> Decoder:
    """Read the weights. Raises CheckpointError."""
    if isinstance(config, DeepseekConfig):
        return load_deepseek(config, checkpoint)
    if isinstance(config, LlamaConfig):
        return load_llama(config, checkpoint)
    raise TypeError(f"no model takes a {type(config).__name__}")


def _architecture(fields: Fields) -> str:
    named = fields.values.get("architectures") or []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise fields.error("architectures", f"must be a list of names, not {named!r}")
    for name in named:
        if name in CONFIGS:
            return name
    model_type = fields.get("model_type", str, "")
    if not named and model_type in MODEL_TYPES:
        return MODEL_TYPES[model_type]
    raise CheckpointError(
        f"{fields.path}: architecture {', '.join(named) or model_type or '(none named)'} is not supported; supported"
        f" are {', '.join(CONFIGS)}"
    )


def _refuse_quantization(fields: Fields) -> None:
    quantization = fields.values.get("quantization_config")
    if not quantization:
        return
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    raise CheckpointError(
        f"{fields.path}: quantization_config asks for {method!r} weights, which are not loaded; float32, bfloat16 and"
        " float16 safetensors are: convert the checkpoint to bfloat16, or take one that is not quantized"
    )
