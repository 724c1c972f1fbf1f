"""Where a caller stands in the traffic: a salted hash, uniform in [0, 1)."""

import hashlib

# A float has 53 bits of fraction, so every value is exact and below 1.
_BITS = 53


def position(salt: str, key: str) -> float:
    """The place of `key` in [0, 1).

    A caller belongs to the canary where its position is below the traffic ratio. The position does not depend on the
    ratio, so raising the ratio moves nobody back; a new salt deals everyone a new place.

    Args:
        salt: of the rollout.
        key: such as `x-session-id:42`; its kind is part of it, so that a user and a session of the same name differ.
    """
    # The salt's length keeps ("a", "bc") and ("ab", "c") apart.
    digest = hashlib.blake2b(f"{len(salt)}:{salt}{key}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> (64 - _BITS)) / 2**_BITS
