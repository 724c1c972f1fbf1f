# mypy: disable-error-code="no-untyped-def"
# Device functions have no types that mypy knows.
"""The three gates on a GPU: router logits, scores, groups, choice and weights; the reference is `moe_gate.py`.

    logits[t, e] = sum_k x[t, k] W[e, k]             float32, whatever x's dtype is
    greedy and group_limited_greedy (DeepSeek-V2): softmax; a group scores its best expert
    noaux_tc (DeepSeek-V3): sigmoid; choice by score + bias, a group scores its two best; weights from the scores alone

Two launches: `gate_logits` splits the hidden dimension over programs, so that one token keeps the card busy too;
`gate_choose` adds the splits in order and chooses, one program a token. Shared experts are appended as further
experts of weight 1, which every token chooses: the expert kernels then need no path of their own for them.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepseek_engine.kernels import launcher
from deepseek_engine.kernels.chaining import follow
from deepseek_engine.kernels.dispatch import DISPATCH, Choice, require
from deepseek_engine.kernels.variants import (
    ARCHITECTURES,
    HOPPER,
    Kernel,
    LaunchPlan,
    Step,
    Table,
    Variant,
    ceil_div,
    next_power_of_2,
)

GREEDY, GROUP_LIMITED_GREEDY, NOAUX_TC = 0, 1, 2
FIXED_TOKENS = 128
"""As many tokens take the row that serves any number well enough."""
METHODS = {"greedy": GREEDY, "group_limited_greedy": GROUP_LIMITED_GREEDY, "noaux_tc": NOAUX_TC}


@triton.jit
def gate_logits_kernel(
    x_ptr,
    weight_ptr,
    logits_ptr,
    x_stride,
    tokens,
    experts,
    hidden,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """logits [SPLITS, tokens, experts]: each split sums its own share of the hidden dimension."""
    follow(CHAINED)
    token = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    expert = tl.program_id(1) * BLOCK_EXPERTS + tl.arange(0, BLOCK_EXPERTS)
    split = tl.program_id(2)
    k = tl.arange(0, BLOCK_K)
    steps = tl.cdiv(tl.cdiv(hidden, BLOCK_K), SPLITS)
    rows = token.to(tl.int64)[:, None] * x_stride
    acc = tl.zeros((BLOCK_TOKENS, BLOCK_EXPERTS), dtype=tl.float32)
    for step in tl.range(split * steps, split * steps + steps):
        column = step * BLOCK_K + k
        inside = column < hidden
        x = tl.load(x_ptr + rows + column[None, :], mask=(token < tokens)[:, None] & inside[None, :], other=0.0)
        w = tl.load(
            weight_ptr + expert[None, :] * hidden + column[:, None],
            mask=(expert < experts)[None, :] & inside[:, None],
            other=0.0,
        )
        acc = tl.dot(x.to(tl.float32), w, acc, input_precision="tf32x3")
    target = (split.to(tl.int64) * tokens + token)[:, None] * experts + expert[None, :]
    tl.store(logits_ptr + target, acc, mask=(token < tokens)[:, None] & (expert < experts)[None, :])


@triton.jit
def gate_choose_kernel(
    logits_ptr,
    bias_ptr,
    slots_ptr,
    weights_ptr,
    experts_ptr,
    tokens,
    experts,
    group_size,
    scaling,
    splits,
    padded,
    GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_CHOICES: tl.constexpr,
    METHOD: tl.constexpr,
    NORMALIZE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    follow(CHAINED)
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    member = tl.arange(0, GROUP_BLOCK)
    inside = (member < group_size)[None, :] & (group >= 0)[:, None]
    expert = group[:, None] * group_size + member[None, :]
    logits = tl.zeros((GROUPS, GROUP_BLOCK), dtype=tl.float32)
    for split in tl.range(0, splits):
        row = logits_ptr + (split * tokens.to(tl.int64) + token) * experts
        logits += tl.load(row + expert, mask=inside, other=0.0)
    if METHOD == 2:
        scores = tl.sigmoid(logits)
        ranked = scores + tl.load(bias_ptr + expert, mask=inside, other=0.0)
    else:
        logits = tl.where(inside, logits, float("-inf"))
        peak = tl.max(tl.max(logits, axis=1), axis=0)
        raised = tl.exp(logits - peak)
        scores = raised / tl.sum(tl.sum(raised, axis=1), axis=0)
        ranked = scores
    ranked = tl.where(inside, ranked, float("-inf"))
    if TOPK_GROUPS < GROUPS:
        best, where = tl.max(ranked, axis=1, return_indices=True)
        if METHOD == 2:
            others = tl.where(member[None, :] == where[:, None], float("-inf"), ranked)
            best += tl.max(others, axis=1)
        kept = tl.zeros((GROUPS,), dtype=tl.int32)
        for _ in tl.static_range(TOPK_GROUPS):
            chosen_group = tl.argmax(best, axis=0)
            kept = tl.where(group == chosen_group, 1, kept)
            best = tl.where(group == chosen_group, float("-inf"), best)
        ranked = tl.where((kept > 0)[:, None], ranked, float("-inf"))
    flat_ranked = tl.reshape(ranked, (GROUPS * GROUP_BLOCK,))
    flat_scores = tl.reshape(scores, (GROUPS * GROUP_BLOCK,))
    place = tl.arange(0, GROUPS * GROUP_BLOCK)
    choice = tl.arange(0, BLOCK_CHOICES)
    weights = tl.zeros((BLOCK_CHOICES,), dtype=tl.float32)
    chosen = tl.zeros((BLOCK_CHOICES,), dtype=tl.int32)
    for rank in tl.static_range(TOP_K):
        where = tl.argmax(flat_ranked, axis=0)
        weight = tl.sum(tl.where(place == where, flat_scores, 0.0), axis=0)
        # Where scores are not numbers the largest may stand anywhere, beside the experts too.
        number = tl.minimum((where // GROUP_BLOCK) * group_size + where % GROUP_BLOCK, experts - 1)
        weights = tl.where(choice == rank, weight, weights)
        chosen = tl.where(choice == rank, number, chosen)
        flat_ranked = tl.where(place == where, float("-inf"), flat_ranked)
    if NORMALIZE:
        weights = weights / (tl.sum(weights, axis=0) + 1e-20)
    weights = tl.where(choice < TOP_K, weights * scaling, 1.0)
    chosen = tl.where(choice < TOP_K, chosen, experts + choice - TOP_K)
    # A padded row chooses no expert, so that none is read for it.
    slot = tl.load(slots_ptr + token, mask=padded > 0, other=0)
    chosen = tl.where(slot >= 0, chosen, -1)
    width: tl.constexpr = TOP_K + SHARED
    tl.store(weights_ptr + token * width + choice, weights, mask=choice < width)
    tl.store(experts_ptr + token * width + choice, chosen, mask=choice < width)


_MODULE = "deepseek_engine.kernels.moe_gate_triton"
GATE_LOGITS = Table(
    Kernel(
        name="gate_logits",
        entry=f"{_MODULE}:gate_logits_kernel",
        signature={
            "x_ptr": "*T",
            "weight_ptr": "*fp32",
            "logits_ptr": "*fp32",
            "x_stride": "i32",
            "tokens": "i32",
            "experts": "i32",
            "hidden": "i32",
        },
        constants=("BLOCK_TOKENS", "BLOCK_EXPERTS", "BLOCK_K", "SPLITS"),
        divisible=frozenset(("x_ptr", "weight_ptr", "logits_ptr", "x_stride", "hidden")),
        chained=True,
    ),
    tuple(
        Variant(
            "gate_logits",
            name,
            {"BLOCK_TOKENS": tokens, "BLOCK_EXPERTS": experts, "BLOCK_K": 64, "SPLITS": splits},
            num_warps=4,
            num_stages=3,
            architectures=architectures,
            when={"tokens": reach},
        )
        for name, tokens, experts, splits, reach, architectures in (
            ("few_tokens", 16, 16, 16, (1, 64), ARCHITECTURES),
            ("some_tokens", 16, 64, 16, (65, 384), ARCHITECTURES),
            ("prompt", 64, 64, 8, (385, 4096), (HOPPER,)),
            ("prompts", 64, 64, 4, (4097, 2**30), (HOPPER,)),
            ("prompts_sm80", 32, 32, 4, (385, 2**30), ARCHITECTURES),
        )
    ),
)


def _choose_row(
    name: str, method: str, experts: int, groups: int, topk_groups: int, top_k: int, shared: int, normalize: bool
) -> Variant:
    return Variant(
        "gate_choose",
        name,
        {
            "GROUPS": groups,
            "TOPK_GROUPS": topk_groups,
            "GROUP_BLOCK": next_power_of_2(experts // groups),
            "TOP_K": top_k,
            "SHARED": shared,
            "BLOCK_CHOICES": next_power_of_2(top_k + shared),
            "METHOD": METHODS[method],
            "NORMALIZE": int(normalize),
        },
        num_warps=1,
        num_stages=1,
        when={
            key: (value, value)
            for key, value in {
                "method": METHODS[method],
                "experts": experts,
                "groups": groups,
                "topk_groups": topk_groups,
                "top_k": top_k,
                "shared": shared,
                "normalize": int(normalize),
            }.items()
        },
    )


GATE_CHOOSE = Table(
    Kernel(
        name="gate_choose",
        entry=f"{_MODULE}:gate_choose_kernel",
        signature={
            "logits_ptr": "*fp32",
            "bias_ptr": "*fp32",
            "slots_ptr": "*i64",
            "weights_ptr": "*fp32",
            "experts_ptr": "*i32",
            "tokens": "i32",
            "experts": "i32",
            "group_size": "i32",
            "scaling": "fp32",
            "splits": "i32",
            "padded": "i32",
        },
        constants=(
            "GROUPS",
            "TOPK_GROUPS",
            "GROUP_BLOCK",
            "TOP_K",
            "SHARED",
            "BLOCK_CHOICES",
            "METHOD",
            "NORMALIZE",
        ),
        chained=True,
    ),
    (
        _choose_row("v2_lite", "greedy", 64, 1, 1, 6, 2, False),
        _choose_row("v2", "group_limited_greedy", 160, 8, 3, 6, 2, False),
        _choose_row("v3", "noaux_tc", 256, 8, 4, 8, 1, True),
        # The demo checkpoint, and a small one of each family that tests make.
        _choose_row("demo", "noaux_tc", 16, 4, 2, 4, 1, True),
        _choose_row("small_v2_lite", "greedy", 16, 1, 1, 4, 2, False),
        _choose_row("small_v2", "group_limited_greedy", 16, 4, 2, 4, 2, False),
        _choose_row("small_v3", "noaux_tc", 16, 4, 2, 6, 1, True),
    ),
)
TABLES = (GATE_LOGITS, GATE_CHOOSE)
PLAN = LaunchPlan(
    "moe_gate",
    (
        Step("gate_logits", ("ceil_div(tokens, BLOCK_TOKENS)", "ceil_div(experts, BLOCK_EXPERTS)", "SPLITS")),
        Step("gate_choose", ("tokens",)),
    ),
    workspaces={"logits": "4 * SPLITS * tokens * experts"},
)
PLANS = (PLAN,)


@lru_cache(maxsize=64)
def choose_variant(
    *, method: str, experts: int, groups: int, topk_groups: int, top_k: int, shared: int, normalize: bool
) -> Variant:
    """The row for a model's gate: a declared one, or one made for a model that no row names."""
    made = _choose_row("made", method, experts, groups, topk_groups, top_k, shared, normalize)
    dims = {name: low for name, (low, _) in made.when.items()}
    row = next((row for row in GATE_CHOOSE.variants if row.fits(dims)), made)
    why = f"row {row.name} is of this gate" if row is not made else "made for this gate, which no row names"
    DISPATCH.record(Choice(GATE_CHOOSE.kernel.name, row, why), row.name)
    return row


