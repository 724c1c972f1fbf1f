"""The graph for a GPU: the launches of the engine's own decoder there, as operators."""

from collections.abc import Iterator
from dataclasses import dataclass

import onnx
import torch
import torch.nn.functional as F
from deepseek_engine.models.config import DeepseekConfig, LlamaConfig
from deepseek_engine.models.latent_attention import LATENT_NORM_EPS, softmax_scale
from torch import Tensor

from deepseek_ops.exporter.model_writer import ModelWriter, rotations
from deepseek_ops.exporter.weight_files import ELEMENT_TYPES
from deepseek_ops.exporter.weight_format import PlainFormat

BLOCK_COLUMNS = 32
"""What the columns of packed experts are multiples of."""

_INT32, _INT64 = onnx.TensorProto.INT32, onnx.TensorProto.INT64
_INPUTS: tuple[tuple[str, int, tuple[str | int, ...]], ...] = (
    ("token_ids", _INT64, ("T",)),
    ("sources", _INT32, ("T",)),
    ("last_tokens", _INT64, ("L",)),
    ("positions", _INT64, ("T",)),
    ("slots", _INT64, ("T",)),
    ("block_tables", _INT32, ("N", "M")),
    ("table_rows", _INT32, ("R",)),
    ("query_starts", _INT32, ("R_and_1",)),
    ("context_lengths", _INT32, ("R",)),
    ("host_batch", _INT32, ("R", 2)),
)
_ATTENTION = ("block_tables", "query_starts", "context_lengths", "table_rows", "positions", "slots", "host_batch")


