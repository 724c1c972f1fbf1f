"""Exports for a GPU: their graphs, run with the operators' references, against the engine's models."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch

pytest.importorskip("triton")
from deepseek_engine.gpu.device_step import DeviceStep
from deepseek_engine.gpu.onnx_decoder import OnnxDecoder
from deepseek_engine.models import load_config, load_model
from deepseek_engine.runners.onnx_graph import HEAD_FILE, MODEL_FILE, check_cache_stays
from deepseek_ops.exporter.export import ExportError, export
from deepseek_ops.exporter.weight_format import Int4Format
from device_graph import device_decoder, write_device_graphs
from int4_checkpoints import dequantized_checkpoint, exported_tensors
from paged_sequences import PagedSequences
from random_checkpoints import random_token_ids
from torch import Tensor

FAMILIES = ("v2", "v2_lite", "v3", "llama", "llama_bias", "qwen2", "qwen3")
DEMO = Path(__file__).parents[3] / "assets" / "demo"
HALVES = (torch.bfloat16, torch.float16)


@pytest.fixture(scope="module")
def device_export(
    checkpoint_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, torch.dtype], Path]:
    """A family's export for a GPU; in float32 too, which no operator takes there, for an exact comparison."""
    made: dict[tuple[str, torch.dtype], Path] = {}

    def folder(family: str, dtype: torch.dtype) -> Path:
        if (family, dtype) not in made:
            out = tmp_path_factory.mktemp("device") / family
            if dtype == torch.float32:
                write_device_graphs(checkpoint_folder(family), load_config(checkpoint_folder(family)), out)
            else:
                export(checkpoint_folder(family), out, precision=dtype)
            made[family, dtype] = out
        return made[family, dtype]

    return folder


class DeviceSequences(PagedSequences):
    """The same over an OnnxDecoder: table rows are not in the step's order, and last come two padded rows."""

    model: OnnxDecoder  # type: ignore[assignment]

    def step(self, chunks: dict[int, list[int]]) -> dict[int, Tensor]:
        batch = self.batch(chunks)
        count, rows = batch.num_tokens, len(chunks)

        def padded(values: Tensor, fill: int, dtype: torch.dtype) -> Tensor:
            return torch.cat((values, torch.full((2,), fill, dtype=values.dtype))).to(dtype)

        tokens = padded(batch.token_ids, 0, torch.int64)
        last_tokens = torch.tensor([int(tokens[0]), 0])
        tokens[0] = 0
        counts = torch.tensor(batch.query_starts).diff()
        lengths = torch.tensor(batch.context_lengths)
        step = DeviceStep(
            token_ids=tokens,
            sources=torch.tensor([0] + [-1] * (count + 1), dtype=torch.int32),
            last_tokens=last_tokens,
            positions=padded(batch.positions, 0, torch.int64),
            slots=padded(batch.slots, -1, torch.int64),
            lengths=padded(lengths, 0, torch.int32),
            query_starts=padded(torch.tensor(batch.query_starts), count, torch.int32),
            table_rows=padded(torch.arange(rows - 1, -1, -1), 0, torch.int32),
            tables=batch.block_tables.flip(0).int().contiguous(),
            block_size=self.block_size,
            max_queries=int(counts.max()),
            num_decoded=count + 2,
        )
        logits = self.model.logits(self.model.forward(step, self.cache)[:count])
        for sequence, token_ids in chunks.items():
            self.filled[sequence] += len(token_ids)
        parts = logits.split([len(token_ids) for token_ids in chunks.values()])
        return dict(zip(chunks, parts, strict=True))


def steps(sequences: PagedSequences) -> list[Tensor]:
    """Prompts in chunks beside decodes, then decodes alone."""
    tokens = [random_token_ids(length, seed) for seed, length in enumerate((50, 30, 40))]
    logits: list[Tensor] = []
    for chunks in (
        {0: tokens[0][:33], 1: tokens[1][:9]},
        {1: tokens[1][9:10], 2: tokens[2][:20], 0: tokens[0][33:36]},
        *({0: tokens[0][36 + i : 37 + i], 2: tokens[2][20 + i : 21 + i]} for i in range(3)),
    ):
        logits += list(sequences.step(chunks).values())
    return logits


