"""The graph of every family, layer by layer."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx
import torch
from deepseek_engine.kernels.rope import rope_table
from deepseek_engine.models.config import DeepseekConfig, LlamaConfig, ModelConfig
from deepseek_engine.models.latent_attention import LATENT_NORM_EPS, softmax_scale
from deepseek_engine.models.rope_frequencies import rope_frequencies, rotation_factor
from deepseek_engine.models.weights import Checkpoint
from torch import Tensor

from deepseek_ops.exporter.graph_builder import GraphBuilder
from deepseek_ops.exporter.weight_files import WeightFiles
from deepseek_ops.exporter.weight_format import PlainFormat, WeightFormat

_FLOAT, _INT64 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64
_BATCH = ("block_tables", "query_starts", "context_lengths")


@dataclass(slots=True)
class ModelWriter:
    """Writes one model in two graphs, so that whoever runs it chooses the rows whose logits are worth their room.

    The body. Inputs: token_ids, positions int64 [T]; block_tables [R, M], query_starts [R + 1], context_lengths [R],
    int64, as DeepSeekPagedAttention takes them; and a cache a layer and plane, float [B, S, width]. Outputs: hidden
    float [T, hidden size], after the last norm, and the caches under their names with _out, which have to be bound to
    the same memory.

    The head. Input: hidden float [N, hidden size], any rows of the body's. Output: logits float [N, vocabulary].

    Products and experts have their weights in `format`. What is read a row at a time (the embedding), is small (norms,
    biases, the gate), is read plain by its operator (kv_b), or costs the logits more than its size is worth (the head)
    keeps its own type.
    """

    config: ModelConfig
    checkpoint: Checkpoint
    files: WeightFiles
    format: WeightFormat = field(default_factory=PlainFormat)
    graph: GraphBuilder = field(default_factory=GraphBuilder)

    def write(self) -> tuple[onnx.ModelProto, onnx.ModelProto]:
        """Body and head; all their weights lie in the files."""
        config, graph = self.config, self.graph
        self._inputs()
        self.files.begin("embedding")
        vocabulary = (config.vocab_size, config.hidden_size)
        table = self._weight("model.embed_tokens.weight", *vocabulary)
        if isinstance(config, LlamaConfig):
            self.files.add("inv_freq", rope_frequencies(config.rope, config.head_dim))
        else:
            self.files.add("rotations", rotations(config))
        hidden = graph.standard("Gather", "embedding", table, "token_ids")
        hidden = graph.standard("Cast", "embedding.cast", hidden, to=_FLOAT)
        for layer in range(config.num_hidden_layers):
            self.files.begin(f"layer_{layer:03}")
            hidden = self._layer(f"model.layers.{layer}", layer, hidden)
        self.files.begin("head")
        self._norm("model.norm", hidden, config.hidden_size, output="hidden")
        graph.output("hidden", _FLOAT, "T", config.hidden_size)
        self._cache_outputs()
        body = graph.model(config.architecture, list(self.files.tensors))
        head = self._head(table, _FLOAT)
        self.files.finish()
        return body, head

    def _head(self, table: str, element: int) -> onnx.ModelProto:
        config, graph = self.config, GraphBuilder()
        if not config.tie_word_embeddings:
            table = self._weight("lm_head.weight", config.vocab_size, config.hidden_size)
        graph.input("hidden", element, "N", config.hidden_size)
        graph.deepseek("DeepSeekLogits", "lm_head", {"x": "hidden", "weight": table}, {"logits": "logits"})
        graph.output("logits", _FLOAT, "N", config.vocab_size)
        return graph.model(f"{config.architecture}.head", [each for each in self.files.tensors if each.name == table])

    @property
    def _deepseek(self) -> DeepseekConfig:
        assert isinstance(self.config, DeepseekConfig)
        return self.config

    def planes(self) -> dict[str, int]:
        """Cache plane of a layer to its width."""
        config = self.config
        if isinstance(config, LlamaConfig):
            return dict.fromkeys(("k", "v"), config.num_key_value_heads * config.head_dim)
        return {"latent": self._deepseek.kv_lora_rank + self._deepseek.qk_rope_head_dim}

    def _inputs(self) -> None:
        for name, sizes in (("token_ids", ["T"]), ("positions", ["T"])):
            self.graph.input(name, _INT64, *sizes)
        for name, sizes in zip(_BATCH, (["R", "M"], ["R_and_1"], ["R"]), strict=True):
            self.graph.input(name, _INT64, *sizes)
        for layer in range(self.config.num_hidden_layers):
            for plane, width in self.planes().items():
                self.graph.input(f"{plane}_{layer}", _FLOAT, "B", "S", width)

    def _cache_outputs(self) -> None:
        for layer in range(self.config.num_hidden_layers):
            for plane, width in self.planes().items():
                self.graph.output(f"{plane}_{layer}_out", _FLOAT, "B", "S", width)

    def _layer(self, prefix: str, layer: int, hidden: str) -> str:
        norm = f"{prefix}.input_layernorm"
        if isinstance(self.config, LlamaConfig):
            normed = self._norm(norm, hidden, self.config.hidden_size)
            hidden = self._grouped_attention(f"{prefix}.self_attn", layer, normed, hidden)
        else:
            hidden = self._latent_attention(f"{prefix}.self_attn", layer, hidden, norm)
        norm = f"{prefix}.post_attention_layernorm"
        if isinstance(self.config, DeepseekConfig) and self.config.is_moe(layer):
            return self._experts(f"{prefix}.mlp", self._norm(norm, hidden, self.config.hidden_size), hidden)
        return self._feed_forward(f"{prefix}.mlp", hidden, hidden, self._norm_input(norm, self.config.hidden_size))

    def _latent_attention(self, prefix: str, layer: int, hidden: str, norm: str) -> str:
        """Few operators, since a step of few rows takes as long to call the small ones as to compute them: products
        normalise what they read, and attention what it caches."""
        config = self._deepseek
        heads, rank, rotary = config.num_attention_heads, config.kv_lora_rank, config.qk_rope_head_dim
        width, bias = config.qk_nope_head_dim + rotary, config.attention_bias
        normed = self._norm_input(norm, config.hidden_size)
        if config.q_lora_rank:
            q = self._linear(
                f"{prefix}.q_a_proj", hidden, config.q_lora_rank, config.hidden_size, bias=bias, norm=normed
            )
            q_norm = self._norm_input(f"{prefix}.q_a_layernorm", config.q_lora_rank, LATENT_NORM_EPS)
            q = self._linear(f"{prefix}.q_b_proj", q, heads * width, config.q_lora_rank, norm=q_norm)
        else:
            q = self._linear(f"{prefix}.q_proj", hidden, heads * width, config.hidden_size, norm=normed)
        name = f"{prefix}.kv_a_proj_with_mqa"
        entries = self._linear(name, hidden, rank + rotary, config.hidden_size, bias=bias, norm=normed)
        rows = heads * (config.qk_nope_head_dim + config.v_head_dim)
        kv_b = self._weight(f"{prefix}.kv_b_proj.weight", rows, rank)
        cache = f"latent_{layer}"
        inputs = {
            "q": q,
            "entries": entries,
            "cache": cache,
            "kv_b": kv_b,
            "latent_norm": self._weight(f"{prefix}.kv_a_layernorm.weight", rank),
            **{each: each for each in (*_BATCH, "positions", "rotations")},
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
        )
        inner = heads * config.v_head_dim
        return self._linear(f"{prefix}.o_proj", f"{prefix}.y", config.hidden_size, inner, bias=bias, residual=hidden)

    def _grouped_attention(self, prefix: str, layer: int, x: str, residual: str) -> str:
        config = self.config
        assert isinstance(config, LlamaConfig)
        heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads, "v": config.num_key_value_heads}
        made = {}
        for name, count in heads.items():
            made[name] = self._linear(
                f"{prefix}.{name}_proj", x, count * config.head_dim, config.hidden_size, bias=config.qkv_bias
            )
            if name == "v":
                continue
            if config.qk_norm:
                made[name] = self._norm(f"{prefix}.{name}_norm", made[name], config.head_dim, heads=count)
            made[name] = self._rotate(f"{prefix}.{name}_rotary", made[name], count, interleaved=False)
        caches = {"key_cache": f"k_{layer}", "value_cache": f"v_{layer}"}
        self.graph.deepseek(
            "DeepSeekPagedAttention",
            prefix,
            {**made, **caches, **{name: name for name in _BATCH}},
            {"y": f"{prefix}.y", **{f"{plane}_out": f"{cache}_out" for plane, cache in caches.items()}},
            num_heads=heads["q"],
            num_key_value_heads=heads["k"],
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
        )
        inner = heads["q"] * config.head_dim
        return self._linear(
            f"{prefix}.o_proj",
            f"{prefix}.y",
            config.hidden_size,
            inner,
            bias=config.attention_bias,
            residual=residual,
        )

    def _feed_forward(self, prefix: str, x: str, residual: str | None, norm: "_NormInput | None" = None) -> str:
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        weight = self._gate_up(prefix, inner)
        both = self._product(f"{prefix}.gate_up_proj", f"{prefix}.gate_up", weight, {"x": x}, norm)
        active = self.graph.deepseek("DeepSeekSwiGLU", f"{prefix}.swiglu", {"gate_up": both})[0]
        return self._linear(f"{prefix}.down_proj", active, hidden, inner, residual=residual)

    def _experts(self, prefix: str, x: str, residual: str) -> str:
        return self._mixed(
            prefix, {"x": x, **self._gate(prefix, x), "residual": residual, **self._expert_weights(prefix)}
        )

    def _gate(
        self, prefix: str, x: str, *, dtype: torch.dtype | None = None, slots: str | None = None, shared: int = 0
    ) -> dict[str, str]:
        """A row's weights and experts, `shared` further ones among them; `dtype` is that of the gate's weight, else it
        keeps its own."""
        config = self._deepseek
        count, grouped = config.n_routed_experts, config.topk_method != "greedy"
        bias = None
        if config.topk_method == "noaux_tc":
            bias = self._weight(f"{prefix}.gate.e_score_correction_bias", count, dtype=torch.float32)
        gate = self._weight(f"{prefix}.gate.weight", count, config.hidden_size, dtype=dtype)
        weights, experts = self.graph.deepseek(
            "DeepSeekMoEGate",
            f"{prefix}.gate",
            {"x": x, "weight": gate, "bias": bias, "slots": slots},
            topk_method=config.topk_method,
            num_experts_per_tok=config.num_experts_per_tok,
            n_group=config.n_group if grouped else 1,
            topk_group=config.topk_group if grouped else 1,
            norm_topk_prob=int(config.norm_topk_prob),
            routed_scaling_factor=config.routed_scaling_factor,
            n_shared_experts=shared,
        )
        return {"weights": weights, "experts": experts}

    def _mixed(self, prefix: str, inputs: Mapping[str, str | None]) -> str:
        operator = self.format.operator("DeepSeekMoE")
        return self.graph.deepseek(operator, f"{prefix}.experts", inputs, None, **self.format.attributes)[0]

    def _expert_weights(self, prefix: str) -> dict[str, str]:
        """The inputs of routed and shared experts."""
        config, format = self._deepseek, self.format
        inner, shared = config.moe_intermediate_size, f"{prefix}.shared_experts"
        names = [f"{prefix}.experts.{expert}" for expert in range(config.n_routed_experts)]
        gate_ups, downs = (self._gate_up(name, inner) for name in names), (self._down(name, inner) for name in names)
        inputs = format.add_stack(self.files, "gate_up", f"{prefix}.experts.gate_up", gate_ups, len(names))
        inputs |= format.add_stack(self.files, "down", f"{prefix}.experts.down", downs, len(names))
        if config.n_shared_experts:
            wide = config.n_shared_experts * inner
            gate_up, down = self._gate_up(shared, wide), self._down(shared, wide)
            inputs |= format.add(self.files, "shared_gate_up", f"{shared}.gate_up", gate_up)
            inputs |= format.add(self.files, "shared_down", f"{shared}.down", down)
        return inputs

    def _gate_up(self, prefix: str, inner: int) -> Tensor:
        names = (f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight")
        return torch.cat([self.checkpoint.tensor(name, inner, self.config.hidden_size) for name in names])

    def _down(self, prefix: str, inner: int) -> Tensor:
        return self.checkpoint.tensor(f"{prefix}.down_proj.weight", self.config.hidden_size, inner)

    def _weight(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> str:
        return self.files.add(name, self.checkpoint.tensor(name, *shape, dtype=dtype))

    def _linear(
        self,
        name: str,
        x: str,
        outputs: int,
        columns: int,
        *,
        bias: bool = False,
        residual: str | None = None,
        norm: "_NormInput | None" = None,
    ) -> str:
        weight = self.checkpoint.tensor(f"{name}.weight", outputs, columns)
        added = self._weight(f"{name}.bias", outputs) if bias else None
        return self._product(name, f"{name}.weight", weight, {"x": x, "bias": added, "residual": residual}, norm)

    def _product(
        self,
        node: str,
        name: str,
        weight: Tensor,
        inputs: Mapping[str, str | None],
        norm: "_NormInput | None" = None,
    ) -> str:
        written = self.format.add(self.files, "weight", name, weight)
        operator = self.format.operator("DeepSeekMatMul")
        given, attributes = {**inputs, **written}, dict[str, int | float](self.format.attributes)
        if norm is not None:
            given["norm"], attributes["epsilon"] = norm.weight, norm.epsilon
        return self.graph.deepseek(operator, node, given, None, **attributes)[0]

    def _norm_input(self, name: str, width: int, epsilon: float | None = None) -> "_NormInput":
        """Of a norm that a product does before it multiplies."""
        weight = self._weight(f"{name}.weight", width)
        return _NormInput(weight, self.config.rms_norm_eps if epsilon is None else epsilon)

    def _norm(
        self, name: str, x: str, width: int, epsilon: float | None = None, *, heads: int = 1, output: str | None = None
    ) -> str:
        return self.graph.deepseek(
            "DeepSeekRMSNorm",
            name,
            {"x": x, "weight": self._weight(f"{name}.weight", width)},
            {"y": output} if output else None,
            epsilon=self.config.rms_norm_eps if epsilon is None else epsilon,
            num_heads=heads,
        )[0]

    def _rotate(self, name: str, x: str, heads: int, *, interleaved: bool) -> str:
        return self.graph.deepseek(
            "DeepSeekRotaryEmbedding",
            name,
            {"x": x, "positions": "positions", "inv_freq": "inv_freq"},
            num_heads=heads,
            interleaved=int(interleaved),
            scale=rotation_factor(self.config.rope),
            max_position_embeddings=self.config.max_position_embeddings,
        )[0]


@dataclass(frozen=True, slots=True)
class _NormInput:
    """A norm's weight in the graph, and its epsilon."""

    weight: str
    epsilon: float


def rotations(config: ModelConfig) -> Tensor:
    """float32 [positions, rotary width]: cosines, then sines, of all positions that the model knows."""
    assert isinstance(config, DeepseekConfig | LlamaConfig)
    width = config.head_dim if isinstance(config, LlamaConfig) else config.qk_rope_head_dim
    frequencies = rope_frequencies(config.rope, width)
    return rope_table(frequencies, rotation_factor(config.rope), config.max_position_embeddings)
