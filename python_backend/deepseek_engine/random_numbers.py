"""Counter-based random numbers, so that a draw depends on its place and never on what else runs.

Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). One formula serves the torch
reference, the device kernel and the ONNX Runtime runner:

    key     = (seed mod 2^32, (seed >> 32) mod 2^32)        the seed as an unsigned 64-bit number
    counter = (position, choice, purpose, 0)                 position counts output tokens from 0
    w       = Philox4x32-10(counter, key)
    u       = ((w0 * 2^32 + w1) >> 11) * 2^-53               in [0, 1), exact in float64

Purpose 0 draws the token (`sampling.draw`); other purposes are free for accept tests of speculative decoding.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

SAMPLE = 0

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


def philox4x32_10(counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any]) -> tuple[Any, Any, Any, Any]:
    """Ten rounds of Philox4x32.

    Args:
        counter: four words below 2^32: Python ints, numpy uint64 arrays or torch int64 tensors that broadcast.
        key: two words of the same kind.

    Returns:
        Four words of the same kind. In int64 the products wrap, which leaves their bits as they are in uint64.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    constants: tuple[Any, ...] = (*_MULTIPLIERS, *_WEYL, _MASK, 32)
    if isinstance(c0, np.ndarray):
        # A Python int beside a numpy 1 scalar would turn uint64 into float64.
        constants = tuple(np.uint64(constant) for constant in constants)
    m0, m1, w0, w1, mask, half = constants
    for _ in range(_ROUNDS):
        product0, product1 = m0 * c0, m1 * c2
        c0, c1, c2, c3 = (
            ((product1 >> half) & mask) ^ c1 ^ k0,
            product1 & mask,
            ((product0 >> half) & mask) ^ c3 ^ k1,
            product0 & mask,
        )
        k0, k1 = (k0 + w0) & mask, (k1 + w1) & mask
    return c0, c1, c2, c3


def key_of(seed: int) -> tuple[int, int]:
    """The two key words of a signed or unsigned 64-bit seed."""
    return seed & _MASK, (seed >> 32) & _MASK


def uniform(seed: int, choice: int, position: int, purpose: int = SAMPLE) -> float:
    """One number in [0, 1) by the formula of this module."""
    w0, w1, _, _ = philox4x32_10((position, choice, purpose, 0), key_of(seed))
    return float((w0 << 32 | w1) >> 11) * 2.0**-53


def uniforms(seed: int, choice: int, start: int, count: int, purpose: int = SAMPLE) -> npt.NDArray[np.float64]:
    """The numbers of positions start .. start + count - 1, [count] float64."""
    position = np.arange(start, start + count, dtype=np.uint64)
    zeros = np.zeros_like(position)
    k0, k1 = (zeros + np.uint64(word) for word in key_of(seed))
    counter = (position, zeros + np.uint64(choice), zeros + np.uint64(purpose), zeros)
    w0, w1, _, _ = philox4x32_10(counter, (k0, k1))
    bits = ((w0 << np.uint64(32)) | w1) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


class UniformStream:
    """One choice's numbers, made a block at a time because a vectorised block costs hardly more than one number."""

    __slots__ = ("_block", "_choice", "_seed", "_start")

    _BLOCK = 64

    def __init__(self, seed: int, choice: int) -> None:
        self._seed = seed
        self._choice = choice
        self._start = 0
        self._block: list[float] = []

    def at(self, position: int) -> float:
        """The number of output token `position`."""
        offset = position - self._start
        if not 0 <= offset < len(self._block):
            self._start, offset = position, 0
            self._block = uniforms(self._seed, self._choice, position, self._BLOCK).tolist()
        return self._block[offset]
