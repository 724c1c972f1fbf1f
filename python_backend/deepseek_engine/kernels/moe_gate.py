"""The three gates that choose experts: DeepSeek-V2's two and DeepSeek-V3's.

Each takes router logits float32 [T, E] and returns the weights float32 [T, top_k] and the experts int64 [T, top_k], in
no particular order. Sources: DeepSeek-V2 (arXiv:2405.04434, section 2.2) and DeepSeek-V3 (arXiv:2412.19437, section
2.1.2). The weights are multiplied by `scaling` here and nowhere else.
"""

import torch
from torch import Tensor

from deepseek_engine.kernels.scalar import scalar


def greedy(logits: Tensor, *, top_k: int, normalize: bool, scaling: float) -> tuple[Tensor, Tensor]:
    """The top_k of softmax(logits): V2-Lite."""
    weights, experts = torch.topk(torch.softmax(logits, dim=-1), top_k, dim=-1, sorted=False)
    return _scaled(weights, normalize, scaling), experts


def group_limited_greedy(
    logits: Tensor, *, top_k: int, groups: int, topk_groups: int, normalize: bool, scaling: float
) -> tuple[Tensor, Tensor]:
    """The top_k of softmax(logits) within the topk_groups groups whose best expert scores highest: V2."""
    scores = torch.softmax(logits, dim=-1)
    group_scores = scores.unflatten(-1, (groups, -1)).amax(-1)
    within = within_best_groups(scores, group_scores, topk_groups)
    weights, experts = torch.topk(within, top_k, dim=-1, sorted=False)
    return _scaled(weights, normalize, scaling), experts


def noaux_tc(
    logits: Tensor, bias: Tensor, *, top_k: int, groups: int, topk_groups: int, normalize: bool, scaling: float
) -> tuple[Tensor, Tensor]:
    """V3's gate without auxiliary loss.

    bias float32 [E] (e_score_correction_bias) is added to sigmoid(logits) for the choice only. A group scores the sum
    of its two best biased scores. The weights are the unbiased scores of the chosen experts.
    """
    scores = torch.sigmoid(logits)
    biased = scores + bias
    if topk_groups < groups:
        group_scores = biased.view(-1, groups, biased.shape[-1] // groups).topk(2, dim=-1, sorted=False)[0].sum(-1)
        biased = within_best_groups(biased, group_scores, topk_groups)
    experts = torch.topk(biased, top_k, dim=-1, sorted=False)[1]
    return _scaled(scores.gather(-1, experts), normalize, scaling), experts


def within_best_groups(scores: Tensor, group_scores: Tensor, topk_groups: int) -> Tensor:
    """scores [T, E] with -inf outside the topk_groups groups that score highest; group_scores [T, groups].

    -inf, not 0: a biased score may be negative, and 0 would then bring a dropped group back.
    """
    groups = group_scores.shape[-1]
    dropped = torch.topk(group_scores, groups - topk_groups, dim=-1, largest=False, sorted=False)[1].unsqueeze(-1)
    grouped = scores.view(-1, groups, scores.shape[-1] // groups)
    return grouped.scatter(1, dropped.expand(-1, -1, grouped.shape[2]), float("-inf")).view_as(scores)


def _scaled(weights: Tensor, normalize: bool, scaling: float) -> Tensor:
    if normalize:
        # The smallest sum is that of DeepSeek's code, so that no choice divides by 0.
        sums = weights.sum(-1, keepdim=True).add_(scalar(1e-20, weights.device))
        return weights * torch.div(scalar(scaling, weights.device), sums)
    return weights * scaling