def decoder(folder: Path, checkpoint: Path) -> OnnxDecoder:
    return device_decoder(folder, load_config(checkpoint))[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_the_engines(
    checkpoint_folder: Callable[[str], Path], device_export: Callable[[str, torch.dtype], Path], family: str
) -> None:
    model = load_model(checkpoint_folder(family), dtype=torch.float32)
    device = decoder(device_export(family, torch.float32), checkpoint_folder(family))
    sizes = [60, 40, 50]
    for got, expected in zip(
        steps(DeviceSequences(device, sizes, poison=float("nan"))),  # type: ignore[arg-type]
        steps(PagedSequences(model, sizes, poison=float("nan"))),
        strict=True,
    ):
        torch.testing.assert_close(got, expected, atol=2e-4, rtol=2e-4)
        assert torch.equal(got.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("family", ["v2_lite", "qwen2"])
@pytest.mark.parametrize("dtype", HALVES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_half_types_are_as_near_as_they_round(
    checkpoint_folder: Callable[[str], Path],
    device_export: Callable[[str, torch.dtype], Path],
    family: str,
    dtype: torch.dtype,
) -> None:
    folder = checkpoint_folder(family)
    exact, sizes = load_model(folder, dtype=torch.float32), [60, 40, 50]
    device = decoder(device_export(family, dtype), folder)
    assert {plane.dtype for plane in device.cache_spec().planes} == {dtype}
    expected = torch.cat(steps(PagedSequences(exact, sizes)))
    got = torch.cat(steps(DeviceSequences(device, sizes)))  # type: ignore[arg-type]
    plain = torch.cat(steps(PagedSequences(load_model(folder, dtype=dtype), sizes)))
    # Not further off than the engine's own model in the type, whose roundings are as many.
    assert (got - expected).norm() <= 1.5 * (plain - expected).norm()


def test_graphs_hold_what_runs_on_a_gpu(device_export: Callable[[str, torch.dtype], Path]) -> None:
    folder = device_export("v3", torch.bfloat16)
    check_cache_stays(folder / MODEL_FILE)
    for name in (MODEL_FILE, HEAD_FILE):
        graph = onnx.load(folder / name, load_external_data=False).graph
        assert {node.domain for node in graph.node} == {"com.deepseek"}
        kinds = {tensor.name: tensor.data_type for tensor in graph.initializer}
        single = {each for each, kind in kinds.items() if kind != onnx.TensorProto.BFLOAT16}
        assert all(
            each == "rotations" or each.endswith(("gate.weight", "e_score_correction_bias")) for each in single
        ), single
        assert {kinds[each] for each in single} <= {onnx.TensorProto.FLOAT}


def test_what_has_no_operators_on_a_gpu_is_refused(checkpoint_folder: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="take heads of 16 to 128 elements in steps of 16, not of 24; export it in"):
        export(checkpoint_folder("qwen3"), tmp_path / "out", precision=torch.bfloat16)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("family", ["v2", "v2_lite", "v3", "llama_bias", "qwen2"])
def test_int4_logits_are_the_engines_over_the_same_weights(
    checkpoint_folder: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    folder, packed = checkpoint_folder(family), Int4Format()
    made = write_device_graphs(folder, load_config(folder), tmp_path / "out", format=packed)
    unpacked = dequantized_checkpoint(folder, made, tmp_path / "unpacked", packed.group_size)
    sizes = [60, 40, 50]
    for got, expected in zip(
        steps(DeviceSequences(decoder(made, folder), sizes)),  # type: ignore[arg-type]
        steps(PagedSequences(load_model(unpacked, dtype=torch.float32), sizes)),
        strict=True,
    ):
        torch.testing.assert_close(got, expected, atol=2e-4, rtol=2e-4)


def test_packed_experts_of_odd_widths_are_padded(tmp_path: Path) -> None:
    """The demo's are 48 wide: its logits are those of the weights that the packed ones stand for all the same."""
    packed, config = Int4Format(), load_config(DEMO)
    made = write_device_graphs(DEMO, config, tmp_path / "out", format=packed)
    stacks = exported_tensors(made)
    assert stacks["model.layers.1.mlp.experts.down"].shape[-1] == 64 // 2
    unpacked = load_model(
        dequantized_checkpoint(DEMO, made, tmp_path / "unpacked", packed.group_size), dtype=torch.float32
    )
    sizes = [60, 40, 50]
    for got, expected in zip(
        steps(DeviceSequences(decoder(made, DEMO), sizes)),  # type: ignore[arg-type]
        steps(PagedSequences(unpacked, sizes)),
        strict=True,
    ):
        torch.testing.assert_close(got, expected, atol=2e-4, rtol=2e-4)


def test_int4_packs_products_and_experts_and_nothing_else(
    checkpoint_folder: Callable[[str], Path], device_export: Callable[[str, torch.dtype], Path], tmp_path: Path
) -> None:
    made = export(checkpoint_folder("v3"), tmp_path / "out", precision=torch.bfloat16, format=Int4Format())
    packed, plain = exported_tensors(made), exported_tensors(device_export("v3", torch.bfloat16))
    kept = {"embed_tokens.weight", "lm_head.weight", "kv_b_proj.weight", "gate.weight", "rotations", "correction_bias"}
    for name, tensor in plain.items():
        if tensor.dim() == 1 or any(name.endswith(each) for each in kept):
            assert torch.equal(packed[name], tensor), name
        else:
            assert packed[name].dtype == torch.uint8, name
            assert packed[f"{name}_scales"].dtype == torch.bfloat16
    operators = {node.op_type for node in onnx.load(made / MODEL_FILE, load_external_data=False).graph.node}
    assert {"DeepSeekMatMulInt4", "DeepSeekMoEInt4"} < operators
    assert not operators & {"DeepSeekMatMul", "DeepSeekMoE"}


def test_packed_experts_of_odd_widths_are_refused(tmp_path: Path, checkpoint_folder: Callable[[str], Path]) -> None:
    folder = tmp_path / "odd"
    shutil.copytree(checkpoint_folder("v3"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 80}))
    with pytest.raises(ExportError, match="packed experts have multiples of 32 columns, not 80; leave out --quantize"):
        export(folder, tmp_path / "out", precision=torch.bfloat16, format=Int4Format())
