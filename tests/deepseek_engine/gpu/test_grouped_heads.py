"""Which grouped heads the device kernels take, and what is told of the others."""

from pathlib import Path

import pytest
import torch
from deepseek_engine.gpu.fusions import HEAD_WIDTHS, kernel_obstacle
from deepseek_engine.models.config import Fields, LlamaConfig, llama_config

pytest.importorskip("triton")
from deepseek_engine.block_pool import BLOCK_SIZES
from deepseek_engine.kernels.grouped_decode_triton import GROUPED_DECODE
from deepseek_engine.kernels.grouped_prefill_triton import GROUPED_PREFILL
from deepseek_engine.kernels.grouped_rope_triton import GROUPED_ROPE_CACHE
from deepseek_engine.kernels.variants import ARCHITECTURES, INTEGER_ALIGNMENT
from deepseek_engine.runners.cuda import CHUNK_QUERIES


def config_of(width: int, heads: int = 8, key_heads: int = 2) -> LlamaConfig:
    values = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": width,
        "max_position_embeddings": 128,
    }
    return llama_config(Fields(Path("config.json"), values), "LlamaForCausalLM")


def obstacle_of(config: LlamaConfig, dtype: torch.dtype) -> str | None:
    obstacle = kernel_obstacle(config, torch.device("cuda", 0), dtype, 90)
    return None if obstacle is None else obstacle.reason


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("page", BLOCK_SIZES)
@pytest.mark.parametrize(("heads", "key_heads"), [(12, 2), (28, 4), (40, 8), (64, 8), (32, 32), (16, 16)], ids=str)
def test_every_step_of_what_is_served_has_its_rows(heads: int, key_heads: int, page: int, architecture: int) -> None:
    for width in HEAD_WIDTHS:
        assert width // 2 % INTEGER_ALIGNMENT == 0
        assert obstacle_of(config_of(width, heads, key_heads), torch.bfloat16) is None
        dims = {"key_heads": key_heads, "page": page, "width": width, "half": width // 2}
        assert GROUPED_PREFILL.choose(architecture, "bf16", dims)
        for norm in (0, 1):
            assert GROUPED_ROPE_CACHE.choose(architecture, "bf16", {**dims, "interleaved": 0, "norm": norm})
        for queries in (1, CHUNK_QUERIES):
            rows = heads // key_heads * queries
            for sequences in (1, 16, 512):
                assert GROUPED_DECODE.choose(architecture, "bf16", {**dims, "rows": rows, "sequences": sequences})


@pytest.mark.parametrize("width", [8, 24, 100, 136, 256])
def test_other_heads_are_told_what_would_do(width: int) -> None:
    told = obstacle_of(config_of(width), torch.float16)
    assert told is not None
    assert told.startswith(f"the device kernels take heads of 16 to 128 elements in steps of 16, not of {width}")


def test_other_types_are_told_what_would_do() -> None:
    told = obstacle_of(config_of(64), torch.float32)
    assert told is not None
    assert "--precision bfloat16" in told
