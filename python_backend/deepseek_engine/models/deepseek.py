"""DeepSeek V2, V2-Lite, Coder-V2, V3, V3.1 and R1: one architecture with two or three gates."""

from deepseek_engine.cache_spec import CachePlane, CacheSpec
from deepseek_engine.models.config import DeepseekConfig
from deepseek_engine.models.decoder import Attention, Decoder, Mlp
from deepseek_engine.models.feed_forward import FeedForward
from deepseek_engine.models.latent_attention import LatentAttention
from deepseek_engine.models.mixture_of_experts import MixtureOfExperts
from deepseek_engine.models.weights import Checkpoint


def load_deepseek(config: DeepseekConfig, checkpoint: Checkpoint) -> Decoder:
    """The model without its MTP layer, which stands after the others and is left unread. Raises CheckpointError."""

    def load_layer(prefix: str, layer: int) -> tuple[Attention, Mlp]:
        mlp: Mlp
        if config.is_moe(layer):
            mlp = MixtureOfExperts.load(checkpoint, f"{prefix}.mlp", config)
        else:
            mlp = FeedForward.load(checkpoint, f"{prefix}.mlp", config.hidden_size, config.intermediate_size)
        return LatentAttention.load(checkpoint, f"{prefix}.self_attn", config), mlp

    width = config.kv_lora_rank + config.qk_rope_head_dim
    return Decoder(
        config,
        checkpoint,
        load_layer=load_layer,
        rotary_dim=config.qk_rope_head_dim,
        cache_spec=CacheSpec((CachePlane("latent", config.num_hidden_layers, width, checkpoint.dtype),)),
    )
