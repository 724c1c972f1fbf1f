"""What one step hands to a model on a GPU. All of it but the counts may be refilled between replays of a graph."""

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(slots=True)
class PrefillChunk:
    """Keys of one or more long rows that are expanded and attended to at once."""

    slots: Tensor
    """int64 [L]: cache slots of the keys, row after row."""
    key_starts: Tensor
    """int32 [R + 1]: row r owns keys key_starts[r] : key_starts[r + 1]."""
    causal: bool
    """Whether the queries are the last of these keys; else every query sees all of them."""


@dataclass(slots=True)
class PrefillGroup:
    """Rows of several new tokens that are attended to together."""

    tokens: slice
    """In the flattened batch."""
    query_starts: Tensor
    """int32 [R + 1], counted from the group's first token."""
    lengths: Tensor
    """int32 [R]: tokens in the cache, the row's new ones last."""
    table_rows: Tensor
    """int32 [R]: its row of the step's tables."""
    longest: int
    """The most new tokens of a row."""
    chunks: list[PrefillChunk]
    """For a model that expands what is cached, the causal one first; a context that is too long to be expanded at once
    has older ones after it. Empty for the others."""


@dataclass(slots=True)
class DeviceStep:
    """A step's tokens, rows flattened; those that the decode kernel attends to stand first.

    A padded token has slot -1: it is written nowhere and chooses no expert.
    """

    token_ids: Tensor
    """int64 [T]."""
    sources: Tensor
    """int32 [T]: a place of `last_tokens` that holds the token, or -1."""
    last_tokens: Tensor
    """int64: the token that each seat sampled last."""
    positions: Tensor
    """int64 [T]."""
    slots: Tensor
    """int64 [T]: where the token's cache entry goes."""
    lengths: Tensor
    """int32 [V]: tokens in the cache up to the last query of a decoded sequence; 0 in the padding."""
    query_starts: Tensor
    """int32 [V + 1]: its tokens; in the padding it owns none."""
    table_rows: Tensor
    """int32 [V]: its row of `tables`."""
    tables: Tensor
    """int32 [seats, blocks]."""
    block_size: int
    """Tokens a block."""
    max_queries: int
    """Query tokens of a decoded sequence at most."""
    num_decoded: int
    """Tokens that the decode kernel attends to."""
    prefill: list[PrefillGroup] = field(default_factory=list)
    host_rows: Tensor | None = None
    """int32 [V, 2], in the host's memory: query tokens and cache entries of every sequence, where they are known. A
    captured step has none: its sequences have up to `max_queries` tokens and any number of entries."""
