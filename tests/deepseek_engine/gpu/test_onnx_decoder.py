"""A model over sessions for a GPU: what it binds, what decides launches, and which sessions it refuses."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch

pytest.importorskip("triton")
from deepseek_engine.gpu.device_step import DeviceStep
from deepseek_engine.gpu.onnx_decoder import OnnxDecoder, check_placement, host_batch, load_onnx_decoder
from deepseek_engine.models import ModelConfig
from deepseek_engine.runners.onnx_graph import ExportError
from device_graph import DeviceSession, device_decoder, write_device_graphs
from onnx import TensorProto, helper
from runner_pair import config_of

BLOCK = 16


@pytest.fixture(scope="module")
def config(checkpoint_folder: Callable[[str], Path]) -> ModelConfig:
    return config_of(checkpoint_folder("v2_lite"), 1)


@pytest.fixture(scope="module")
def export(
    checkpoint_folder: Callable[[str], Path], config: ModelConfig, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return write_device_graphs(checkpoint_folder("v2_lite"), config, tmp_path_factory.mktemp("out") / "export")


@pytest.fixture
def sessions(export: Path, config: ModelConfig) -> tuple[OnnxDecoder, DeviceSession, DeviceSession]:
    return device_decoder(export, config)


def step_of(count: int, **changes: Any) -> DeviceStep:
    """Sequences of one token each, in blocks of their own."""
    numbers = torch.arange(count)
    fields: dict[str, Any] = {
        "token_ids": numbers + 3,
        "sources": torch.full((count,), -1, dtype=torch.int32),
        "last_tokens": torch.zeros(count + 1, dtype=torch.int64),
        "positions": torch.zeros(count, dtype=torch.int64),
        "slots": numbers * BLOCK,
        "lengths": torch.ones(count, dtype=torch.int32),
        "query_starts": torch.arange(count + 1, dtype=torch.int32),
        "table_rows": numbers.int(),
        "tables": numbers.int().unsqueeze(1),
        "block_size": BLOCK,
        "max_queries": 1,
        "num_decoded": count,
        **changes,
    }
    return DeviceStep(**fields)


def test_what_stays_is_bound_once(sessions: tuple[OnnxDecoder, DeviceSession, DeviceSession]) -> None:
    model, body, _ = sessions
    cache = model.cache_spec().allocate(4, BLOCK)
    step = step_of(3)
    first = model.forward(step, cache)
    step.token_ids += 1
    second = model.forward(step, cache)
    assert not torch.equal(first, second)
    moving = {"hidden", "host_batch"}
    assert {name for name, count in body.bound.items() if count > 1} <= moving
    assert body.bound["latent_0"] == body.bound["latent_0_out"] == 1


def test_another_step_and_another_cache_are_bound_anew(
    sessions: tuple[OnnxDecoder, DeviceSession, DeviceSession],
) -> None:
    model, body, _ = sessions
    caches = [model.cache_spec().allocate(4, BLOCK) for _ in range(2)]
    first = model.forward(step_of(2), caches[0])
    torch.testing.assert_close(model.forward(step_of(3), caches[1])[:2], first)
    assert body.bound["latent_0"] == 2
    torch.testing.assert_close(caches[0]["latent"][:, : 2 * BLOCK], caches[1]["latent"][:, : 2 * BLOCK])


def test_a_padded_row_writes_nothing(sessions: tuple[OnnxDecoder, DeviceSession, DeviceSession]) -> None:
    model, _, _ = sessions
    caches = [model.cache_spec().allocate(4, BLOCK) for _ in range(2)]
    padding = {
        "slots": torch.tensor([0, -1]),
        "lengths": torch.tensor([1, 0], dtype=torch.int32),
        "query_starts": torch.tensor([0, 1, 1], dtype=torch.int32),
    }
    padded = model.forward(step_of(2, **padding), caches[0])
    torch.testing.assert_close(padded[:1], model.forward(step_of(1), caches[1]))
    torch.testing.assert_close(caches[0]["latent"], caches[1]["latent"])


def test_logits_go_where_they_are_wanted(sessions: tuple[OnnxDecoder, DeviceSession, DeviceSession]) -> None:
    model, _, head = sessions
    hidden = torch.randn(4, model.config.hidden_size)
    out = torch.full((4, model.config.vocab_size), float("nan"))
    assert model.logits(hidden, out) is out
    assert torch.equal(model.logits(hidden), out)
    # Every second row: they do not lie one after the other.
    torch.testing.assert_close(model.logits(hidden[::2]), out[::2])
    assert head.runs == 3


def test_what_decides_launches_is_a_bound_where_a_step_is_captured() -> None:
    assert host_batch(step_of(3, max_queries=4)).tolist() == [[4, 1]] * 3
    told = torch.tensor([[9, 40], [1, 7]], dtype=torch.int32)
    assert host_batch(step_of(2, host_rows=told)) is told


def test_sessions_of_another_checkpoint_are_refused(export: Path, config: ModelConfig) -> None:
    with pytest.raises(ExportError, match=r"hidden size and layers are .*, 1 and the checkpoint's .*, 2; publish"):
        device_decoder(export, replace(config, num_hidden_layers=2))


def test_an_export_for_a_cpu_is_told_before_it_is_opened(
    export_folder: Callable[[str], Path], config: ModelConfig, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match="was exported for a CPU; publish with --device cpu"):
        load_onnx_decoder(
            export_folder("v2_lite"), tmp_path / "no.so", config, device=torch.device("cuda", 0), memory=1
        )


def session_on_the_cpu(cache: str) -> Any:
    """A real one of one node, whose input and output are a cache."""
    rows = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["T"]) for name in (cache, f"{cache}_out")]
    node = helper.make_node("Neg", [cache], [f"{cache}_out"], name="the_node")
    graph = helper.make_graph([node], "g", rows[:1], rows[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def test_a_node_that_is_not_on_the_gpu_is_named() -> None:
    with pytest.raises(ExportError, match="node 'the_node', a Neg, would run on CPUExecutionProvider"):
        check_placement(session_on_the_cpu("latent_0"))


def test_a_cache_in_the_hosts_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_on_the_cpu("latent_0")
    monkeypatch.setattr(session, "get_provider_graph_assignment_info", list)
    with pytest.raises(ExportError, match="takes the cache latent_0 from the host's memory"):
        check_placement(session)
