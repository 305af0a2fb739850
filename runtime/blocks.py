"""Cache blocks: who holds which. Block 0 is the null block, which padding rows write to and no one reads."""

from collections import deque
from collections.abc import Sequence


class BlockPool:
    """Free blocks of one cache.

    Args:
        blocks: blocks in the cache, the null block included.
        block_size: tokens in a block.
    """

    def __init__(self, blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._free = deque(range(1, blocks))

    @property
    def free(self) -> int:
        """How many blocks are free."""
        return len(self._free)

    def needed(self, tokens: int) -> int:
        """Blocks that ``tokens`` tokens take."""
        return -(-tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks; the caller has made sure that so many are free."""
        assert count <= self.free, (count, self.free)
        return [self._free.popleft() for _ in range(count)]

    def release(self, blocks: Sequence[int]) -> None:
        """Give blocks back. What they hold stays in the cache and may be anything."""
        assert 0 not in blocks
        self._free.extend(blocks)
