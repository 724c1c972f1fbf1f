"""Runs an export for a GPU without one: a session whose operators are plain torch, over the addresses bound to it."""

import ctypes
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import torch
import torch.nn.functional as F
from deepseek_engine.gpu.onnx_decoder import OnnxDecoder
from deepseek_engine.kernels import moe_gate
from deepseek_engine.kernels.int4_gemm import dequantized
from deepseek_engine.kernels.rms_norm import rms_norm
from deepseek_engine.kernels.swiglu import swiglu
from deepseek_engine.models import ModelConfig
from deepseek_engine.models.weights import Checkpoint
from deepseek_engine.runners.onnx_graph import HEAD_FILE, MODEL_FILE
from deepseek_engine.runners.onnx_operators import exported_operators
from deepseek_ops.exporter.device_writer import DeviceWriter
from deepseek_ops.exporter.weight_files import WeightFiles
from deepseek_ops.exporter.weight_format import PlainFormat, WeightFormat
from onnx import TensorProto
from torch import Tensor

DTYPES = {
    TensorProto.FLOAT: torch.float32,
    TensorProto.FLOAT16: torch.float16,
    TensorProto.BFLOAT16: torch.bfloat16,
    TensorProto.UINT8: torch.uint8,
    TensorProto.INT32: torch.int32,
    TensorProto.INT64: torch.int64,
}
_SPELLED = {
    torch.float32: "tensor(float)",
    torch.float16: "tensor(float16)",
    torch.bfloat16: "tensor(bfloat16)",
    torch.int32: "tensor(int32)",
    torch.int64: "tensor(int64)",
}


def write_device_graphs(
    checkpoint: Path,
    config: ModelConfig,
    out: Path,
    dtype: torch.dtype = torch.float32,
    format: WeightFormat | None = None,
) -> Path:
    """A checkpoint's graphs for a GPU, of the layers that `config` says.

    No operator takes float32 there: it is for an exact comparison.
    """
    out.mkdir()
    writer = DeviceWriter(config, Checkpoint(checkpoint, dtype=dtype), WeightFiles(out), format or PlainFormat())
    for name, graph in zip((MODEL_FILE, HEAD_FILE), writer.write(), strict=True):
        (out / name).write_bytes(graph.SerializeToString())
    return out


def device_decoder(export: Path, config: ModelConfig) -> "tuple[OnnxDecoder, DeviceSession, DeviceSession]":
    """An export for a GPU over sessions without one: the model, its body and its head."""
    body, head = (DeviceSession(export / name) for name in (MODEL_FILE, HEAD_FILE))
    sessions: Any = (body, head)
    device = torch.device("cpu")
    return OnnxDecoder(*sessions, config, exported=exported_operators(export), device=device), body, head


class DeviceSession:
    """Takes the place of an InferenceSession.

    Attributes:
        bound: how often each name was bound.
        runs: how often it ran.
        host_batches: what decided the launches of each run.
    """

    def __init__(self, path: Path) -> None:
        model = onnx.load(str(path), load_external_data=False)
        self._graph = model.graph
        self._weights = {proto.name: _external(path.parent, proto) for proto in model.graph.initializer}
        self._operators = Operators()
        self.bound: dict[str, int] = {}
        self.runs = 0
        self.host_batches: list[list[list[int]]] = []

    def get_inputs(self) -> list[Any]:
        return [_argument(each) for each in self._graph.input]

    def get_outputs(self) -> list[Any]:
        return [_argument(each) for each in self._graph.output]

    def get_modelmeta(self) -> Any:
        return SimpleNamespace(graph_name=self._graph.name)

    def io_binding(self) -> "_Binding":
        return _Binding(self)

    def run_with_iobinding(self, binding: "_Binding", options: Any) -> None:
        assert options.get_run_config_entry("disable_synchronize_execution_providers") == "1"
        self.runs += 1
        values = {**self._weights, **binding.inputs}
        assert values.keys() >= {each.name for each in self._graph.input}
        if "host_batch" in values:
            self.host_batches.append(values["host_batch"].tolist())
        for node in self._graph.node:
            attributes = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
            operator: Callable[..., tuple[Tensor, ...]] = getattr(self._operators, node.op_type)
            given = [values[name] if name else None for name in node.input]
            made = operator(*given, **attributes)
            values.update({name: tensor for name, tensor in zip(node.output, made, strict=False) if name})
        for name, target in binding.outputs.items():
            if values[name].data_ptr() != target.data_ptr():
                assert values[name].dtype == target.dtype, name
                target.copy_(values[name])


class _Binding:
    def __init__(self, session: DeviceSession) -> None:
        self._session = session
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}

    def bind_input(self, name: str, device: str, number: int, kind: int, shape: tuple[int, ...], place: int) -> None:
        self.inputs[name] = self._at(name, device, kind, shape, place)

    def bind_output(self, name: str, device: str, number: int, kind: int, shape: tuple[int, ...], place: int) -> None:
        self.outputs[name] = self._at(name, device, kind, shape, place)

    def _at(self, name: str, device: str, kind: int, shape: tuple[int, ...], place: int) -> Tensor:
        assert device == "cpu"
        self._session.bound[name] = self._session.bound.get(name, 0) + 1
        dtype = DTYPES[kind]
        size = dtype.itemsize * torch.Size(shape).numel()
        memory = (ctypes.c_char * size).from_address(place)
        return torch.frombuffer(memory, dtype=dtype).view(shape)