def moe_gate(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    method: str,
    top_k: int,
    groups: int = 1,
    topk_groups: int = 1,
    normalize: bool,
    scaling: float,
    shared: int = 0,
    slots: Tensor | None = None,
    fixed: bool = False,
    variant: Variant | None = None,
) -> tuple[Tensor, Tensor]:
    """Route tokens.

    x [T, hidden], rows at one stride; weight float32 [E, hidden], contiguous; bias float32 [E] for noaux_tc. `method`
    is the checkpoint's topk_method. Returns weights float32 [T, top_k + shared] and experts int32 of that shape; the
    last `shared` columns are the shared experts E, E + 1, ... with weight 1. With `slots` int64 [T], a token whose slot
    is below 0 is a padded row: its experts are -1. `fixed` splits the sums alike for any number of tokens.
    `variant` forces a row of GATE_LOGITS.
    """
    tokens, hidden = x.shape
    experts = weight.shape[0]
    if method == "greedy":
        groups = topk_groups = 1
    dims = {"tokens": tokens, "experts": experts, "hidden": hidden}
    row = variant or require(GATE_LOGITS, x, {**dims, "tokens": FIXED_TOKENS} if fixed else dims)
    splits = row.constants["SPLITS"]
    logits = torch.empty(splits, tokens, experts, dtype=torch.float32, device=x.device)
    launcher.launch(
        GATE_LOGITS.kernel,
        row,
        PLAN.steps[0].blocks(dims, row),
        {
            "x_ptr": x,
            "weight_ptr": weight,
            "logits_ptr": logits,
            "x_stride": x.stride(0),
            "tokens": tokens,
            "experts": experts,
            "hidden": hidden,
        },
    )
    chooser = choose_variant(
        method=method,
        experts=experts,
        groups=groups,
        topk_groups=topk_groups,
        top_k=top_k,
        shared=shared,
        normalize=normalize,
    )
    weights = torch.empty(tokens, top_k + shared, dtype=torch.float32, device=x.device)
    chosen = torch.empty(tokens, top_k + shared, dtype=torch.int32, device=x.device)
    launcher.launch(
        GATE_CHOOSE.kernel,
        chooser,
        PLAN.steps[1].blocks(dims, chooser),
        {
            "logits_ptr": logits,
            "bias_ptr": weight if bias is None else bias,
            "slots_ptr": chosen if slots is None else slots,
            "weights_ptr": weights,
            "experts_ptr": chosen,
            "tokens": tokens,
            "experts": experts,
            "group_size": ceil_div(experts, groups),
            "scaling": scaling,
            "splits": splits,
            "padded": int(slots is not None),
        },
    )
    return weights, chosen
