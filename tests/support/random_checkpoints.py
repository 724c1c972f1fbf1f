"""Small random checkpoints of every family, written by transformers with the names that real ones have on disk.

Default initialisation hides mistakes: every norm weight is one, the correction bias zero, the logits nearly flat. So
norm weights lie in 0.5-1.5, the bias is N(0, 0.5), queries and gates are scaled until attention and routing are
decided, and the latents are made small, so that the epsilon of their norms shows.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB_SIZE = 320
LATENT_GAIN = 3e-3

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}
_LATENT = {
    **_COMMON,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
_GROUPED = {**_COMMON, "num_key_value_heads": 2}


def _yarn(mscale: float) -> dict[str, Any]:
    return {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": mscale,
        "mscale_all_dim": mscale,
    }


def _v2(**changes: Any) -> PreTrainedModel:
    gate = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 4.0}
    settings = {**_LATENT, **gate, "n_shared_experts": 2, "norm_topk_prob": False, **changes}
    return DeepseekV2ForCausalLM(DeepseekV2Config(**settings, rope_parameters=_yarn(0.707)))


def _v2_lite() -> PreTrainedModel:
    settings = {**_LATENT, "q_lora_rank": None, "n_shared_experts": 2, "topk_method": "greedy"}
    return DeepseekV2ForCausalLM(DeepseekV2Config(**settings, norm_topk_prob=False, rope_parameters=_yarn(0.707)))


def _v3(**changes: Any) -> PreTrainedModel:
    # Six of the eight experts in two groups: some have negative biased scores, which shows how the others are masked.
    gate = {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 6, "routed_scaling_factor": 2.5}
    settings = {**_LATENT, **gate, "n_shared_experts": 1, "rope_parameters": _yarn(1.0), **changes}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**settings))


def _llama(*, sizes: dict[str, Any] | None = None, **rope: Any) -> PreTrainedModel:
    parameters = {"rope_type": "default", "rope_theta": 10000.0, **rope}
    return LlamaForCausalLM(LlamaConfig(**{**_GROUPED, **(sizes or {})}, rope_parameters=parameters))


def _llama3() -> PreTrainedModel:
    frequencies = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    return _llama(rope_type="llama3", factor=8.0, **frequencies)


def _qwen2() -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**{**_GROUPED, "tie_word_embeddings": True}))


def _qwen3(head_dim: int = 24) -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**_GROUPED, head_dim=head_dim))


FAMILIES = {
    "v2": _v2,
    "v2_lite": _v2_lite,
    "v3": _v3,
    "v3_no_q_lora": lambda: _v3(q_lora_rank=None),
    "llama": _llama,
    "llama_linear": lambda: _llama(rope_type="linear", factor=4.0),
    "llama3": _llama3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
}

VARIANTS = {
    "v2_bias": lambda: _v2(attention_bias=True),
    "v2_lite_bias": lambda: _v2(attention_bias=True, q_lora_rank=None),
    "v3_plain": lambda: _v3(n_group=1, topk_group=1, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
    "v3_one_dense_layer": lambda: _v3(first_k_dense_replace=3, num_hidden_layers=1),
    "llama_bias": lambda: _llama(sizes={"attention_bias": True}),
    "llama_yarn": lambda: _llama(rope_type="yarn", factor=8.0, original_max_position_embeddings=64),
    "llama_wide": lambda: _llama(
        sizes={"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 64, "attention_bias": True}
    ),
    "qwen3_wide": lambda: _qwen3(head_dim=80),
}
"""What the families leave out of their options."""


def make_checkpoint(family: str, folder: Path, *, max_shard_size: str = "50GB") -> Path:
    """Write the family's, or the variant's, checkpoint into the folder, the same at every call."""
    with torch.random.fork_rng():
        torch.manual_seed([*sorted(FAMILIES), *VARIANTS].index(family))
        model = {**FAMILIES, **VARIANTS}[family]()
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            _randomize(name, tensor)
        if model.config.tie_word_embeddings:
            # As a head, the embedding's rows would make logits many times sharper than the others'.
            model.get_input_embeddings().weight.data *= 0.25
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def load_oracle(folder: Path) -> PreTrainedModel:
    """transformers' own model of the checkpoint: float32, eager attention."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def oracle_logits(oracle: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """float32 [tokens, vocab]."""
    with torch.inference_mode():
        return oracle(torch.tensor([token_ids])).logits[0].float()


def random_token_ids(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCAB_SIZE, (length,), generator=generator).tolist()


@torch.no_grad()
def _randomize(name: str, tensor: torch.Tensor) -> None:
    if "inv_freq" in name:
        return
    if "norm" in name:
        tensor.uniform_(0.5, 1.5)
    elif "embed_tokens" in name:
        tensor.normal_(0.0, 1.0)
    elif name.endswith("e_score_correction_bias"):
        tensor.normal_(0.0, 0.5)
    elif name.endswith("bias"):
        tensor.normal_(0.0, 0.3)
    else:
        tensor.normal_(0.0, _gain(name) / tensor.shape[-1] ** 0.5)
    if name.endswith("kv_a_proj_with_mqa.weight"):
        tensor[: _LATENT["kv_lora_rank"]] *= LATENT_GAIN
    if name.endswith("q_a_proj.weight"):
        tensor *= LATENT_GAIN


def _gain(name: str) -> float:
    if name.endswith(("q_proj.weight", "q_b_proj.weight", "gate.weight")):
        return 2.0
    if name.endswith("lm_head.weight"):
        return 1.5
    return 1.0