@dataclass(slots=True)
class DeviceWriter(ModelWriter):
    """Writes a model in two graphs, for operators on a GPU.

    Activations, caches and weights are of the checkpoint's `dtype`, or packed as `format` says with scales of that
    dtype; only the gates' weights and biases are float.

    The body. Inputs: those of `gpu.device_step.DeviceStep` (token_ids, sources, last_tokens, positions, slots,
    block_tables, table_rows, query_starts, context_lengths); host_batch int32 [R, 2] in the host's memory, rows and
    cache entries of every sequence, which decides launches; and a cache a layer and plane [B, S, width]. Outputs:
    hidden [T, hidden size], after the last norm, and the caches under their names with _out, which have to be bound to
    the same memory.

    The head. Input: hidden [N, hidden size], any rows of the body's. Output: logits float [N, vocabulary].

    The residual is a tensor of its own that each norm adds the last product to, and shared experts stand behind the
    routed ones in their stacks, as in `gpu.decoder` and `gpu.mixture_of_experts`.
    """

    def write(self) -> tuple[onnx.ModelProto, onnx.ModelProto]:
        """Body and head; all their weights lie in the files."""
        config, graph = self.config, self.graph
        element = ELEMENT_TYPES[self.checkpoint.dtype]
        for name, kind, sizes in _INPUTS:
            graph.input(name, kind, *sizes)
        layers = range(config.num_hidden_layers)
        caches = {f"{plane}_{layer}": width for layer in layers for plane, width in self.planes().items()}
        for cache, width in caches.items():
            graph.input(cache, element, "B", "S", width)
        self.files.begin("embedding")
        table = self._weight("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self.files.add("rotations", rotations(config))
        inputs = {name: name for name in ("token_ids", "sources", "last_tokens")}
        hidden = graph.deepseek("DeepSeekEmbedding", "embedding", {**inputs, "table": table})[0]
        self._schedule(next(iter(caches)))
        delta = None
        for layer in layers:
            self.files.begin(f"layer_{layer:03}")
            hidden, delta = self._run_layer(f"model.layers.{layer}", layer, hidden, delta)
        self.files.begin("head")
        self._add_norm("model.norm", hidden, delta, output="hidden")
        graph.output("hidden", element, "T", config.hidden_size)
        for cache, width in caches.items():
            graph.output(f"{cache}_out", element, "B", "S", width)
        body = graph.model(config.architecture, list(self.files.tensors))
        head = self._head(table, element)
        self.files.finish()
        return body, head

    def _schedule(self, cache: str) -> None:
        """How the decode kernel splits the step's sequences is the same in every layer."""
        config = self.config
        inputs: dict[str, str | None] = {name: name for name in ("context_lengths", "host_batch")}
        if isinstance(config, LlamaConfig):
            self.graph.deepseek(
                "DeepSeekPagedSchedule",
                "schedule",
                {"key_cache": cache, **inputs},
                {"plan": "plan"},
                num_heads=config.num_attention_heads,
                num_key_value_heads=config.num_key_value_heads,
                head_dim=config.head_dim,
            )
            return
        self.graph.deepseek(
            "DeepSeekMLASchedule",
            "schedule",
            {"cache": cache, **inputs},
            {"plan": "plan"},
            num_heads=config.num_attention_heads,
            qk_rope_head_dim=self._deepseek.qk_rope_head_dim,
        )

    def _run_layer(self, prefix: str, layer: int, hidden: str, delta: str | None) -> tuple[str, str]:
        """The residual, and what the next norm is to add to it."""
        x, hidden = self._add_norm(f"{prefix}.input_layernorm", hidden, delta)
        attend = self._attend_grouped if isinstance(self.config, LlamaConfig) else self._attend
        delta = attend(f"{prefix}.self_attn", layer, x)
        x, hidden = self._add_norm(f"{prefix}.post_attention_layernorm", hidden, delta)
        if isinstance(self.config, DeepseekConfig) and self.config.is_moe(layer):
            return hidden, self._mixture(f"{prefix}.mlp", x)
        return hidden, self._feed_forward(f"{prefix}.mlp", x, None)

    def _attend(self, prefix: str, layer: int, x: str) -> str:
        config = self._deepseek
        heads, rank, rotary = config.num_attention_heads, config.kv_lora_rank, config.qk_rope_head_dim
        bias = config.attention_bias
        q = self._queries(prefix, x)
        entries = self._linear(f"{prefix}.kv_a_proj_with_mqa", x, rank + rotary, config.hidden_size, bias=bias)
        rows = heads * (config.qk_nope_head_dim + config.v_head_dim)
        cache = f"latent_{layer}"
        inputs = {
            "q": q,
            "entries": entries,
            "cache": cache,
            "kv_b": self._weight(f"{prefix}.kv_b_proj.weight", rows, rank),
            "latent_norm": self._weight(f"{prefix}.kv_a_layernorm.weight", rank),
            "rotations": "rotations",
            "plan": "plan",
            **{name: name for name in _ATTENTION},
        }
        self.graph.deepseek(
            "DeepSeekMLAPagedAttention",
            prefix,
            inputs,
            {"y": f"{prefix}.y", "cache_out": f"{cache}_out"},
            num_heads=heads,
            qk_nope_head_dim=config.qk_nope_head_dim,
            qk_rope_head_dim=rotary,
            v_head_dim=config.v_head_dim,
            scale=softmax_scale(config),
            latent_epsilon=LATENT_NORM_EPS,
            interleaved=1,
        )
        return self._linear(f"{prefix}.o_proj", f"{prefix}.y", config.hidden_size, heads * config.v_head_dim, bias=bias)

    def _queries(self, prefix: str, x: str) -> str:
        """The heads of latent attention's queries, not rotated."""
        config = self._deepseek
        width = config.num_attention_heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
        if not config.q_lora_rank:
            return self._linear(f"{prefix}.q_proj", x, width, config.hidden_size)
        bias = config.attention_bias
        q = self._linear(f"{prefix}.q_a_proj", x, config.q_lora_rank, config.hidden_size, bias=bias)
        q = self._norm(f"{prefix}.q_a_layernorm", q, config.q_lora_rank, LATENT_NORM_EPS)
        return self._linear(f"{prefix}.q_b_proj", q, width, config.q_lora_rank)

    def _attend_grouped(self, prefix: str, layer: int, x: str) -> str:
        config = self.config
        assert isinstance(config, LlamaConfig)
        heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads, "v": config.num_key_value_heads}
        inputs: dict[str, str | None] = {name: name for name in (*_ATTENTION, "rotations", "plan")}
        for name, count in heads.items():
            rows = count * config.head_dim
            inputs[name] = self._linear(f"{prefix}.{name}_proj", x, rows, config.hidden_size, bias=config.qkv_bias)
            if config.qk_norm and name != "v":
                inputs[f"{name}_norm"] = self._weight(f"{prefix}.{name}_norm.weight", config.head_dim)
        caches = {"key_cache": f"k_{layer}", "value_cache": f"v_{layer}"}
        self.graph.deepseek(
            "DeepSeekPagedAttention",
            prefix,
            {**inputs, **caches},
            {"y": f"{prefix}.y", **{f"{plane}_out": f"{cache}_out" for plane, cache in caches.items()}},
            num_heads=heads["q"],
            num_key_value_heads=heads["k"],
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            norm_epsilon=config.rms_norm_eps,
            interleaved=0,
        )
        inner = heads["q"] * config.head_dim
        return self._linear(f"{prefix}.o_proj", f"{prefix}.y", config.hidden_size, inner, bias=config.attention_bias)

    def _mixture(self, prefix: str, x: str) -> str:
        shared = self._deepseek.n_shared_experts or 0
        chosen = self._gate(prefix, x, dtype=torch.float32, slots="slots", shared=shared)
        return self._mixed(prefix, {"x": x, **chosen, **self._expert_weights(prefix)})

    def _expert_weights(self, prefix: str) -> dict[str, str]:
        """The inputs of all experts, the shared ones behind the routed."""
        config, format = self._deepseek, self.format
        count = config.n_routed_experts + (config.n_shared_experts or 0)
        gate_ups, downs = self._gate_ups(prefix), self._downs(prefix)
        inputs = format.add_stack(self.files, "gate_up", f"{prefix}.experts.gate_up", gate_ups, count)
        return inputs | format.add_stack(self.files, "down", f"{prefix}.experts.down", downs, count)

    def _gate_ups(self, prefix: str) -> Iterator[Tensor]:
        """[2 * I, hidden] of every expert; shared ones are stored as one, side by side."""
        config = self._deepseek
        inner, shared = config.moe_intermediate_size, config.n_shared_experts or 0
        for expert in range(config.n_routed_experts):
            whole = self._gate_up(f"{prefix}.experts.{expert}", inner)
            yield F.pad(whole.view(2, inner, -1), (0, 0, 0, self._padding)).flatten(0, 1)
        if shared:
            whole = self._gate_up(f"{prefix}.shared_experts", shared * inner).view(2, shared, inner, -1)
            whole = F.pad(whole, (0, 0, 0, self._padding))
            yield from (whole[:, index].flatten(0, 1) for index in range(shared))

    def _downs(self, prefix: str) -> Iterator[Tensor]:
        """[hidden, I] of every expert."""
        config = self._deepseek
        inner, shared = config.moe_intermediate_size, config.n_shared_experts or 0
        for expert in range(config.n_routed_experts):
            yield F.pad(self._down(f"{prefix}.experts.{expert}", inner), (0, self._padding))
        if shared:
            parts = self._down(f"{prefix}.shared_experts", shared * inner).split(inner, dim=1)
            yield from (F.pad(part, (0, self._padding)) for part in parts)

    @property
    def _padding(self) -> int:
        """Columns of zeros that an expert's inner ones are followed by, for kernels that take packed ones in blocks."""
        return 0 if isinstance(self.format, PlainFormat) else -self._deepseek.moe_intermediate_size % BLOCK_COLUMNS

    def _add_norm(self, name: str, hidden: str, delta: str | None, output: str | None = None) -> tuple[str, str]:
        """The norm of hidden + delta, and that sum; before anything was computed there is nothing to add."""
        if delta is None:
            return self._norm(name, hidden, self.config.hidden_size), hidden
        weight = self._weight(f"{name}.weight", self.config.hidden_size)
        y, added = self.graph.deepseek(
            "DeepSeekRMSNorm",
            name,
            {"x": delta, "weight": weight, "residual": hidden},
            {"y": output or f"{name}.y", "sum": f"{name}.sum"},
            epsilon=self.config.rms_norm_eps,
        )
        return y, added
