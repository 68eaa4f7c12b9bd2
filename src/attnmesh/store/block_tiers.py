"""Which blocks are in memory and on disk, least recently used first, and which go when others need their room.

All ranks hold blocks. One rank decides, so a tier is a table of names, and what goes is a list that it sends.
"""

from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator
from typing import NamedTuple

from attnmesh.store.block_names import BLOCK_GRAIN, BlockNames, StoredBlock

MAX_BLOCK_TOKENS = 1024
"""Tokens of the longest block, after which no further one continues a prefix."""


class TierEntry(NamedTuple):
    """A block in a tier."""

    nbytes: int
    run_tokens: int = 0
    """Consecutive tokens that one rank held, where each rank has its own in memory."""


class Tier:
    """Blocks that together take at most `max_bytes` bytes."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.nbytes = max_bytes, 0
        self.blocks: OrderedDict[StoredBlock, TierEntry] = OrderedDict()

    def add(self, block: StoredBlock, entry: TierEntry) -> None:
        """Add a block as the last used."""
        self.remove(block)
        self.blocks[block] = entry
        self.nbytes += entry.nbytes

    def remove(self, block: StoredBlock) -> None:
        """Remove a block, if it is there."""
        if (entry := self.blocks.pop(block, None)) is not None:
            self.nbytes -= entry.nbytes

    def touch(self, block: StoredBlock) -> None:
        """Note that a block is used now, if it is there."""
        if block in self.blocks:
            self.blocks.move_to_end(block)

    def make_room(self, nbytes: int, *spared: Container[StoredBlock]) -> list[StoredBlock] | None:
        """Remove the least recently used blocks but `spared`, until `nbytes` fit. Return them; None if they cannot fit.

        >>> tier = Tier(10)
        >>> for number in range(3):
        ...     tier.add(StoredBlock(str(number), 0, 16), TierEntry(3))
        >>> [block.name for block in tier.make_room(4, {StoredBlock("0", 0, 16)})], tier.make_room(11)
        (['1'], None)
        """
        evicted, bytes_left = [], self.nbytes
        for block, entry in self.blocks.items() if nbytes <= self.max_bytes else ():
            if bytes_left + nbytes <= self.max_bytes:
                break
            if not any(block in blocks for blocks in spared):
                evicted.append(block)
                bytes_left -= entry.nbytes
        if bytes_left + nbytes > self.max_bytes:
            return None
        for block in evicted:
            self.remove(block)
        return evicted


class BlockTiers:
    """Blocks of a folder, blocks in memory, and blocks on their way to the folder, by name and first token."""

    def __init__(self, memory: int, disk: int) -> None:
        self.memory, self.disk = Tier(memory), Tier(disk)
        self.blocks_by_name: dict[str, dict[int, StoredBlock]] = {}
        self.states_by_stop: dict[int, int] = {}
        """Number of states, by how many tokens they are of."""
        self.writing: dict[StoredBlock, int] = {}
        """Bytes of blocks on their way to the folder, in their order; 0 for those that stay in memory."""
        self.pinned: frozenset[StoredBlock] = frozenset()
        """Blocks that are being read."""
        self.gone_from_memory: list[StoredBlock] = []
        """Blocks that have left memory since `pop_gone` was called last."""
        self.gone_from_folder: list[StoredBlock] = []
        """Blocks that have left the folder since `pop_gone` was called last."""

    def add(self, tier: Tier, block: StoredBlock, entry: TierEntry) -> None:
        """Add a block to a tier."""
        tier.add(block, entry)
        if block.start not in self.blocks_by_name.setdefault(block.name, {}):
            self.blocks_by_name[block.name][block.start] = block
            if block.is_state:
                self.states_by_stop[block.stop] = self.states_by_stop.get(block.stop, 0) + 1

    def make_room(self, tier: Tier, nbytes: int) -> bool:
        """Drop blocks that are not on their way, least recently used first, for `nbytes`. Return whether they fit."""
        blocks = tier.make_room(nbytes, self.writing, self.pinned)
        for block in blocks or []:
            self._note_gone(tier, block)
        return blocks is not None

    def admit(self, block: StoredBlock, entry: TierEntry) -> bool | None:
        """Make room for a new block and add it to memory.

        Return whether it goes to the folder too; None if there is no room in memory now.
        """
        if not self.make_room(self.memory, entry.nbytes):
            return None
        goes_on = self.make_room(self.disk, entry.nbytes + sum(self.writing.values()))
        self.add(self.memory, block, entry)
        self.writing[block] = entry.nbytes if goes_on else 0
        return goes_on

    def keep_in_memory(self, block: StoredBlock, entry: TierEntry) -> bool:
        """Make room for a block of the folder and add it to memory too. Return whether there was room."""
        if fits := self.make_room(self.memory, entry.nbytes):
            self.add(self.memory, block, entry)
        return fits

    def drop(self, tier: Tier, block: StoredBlock) -> None:
        """Remove a block from a tier."""
        tier.remove(block)
        self._note_gone(tier, block)

    def pin(self, blocks: Iterable[StoredBlock]) -> None:
        """Keep blocks that are being read, and let those go that were pinned before."""
        self.pinned = frozenset(blocks)

    def forget_writing(self) -> None:
        """Forget which blocks are on their way: none will arrive."""
        self.writing.clear()

    def pop_written(self) -> tuple[StoredBlock, bool]:
        """Return the first block of those on their way, which has arrived, and whether it went to the folder."""
        block = next(iter(self.writing))
        return block, self.writing.pop(block) > 0

    def pop_gone(self) -> tuple[list[StoredBlock], list[StoredBlock]]:
        """Return what has left memory, and the folder, since the last call."""
        gone = self.gone_from_memory, self.gone_from_folder
        self.gone_from_memory, self.gone_from_folder = [], []
        return gone

    def _note_gone(self, tier: Tier, block: StoredBlock) -> None:
        """Note that a block has left a tier, and forget its name once it is in none."""
        gone = self.gone_from_folder if tier is self.disk else self.gone_from_memory
        gone.append(block)
        if block in self.memory.blocks or block in self.disk.blocks or block.name not in self.blocks_by_name:
            return
        self.blocks_by_name[block.name].pop(block.start, None)
        if not self.blocks_by_name[block.name]:
            del self.blocks_by_name[block.name]
        if block.is_state:
            self.states_by_stop[block.stop] -= 1
            if not self.states_by_stop[block.stop]:
                del self.states_by_stop[block.stop]

    def touch(self, blocks: Iterable[StoredBlock]) -> None:
        """Note that blocks are used now, the last one first: a block is of no use without the blocks before it."""
        for block in sorted(blocks, key=lambda block: block.stop, reverse=True):
            self.memory.touch(block)
            self.disk.touch(block)

    def has(self, block: StoredBlock, run_tokens: int | None = None) -> bool:
        """Return whether a block is on disk, or in memory in runs of `run_tokens` tokens; None for any runs."""
        entry = self.memory.blocks.get(block)
        return block in self.disk.blocks or (entry is not None and run_tokens in (None, entry.run_tokens))

    def prefix_blocks(
        self, names: BlockNames, ids: list[int], most: int, run_tokens: int | None = None
    ) -> list[StoredBlock]:
        """Return blocks that lead from the first token as far as they can, to `most` tokens at most."""
        reached: dict[int, StoredBlock | None] = {0: None}
        last = 0
        for stop in range(BLOCK_GRAIN, most + 1, BLOCK_GRAIN):
            blocks = self.blocks_by_name.get(names.at(ids, stop), {}).values()
            usable = (
                block
                for block in blocks
                if not block.is_state and block.start in reached and self.has(block, run_tokens)
            )
            if (block := next(usable, None)) is not None:
                reached[stop], last = block, stop
            elif stop - last > MAX_BLOCK_TOKENS:
                break
        return _blocks_to(reached, last)

    def states(self, names: BlockNames, ids: list[int], most: int, run_tokens: int) -> Iterator[StoredBlock]:
        """Yield states after at most `most` tokens of a sequence, the longest first."""
        for stop in sorted((stop for stop in self.states_by_stop if stop <= most), reverse=True):
            for block in self.blocks_by_name.get(names.state_at(ids, stop), {}).values():
                if block.is_state and self.has(block, run_tokens):
                    yield block


def _blocks_to(reached: dict[int, StoredBlock | None], stop: int) -> list[StoredBlock]:
    """Return the blocks that lead from the first token to `stop`."""
    blocks: list[StoredBlock] = []
    while (block := reached[stop]) is not None:
        blocks.append(block)
        stop = block.start
    return blocks[::-1]
