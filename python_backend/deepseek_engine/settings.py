"""How an engine runs a checkpoint."""

from dataclasses import dataclass

from deepseek_engine.block_pool import BLOCK_SIZES

_DEFAULT_CACHE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Sizes and limits; asserts its own invariants.

    Attributes:
        block_size: tokens a cache block: 16, 32 or 64.
        num_blocks: blocks of the cache; None derives them from cache_bytes.
        cache_bytes: size of the cache where num_blocks is None.
        max_num_seqs: sequences that run at once.
        max_num_waiting: sequences that may wait; a request that comes when there are more is refused.
        max_queue_seconds: how long a sequence may wait for its first step before its request is given up.
        max_num_batched_tokens: tokens a step, decodes and prefill together.
        prefill_chunk: prefill tokens a step while other sequences decode; without decodes the whole budget is used.
        prefill_gap: while others decode, prefill is made smaller still so that a step takes about this many times a
            step without prefill; None keeps prefill_chunk as it is, which makes steps independent of the clock.
        enable_prefix_caching: whether computed blocks are kept for requests that begin alike.
        max_model_len: prompt and output tokens of a sequence; None takes the model's, or what the cache can hold.
        adapter: name of the weights' adapter, part of the prefix key.
    """

    block_size: int = 16
    num_blocks: int | None = None
    cache_bytes: int = _DEFAULT_CACHE_BYTES
    max_num_seqs: int = 64
    max_num_waiting: int = 512
    max_queue_seconds: float = 60.0
    max_num_batched_tokens: int = 2048
    prefill_chunk: int = 256
    prefill_gap: float | None = 2.0
    enable_prefix_caching: bool = True
    max_model_len: int | None = None
    adapter: str = ""

    def __post_init__(self) -> None:
        self._check(self.block_size in BLOCK_SIZES, f"block_size is {self.block_size}; use one of {BLOCK_SIZES}")
        for name in ("cache_bytes", "max_num_seqs", "max_num_waiting", "max_num_batched_tokens", "prefill_chunk"):
            value = getattr(self, name)
            self._check(value >= 1, f"{name} is {value}; it has to be at least 1")
        for name in ("num_blocks", "max_model_len"):
            value = getattr(self, name)
            self._check(value is None or value >= 1, f"{name} is {value}; leave it out or make it at least 1")
        self._check(
            self.max_queue_seconds > 0, f"max_queue_seconds is {self.max_queue_seconds}; it has to be more than 0"
        )
        self._check(
            self.max_num_batched_tokens >= self.max_num_seqs,
            f"max_num_batched_tokens {self.max_num_batched_tokens} is less than max_num_seqs {self.max_num_seqs}, so "
            "not every running sequence could decode in a step; raise the one or lower the other",
        )
        self._check(
            self.prefill_gap is None or self.prefill_gap > 1.0,
            f"prefill_gap is {self.prefill_gap}; it is a multiple of a step without prefill and has to be above 1",
        )

    @staticmethod
    def _check(holds: bool, message: str) -> None:
        if not holds:
            raise ValueError(message)

    def blocks_for(self, bytes_per_token: int) -> int:
        """Blocks of the cache for a model that needs `bytes_per_token`.

        Raises:
            ValueError: cache_bytes does not hold one block.
        """
        if self.num_blocks is not None:
            return self.num_blocks
        block_bytes = bytes_per_token * self.block_size
        self._check(
            block_bytes <= self.cache_bytes,
            f"cache_bytes {self.cache_bytes} is less than one block of {block_bytes} bytes; raise it",
        )
        return self.cache_bytes // block_bytes

    def context_for(self, max_position_embeddings: int, num_blocks: int) -> int:
        """Tokens of a sequence at most: max_model_len, the model's positions, and what the cache can hold.

        Raises:
            ValueError: max_model_len is more than the model or the cache has.
        """
        capacity = num_blocks * self.block_size
        if self.max_model_len is None:
            return min(max_position_embeddings, capacity)
        self._check(
            self.max_model_len <= max_position_embeddings,
            f"max_model_len {self.max_model_len} is more than the model's {max_position_embeddings} positions; "
            "lower it",
        )
        self._check(
            self.max_model_len <= capacity,
            f"max_model_len {self.max_model_len} is more than the {capacity} tokens of the cache, so one sequence "
            "could never end; lower it or give the cache more blocks",
        )
        return self.max_model_len
