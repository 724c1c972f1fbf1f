"""Synthetic traffic over two versions whose latency depends on their load. Seeded; no clock, no server."""

from dataclasses import dataclass
from math import exp, sqrt

import numpy as np
from numpy.typing import NDArray
from piccard_canary.rollout.golden import GoldenComparison, GoldenScore
from piccard_canary.rollout.observations import Observations

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Behaviour:
    """How a version behaves.

    Attributes:
        errors: share of requests that fail; half of these after their first token, so that they are truncated too.
        truncated: share of requests whose stream breaks off, beside those.
        first_token, token_gap: factors of both latencies.
        golden_drop: by how much it finds the golden prompts less likely than stable, nats a token.
    """

    errors: float = 0.001
    truncated: float = 0.0
    first_token: float = 1.0
    token_gap: float = 1.0
    golden_drop: float = 0.0


@dataclass(frozen=True, slots=True)
class Traffic:
    """What clients send.

    The rate wanders as real traffic does: its logarithm is an Ornstein-Uhlenbeck process.

    Attributes:
        rate: requests a second on average.
        burst: standard deviation of the logarithm of the rate.
        burst_seconds: time over which the rate keeps its value.
        tokens: of an answer, on average.
        shadow: share of stable's requests that the canary answers too, as far as that makes it no busier than stable.
    """

    rate: float = 50.0
    burst: float = 0.4
    burst_seconds: float = 20.0
    tokens: float = 40.0
    shadow: float = 0.0


# An engine at load b (requests in flight) needs these times (1 + b / FULL); a prompt token adds to the first.
FULL = 48.0
FIRST_TOKEN = 0.05
PROMPT_TOKEN = 0.0001
TOKEN_GAP = 0.010

# Deviations of the logarithms of single requests' times, and of prompt lengths around their median.
FIRST_TOKEN_SPREAD = 0.30
TOKEN_GAP_SPREAD = 0.15
PROMPT_MEDIAN = 300.0
PROMPT_SPREAD = 0.8
ANSWER_SPREAD = 0.8

# Golden prompts, tokens of each, and the deviation between them of what two equal models find more or less likely.
GOLDEN_PROMPTS = 16
GOLDEN_TOKENS = 24
GOLDEN_SPREAD = 0.05


class Engine:
    """One version's engine as a fluid: what is in flight follows the arrivals, and the latency what is in flight."""

    def __init__(self, behaviour: Behaviour, traffic: Traffic) -> None:
        self.behaviour = behaviour
        self._tokens = traffic.tokens
        self._load = 0.0

    def seconds(
        self, arrivals: list[int], offered: list[int] | None = None, limit: Floats | None = None
    ) -> tuple[Floats, NDArray[np.int64]]:
        """The load in each second, float64 [seconds], in which `arrivals` come, and the mirrored requests among them.

        Args:
            offered: requests that may be mirrored, as many as bring the load to `limit` [seconds].
        """
        first = (FIRST_TOKEN + PROMPT_TOKEN * PROMPT_MEDIAN) * self.behaviour.first_token
        following = TOKEN_GAP * self._tokens * self.behaviour.token_gap
        load, loads, mirrored = self._load, [], []
        for second, count in enumerate(arrivals):
            stay = (first + following) * (1.0 + load / FULL)
            kept = exp(-1.0 / stay)
            if offered is not None and limit is not None:
                room = int((float(limit[second]) - load * kept) / (stay * (1.0 - kept))) - count
                mirrored.append(min(offered[second], max(0, room)))
                count += mirrored[-1]
            # Within a second the load goes from where it was to where this second's arrivals lead it.
            end = load * kept + count * stay * (1.0 - kept)
            loads.append(0.5 * (load + end))
            load = end
        self._load = load
        return np.array(loads), np.array(mirrored, dtype=np.int64)

    def serve(self, arrivals: list[int], others: Floats, random: np.random.Generator) -> Observations:
        """What comes of requests that arrive in the given numbers, second by second."""
        return self.observe(np.array(arrivals), self.seconds(arrivals)[0], others, random)

    def observe(
        self, arrivals: NDArray[np.int64], loads: Floats, others: Floats, random: np.random.Generator
    ) -> Observations:
        """One observation a request of `arrivals` [seconds] at `loads` [seconds], beside `others` [seconds]."""
        count = int(arrivals.sum())
        load = np.repeat(loads, arrivals)
        slow = 1.0 + load / FULL
        noise = random.standard_normal((4, count), dtype=np.float32)
        prompt = PROMPT_MEDIAN * np.exp(PROMPT_SPREAD * noise[0])
        first = (FIRST_TOKEN + PROMPT_TOKEN * prompt) * slow * np.exp(FIRST_TOKEN_SPREAD * noise[1])
        gap = TOKEN_GAP * slow * np.exp(TOKEN_GAP_SPREAD * noise[2])
        # The mean of exp(N(0, spread)) is exp(spread^2 / 2).
        answer = np.ceil(self._tokens * np.exp(ANSWER_SPREAD * noise[3] - ANSWER_SPREAD**2 / 2))
        draw = random.random(count)
        how = self.behaviour
        truncated = draw < how.truncated + how.errors / 2
        failed = draw < how.truncated + how.errors
        return Observations(
            failed=failed,
            truncated=truncated,
            # What stable would take over is decided by the router; here every failure of either version is one.
            fallback=failed,
            first_token=first * how.first_token,
            token_gap=gap * how.token_gap,
            first_load=load,
            gap_load=load,
            others=np.repeat(others, arrivals),
            prompt_tokens=prompt,
            shadow=np.zeros(count, dtype=bool),
            completion_tokens=answer,
        )


