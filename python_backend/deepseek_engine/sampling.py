"""Sampling on torch: the reference of every runner. Pure functions over a batch of rows; nothing here keeps state.

Order and meaning are those of vLLM: penalties, logit bias and masks, temperature, min_p, top_k, top_p, then the draw.
Log-probabilities are told of the raw logits, before any of these.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# A nucleus is nearly always among the 256 most likely tokens; where it is not, more of the row is sorted.
_NUCLEUS_HEADS = (256, 2048)


def apply_penalties(
    logits: Tensor,
    output_counts: Tensor,
    prompt_seen: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> Tensor:
    """Penalise tokens that have occurred.

    Repetition (Keskar et al., CTRL, 2019) divides positive and multiplies negative logits of tokens in prompt or
    output; frequency is taken off once an occurrence in the output, presence once.

    Args:
        logits: [R, V] float32.
        output_counts: [R, V] int32, occurrences in the output.
        prompt_seen: [R, V] bool.
        repetition, frequency, presence: [R, 1] float32.

    Returns:
        [R, V], a new tensor.
    """
    in_output = output_counts > 0
    seen = prompt_seen | in_output
    factor = torch.where(seen, repetition, 1.0)
    penalised = torch.where(logits > 0, logits / factor, logits * factor)
    return penalised - frequency * output_counts - presence * in_output


def apply_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Mask tokens less likely than min_p times the most likely one.

    Args:
        logits: [R, V] after temperature.
        min_p: [R, 1] in [0, 1]; 0 keeps all.
    """
    floor = logits.amax(dim=-1, keepdim=True) + min_p.log()
    return logits.masked_fill(logits < floor, float("-inf"))


def apply_top_k(logits: Tensor, top_k: Tensor) -> Tensor:
    """Keep the top_k most likely tokens and those that tie with the last of them.

    Args:
        logits: [R, V].
        top_k: [R, 1] int64; 0 or less keeps all, as does more than V.
    """
    vocabulary = logits.shape[-1]
    unlimited = (top_k <= 0) | (top_k >= vocabulary)
    limited = top_k.masked_fill(unlimited, 1)
    values = logits.topk(int(limited.max()), dim=-1).values
    floor = values.gather(-1, limited - 1).masked_fill(unlimited, float("-inf"))
    return logits.masked_fill(logits < floor, float("-inf"))


def apply_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    """Keep the smallest set of most likely tokens whose mass reaches top_p, and those that tie with its last.

    A token stays where the mass above it is less than top_p (Holtzman et al., 2020), so one always does.

    Args:
        logits: [R, V], earlier filters applied.
        top_p: [R, 1] in (0, 1]; 1 keeps all.
    """
    log_total = logits.logsumexp(dim=-1, keepdim=True)
    vocabulary = logits.shape[-1]
    for head in (*(size for size in _NUCLEUS_HEADS if size < vocabulary), vocabulary):
        values, mass = _descending_mass(logits, log_total, head)
        if head == vocabulary or bool(((mass[:, -1:] >= top_p) | (top_p >= 1.0)).all()):
            break
    above = torch.cat((torch.zeros_like(mass[:, :1]), mass[:, :-1]), dim=-1)
    # A row of NaN, which the caller reports as failed, keeps none.
    kept = (above < top_p).sum(dim=-1, keepdim=True).clamp_(min=1)
    floor = values.gather(-1, kept - 1).masked_fill(top_p >= 1.0, float("-inf"))
    return logits.masked_fill(logits < floor, float("-inf"))


def _descending_mass(logits: Tensor, log_total: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest logits in order and the cumulated probability up to each, float64."""
    values = logits.topk(count, dim=-1).values
    return values, (values - log_total).exp().cumsum(dim=-1, dtype=torch.float64)


def draw(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Draw a token a row by inverting the cumulated distribution in vocabulary order.

    With x_i = exp(logit_i - max) in float32 and c_i = x_0 + … + x_i in float64, the token is the first i with
    c_i > u · c_last. A masked token has x_i = 0 and is never first.

    Args:
        logits: [R, V] float32, filters applied; at least one finite entry a row.
        uniforms: [R] float64 in [0, 1), `random_numbers.uniform` of the row's place.

    Returns:
        [R] int64.
    """
    weights = (logits - logits.amax(dim=-1, keepdim=True)).exp()
    cumulated = weights.cumsum(dim=-1, dtype=torch.float64)
    total = cumulated[:, -1:]
    # Rounding could lift u · total to total, which no c_i exceeds.
    target = torch.minimum(uniforms.unsqueeze(-1) * total, total * (1.0 - 2.0**-53))
    # A row of NaN, which the caller reports as failed, finds no place.
    return torch.searchsorted(cumulated, target, right=True).squeeze(-1).clamp_(max=logits.shape[-1] - 1)


@dataclass(slots=True)
class LogprobTensors:
    """Log-probabilities of N positions, on the device.

    Attributes:
        token_ids: [N, 1 + k] int64: the chosen token, then the k most likely.
        logprobs: [N, 1 + k] float32.
        ranks: [N] int64: tokens at least as likely as the chosen one.
    """

    token_ids: Tensor
    logprobs: Tensor
    ranks: Tensor


def gather_logprobs(logits: Tensor, chosen: Tensor, count: int) -> LogprobTensors:
    """Log-probabilities of the chosen and of the `count` most likely tokens.

    Args:
        logits: [N, V] float32, raw.
        chosen: [N] int64.
        count: k, 0 to V.
    """
    logprobs = logits.log_softmax(dim=-1)
    chosen = chosen.unsqueeze(-1)
    own = logprobs.gather(-1, chosen)
    ranks = (logprobs >= own).sum(dim=-1)
    if count == 0:
        return LogprobTensors(chosen, own, ranks)
    top = logprobs.topk(count, dim=-1)
    return LogprobTensors(torch.cat((chosen, top.indices), dim=-1), torch.cat((own, top.values), dim=-1), ranks)
