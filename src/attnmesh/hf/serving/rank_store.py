"""Stored prefixes on a rank: blocks in its memory, and a thread that writes blocks to a folder and reads them.

Steps copy rows between caches and blocks, a few blocks each. The thread writes and reads files meanwhile.
"""

import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from errno import EIO
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from attnmesh.hf.cache.folder_layers import STATES
from attnmesh.hf.cache.sharded_cache import ShardedCache
from attnmesh.hf.chunked_prefill import Prompt
from attnmesh.hf.serving.operations import BlockToRead, BlockToSave, ReadFrom
from attnmesh.hf.serving.prefix_store import OpenStore
from attnmesh.hf.serving.rank_report import RankReport
from attnmesh.mesh.axes import RankMesh
from attnmesh.store.block_names import StoredBlock
from attnmesh.store.block_rows import CacheFiller, rows_of_block
from attnmesh.store.layer_files import TOKEN_INDEX

CLOSE_SECONDS = 5.0
"""Seconds that an engine waits at its end for files to be written."""

Rows = dict[str, Tensor]


@dataclass
class Reading:
    """Blocks that are read for a cache: the thread reads them, and steps copy them to the cache."""

    cache: ShardedCache
    filler: CacheFiller
    blocks: Sequence[BlockToRead]
    device: torch.device
    ready: "queue.SimpleQueue[list[Rows] | None]" = field(default_factory=queue.SimpleQueue)
    """Rows of the blocks in order, as a list with an entry for each file; None for a damaged block."""
    done: int = 0
    """Number of blocks that steps have copied."""
    is_damaged: bool = False
    """True if the next block could not be copied."""
    is_closed: bool = False


