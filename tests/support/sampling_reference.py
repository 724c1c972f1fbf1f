"""Sampling by its definition: one row, one token at a time, in float64."""

import numpy as np
from piccard_contract.sampling import SamplingParams


def softmax(row: np.ndarray) -> np.ndarray:
    """[V] float64."""
    weights = np.exp(row - row.max())
    return weights / weights.sum()


def reference_logits(
    raw: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int], eos_ids: tuple[int, ...]
) -> np.ndarray:
    """Logits after everything that vLLM does to them before the draw, -inf where a token cannot be drawn."""
    logits = np.asarray(raw, dtype=np.float64).copy()
    for token in {*prompt, *output}:
        factor = params.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token in set(output):
        logits[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    if len(output) < params.min_tokens:
        logits[[*eos_ids, *params.stop_token_ids]] = -np.inf
    if params.greedy:
        return logits
    return filtered(logits / params.temperature, params.top_k, params.top_p, params.min_p)


def filtered(logits: np.ndarray, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> np.ndarray:
    """min_p, then top_k, then top_p of what is left."""
    logits = logits.copy()
    exact = softmax(logits)
    logits[exact < min_p * exact.max()] = -np.inf
    order = np.argsort(-logits, kind="stable")
    if top_k > 0:
        logits[order[top_k:]] = -np.inf
    exact, above = softmax(logits), 0.0
    for token in order:
        if above >= top_p:
            logits[token] = -np.inf
        above += exact[token]
    return logits