class Operators:
    """com.deepseek as the CUDA library has it, by what the registry says of each."""

    def DeepSeekEmbedding(  # noqa: N802
        self, token_ids: Tensor, table: Tensor, sources: Tensor, last_tokens: Tensor
    ) -> tuple[Tensor, ...]:
        last = last_tokens[sources.long().clamp(min=0)]
        return (table[torch.where(sources < 0, token_ids, last)],)

    def DeepSeekRMSNorm(  # noqa: N802
        self, x: Tensor, weight: Tensor, residual: Tensor | None = None, *, epsilon: float, num_heads: int = 1
    ) -> tuple[Tensor, ...]:
        assert num_heads == 1
        total = x if residual is None else x + residual
        return rms_norm(total, weight, epsilon), total

    def DeepSeekMatMul(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, ...]:  # noqa: N802
        return (F.linear(x, weight, bias),)

    def DeepSeekMatMulInt4(  # noqa: N802
        self,
        x: Tensor,
        weight: Tensor,
        scales: Tensor,
        zeros: Tensor,
        bias: Tensor | None = None,
        *,
        group_size: int,
    ) -> tuple[Tensor, ...]:
        return (F.linear(x, dequantized(weight, scales, zeros, x.shape[1], group_size).to(x.dtype), bias),)

    def DeepSeekMoEInt4(  # noqa: N802
        self,
        x: Tensor,
        weights: Tensor,
        experts: Tensor,
        gate_up: Tensor,
        gate_up_scales: Tensor,
        gate_up_zeros: Tensor,
        down: Tensor,
        down_scales: Tensor,
        down_zeros: Tensor,
        *,
        group_size: int,
    ) -> tuple[Tensor, ...]:
        inner = gate_up.shape[1] // 2
        whole = dequantized(gate_up, gate_up_scales, gate_up_zeros, x.shape[1], group_size).to(x.dtype)
        out = dequantized(down, down_scales, down_zeros, inner, group_size).to(x.dtype)
        return self.DeepSeekMoE(x, weights, experts, whole, out)

    def DeepSeekLogits(self, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:  # noqa: N802
        return (F.linear(x.float(), weight.float()),)

    def DeepSeekSwiGLU(self, gate_up: Tensor) -> tuple[Tensor, ...]:  # noqa: N802
        return (swiglu(gate_up),)

    def DeepSeekMLASchedule(  # noqa: N802
        self, cache: Tensor, context_lengths: Tensor, host_batch: Tensor, **attributes: int
    ) -> tuple[Tensor, ...]:
        return (torch.zeros(len(context_lengths), dtype=torch.int32),)

    def DeepSeekMoEGate(  # noqa: N802
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        slots: Tensor,
        *,
        topk_method: bytes,
        num_experts_per_tok: int,
        n_group: int,
        topk_group: int,
        norm_topk_prob: int,
        routed_scaling_factor: float,
        n_shared_experts: int,
    ) -> tuple[Tensor, ...]:
        logits = F.linear(x.float(), weight)
        common: dict[str, Any] = {
            "top_k": num_experts_per_tok,
            "normalize": bool(norm_topk_prob),
            "scaling": routed_scaling_factor,
        }
        groups = {"groups": n_group, "topk_groups": topk_group}
        method = topk_method.decode()
        if method == "greedy":
            weights, experts = moe_gate.greedy(logits, **common)
        elif method == "group_limited_greedy":
            weights, experts = moe_gate.group_limited_greedy(logits, **common, **groups)
        else:
            assert bias is not None
            weights, experts = moe_gate.noaux_tc(logits, bias, **common, **groups)
        shared = torch.arange(len(weight), len(weight) + n_shared_experts).expand(len(x), -1)
        experts = torch.cat((experts, shared), dim=1).masked_fill(slots[:, None] < 0, -1)
        return torch.cat((weights, torch.ones(shared.shape)), dim=1), experts.int()

    def DeepSeekMoE(  # noqa: N802
        self, x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor
    ) -> tuple[Tensor, ...]:
        total = torch.zeros(x.shape)
        for expert in experts.unique().tolist():
            if expert >= 0:
                rows, places = (experts == expert).nonzero(as_tuple=True)
                inner = F.linear(swiglu(F.linear(x[rows], gate_up[expert])), down[expert])
                total.index_add_(0, rows, inner.float() * weights[rows, places, None])
        return (total.to(x.dtype),)

    def DeepSeekMLAPagedAttention(  # noqa: N802
        self,
        q: Tensor,
        entries: Tensor,
        cache: Tensor,
        kv_b: Tensor,
        block_tables: Tensor,
        query_starts: Tensor,
        context_lengths: Tensor,
        table_rows: Tensor,
        positions: Tensor,
        slots: Tensor,
        rotations: Tensor,
        latent_norm: Tensor,
        host_batch: Tensor,
        plan: Tensor,
        *,
        num_heads: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        scale: float,
        latent_epsilon: float,
        interleaved: int,
    ) -> tuple[Tensor, ...]:
        assert interleaved == 1
        nope, rank, block = qk_nope_head_dim, latent_norm.shape[0], cache.shape[1]
        cos, sin = rotations[positions].chunk(2, dim=-1)
        heads = q.unflatten(1, (num_heads, -1))
        q = torch.cat((heads[..., :nope], _rotated(heads[..., nope:], cos[:, None], sin[:, None])), dim=-1)
        latent = rms_norm(entries[:, :rank].contiguous(), latent_norm, latent_epsilon)
        written = torch.cat((latent, _rotated(entries[:, rank:], cos, sin)), dim=-1)
        plane = cache.view(-1, cache.shape[-1])
        plane[slots[slots >= 0]] = written[slots >= 0]
        weight = kv_b.view(num_heads, nope + v_head_dim, rank).float()
        y = torch.zeros(len(q), num_heads, v_head_dim)
        for place, length in enumerate(context_lengths.tolist()):
            first, stop = query_starts[place : place + 2].tolist()
            assert stop - first <= host_batch[place, 0]
            if first == stop:
                continue
            at = torch.arange(length)
            seen = plane[block_tables[table_rows[place]].long()[at // block] * block + at % block].float()
            both = torch.einsum("lr,hdr->hld", seen[:, :rank], weight)
            keys = torch.cat((both[..., :nope], seen[:, rank:].expand(num_heads, -1, -1)), dim=-1)
            scores = torch.einsum("thd,hld->htl", q[first:stop].float(), keys) * scale
            scores.masked_fill_(at > positions[first:stop, None], float("-inf"))
            y[first:stop] = torch.einsum("htl,hld->thd", scores.softmax(-1), both[..., nope:])
        return y.flatten(1).to(q.dtype), cache

    def DeepSeekPagedSchedule(  # noqa: N802
        self, key_cache: Tensor, context_lengths: Tensor, host_batch: Tensor, **attributes: int
    ) -> tuple[Tensor, ...]:
        return (torch.zeros(len(context_lengths), dtype=torch.int32),)

    def DeepSeekPagedAttention(  # noqa: N802
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        query_starts: Tensor,
        context_lengths: Tensor,
        table_rows: Tensor,
        positions: Tensor,
        slots: Tensor,
        rotations: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        host_batch: Tensor,
        plan: Tensor,
        *,
        num_heads: int,
        num_key_value_heads: int,
        head_dim: int,
        scale: float,
        norm_epsilon: float,
        interleaved: int,
    ) -> tuple[Tensor, ...]:
        assert interleaved == 0
        cos, sin = (part[:, None] for part in rotations[positions].chunk(2, dim=-1))
        heads = [each.unflatten(1, (-1, head_dim)) for each in (q, k)]
        for place, norm in enumerate((q_norm, k_norm)):
            if norm is not None:
                heads[place] = rms_norm(heads[place].contiguous(), norm, norm_epsilon)
        queries, keys = (_halves_rotated(each, cos, sin) for each in heads)
        block = key_cache.shape[1]
        planes = [each.view(-1, num_key_value_heads, head_dim) for each in (key_cache, value_cache)]
        for plane, written in zip(planes, (keys, v.unflatten(1, (-1, head_dim))), strict=True):
            plane[slots[slots >= 0]] = written[slots >= 0]
        y = torch.zeros(len(q), num_heads, head_dim)
        for place, length in enumerate(context_lengths.tolist()):
            first, stop = query_starts[place : place + 2].tolist()
            assert stop - first <= host_batch[place, 0]
            if first == stop:
                continue
            at = torch.arange(length)
            where = block_tables[table_rows[place]].long()[at // block] * block + at % block
            seen = [plane[where].float().repeat_interleave(num_heads // num_key_value_heads, 1) for plane in planes]
            scores = torch.einsum("thd,lhd->htl", queries[first:stop].float(), seen[0]) * scale
            scores.masked_fill_(at > positions[first:stop, None], float("-inf"))
            y[first:stop] = torch.einsum("htl,lhd->thd", scores.softmax(-1), seen[1])
        return y.flatten(1).to(q.dtype), key_cache, value_cache


def _halves_rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs (i, i + half) turned in float32."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs (2i, 2i + 1) turned in float32."""
    a, b = x.float()[..., 0::2], x.float()[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2).to(x.dtype)


def _argument(value: onnx.ValueInfoProto) -> Any:
    kind = value.type.tensor_type
    shape = [size.dim_param or size.dim_value for size in kind.shape.dim]
    return SimpleNamespace(name=value.name, type=_SPELLED[DTYPES[kind.elem_type]], shape=shape)


def _external(folder: Path, proto: onnx.TensorProto) -> Tensor:
    told = {each.key: each.value for each in proto.external_data}
    with (folder / told["location"]).open("rb") as file:
        file.seek(int(told["offset"]))
        data = bytearray(file.read(int(told["length"])))
    return torch.frombuffer(data, dtype=DTYPES[proto.data_type]).view(*proto.dims)
