"""The frequencies of rotary embedding, for each way of stretching the context."""

import math

import torch
from torch import Tensor

from deepseek_engine.models.config import RopeConfig


def rope_frequencies(config: RopeConfig, dim: int) -> Tensor:
    """Angles a position, float32 [dim / 2]."""
    base = 1.0 / config.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if config.rope_type == "linear":
        return base / config.factor
    if config.rope_type == "llama3":
        return _llama3(base, config)
    if config.rope_type == "yarn":
        return _yarn(base, config, dim)
    return base


def rotation_factor(config: RopeConfig) -> float:
    """What cos and sin are multiplied by: m(factor, mscale) / m(factor, mscale_all_dim) under YaRN, else 1."""
    if config.rope_type != "yarn":
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return yarn_mscale(config.factor, config.mscale) / yarn_mscale(config.factor, config.mscale_all_dim)
    return yarn_mscale(config.factor, 1.0)


def yarn_mscale(factor: float, mscale: float) -> float:
    """m(s, k) = 0.1 * k * ln(s) + 1, and 1 without stretching (YaRN, arXiv:2309.00071, section 3.4)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _llama3(base: Tensor, config: RopeConfig) -> Tensor:
    """Llama 3.1's: long wavelengths are stretched by the factor, short ones kept, those between interpolated."""
    wavelengths = 2 * math.pi / base
    turns = config.original_max_position_embeddings / wavelengths
    keep = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return (1 - keep) * base / config.factor + keep * base


def _yarn(base: Tensor, config: RopeConfig, dim: int) -> Tensor:
    """YaRN's by parts (arXiv:2309.00071, section 3.2), the ramp running over dimensions as in DeepSeek's code."""
    low = _correction_dim(config.beta_fast, config, dim)
    high = _correction_dim(config.beta_slow, config, dim)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    stretch = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return base / config.factor * stretch + base * (1 - stretch)


def _correction_dim(turns: float, config: RopeConfig, dim: int) -> float:
    """The dimension whose frequency makes `turns` turns over the original context."""
    ratio = config.original_max_position_embeddings / (turns * 2 * math.pi)
    return dim * math.log(ratio) / (2 * math.log(config.rope_theta))
