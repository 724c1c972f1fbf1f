"""What a request is expected to cost, in tokens, before any version has read it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from piccard_contract.policy import Policy
from piccard_contract.reports import BYTES_PER_TOKEN
from piccard_contract.request import Charge, GenerateRequest

from piccard_canary.availability import LoadedVersion


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a request will meet.

    Attributes:
        load: of the versions that it may come to, 0 to 1; 1 where there is none.
        bytes_per_token: of text.
        max_model_len: tokens of the context, 0 where it is not known.
    """

    load: float = 1.0
    bytes_per_token: float = BYTES_PER_TOKEN
    max_model_len: int = 0


def outlook(ready: Mapping[int, LoadedVersion], policy: Policy, stable: int | None) -> Outlook:
    """What stable and canary tell, weighted by their share of the traffic; of the tokenizer, what stable tells."""
    ratio = 0.0 if policy.canary in (None, stable) else policy.traffic_ratio
    shares = ((stable, 1.0 - ratio), (policy.canary, ratio))
    known = [(ready[number], share) for number, share in shares if number is not None and number in ready and share]
    # Neither is there: whatever else is may serve as a fallback.
    known = known or [(version, 1.0) for version in ready.values()]
    if not known:
        return Outlook()
    total = sum(share for _, share in known)
    load = sum(version.load * share for version, share in known) / total
    reader = known[0][0]
    return Outlook(min(1.0, max(0.0, load)), reader.bytes_per_token, reader.max_model_len)


def estimate(request: GenerateRequest, found: Outlook) -> Charge:
    """Tokens of the prompt and of all that may be generated for it; without max_tokens that is the rest of the context.

    Tokens that were generated elsewhere count within max_tokens.
    """
    if request.input_ids is not None:
        prompt = len(request.input_ids)
    else:
        size = _text_bytes(request.text if request.text is not None else request.messages)
        prompt = math.ceil(size / found.bytes_per_token)
    rest = max(1, found.max_model_len - prompt)
    most = rest if request.sampling.max_tokens is None else request.sampling.max_tokens
    return Charge(tokens=prompt + request.sampling.n * most, prompt=prompt)


def _text_bytes(value: Any) -> int:
    """Bytes of all texts of a JSON value, the names of its keys apart."""
    if isinstance(value, str):
        return len(value.encode())
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list):
        return 0
    return sum(map(_text_bytes, value))