class Scene:
    """Two versions under one stream of requests."""

    def __init__(self, traffic: Traffic, stable: Behaviour, canary: Behaviour, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._traffic = traffic
        self._stable, self._canary = Engine(stable, traffic), Engine(canary, traffic)
        self._wander = traffic.burst * float(self._random.standard_normal())

    def run(self, seconds: int, ratio: float) -> tuple[Observations, Observations]:
        """What canary and stable do in the next whole seconds, with `ratio` of the requests for the canary."""
        traffic, random = self._traffic, self._random
        keep = exp(-1.0 / traffic.burst_seconds)
        steps = traffic.burst * sqrt(1.0 - keep * keep) * random.standard_normal(seconds)
        rates = []
        wander = self._wander
        for step in steps.tolist():
            wander = wander * keep + step
            rates.append(wander)
        self._wander = wander
        # The mean of exp(N(0, burst)) is exp(burst^2 / 2).
        rate = traffic.rate * np.exp(np.array(rates) - traffic.burst**2 / 2)
        to_canary, to_stable = random.poisson(rate * ratio), random.poisson(rate * (1.0 - ratio))
        stable, _ = self._stable.seconds(to_stable.tolist())
        offered = random.binomial(to_stable, traffic.shadow) if traffic.shadow else None
        canary, mirrored = self._canary.seconds(
            to_canary.tolist(), None if offered is None else offered.tolist(), stable
        )
        seen = self._canary.observe(to_canary, canary, stable, random)
        if offered is not None:
            seen = seen.joined(self._canary.observe(mirrored, canary, stable, random).as_shadows())
        return seen, self._stable.observe(to_stable, stable, canary, random)


def golden_of(canary: Behaviour, seed: int) -> GoldenComparison:
    """What two versions make of golden prompts; they say the same whenever they are asked."""
    drops = canary.golden_drop + GOLDEN_SPREAD * np.random.default_rng(seed).standard_normal(GOLDEN_PROMPTS)
    pieces = ("word",) * (2 * GOLDEN_TOKENS)
    return GoldenComparison(
        canary=[GoldenScore(-GOLDEN_TOKENS * (1.0 + drop), pieces, GOLDEN_TOKENS) for drop in drops.tolist()],
        stable=[GoldenScore(-float(GOLDEN_TOKENS), pieces, GOLDEN_TOKENS)] * GOLDEN_PROMPTS,
        text_bytes=[4 * GOLDEN_TOKENS] * GOLDEN_PROMPTS,
    )
