"""Requests under like conditions: the same load of their version, a like prompt, neighbours at work or not.

A version with 5 % of the traffic has a small batch and is quick whatever its code, so latencies are compared within
strata alone. Within one, loads differ by less than a fifth, which a latency cannot more than follow.
"""

import numpy as np
from numpy.typing import NDArray

# Bounds of the mean number of requests in flight: below one, then four to an octave, up to 1,024.
LOAD_EDGES = 2.0 ** (np.arange(0, 41) / 4)

# Tokens.
PROMPT_EDGES = np.array([64.0, 256.0, 1024.0, 4096.0])

# Tokens of an answer, for what is measured over whole requests: the wait for the first one is spread over all.
ANSWER_EDGES = np.array([2.0, 8.0, 32.0, 128.0, 512.0])

# Versions of one machine share it: whether the others have a request in flight is a condition too.
OTHERS_BUSY = 0.5

# Latencies in seconds are kept as counts in bins of 5 %.
BIN_RATIO = 1.05
SHORTEST = 0.0005
VALUE_BINS = 260
_LOG_RATIO = np.log(BIN_RATIO)

_CONDITIONS = (len(PROMPT_EDGES) + 1) * 2
STRATA = (len(LOAD_EDGES) + 1) * _CONDITIONS
ANSWER_STRATA = STRATA * (len(ANSWER_EDGES) + 1)


def condition_of(prompt: NDArray[np.float64], others: NDArray[np.float64]) -> NDArray[np.int64]:
    """Number of the condition beside the load, [n], of the prompt tokens and others' load, [n] each."""
    cell = np.searchsorted(PROMPT_EDGES, prompt, side="right") * 2
    return np.asarray(cell + (others >= OTHERS_BUSY), dtype=np.int64)


def stratum_of(load: NDArray[np.float64], conditions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Number of the stratum, [n], of the load and `condition_of` the rest, [n] each."""
    cell = np.searchsorted(LOAD_EDGES, load, side="right") * _CONDITIONS
    return np.asarray(cell + conditions, dtype=np.int64)


def answer_stratum_of(strata: NDArray[np.int64], answer: NDArray[np.float64]) -> NDArray[np.int64]:
    """Number of the stratum, [n], of whole requests: of `strata`, [n], by the tokens of the answer, [n]."""
    cell = strata * (len(ANSWER_EDGES) + 1) + np.searchsorted(ANSWER_EDGES, answer, side="right")
    return np.asarray(cell, dtype=np.int64)


def value_bin(seconds: NDArray[np.float64]) -> NDArray[np.int64]:
    """Number of the bin of a latency in seconds; what is shorter or longer than any is in the first or last."""
    position = np.log(np.maximum(seconds, SHORTEST) / SHORTEST) / _LOG_RATIO
    return np.minimum(position, VALUE_BINS - 1).astype(np.int64)


def bin_seconds(number: int) -> float:
    """The geometric middle of a bin, seconds."""
    return float(SHORTEST * BIN_RATIO ** (number + 0.5))
