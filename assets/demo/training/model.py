"""The training form of a DeepSeek-V3 model: MLA, sigmoid gate with a correction bias, and one MTP layer.

Parameter names are those of the checkpoint, except that a layer's experts are stacked, and that embedding and head are
shared with the MTP layer (the checkpoint repeats them there). Every expert computes every token and the gate's
weights, zero for the experts not chosen, scale the inner activations: at these sizes one wide matrix product is
faster than sorting tokens by expert, and it is the same function.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from training.shape import Shape

IGNORED = -100
LATENT_EPS = 1e-6


class RMSNorm(nn.Module):
    """x / rms(x) * weight, normalised in fp32 and cast before the weight, as DeepSeek does."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return normed.to(x.dtype) * self.weight.to(x.dtype)


def rotary_table(shape: Shape) -> tuple[Tensor, Tensor]:
    """Return cos and sin, each [max_position_embeddings, qk_rope_head_dim / 2] fp32."""
    pairs = torch.arange(0, shape.qk_rope_head_dim, 2, dtype=torch.float64)
    frequencies = shape.rope_theta ** (-pairs / shape.qk_rope_head_dim)
    angles = torch.arange(shape.max_position_embeddings, dtype=torch.float64)[:, None] * frequencies
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the interleaved pairs (2i, 2i+1) of x [..., tokens, heads, rope] by cos, sin [tokens, 1, rope / 2]."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2).to(x.dtype)


class Attention(nn.Module):
    """Multi-head latent attention, written out in full heads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.num_attention_heads
        self.nope, self.rope, self.value = shape.qk_nope_head_dim, shape.qk_rope_head_dim, shape.v_head_dim
        self.latent = shape.kv_lora_rank
        self.q_a_proj = nn.Linear(shape.hidden_size, shape.q_lora_rank, bias=False)
        self.q_a_layernorm = RMSNorm(shape.q_lora_rank, LATENT_EPS)
        self.q_b_proj = nn.Linear(shape.q_lora_rank, self.heads * shape.qk_head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(shape.hidden_size, self.latent + self.rope, bias=False)
        self.kv_a_layernorm = RMSNorm(self.latent, LATENT_EPS)
        self.kv_b_proj = nn.Linear(self.latent, self.heads * (self.nope + self.value), bias=False)
        self.o_proj = nn.Linear(self.heads * self.value, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(rows, tokens, self.heads, -1)
        q_nope, q_rope = q.split([self.nope, self.rope], -1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([self.latent, self.rope], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(rows, tokens, self.heads, -1)
        k_nope, v = kv.split([self.nope, self.value], -1)
        k_rope = rotate(k_rope[:, :, None], cos, sin).expand(-1, -1, self.heads, -1)
        q = torch.cat((q_nope, rotate(q_rope, cos, sin)), -1).transpose(1, 2)
        k = torch.cat((k_nope, k_rope), -1).transpose(1, 2)
        # The flash kernel wants values as wide as keys.
        v = F.pad(v, (0, self.nope + self.rope - self.value)).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)[..., : self.value]
        return self.o_proj(out.transpose(1, 2).reshape(rows, tokens, -1))


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor, temperature: Tensor) -> tuple[Tensor, None]:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)), None


def largest(values: Tensor, count: int) -> Tensor:
    """Return a mask of the ``count`` largest of the last dimension, the earlier ones first among equals."""
    rival, own = values.unsqueeze(-2), values.unsqueeze(-1)
    index = torch.arange(values.shape[-1], device=values.device)
    earlier = index[None, :] < index[:, None]
    return ((rival > own) | ((rival == own) & earlier)).sum(-1) < count


class Gate(nn.Module):
    """V3's sigmoid gate; the correction bias chooses, the plain scores weigh.

    ``temperature`` divides the logits; the exporter folds its last value into the weight.
    """

    e_score_correction_bias: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.groups, self.kept_groups = shape.n_group, shape.topk_group
        self.chosen, self.scale = shape.num_experts_per_tok, shape.routed_scaling_factor
        self.weight = nn.Parameter(torch.empty(shape.n_routed_experts, shape.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(shape.n_routed_experts))

    def forward(self, x: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights [..., experts], zero where not chosen, and how many tokens chose each expert."""
        with torch.autocast(x.device.type, enabled=False):
            scores = (F.linear(x.float(), self.weight.float()) / temperature).sigmoid()
        with torch.no_grad():
            biased = (scores + self.e_score_correction_bias).unflatten(-1, (self.groups, -1))
            of_groups = (biased * largest(biased, 2)).sum(-1)
            allowed = largest(of_groups, self.kept_groups).unsqueeze(-1)
            mask = largest(biased.masked_fill(~allowed, -torch.inf).flatten(-2), self.chosen)
            load = mask.flatten(0, -2).sum(0).float()
        kept = scores * mask
        return kept / (kept.sum(-1, keepdim=True) + 1e-20) * self.scale, load


