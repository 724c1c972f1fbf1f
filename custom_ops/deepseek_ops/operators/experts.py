"""The mixture of experts: gate and experts."""

from dataclasses import replace

from deepseek_ops.operators.common import (
    FLOATS,
    GROUP_SIZE,
    ON_CUDA,
    PROVIDERS,
    TOLERANCE,
    WHOLE_BYTES,
    attribute,
    packed_int4,
    residual,
)
from deepseek_ops.registry import CUDA, Attribute, Input, Operator, Output, Requirement

MOE_GATE = Operator(
    name="DeepSeekMoEGate",
    kernel="moe_gate",
    reference="deepseek_engine.kernels.moe_gate",
    doc="Chooses experts by logits = x weight^T in float32. greedy: the best of softmax(logits) (V2-Lite);"
    " group_limited_greedy: within the topk_group groups whose best expert scores highest (V2); noaux_tc: by"
    " sigmoid(logits) + bias within the groups whose two best score highest in sum, weights without the bias (V3)."
    " Weights are divided by their sum + 1e-20 where norm_topk_prob, then multiplied by routed_scaling_factor. Of equal"
    " scores the lower expert is taken. Shared experts are further choices: E, E + 1, ... of weight 1.",
    inputs=(
        Input("x", "T", ("T", "D"), "rows"),
        Input("weight", "G", ("E", "D"), "of the router", panels=True),
        Input("bias", "float", ("E",), "e_score_correction_bias, for noaux_tc", optional=True),
        Input("slots", "int64", ("T",), "where below 0 the row is padding: its choices are -1", optional=True),
    ),
    outputs=(
        Output("weights", "float", ("T", "num_experts_per_tok + n_shared_experts"), "best first, then the shared"),
        Output("experts", "int32", ("T", "num_experts_per_tok + n_shared_experts"), "whose they are"),
    ),
    attributes=(
        Attribute(
            "topk_method",
            "string",
            "which gate",
            "greedy",
            choices=("greedy", "group_limited_greedy", "noaux_tc"),
        ),
        attribute("num_experts_per_tok", "experts a row"),
        attribute("n_group", "groups of experts; 1 for greedy", 1),
        attribute("topk_group", "groups that a row may choose from", 1),
        attribute("norm_topk_prob", "whether the weights of a row are made to sum to 1", 0, minimum=0),
        attribute("routed_scaling_factor", "what weights are multiplied by", 1.0),
        attribute("n_shared_experts", "experts beside the E that every row chooses, with weight 1", 0, minimum=0),
    ),
    types={"T": FLOATS, "G": FLOATS},
    requirements=(
        Requirement("E // n_group * n_group", "E", equal=True),
        Requirement("topk_group", "n_group"),
        Requirement("num_experts_per_tok", "E // n_group * topk_group"),
        Requirement("norm_topk_prob", "1"),
    ),
    tolerance={"float": TOLERANCE["float"]},
    providers=PROVIDERS,
    cuda={"T": ON_CUDA["T"], "G": "float"},
)

_ROUTED = (
    Input("x", "T", ("T", "D"), "rows"),
    Input("weights", "float", ("T", "K"), "of the gate"),
    Input("experts", "int32", ("T", "K"), "of the gate; one below 0 is none"),
)
_MOE_RESIDUAL = replace(
    residual(("T", "D")), refused={CUDA: "the DeepSeekRMSNorm that follows adds it in the same pass"}
)
_STACK = {CUDA: "put the shared experts behind the routed ones and have the gate choose them (n_shared_experts)"}
_ROWS = (Output("y", "T", ("T", "D"), "rows"),)
_REFERENCE = "deepseek_engine.kernels.moe_experts:moe_experts"

MOE = Operator(
    name="DeepSeekMoE",
    kernel="moe",
    reference=_REFERENCE,
    doc="y = residual + sum_k weights[t, k] f(experts[t, k], x[t]) + the shared expert of x[t], where f(e, x) ="
    " down[e] (silu(gate) * up) and [gate | up] = gate_up[e] x (DeepSeekMoE, arXiv:2401.06066). Reads the chosen"
    " experts only, each once for all its rows.",
    inputs=(
        *_ROUTED,
        Input("gate_up", "W", ("E", "2 * I", "D"), "an expert's gate rows before its up rows", panels=True),
        Input("down", "W", ("E", "D", "I"), "as stored: [out, in]", panels=True),
        Input(
            "shared_gate_up",
            "W",
            ("2 * J", "D"),
            "of the shared expert, which every row runs",
            optional=True,
            panels=True,
            refused=_STACK,
        ),
        Input("shared_down", "W", ("D", "J"), "of the shared expert", optional=True, panels=True, refused=_STACK),
        _MOE_RESIDUAL,
    ),
    outputs=_ROWS,
    types={"T": FLOATS, "W": FLOATS},
    requirements=(Requirement("K", "E"),),
    tolerance=TOLERANCE,
    providers=PROVIDERS,
    cuda=ON_CUDA,
)

MOE_INT4 = Operator(
    name="DeepSeekMoEInt4",
    kernel="moe_int4",
    reference=_REFERENCE,
    doc="DeepSeekMoE with every expert packed as DeepSeekMatMulInt4 has its weight; P and Q are gate rows and up rows,"
    " of a routed expert and of the shared one. An expert that is not chosen is not unpacked. On CUDA D"
    " and P // 2 are multiples of 32, in groups of 32, 64 or 128.",
    inputs=(
        *_ROUTED,
        *packed_int4("gate_up", ("E", "P"), "D"),
        *packed_int4("down", ("E", "D"), "P // 2"),
        *(
            replace(each, refused=_STACK)
            for each in (
                *packed_int4("shared_gate_up", ("Q",), "D", optional=True),
                *packed_int4("shared_down", ("D",), "Q // 2", optional=True),
            )
        ),
        _MOE_RESIDUAL,
    ),
    outputs=_ROWS,
    attributes=(GROUP_SIZE,),
    types={"T": FLOATS, "W": FLOATS},
    requirements=(
        Requirement("K", "E"),
        Requirement("P // 2 * 2", "P", equal=True),
        Requirement("Q // 2 * 2", "Q", equal=True),
        WHOLE_BYTES,
    ),
    tolerance=TOLERANCE,
    providers=PROVIDERS,
    cuda=ON_CUDA,
)
