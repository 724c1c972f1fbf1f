"""Prefix sharing: a full block's key is the hash of all that its content depends on."""

from array import array
from hashlib import blake2b

from deepseek_engine.block_pool import BlockPool
from deepseek_engine.sequence import Sequence

_DIGEST_BYTES = 16


def root_key(cache_format: str, adapter: str, salt: str) -> bytes:
    """The parent of a first block: cache format, adapter and tenant salt, each told apart by its length."""
    digest = blake2b(digest_size=_DIGEST_BYTES)
    for part in (cache_format, adapter, salt):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()


def block_key(parent: bytes, token_ids: list[int]) -> bytes:
    """Key of a block that follows `parent` and holds `token_ids`."""
    return blake2b(parent + array("q", token_ids).tobytes(), digest_size=_DIGEST_BYTES).digest()


class PrefixCache:
    """Finds and publishes the full blocks of sequences in a pool.

    Args:
        pool: whose blocks are shared.
        cache_format: planes and types of the cache; blocks of another format are not the same content.
        adapter: name of the weights' adapter, empty for none.
    """

    def __init__(self, pool: BlockPool, cache_format: str, adapter: str = "") -> None:
        self._pool = pool
        self._cache_format = cache_format
        self._adapter = adapter
        self.hit_tokens = 0

    def match(self, sequence: Sequence, limit: int) -> list[int]:
        """Blocks that hold the beginning of the sequence.

        Args:
            sequence: its tokens and salt.
            limit: tokens that may be taken from the cache at most; only whole blocks within it are.
        """
        blocks: list[int] = []
        count = limit // self._pool.block_size
        self._extend_keys(sequence, count)
        for key in sequence.block_keys[:count]:
            block = self._pool.find(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def publish(self, sequence: Sequence) -> None:
        """Let the sequence's full and computed blocks be shared."""
        full = sequence.num_computed // self._pool.block_size
        if full <= sequence.num_published:
            return
        self._extend_keys(sequence, full)
        for index in range(sequence.num_published, full):
            self._pool.publish(sequence.block_table[index], sequence.block_keys[index])
        sequence.num_published = full

    def forget(self, sequence: Sequence) -> None:
        """Let nobody share the sequence's beginning, whoever holds the blocks now."""
        for key in sequence.block_keys:
            block = self._pool.find(key)
            if block is not None:
                self._pool.forget(block)

    def _extend_keys(self, sequence: Sequence, count: int) -> None:
        keys, size = sequence.block_keys, self._pool.block_size
        parent = keys[-1] if keys else root_key(self._cache_format, self._adapter, sequence.salt)
        for index in range(len(keys), count):
            parent = block_key(parent, sequence.token_ids[index * size : (index + 1) * size])
            keys.append(parent)