class Experts(nn.Module):
    """Stacked expert weights."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        count, hidden, inner = shape.n_routed_experts, shape.hidden_size, shape.moe_intermediate_size
        self.gate_proj = nn.Parameter(torch.empty(count, inner, hidden))
        self.up_proj = nn.Parameter(torch.empty(count, inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(count, hidden, inner))


class MoE(nn.Module):
    """Routed experts and the shared one, as one wide MLP whose inner activations the gate scales."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = Gate(shape)
        self.experts = Experts(shape)
        self.shared_experts = MLP(shape.hidden_size, shape.moe_intermediate_size * shape.n_shared_experts)

    def forward(self, x: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
        weights, load = self.gate(x, temperature)
        experts, shared = self.experts, self.shared_experts
        gate = torch.cat((experts.gate_proj.flatten(0, 1), shared.gate_proj.weight))
        up = torch.cat((experts.up_proj.flatten(0, 1), shared.up_proj.weight))
        down = torch.cat((experts.down_proj.transpose(1, 2).flatten(0, 1), shared.down_proj.weight.T)).T
        inner = F.silu(F.linear(x, gate)) * F.linear(x, up)
        routed, own = inner.split(
            [experts.gate_proj.shape[0] * experts.gate_proj.shape[1], shared.up_proj.out_features], -1
        )
        routed = (routed.unflatten(-1, (weights.shape[-1], -1)) * weights.to(inner.dtype).unsqueeze(-1)).flatten(-2)
        return F.linear(torch.cat((routed, own), -1), down), load


class Layer(nn.Module):
    """A decoder layer."""

    def __init__(self, shape: Shape, index: int, dropout: float) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        dense = index < shape.first_k_dense_replace
        self.mlp = MLP(shape.hidden_size, shape.intermediate_size) if dense else MoE(shape)
        self.dropout = dropout

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor | None]:
        x = x + F.dropout(self.self_attn(self.input_layernorm(x), cos, sin), self.dropout, self.training)
        out, load = self.mlp(self.post_attention_layernorm(x), temperature)
        return x + F.dropout(out, self.dropout, self.training), load


class MTPLayer(Layer):
    """A decoder layer over eh_proj([enorm(embedding of the next token), hnorm(hidden state)])."""

    def __init__(self, shape: Shape, index: int, dropout: float) -> None:
        super().__init__(shape, index, dropout)
        self.enorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.hnorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=False)
        self.shared_head_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)


class Model(nn.Module):
    """The whole model. ``dropout`` acts on the embedding and on what every sublayer adds."""

    cos: Tensor
    sin: Tensor
    temperature: Tensor

    def __init__(self, shape: Shape, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape = shape
        self.dropout = dropout
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape, i, dropout) for i in range(shape.num_hidden_layers))
        self.mtp = MTPLayer(shape, shape.num_hidden_layers, dropout)
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        cos, sin = rotary_table(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.register_buffer("temperature", torch.ones(()), persistent=False)
        self.initialise()

    def initialise(self) -> None:
        """Draw matrices with std 1 / sqrt(inputs); what a sublayer adds to the stream starts at zero."""
        for name, parameter in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj")):
                nn.init.zeros_(parameter)
            elif name.endswith("embed_tokens.weight"):
                nn.init.normal_(parameter, std=0.5)
            elif parameter.dim() > 1:
                nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)

    def gates(self) -> list[Gate]:
        """Return the gates, main layers first, the MTP layer's last."""
        return [module for module in self.modules() if isinstance(module, Gate)]

    def hidden_states(self, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the states after the final norm, [rows, tokens, hidden], and the load of every MoE layer."""
        cos, sin = self.cos[: ids.shape[1], None], self.sin[: ids.shape[1], None]
        x = F.dropout(self.embed_tokens(ids), self.dropout, self.training)
        loads = []
        for layer in self.layers:
            x, load = layer(x, cos, sin, self.temperature)
            if load is not None:
                loads.append(load)
        return self.norm(x), loads

    def mtp_states(self, hidden: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
        """Return the MTP layer's normed states for ``hidden`` and the token after each, and the layer's load."""
        cos, sin = self.cos[: following.shape[1], None], self.sin[: following.shape[1], None]
        embedded = F.dropout(self.embed_tokens(following), self.dropout, self.training)
        x = self.mtp.eh_proj(torch.cat((self.mtp.enorm(embedded), self.mtp.hnorm(hidden)), -1))
        x, load = self.mtp(x, cos, sin, self.temperature)
        assert load is not None
        return self.mtp.shared_head_norm(x), load

    def losses(self, ids: Tensor, ignored: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the mean losses of the next token and of the one after it, and the loads [MoE layers, experts].

        ids [rows, tokens + 2]; targets equal to ``ignored`` do not count.
        """
        hidden, loads = self.hidden_states(ids[:, :-2])
        ahead, load = self.mtp_states(hidden, ids[:, 1:-1])
        targets = ids.masked_fill(ids == ignored, IGNORED)
        main = self.cross_entropy(hidden, targets[:, 1:-1])
        return main, self.cross_entropy(ahead, targets[:, 2:]), torch.stack([*loads, load])

    def cross_entropy(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of the head's prediction."""
        logits = self.lm_head(hidden).flatten(0, 1).float()
        return F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED)
