"""The cache's blocks: who owns them, which are free, and which keep a prefix that nobody uses at the moment."""

from collections import OrderedDict, deque

BLOCK_SIZES = (16, 32, 64)


class BlockPool:
    """Reference counts over `num_blocks` blocks of `block_size` tokens.

    A block is free, referenced by one or more tables, or idle: unreferenced, but its content is known by a key and may
    be shared again. Idle blocks are taken, least recently used first, when no free one is left. A block that is known
    by a key is full and never written again.

    Args:
        num_blocks: blocks of the cache.
        block_size: tokens a block, 16, 32 or 64.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; a cache needs at least 1 block")
        if block_size not in BLOCK_SIZES:
            raise ValueError(f"block_size is {block_size}; use one of {BLOCK_SIZES}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._references = [0] * num_blocks
        self._free = deque(range(num_blocks))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated: free and idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def num_free(self) -> int:
        """Blocks with no owner and no known content."""
        return len(self._free)

    @property
    def num_idle(self) -> int:
        """Blocks with no owner whose content may be shared again."""
        return len(self._idle)

    @property
    def num_referenced(self) -> int:
        """Blocks with an owner."""
        return self.num_blocks - self.num_available

    def references(self, block: int) -> int:
        """How many tables hold `block`."""
        return self._references[block]

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` tokens fill, the last one perhaps in part."""
        return -(-tokens // self.block_size)

    def reserve(self, table: list[int], tokens: int) -> bool:
        """Lengthen `table` to cover `tokens` tokens; all or nothing.

        Returns:
            False, with nothing changed, where too few blocks are available.
        """
        missing = self.blocks_for(tokens) - len(table)
        if missing > self.num_available:
            return False
        for _ in range(missing):
            table.append(self._take())
        return True

    def share(self, table: list[int], blocks: list[int]) -> None:
        """Append blocks that are referenced or idle already to `table`, as one more owner."""
        for block in blocks:
            if self._references[block] == 0:
                del self._idle[block]
            self._references[block] += 1
            table.append(block)

    def truncate(self, table: list[int], tokens: int) -> int:
        """Shorten `table` to `tokens` tokens.

        Where the cut falls within a block that others own or may come to share, that block goes too, since what
        follows would overwrite it.

        Returns:
            Tokens that the table still holds, `tokens` or a multiple of the block size below it.
        """
        if tokens % self.block_size and self.blocks_for(tokens) <= len(table):
            partial = table[tokens // self.block_size]
            if self._references[partial] > 1 or partial in self._key_of:
                tokens -= tokens % self.block_size
        keep = self.blocks_for(tokens)
        self._release(table[keep:])
        del table[keep:]
        return tokens

    def release(self, table: list[int]) -> None:
        """Give up all blocks of `table` and empty it."""
        self._release(table)
        table.clear()

    def find(self, key: bytes) -> int | None:
        """The block whose content is known by `key`."""
        return self._block_of.get(key)

    def publish(self, block: int, key: bytes) -> None:
        """Let a full block be shared by `key`. The first block of a key keeps it; a twin stays its owner's alone."""
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def forget(self, block: int) -> None:
        """Let nobody share a block any more, since its content is not to be trusted."""
        key = self._key_of.pop(block, None)
        if key is None:
            return
        del self._block_of[key]
        if block in self._idle:
            del self._idle[block]
            self._free.append(block)

    def drop_idle(self) -> None:
        """Forget the content of all blocks that nobody owns."""
        for block in self._idle:
            del self._block_of[self._key_of.pop(block)]
        self._free.extend(self._idle)
        self._idle.clear()

    def _take(self) -> int:
        if self._free:
            block = self._free.popleft()
        else:
            block, _ = self._idle.popitem(last=False)
            del self._block_of[self._key_of.pop(block)]
        self._references[block] = 1
        return block

    def _release(self, blocks: list[int]) -> None:
        # Last block first, so that of a prefix nobody uses the end is evicted before its beginning.
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block]:
                continue
            if block in self._key_of:
                self._idle[block] = None
            else:
                self._free.append(block)
