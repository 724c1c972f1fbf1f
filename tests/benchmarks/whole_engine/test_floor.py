"""The floor of a decoding step and the count of the experts behind it."""

from pathlib import Path

import pytest
import torch
from deepseek_engine.models import load_config
from hypothesis import given
from hypothesis import strategies as st
from whole_engine import checkpoint
from whole_engine.floor import Routing, expected_touched, step_bytes


@pytest.fixture
def config(tmp_path: Path):  # type: ignore[no-untyped-def]
    import json

    (tmp_path / "config.json").write_text(json.dumps(checkpoint.v2_lite()))
    return load_config(tmp_path)


def test_the_weights_of_a_step_by_hand(config) -> None:  # type: ignore[no-untyped-def]
    touched = 26 * 6
    read = step_bytes(config, rows=1, context=200, touched=touched)
    attention = 3072 * 2048 + 576 * 2048 + 4096 * 512 + 2048 * 2048
    assert read.attention == 2 * 27 * attention
    assert read.dense == 2 * 3 * 2048 * 10944
    assert read.shared == 2 * 26 * 3 * 2048 * 2816
    assert read.gate == 2 * 26 * 64 * 2048
    assert read.norms == 2 * (27 * (2048 + 2048 + 512) + 2048)
    assert read.lm_head == 2 * 102400 * 2048
    assert read.embedding == 2 * 2048
    assert read.experts == 2 * touched * 3 * 2048 * 1408
    assert read.latent == 200 * 31_104
    assert read.total == pytest.approx(4.91e9, rel=0.01)


def test_all_experts_touched_is_the_file_without_the_embedding(config) -> None:  # type: ignore[no-untyped-def]
    entries = {entry.name: 2 * entry.count for entry in checkpoint.entries(checkpoint.v2_lite())}
    read = step_bytes(config, rows=1, context=0, touched=26 * 64)
    assert read.total - read.embedding == sum(entries.values()) - entries["model.embed_tokens.weight"]


def test_query_compression_counts_its_own_weights(config) -> None:  # type: ignore[no-untyped-def]
    from dataclasses import replace

    plain = step_bytes(config, rows=1, context=0, touched=0)
    compressed = step_bytes(replace(config, q_lora_rank=256), rows=1, context=0, touched=0)
    assert plain.attention - compressed.attention == 2 * 27 * (3072 * 2048 - 256 * (2048 + 3072))
    assert compressed.norms - plain.norms == 2 * 27 * 256


@pytest.mark.parametrize(("rows", "expected"), [(1, 6.0), (8, 34.88), (32, 61.26), (256, 64.0)])
def test_expected_touched(rows: int, expected: float) -> None:
    assert expected_touched(64, 6, rows) == pytest.approx(expected, abs=0.01)


@given(rows=st.integers(1, 40))
def test_lots_touch_what_is_expected(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    routing = Routing(64)
    for _ in range(200):
        routing(1, torch.rand(rows, 64, generator=generator).topk(6).indices)
    assert routing.report(6, rows)["touched_over_expected"] == pytest.approx(1.0, abs=0.02)


def test_shared_and_padded_ids_are_left_out() -> None:
    routing = Routing(4)
    assert not routing
    routing(3, torch.tensor([[0, 1, 4], [-1, -1, 4]], dtype=torch.int32))
    routing(3, torch.tensor([[3, 2, 4], [3, 1, 4]], dtype=torch.int32))
    routing(1, torch.tensor([[2, 2, 4]], dtype=torch.int32))
    assert routing
    report = routing.report(2, 2)
    assert routing.touched == {1: 1.0, 3: 2.5}
    assert report["touched_sum"] == 3.5
    assert report["histogram"] == {1: [0, 0, 2, 0], 3: [1, 2, 1, 2]}
    assert report["steps"] == 2
    assert report["least_layer_over_expected"] == pytest.approx(1.0 / 3.0)
