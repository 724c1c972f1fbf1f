"""Which fusions a model has on a device, and what is in the way."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from deepseek_engine.gpu.fusions import (
    APART,
    CACHE,
    COMBINE,
    DOWN,
    EXPERTS,
    FUSIONS,
    GATE,
    GRAPH,
    INPUTS,
    LOGPROBS,
    NORM,
    NOT_IN_USE,
    SAMPLE,
    Obstacle,
    fused_operators,
    fusions,
    kernel_obstacle,
    step_operators,
)
from deepseek_engine.models import load_config
from deepseek_engine.models.config import DeepseekConfig, LlamaConfig, RopeConfig
from deepseek_engine.runners.onnx_operators import exported_operators

pytest.importorskip("triton")
from device_graph import write_device_graphs

COMMON = {
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope": RopeConfig(),
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_ids": (1,),
}
V2_LITE = DeepseekConfig(
    architecture="DeepseekV2ForCausalLM",
    q_lora_rank=None,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    n_routed_experts=64,
    n_shared_experts=2,
    num_experts_per_tok=6,
    moe_intermediate_size=1408,
    first_k_dense_replace=1,
    moe_layer_freq=1,
    topk_method="greedy",
    n_group=1,
    topk_group=1,
    norm_topk_prob=False,
    routed_scaling_factor=1.0,
    **COMMON,
)
LLAMA = LlamaConfig(
    architecture="LlamaForCausalLM", num_key_value_heads=8, head_dim=128, qkv_bias=False, qk_norm=False, **COMMON
)
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("config", "device", "dtype", "capability", "cause", "named"),
    [
        (V2_LITE, GPU, BF16, 90, None, ""),
        (V2_LITE, GPU, torch.float16, 86, None, ""),
        (V2_LITE, CPU, BF16, None, "device", "the device is a CPU"),
        (LLAMA, GPU, BF16, 90, None, ""),
        (
            replace(LLAMA, head_dim=256),
            GPU,
            BF16,
            90,
            "model",
            "heads of 16 to 128 elements in steps of 16",
        ),
        (V2_LITE, GPU, BF16, 75, "device", "sm_75"),
        (V2_LITE, GPU, BF16, 120, "device", "sm_120"),
        (V2_LITE, GPU, torch.float32, 90, "dtype", "no kernel takes float32; publish with --precision bfloat16"),
    ],
)
def test_what_keeps_a_model_off_the_kernels(config, device, dtype, capability, cause, named):
    found = kernel_obstacle(config, device, dtype, capability)
    assert (found.cause if found else None) == cause
    assert named in (found.reason if found else "")


def test_everything_applies_to_a_mixture_of_experts_on_the_kernels():
    found = fusions(V2_LITE, None)
    assert tuple(fusion.name for fusion in found) == FUSIONS
    missing = {fusion.name: fusion.obstacle.cause for fusion in found if fusion.obstacle is not None}
    assert missing == {DOWN: "side effects", LOGPROBS: "memory space"}
    sizes = {fusion.name: fusion.operators for fusion in found}
    assert (sizes[NORM], sizes[CACHE], sizes[EXPERTS]) == (4 * 27, 4 * 27, 4 * 26)
    assert sizes[GRAPH] == sum(step_operators(V2_LITE).values())
    assert fused_operators(found) == sum(sizes.values()) - sizes[GRAPH] - sizes[DOWN]
    assert 0.7 < fused_operators(found) / sizes[GRAPH] < 0.8


def test_a_model_without_experts_has_no_fusion_of_theirs():
    dense = replace(V2_LITE, n_routed_experts=0)
    missing = {fusion.name: fusion.obstacle.cause for fusion in fusions(dense, None) if fusion.obstacle is not None}
    assert [name for name, cause in missing.items() if cause == "model"] == [GATE, EXPERTS, COMBINE]


@pytest.mark.parametrize("config", [V2_LITE, LLAMA])
@pytest.mark.parametrize("obstacle", [NOT_IN_USE, Obstacle("device", "the device is a CPU")])
def test_what_is_in_the_way_is_told_of_every_fusion_but_that_of_the_weights(config, obstacle):
    found = fusions(config, obstacle)
    assert {fusion.obstacle for fusion in found if fusion.name != INPUTS} == {obstacle}
    (inputs,) = [fusion for fusion in found if fusion.name == INPUTS]
    assert inputs.obstacle is None
    assert fused_operators(found) == inputs.operators > 0


def test_an_export_fuses_what_its_nodes_share():
    found = {
        fusion.name: fusion
        for fusion in fusions(V2_LITE, None, exported={"SiLU": 26, "gate product": 1, "up product": 1, "top-k": 99})
    }
    assert (found[EXPERTS].operators, found[EXPERTS].obstacle) == (26, None)
    assert "78 more are nodes of their own" in found[EXPERTS].limits
    assert (found[INPUTS].operators, found[INPUTS].obstacle) == (2, None)
    # Never more than the model has.
    assert found[GATE].operators == 26
    assert found[NORM].obstacle == found[CACHE].obstacle == APART
    assert found[DOWN].obstacle is not None
    assert found[DOWN].obstacle.cause == "side effects"
    assert found[GRAPH].obstacle is None
    assert fused_operators(list(found.values())) == 26 + 2 + 26 + found[SAMPLE].operators


@pytest.mark.parametrize("on_gpu", [True, False])
@pytest.mark.parametrize("family", ["v2", "v2_lite", "v3", "llama", "qwen3"])
def test_exports_fuse_as_the_engine_does(checkpoint_folder, export_folder, tmp_path, family, on_gpu):
    """Two ways to count one thing: the graph that was written, and the config."""
    folder = checkpoint_folder(family)
    config = load_config(folder)
    apart = {INPUTS}
    if not on_gpu:
        # On a CPU grouped heads come rotated to their attention, and a product adds the residual.
        apart |= {NORM, CACHE} if isinstance(config, LlamaConfig) else {NORM}
    exported = exported_operators(
        write_device_graphs(folder, config, tmp_path / "out") if on_gpu else export_folder(family)
    )
    assert exported.provider == ("CUDAExecutionProvider" if on_gpu else "CPUExecutionProvider")
    named = {operator for operator, _ in step_operators(config)}
    assert exported.fused.keys() <= named
    own = {fusion.name: fusion for fusion in fusions(config, None)}
    # On a CPU residuals are added by products, and grouped heads are turned before attention.
    apart = set() if on_gpu else {NORM} | ({CACHE} if isinstance(config, LlamaConfig) else set())
    for fusion in fusions(config, None, exported=exported.fused):
        if fusion.name == INPUTS:
            pairs = sum(operator in ("gate product", "up product") for operator in Counter(exported.fused).elements())
            assert fusion.operators == (pairs or own[INPUTS].operators)
            assert (fusion.obstacle is None) == (pairs > 0)
        elif fusion.name == DOWN and not on_gpu and own[DOWN].operators:
            assert (fusion.operators, fusion.obstacle) == (own[DOWN].operators, None)
        elif fusion.name in apart:
            assert fusion.obstacle == APART
        else:
            assert (fusion.operators, fusion.obstacle) == (own[fusion.name].operators, own[fusion.name].obstacle)


@pytest.mark.parametrize(("norm", "operators"), [(False, 3), (True, 5)])
def test_grouped_heads_turn_and_are_written_in_one_launch(norm, operators):
    sizes = {fusion.name: fusion.operators for fusion in fusions(replace(LLAMA, qk_norm=norm), None)}
    assert sizes[CACHE] == operators * LLAMA.num_hidden_layers


def test_what_keeps_steps_off_graphs_harms_no_other_fusion():
    eager = Obstacle("device", "no graph was captured")
    found = fusions(V2_LITE, None, graphs=eager)
    assert [fusion.name for fusion in found if fusion.obstacle is eager] == [GRAPH]
    assert fused_operators(found) == fused_operators(fusions(V2_LITE, None))


@pytest.mark.parametrize(("changes", "more"), [({"q_lora_rank": 1536}, 2 * 27), ({"topk_method": "noaux_tc"}, 26)])
def test_operators_follow_the_config(changes, more):
    other = step_operators(replace(V2_LITE, **changes))
    assert sum(other.values()) == sum(step_operators(V2_LITE).values()) + more
