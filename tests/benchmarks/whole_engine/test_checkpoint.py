"""The random weights of the whole-engine benchmark: what is on disk, and what it makes of a model."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from deepseek_engine.engine import Engine
from deepseek_engine.models import load_model
from deepseek_engine.models.decoder import Decoder
from deepseek_engine.runners.torch import TorchRunner
from deepseek_engine.settings import EngineSettings
from deepseek_engine.text.tokenizer import Tokenizer
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM
from whole_engine import checkpoint
from whole_engine.engine import Built, Prompts, Streams, watched_experts
from whole_engine.floor import Routing

CPU = torch.device("cpu")


def made(folder: Path, config: dict[str, Any], **changes: Any) -> Path:
    checkpoint.make(folder, config, seed=3, device=CPU, **changes)
    return folder


def test_v2_lite_has_its_parameters() -> None:
    # DeepSeek gives 15.7 billion, 2.4 of them used by a token.
    entries = list(checkpoint.entries(checkpoint.v2_lite()))
    assert sum(entry.count for entry in entries) == pytest.approx(15.7e9, rel=0.005)
    assert len({entry.name for entry in entries}) == len(entries)


@given(limit=st.integers(1, 3_000_000))
def test_shards_hold_every_entry_once_and_in_order(limit: int) -> None:
    config = checkpoint.tiny()
    shards = list(checkpoint._shards(config, limit))
    assert [entry for shard in shards for entry in shard] == list(checkpoint.entries(config))
    assert all(len(shard) == 1 or 2 * sum(entry.count for entry in shard) <= limit for shard in shards)


def test_files_are_safetensors_with_the_stated_spread(tmp_path: Path) -> None:
    config = checkpoint.tiny()
    folder = made(tmp_path / "model", config, shard_bytes=200_000)
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 2
    found: dict[str, Tensor] = {}
    for file in files:
        with safe_open(file, "pt") as handle:
            assert handle.metadata() == {"format": "pt"}
            found |= {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    entries = list(checkpoint.entries(config))
    assert set(found) == {entry.name for entry in entries}
    for entry in entries:
        values = found[entry.name]
        assert values.dtype == torch.bfloat16
        assert tuple(values.shape) == entry.shape
        if entry.std is None:
            assert 0.5 <= float(values.min()) <= float(values.max()) <= 1.5
        else:
            assert float(values.float().std()) == pytest.approx(entry.std, rel=8 / math.sqrt(entry.count))
    index = json.loads((folder / checkpoint.INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(values.nbytes for values in found.values())


def test_a_folder_is_made_once_and_again_where_it_is_not_whole(tmp_path: Path) -> None:
    folder, config = tmp_path / "model", checkpoint.tiny()
    assert checkpoint.ensure(folder, config, seed=3, device=CPU)
    first = {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}
    assert not checkpoint.ensure(folder, config, seed=3, device=CPU)
    damaged = next(folder.glob("*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-2])
    assert checkpoint.ensure(folder, config, seed=3, device=CPU)
    assert {file.name: file.read_bytes() for file in folder.glob("*.safetensors")} == first
    assert checkpoint.ensure(folder, config, seed=4, device=CPU)
    assert {file.name: file.read_bytes() for file in folder.glob("*.safetensors")} != first
    assert checkpoint.read_through(folder) == sum(map(len, first.values()))


def test_another_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(ValueError, match="name another folder"):
        checkpoint.ensure(tmp_path, checkpoint.tiny(), seed=0, device=CPU)


def test_a_peer_reads_the_same_model(tmp_path: Path) -> None:
    folder = made(tmp_path / "model", checkpoint.tiny())
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(0, 2560, (1, 24))
    with torch.inference_mode():
        expected = oracle(ids).logits[0]
    model = load_model(folder, dtype=torch.float32)
    assert torch.allclose(all_logits(model, ids[0]), expected, atol=2e-4)


def all_logits(model: Decoder, ids: Tensor) -> Tensor:
    """float32 [T, vocab] of one sequence."""
    from deepseek_engine.batch import Batch

    count = len(ids)
    batch = Batch(
        token_ids=ids,
        positions=torch.arange(count),
        slots=torch.arange(count),
        query_starts=[0, count],
        context_lengths=[count],
        block_tables=torch.arange(-(-count // 16)).unsqueeze(0),
        block_size=16,
    )
    cache = model.cache_spec().allocate(-(-count // 16), 16)
    return model.logits(model.forward(batch, cache))


# Deep and narrow, and as wide as V2-Lite; experts are small, since their number and the gate alone decide.
SHAPED = {
    "deep": checkpoint.v2_lite(27)
    | {"hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 256, "kv_lora_rank": 64},
    "wide": checkpoint.v2_lite(3) | {"intermediate_size": 512},
}


@pytest.fixture(params=SHAPED, scope="module")
def shaped(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    config = SHAPED[request.param] | {"moe_intermediate_size": 32, "vocab_size": 4096}
    config |= {"bos_token_id": 0, "eos_token_id": 1}
    settings = EngineSettings(max_model_len=256, num_blocks=512, enable_prefix_caching=False)
    folder = made(tmp_path_factory.mktemp("shaped") / "model", config)
    # Products of bfloat16 are slow on most CPUs, and choose the same way.
    model = load_model(folder, dtype=torch.float32)
    runner = TorchRunner(model, settings)
    return Built(Engine(runner, Tokenizer.from_folder(folder), settings), runner, model, settings)


def test_real_gates_touch_the_experts_that_lots_would(shaped: Built) -> None:
    prompts, steps = Prompts(4096), 3
    for rows in (1, 32):
        routing = Routing(64)
        with Streams(shaped.engine) as streams:
            streams.add(prompts.draw(rows, 8), 64)
            streams.until(2)
            with watched_experts(shaped, routing):
                streams.until(2 + steps)
        report = routing.report(6, rows)
        assert len(report["histogram"]) == shaped.model.config.num_hidden_layers - 1
        assert sum(map(sum, report["histogram"].values())) == rows * 6 * steps * len(report["histogram"])
        assert report["touched_over_expected"] >= 0.95
        # A single row always takes six.
        assert report["least_layer_over_expected"] >= (0.999 if rows == 1 else 0.85)


def test_activations_stay_sane(shaped: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    model = shaped.model
    outputs: list[Tensor] = []
    for layer in model.layers:
        monkeypatch.setattr(layer, "mlp", Recorded(layer.mlp, outputs))
    logits = all_logits(model, torch.randint(0, 4096, (64,)))
    assert 0.7 < float(logits.std()) < 1.5
    for hidden in outputs:
        assert 0.8 < float(hidden.float().square().mean().sqrt()) < 2.0


class Recorded:
    """A feed-forward layer that keeps what it gives."""

    def __init__(self, mlp: Any, outputs: list[Tensor]) -> None:
        self._mlp = mlp
        self._outputs = outputs

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        self._outputs.append(self._mlp.forward(x, residual))
        return self._outputs[-1]
