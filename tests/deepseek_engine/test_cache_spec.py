"""Sizes of the cache."""

import pytest
import torch
from deepseek_engine.cache_spec import CachePlane, CacheSpec


def test_bytes_of_deepseek_v3_and_v2_lite() -> None:
    for layers, size in ((61, 70_272), (27, 31_104)):
        spec = CacheSpec((CachePlane("latent", layers, 576, torch.bfloat16),))
        assert spec.bytes_per_token == size


def test_planes_add_up_and_are_allocated() -> None:
    spec = CacheSpec((CachePlane("k", 2, 8, torch.float32), CachePlane("scale", 2, 1, torch.float16)))
    assert spec.bytes_per_token == 2 * 8 * 4 + 2 * 2
    assert spec.num_blocks(68 * 16 * 3 + 5, 16) == 3
    cache = spec.allocate(3, 16)
    assert {name: (tuple(plane.shape), plane.dtype) for name, plane in cache.items()} == {
        "k": ((2, 48, 8), torch.float32),
        "scale": ((2, 48, 1), torch.float16),
    }


def test_alignment_is_asserted() -> None:
    CachePlane("latent", 1, 656, torch.uint8, alignment=16)
    with pytest.raises(ValueError, match=r"latent.*multiple of 16"):
        CachePlane("latent", 1, 655, torch.uint8, alignment=16)