class RankStore:
    """The blocks of one rank."""

    def __init__(self, opened: OpenStore, mesh: RankMesh, caches: dict[int, ShardedCache]) -> None:
        self.folder = opened.folder
        self.lock = opened.lock
        self.mesh = mesh
        self.caches = caches
        self.memory: dict[StoredBlock, Rows] = {}
        self.readings: dict[int, Reading] = {}
        self.written = 0
        """Blocks whose file is written, or of which this rank has no file."""
        self.fault = 0
        """Number of the system's error that ended writing; 0 while there is none."""
        self._work: queue.SimpleQueue[tuple[Callable[..., None], *tuple[Any, ...]]] = queue.SimpleQueue()
        self._is_open = True
        self._thread = Thread(target=self._run, name="attnmesh store", daemon=True)
        self._thread.start()

    def add_to(self, report: RankReport) -> RankReport:
        """Return a report with the blocks that were written, and those copied to the cache that is being loaded."""
        written = report._replace(blocks_written=self.written, write_error=self.fault)
        for reading in self.readings.values():
            return written._replace(blocks_read=reading.done, is_damaged=reading.is_damaged)
        return written

    # --- operations of steps ---

    def do_save(self, cache_id: int, blocks: Sequence[BlockToSave]) -> None:
        """Copy this rank's rows of blocks to memory. The thread writes blocks with `to_disk` to the folder."""
        cache = self.caches[cache_id]
        for block, to_disk in blocks:
            is_apart = block.is_state or block.file_count > self.mesh.heads.size  # each rank writes a file of its own
            rows = rows_of_block(cache.kv_caches, block, is_apart=is_apart)
            states = {}
            if block.is_state:
                states = {STATES + name: x.to("cpu", copy=True) for name, x in cache.states.items()}
            if rows or states:
                self.memory[block] = rows | states
            mine = {} if self.mesh.shard_index else states  # states are equal on all ranks: one writes them
            file_number = self.mesh.shard_index if is_apart else self.mesh.heads.index
            self._work.put((self._write, block, file_number, rows | mine if to_disk else {}))

    def do_forget(self, in_memory: Sequence[StoredBlock], on_disk: Sequence[StoredBlock]) -> None:
        """Forget blocks in memory. Rank 0 removes files."""
        for block in in_memory:
            self.memory.pop(block, None)
        for block in () if self.mesh.shard_index else on_disk:
            self.folder.remove(block)

    def begin_reading(self, cache_id: int, reading: Reading) -> None:
        """Let the thread read blocks for the cache."""
        self.readings[cache_id] = reading
        self._work.put((self._read, reading))

    def do_load(self, cache_id: int, nbytes: int, patience: float) -> None:
        """Copy blocks that have been read to the cache, about `nbytes` bytes. Wait `patience` seconds for the first."""
        reading = self.readings[cache_id]
        while not reading.is_damaged and reading.done < len(reading.blocks) and nbytes > 0:
            try:
                rows_by_file = reading.ready.get(timeout=patience) if patience else reading.ready.get_nowait()
            except queue.Empty:
                return
            patience = 0.0
            block, read_from = reading.blocks[reading.done]
            nbytes -= sum(x.nbytes for rows in rows_by_file or () for x in rows.values())
            if not self._copy(reading, block, rows_by_file):
                reading.is_damaged = True
            else:
                reading.done += 1
                if read_from == ReadFrom.DISK_TO_MEMORY and rows_by_file:
                    self.memory[block] = rows_by_file[0]

    def do_close(self, cache_id: int, length: int) -> None:
        """End the reading of a cache, which then has the first `length` tokens; 0 leaves it as it is."""
        reading = self.readings.pop(cache_id)
        reading.is_closed = True
        if length:
            reading.filler.finish(length)
            reading.cache.set_length(length)

    def _copy(self, reading: Reading, block: StoredBlock, rows_by_file: list[Rows] | None) -> bool:
        """Copy a block to a cache. Return False if it is damaged."""
        if not rows_by_file:
            return rows_by_file is not None
        try:
            if block.is_state:
                reading.filler.begin(block, rows_by_file)
                names = [name for name in rows_by_file[0] if name.startswith(STATES)]
                reading.cache.set_states(
                    {name.removeprefix(STATES): rows_by_file[0][name].to(reading.device, copy=True) for name in names}
                )
            reading.filler.put(block, rows_by_file)
        except Exception:  # what a file of any contents may raise: its tokens are computed again
            return False
        return True

    # --- files ---

    def later(self, work: Callable[..., None], *arguments: Any) -> None:
        """Call `work` in the thread, after the work that was asked for before."""
        self._work.put((work, *arguments))

    def close(self, *, at_once: bool) -> None:
        """End the thread: `at_once` after its present file, otherwise after all work, or after `CLOSE_SECONDS`."""
        self._work.put((self._end,))
        if not at_once:
            self._thread.join(CLOSE_SECONDS)
        self._end()

    def _end(self) -> None:
        self._is_open = False

    def _run(self) -> None:
        """Work until the end, and then release the folder: the next engine removes half-written files."""
        try:
            while self._is_open:
                work, *arguments = self._work.get()
                work(*arguments)
        finally:
            self.lock.release()

    def _write(self, block: StoredBlock, file_number: int, rows: Rows) -> None:
        """Write a file of a block, unless an earlier file could not be written."""
        try:
            if rows and not self.fault:
                self.folder.write(block, file_number, rows)
            self.written += 1
        except Exception as error:  # an error of files alone: requests go on, and rank 0 warns
            self.fault = getattr(error, "errno", None) or EIO

    def _read(self, reading: Reading) -> None:
        """Read blocks until one is damaged."""
        for block, read_from in reading.blocks:
            if reading.is_closed:
                return
            try:
                reading.ready.put(self._rows_by_file(reading, block, read_from))
            except Exception:  # what a file of any contents may raise: its tokens are computed again
                reading.ready.put(None)
                return

    def _rows_by_file(self, reading: Reading, block: StoredBlock, read_from: ReadFrom) -> list[Rows]:
        """Return the rows of a block, an entry for each file; none if this rank needs no row of it."""
        if not reading.filler.needs(block):
            return []
        rows_in_memory = self.memory.get(block)
        if rows_in_memory is not None and (read_from == ReadFrom.MEMORY or _is_whole(rows_in_memory, block)):
            return [rows_in_memory]
        return [self.folder.read(block, file_number) for file_number in range(block.file_count)]


def _is_whole(rows: Rows, block: StoredBlock) -> bool:
    """Return whether rows are of all tokens of a block. With unequal shares several ranks may hold parts of it."""
    return not block.is_state and len(rows.get(TOKEN_INDEX, ())) == block.stop - block.start


def set_prompt_tokens(cache: ShardedCache, prompt: Prompt) -> None:
    """Set the tokens of a cache that was filled for a prompt, and their images if all of them are in the cache.

    Without this the prompt goes on only from the tokens before its first image.
    """
    length = cache.get_seq_length()
    cache.tokens = prompt.mark(prompt.ids)[:, :length]
    if prompt.image_tokens is not None and not bool(prompt.image_tokens.is_image[:, length:].any()):
        cache.history.image_fingerprints = prompt.image_tokens.fingerprints
