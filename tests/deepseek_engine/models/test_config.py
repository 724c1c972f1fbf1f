"""config.json in its two spellings, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from deepseek_engine.models import CheckpointError, ModelConfig, load_config
from deepseek_engine.models.config import DeepseekConfig, LlamaConfig

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32256,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 32013,
    "eos_token_id": 32014,
    "rope_theta": 100000,
    "rope_scaling": {"factor": 4.0, "type": "linear"},
}
V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "topk_method": "greedy",
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
}


def read(folder: Path, base: dict[str, Any], **changes: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps({**base, **changes}))
    return load_config(folder)


def test_deepseek_coder(tmp_path: Path) -> None:
    config = read(tmp_path, LLAMA)
    assert isinstance(config, LlamaConfig)
    assert (config.rope.rope_type, config.rope.factor, config.rope.rope_theta) == ("linear", 4.0, 100000.0)
    assert (config.num_key_value_heads, config.head_dim, config.qkv_bias, config.qk_norm) == (32, 128, False, False)
    assert (config.bos_token_id, config.eos_token_ids) == (32013, (32014,))
    assert config.max_position_embeddings == 16384


def test_v2_lite(tmp_path: Path) -> None:
    config = read(tmp_path, V2_LITE)
    assert isinstance(config, DeepseekConfig)
    assert (config.q_lora_rank, config.topk_method, config.norm_topk_prob) == (None, "greedy", False)
    assert (config.rope.rope_type, config.rope.factor, config.rope.mscale_all_dim) == ("yarn", 40.0, 0.707)
    assert [config.is_moe(layer) for layer in range(3)] == [False, True, True]


def test_new_and_old_spelling_of_rope_are_equal(tmp_path: Path) -> None:
    scaling = {key: value for key, value in V2_LITE["rope_scaling"].items() if key != "type"}
    parameters = {**scaling, "rope_type": "yarn", "rope_theta": 10000.0}
    without = {key: value for key, value in V2_LITE.items() if key not in ("rope_scaling", "rope_theta")}
    assert read(tmp_path, without, rope_parameters=parameters).rope == read(tmp_path, V2_LITE).rope


def test_the_model_type_stands_in_for_architectures(tmp_path: Path) -> None:
    config = read(tmp_path, LLAMA, architectures=None, model_type="qwen3")
    assert isinstance(config, LlamaConfig)
    assert config.qk_norm


@pytest.mark.parametrize(("bias", "qkv", "out"), [(True, True, True), (False, False, False)])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_attention_bias_is_on_all_four(tmp_path: Path, architecture: str, bias: bool, qkv: bool, out: bool) -> None:
    config = read(tmp_path, LLAMA, architectures=[architecture], attention_bias=bias)
    assert isinstance(config, LlamaConfig)
    assert (config.qkv_bias, config.attention_bias) == (qkv, out)


def test_qwen2_has_bias_on_three(tmp_path: Path) -> None:
    config = read(tmp_path, LLAMA, architectures=["Qwen2ForCausalLM"])
    assert isinstance(config, LlamaConfig)
    assert (config.qkv_bias, config.attention_bias) == (True, False)


def test_yarn_stretches_the_context(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    changes = {"architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 32768, "rope_scaling": scaling}
    assert read(tmp_path, LLAMA, **changes).max_position_embeddings == 131072


def test_end_ids_of_both_files(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [32021, 32014]}')
    assert read(tmp_path, LLAMA).eos_token_ids == (32014, 32021)


def test_the_gate_without_its_second_e(tmp_path: Path) -> None:
    config = read(tmp_path, V2_LITE, topk_method="gready")
    assert isinstance(config, DeepseekConfig)
    assert config.topk_method == "greedy"


@pytest.mark.parametrize(
    ("base", "changes", "words"),
    [
        (LLAMA, {"architectures": ["MambaForCausalLM"]}, ["MambaForCausalLM", "DeepseekV3ForCausalLM"]),
        (LLAMA, {"architectures": [], "model_type": "rwkv"}, ["rwkv"]),
        (LLAMA, {"architectures": "LlamaForCausalLM"}, ["architectures", "list"]),
        (LLAMA, {"quantization_config": {"quant_method": "fp8"}}, ["fp8", "bfloat16", "quantization_config"]),
        (LLAMA, {"hidden_size": None}, ["hidden_size", "missing"]),
        (LLAMA, {"hidden_size": "4096"}, ["hidden_size", "'4096'"]),
        (LLAMA, {"num_hidden_layers": 0}, ["num_hidden_layers", "at least 1"]),
        (LLAMA, {"num_key_value_heads": 5}, ["num_key_value_heads", "divide"]),
        (LLAMA, {"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        (LLAMA, {"mlp_bias": True}, ["mlp_bias"]),
        (LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["dynamic", "yarn"]),
        (LLAMA, {"rope_scaling": {"full_attention": {"type": "linear"}}}, ["rope_scaling"]),
        (LLAMA, {"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        (LLAMA, {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 8}, ["use_sliding_window"]),
        (LLAMA, {"head_dim": 63}, ["head_dim", "even"]),
        (LLAMA, {"eos_token_id": "end"}, ["eos_token_id", "'end'"]),
        (V2_LITE, {"topk_method": "random"}, ["topk_method", "random"]),
        (V2_LITE, {"rope_interleave": False}, ["rope_interleave"]),
        (V2_LITE, {"topk_method": "group_limited_greedy", "n_group": 7}, ["n_group", "64"]),
        (V2_LITE, {"topk_method": "noaux_tc", "n_group": 8, "topk_group": 9}, ["topk_group"]),
        (V2_LITE, {"topk_method": "noaux_tc", "n_group": 64, "topk_group": 4}, ["n_group", "two"]),
        (V2_LITE, {"num_experts_per_tok": 65}, ["num_experts_per_tok", "64"]),
        (V2_LITE, {"qk_rope_head_dim": 63}, ["qk_rope_head_dim", "even"]),
    ],
)
def test_what_is_refused_is_named(
    tmp_path: Path, base: dict[str, Any], changes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path, base, **changes)
    for word in [*words, "config.json"]:
        assert word in str(caught.value)


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is missing.*folder of a Hugging Face checkpoint"):
        load_config(tmp_path)


@pytest.mark.parametrize("text", ["{", "", "\xff"])
def test_config_that_is_no_json(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read as JSON"):
        load_config(tmp_path)


def test_config_that_is_a_list(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="must hold a JSON object"):
        load_config(tmp_path)
