"""The Llama-shaped models: deepseek-llm, deepseek-coder and R1's Llama, Qwen2 and Qwen3 distills."""

from deepseek_engine.cache_spec import CachePlane, CacheSpec
from deepseek_engine.models.config import LlamaConfig
from deepseek_engine.models.decoder import Attention, Decoder, Mlp
from deepseek_engine.models.feed_forward import FeedForward
from deepseek_engine.models.grouped_attention import GroupedAttention
from deepseek_engine.models.weights import Checkpoint


def load_llama(config: LlamaConfig, checkpoint: Checkpoint) -> Decoder:
    """Raises CheckpointError."""

    def load_layer(prefix: str, layer: int) -> tuple[Attention, Mlp]:
        return (
            GroupedAttention.load(checkpoint, f"{prefix}.self_attn", config),
            FeedForward.load(checkpoint, f"{prefix}.mlp", config.hidden_size, config.intermediate_size),
        )

    width = config.num_key_value_heads * config.head_dim
    planes = [CachePlane(name, config.num_hidden_layers, width, checkpoint.dtype) for name in ("k", "v")]
    return Decoder(
        config, checkpoint, load_layer=load_layer, rotary_dim=config.head_dim, cache_spec=CacheSpec(tuple(planes))
    )
