"""Stored prefixes on rank 0: which blocks are stored, and the operations that store blocks and load them.

Each step copies a few blocks of kept caches to the memory of their ranks, whose threads write them to files. If the
longest prefix of a prompt is stored, ranks fill a cache with its blocks, a few in each step, before the prompt begins.
"""

import os
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary, WeakSet

from attnmesh.cache.cache_config import CacheConfig
from attnmesh.errors import InputError, warn_once
from attnmesh.hf.cache.sharded_cache import ShardedCache
from attnmesh.hf.models import has_windows, rope_regime
from attnmesh.hf.serving.chunk_pace import PACE_EMA_WEIGHT
from attnmesh.hf.serving.engine_request import EngineRequest, Origin
from attnmesh.hf.serving.operations import (
    BlockToRead,
    BlockToSave,
    CloseStored,
    ForgetBlocks,
    LoadBlocks,
    OpenStored,
    Operation,
    ReadFrom,
    SaveBlocks,
    StepResults,
)
from attnmesh.hf.serving.prefix_store import OpenStore, PrefixStore
from attnmesh.hf.serving.rank_report import RankReport
from attnmesh.hf.serving.rank_worker import RankWorker
from attnmesh.store.block_names import BLOCK_GRAIN, BlockNames, StoredBlock
from attnmesh.store.block_tiers import BlockTiers, TierEntry

COPY_SECONDS = 0.05
"""Seconds for which a step may copy blocks while no rows decode. Requests join between steps."""

LOAD_WAIT_SECONDS = 0.005
"""Seconds for which a step without rows waits for a block that is being read."""

NOTE_BYTES = 16
"""Bytes of the two numbers in a block for its heads, and for each layer that forgets."""

FIRST_COPY_RATE = 1e9
"""Bytes a second that are assumed for the first copy, before any was measured."""


@dataclass
class SavingCache:
    """A kept cache whose blocks are being stored."""

    cache_id: int
    ids: list[int]
    names: BlockNames
    stop: int
    stored_tokens: int = -1
    """Tokens whose blocks are stored or being stored; -1 before the blocks were first looked up."""
    last: StoredBlock | None = None
    """The block of the cache that was stored last."""

    @property
    def is_done(self) -> bool:
        """True if none of its blocks is left to be stored."""
        return self.stored_tokens >= self.stop


@dataclass
class LoadingCache:
    """A cache that is filled for a request."""

    request: EngineRequest
    cache_id: int
    blocks: Sequence[BlockToRead]
    max_tokens: int
    """Most tokens in the cache before the prompt begins. The last block may hold more, which are left out."""


class StoreScheduler:
    """The stored blocks of an engine, in the memory of its ranks and in a folder."""

    def __init__(self, settings: PrefixStore, opened: OpenStore, worker: RankWorker) -> None:
        self.worker = worker
        self.folder = opened.folder
        self.name = opened.name
        self.template = worker.template
        self.folder_path = settings.folder
        config = worker.template.config
        self.forgets = bool(self.template.irreversible_layers)
        self.forgets = self.forgets or (self.template.windows and has_windows(config))
        self.tiers = BlockTiers(settings.memory, settings.disk)
        for block, nbytes in self.folder.scan().items():
            self.tiers.add(self.tiers.disk, block, TierEntry(nbytes))
        self.layers = self._read_layers()
        """Configurations of the layers' caches; None until the folder or a cache shows them."""
        self.saving: deque[SavingCache] = deque()
        """Caches of which blocks are left to be stored."""
        self.finishing: deque[SavingCache] = deque()
        """Caches whose last blocks may not be written yet."""
        self.written_blocks = 0
        """Blocks that all ranks have written."""
        self.stopped = False
        """True once a rank could not write: no more blocks are stored then."""
        self.loading: LoadingCache | None = None
        self.loaded: dict[EngineRequest, Origin] = {}
        """Caches that were loaded for requests which have not begun."""
        self.looked_up = WeakSet[EngineRequest]()
        """Requests for which loading has begun: it is tried once."""
        self.names = WeakKeyDictionary[EngineRequest, BlockNames]()
        self.opening: OpenStored | None = None
        """Operation that begins the loading, until a step has it."""
        self.closing: CloseStored | None = None
        """Operation that ends the loading, until a step has it."""
        self.copy_rate = FIRST_COPY_RATE
        """Bytes that are copied in a second, a moving average."""
        self.copied = 0
        """Bytes of blocks that this step copies from caches."""
        names = ("memory_tokens", "disk_tokens", "blocks_written", "blocks_damaged")
        self.counts = dict.fromkeys((f"store_{name}" for name in names), 0)
        self.tiers.make_room(self.tiers.disk, 0)

    @property
    def busy(self) -> bool:
        """True if a step has something to do."""
        return bool(
            self.loading or self.closing or self.saving or self.tiers.gone_from_memory or self.tiers.gone_from_folder
        )

    @property
    def is_writing(self) -> bool:
        """True if blocks are being written to the folder."""
        return bool(self.tiers.writing)

    @property
    def holds_memory(self) -> bool:
        """True if a cache is being loaded, or was loaded and no request has taken it."""
        return bool(self.loading or self.closing or self.loaded)

    def metrics(self) -> dict[str, float]:
        """Return counts and sizes."""
        sizes: dict[str, float] = {}
        for name, tier in (("memory", self.tiers.memory), ("disk", self.tiers.disk)):
            sizes |= {f"store_{name}_bytes": tier.nbytes, f"store_{name}_blocks": len(tier.blocks)}
        return {**self.counts, **sizes, "store_stopped": float(self.stopped)}

    # --- storing ---

    def name_blocks(self, request: EngineRequest) -> None:
        """Name the blocks of a new request. The thread that submits the request calls this, and not that of steps."""
        self._names(request).at(request.ids, len(request.ids) // BLOCK_GRAIN * BLOCK_GRAIN)

    def keep(self, request: EngineRequest, cache_id: int, rejected: int = 0) -> None:
        """Let the next steps store the prefix in a cache, without its last `rejected` tokens."""
        cache = self.worker.caches.get(cache_id)
        if self.stopped or cache is None or any(layer.is_initialized for layer in cache.cross_layers):
            return
        if (
            cache.history.is_consistent
            and cache.history.rope_regime == self._rope(request)
            and all(kv_cache.is_block_cyclic for kv_cache in cache.kv_caches)
        ):
            ids = request.ids
            length = cache.get_seq_length() - rejected
            self.saving.append(SavingCache(cache_id, ids, self._names(request), min(length, len(ids))))

    def operations_before(self, drops: Collection[int], seconds: float | None) -> list[Operation]:
        """Return operations that forget, save and load blocks, before those of a step.

        They take about `seconds`, or `COPY_SECONDS` if it is None: no rows decode then. `drops` are the caches that the
        step drops: their blocks are saved first.
        """
        copy_seconds = COPY_SECONDS if seconds is None else seconds
        most_bytes = int(min(self.copy_rate * copy_seconds, sys.maxsize))  # `seconds` may be inf
        saves = list[Operation]()
        self.saving = deque(saving for saving in self.saving if saving.cache_id in self.worker.caches)
        self.copied = 0
        for saving in sorted(self.saving, key=lambda saving: saving.cache_id not in drops):
            blocks = list[BlockToSave]()
            while (self.copied < most_bytes or not self.copied) and (entry := self._next_block(saving)) is not None:
                blocks.append(entry)
            if blocks:
                saves.append(SaveBlocks(saving.cache_id, blocks))
        self.finishing += [saving for saving in self.saving if saving.is_done or saving.cache_id in drops]
        self.saving = deque(saving for saving in self.saving if not saving.is_done and saving.cache_id not in drops)
        loads: list[Operation] = [] if self.closing is None else [self.closing]
        self.closing = None
        if self.loading is not None and self.opening is None and not loads:
            nbytes = max(1, (most_bytes - self.copied) // self.worker.mesh.ranks)
            loads = [LoadBlocks(self.loading.cache_id, nbytes, LOAD_WAIT_SECONDS if seconds is None else 0.0)]
        forgets = [ForgetBlocks(*gone)] if any(gone := self.tiers.pop_gone()) else []
        return [*forgets, *saves, *loads]

    def operations_after(self) -> list[Operation]:
        """Return operations after those of a step: one may begin to load a cache."""
        opening = self.opening
        self.opening = None
        return [] if opening is None else [opening]

    def _next_block(self, saving: SavingCache) -> BlockToSave | None:
        """Return the next block of a cache that is to be stored; None if there is none, or no room for it now."""
        cache = self.worker.caches[saving.cache_id]
        keeps_all = any(kv_cache.config.mask is None for kv_cache in cache.kv_caches)
        whole = saving.stop // BLOCK_GRAIN * BLOCK_GRAIN if keeps_all else 0
        if saving.stored_tokens < 0:
            self._note_layers(cache)
        if self.stopped:  # `_note_layers` may have found the disk full
            return None
        if saving.stored_tokens < 0:
            prefix = self.tiers.prefix_blocks(saving.names, saving.ids, whole)
            state = self._state_of(saving)
            self._touch([*prefix, *state])
            saving.stored_tokens = prefix[-1].stop if prefix else 0
            if state and not self.tiers.has(state[0]):
                entry = self._admit(saving, state[0], self._state_bytes(cache, state[0]))
                if entry is None and not saving.is_done:
                    saving.stored_tokens = -1  # the next step looks at the cache again
                return entry
        while saving.stored_tokens < whole:
            stop = min((saving.stored_tokens // cache.block + 1) * cache.block, whole)
            block = StoredBlock(
                saving.names.at(saving.ids, stop), saving.stored_tokens, stop, file_count=self._file_count_of(cache)
            )
            entry = None
            if not self.tiers.has(block):  # another cache may have stored it meanwhile
                entry = self._admit(
                    saving, block, NOTE_BYTES + (stop - saving.stored_tokens) * self._token_bytes(cache)
                )
                if entry is None:
                    return None
            saving.stored_tokens = stop
            if entry is not None:
                return entry
        saving.stored_tokens = saving.stop
        return None

    def _file_count_of(self, cache: ShardedCache) -> int:
        """Return the number of files of a block. With unequal shares of tokens each rank writes one."""
        even = all(kv_cache.own_shard.block_cyclic.is_even for kv_cache in cache.kv_caches)
        return self.worker.mesh.heads.size if even else self.worker.mesh.ranks

    def _state_of(self, saving: SavingCache) -> list[StoredBlock]:
        """Return the block of the state at the end of a cache, in a list; an empty list if no layer forgets."""
        name = saving.names.state_at(saving.ids, saving.stop)
        first = saving.stop // BLOCK_GRAIN * BLOCK_GRAIN
        return [StoredBlock(name, first, saving.stop, True, self.worker.mesh.ranks)] if self.forgets else []

    def _touch(self, blocks: Sequence[StoredBlock]) -> None:
        """Note that blocks are used, in the folder too, for servers that come later. Earlier blocks stay longest."""
        store = self.worker.store
        ordered = sorted(blocks, key=lambda block: block.stop, reverse=True)
        self.tiers.touch(ordered)
        if store is not None:
            for block in ordered:
                store.later(self.folder.touch, block)

    def _admit(self, saving: SavingCache, block: StoredBlock, nbytes: int) -> BlockToSave | None:
        """Make room for a block. Return it, and whether it goes to the folder; None if there is no room.

        If no room can ever hold a block of this size, the cache counts as done. Otherwise there is room once earlier
        blocks are written.
        """
        to_folder = self.tiers.admit(block, TierEntry(nbytes, self.worker.caches[saving.cache_id].block))
        if to_folder is None:
            saving.stored_tokens = saving.stop if nbytes > self.tiers.memory.max_bytes else saving.stored_tokens
            return None
        self.copied += nbytes
        saving.last = block
        return BlockToSave(block, to_folder)

    def _token_bytes(self, cache: ShardedCache) -> int:
        """Return the bytes of a token on all ranks, in layers that keep all tokens."""
        return 8 + sum(_row_bytes(kv_cache.config) for kv_cache in cache.kv_caches if kv_cache.config.mask is None)

    def _state_bytes(self, cache: ShardedCache, block: StoredBlock) -> int:
        """Return the bytes of a state on all ranks."""
        key_bytes = (block.stop - block.start) * self._token_bytes(cache)
        forgetting = [kv_cache for kv_cache in cache.kv_caches if kv_cache.config.mask is not None]
        for kv_cache in forgetting:
            key_bytes += (kv_cache.length - kv_cache.local_shards.window_start.oldest_kept_token) * (
                _row_bytes(kv_cache.config) + 8
            )
        state_bytes = sum(x.nbytes for x in cache.states.values())
        return int(key_bytes + state_bytes) + NOTE_BYTES * self.worker.mesh.ranks * (1 + len(cache.kv_caches))

    def _note_layers(self, cache: ShardedCache) -> None:
        """Write the configurations of layers to the folder: a later server makes caches by them before any prompt."""
        layers = [replace(kv_cache.config, batch=1, capacity=1, block=1) for kv_cache in cache.kv_caches]
        if layers != self.layers:
            self.layers = layers
            try:
                self.folder.write_layers(self.name, layers)
            except OSError as error:
                self._stop(error.errno or 0, 0)

    def _read_layers(self) -> list[CacheConfig] | None:
        try:
            return self.folder.read_layers(self.name)
        except InputError:
            return None

    # --- loading ---

    def begin_loading(
        self, request: EngineRequest, common_tokens: int, new_cache_ids: Iterator[int], reserve: Callable[[], bool]
    ) -> bool:
        """Begin to load a cache for a request, if `reserve` makes room for it. Return whether loading begins.

        It does not begin if the stored prefix is hardly longer than `common_tokens`, the tokens that a kept cache has.
        """
        if self.loading is not None or request in self.looked_up or self.layers is None:
            return False
        tokens = self._count_loadable(request)
        blocks, run_tokens = self._find(request, tokens)
        stop = max((block.stop for block in blocks), default=0)
        if min(stop, tokens) < common_tokens + BLOCK_GRAIN or not reserve():
            return False
        self.looked_up.add(request)
        self._touch(blocks)
        self.tiers.pin(blocks)
        sources = [BlockToRead(block, self._choose_source(block, run_tokens)) for block in blocks]
        self.loading = LoadingCache(request, next(new_cache_ids), sources, tokens)
        codes = [layer.to_code() for layer in self.layers]
        self.opening = OpenStored(self.loading.cache_id, codes, tokens, self._rope(request), sources)
        return True

    def holds_up(self, request: EngineRequest) -> bool:
        """Return whether a request has to wait: its own prefix is being loaded, or that of another, which it shares."""
        if self.loading is None or self.loading.request is request:
            return self.loading is not None
        last, _ = self.loading.blocks[-1]
        if self.forgets or len(request.ids) <= last.stop:
            return False
        return self._names(request).at(request.ids, last.stop) == last.name

    def origin_of(self, request: EngineRequest) -> Origin | None:
        """Return the cache that was loaded for a request; None if none was."""
        return self.loaded.get(request)

    def note_begun(self, request: EngineRequest) -> None:
        """Note that a request has begun, from its loaded cache or from another."""
        self.loaded.pop(request, None)

    def _find(self, request: EngineRequest, tokens: int) -> tuple[list[StoredBlock], int]:
        """Return the blocks of the longest stored prefix, in the order of reading, and the tokens of a cache's block.

        A state is read first: it says which tokens the layers have forgotten.
        """
        sized = copy(self.template)
        sized.choose_block(tokens)
        names = self._names(request)
        ids = request.ids
        run_tokens = sized.block
        if not self.forgets:
            return self.tiers.prefix_blocks(names, ids, tokens + self.worker.left_to_decode, run_tokens), run_tokens
        assert self.layers is not None
        has_runs = any(config.mask is None for config in self.layers)
        for state in self.tiers.states(names, ids, tokens, run_tokens):
            prefix = self.tiers.prefix_blocks(names, ids, state.start, run_tokens) if has_runs else []
            if not has_runs or (prefix[-1].stop if prefix else 0) == state.start:
                return [state, *prefix], run_tokens
        return [], run_tokens

    def _choose_source(self, block: StoredBlock, run_tokens: int) -> ReadFrom:
        """Return from where a block is read. If one rank reads it whole and there is room, it is kept in memory."""
        block_in_memory = self.tiers.memory.blocks.get(block)
        if block_in_memory is not None and block_in_memory.run_tokens == run_tokens:
            return ReadFrom.MEMORY
        whole = block.file_count == self.worker.mesh.heads.size == 1 and not block.is_state
        if not whole or block.start // run_tokens != (block.stop - 1) // run_tokens or block_in_memory is not None:
            return ReadFrom.DISK
        entry = self.tiers.disk.blocks[block]._replace(run_tokens=run_tokens)
        return ReadFrom.DISK_TO_MEMORY if self.tiers.keep_in_memory(block, entry) else ReadFrom.DISK

    def receive_reports(self, reports: Sequence[RankReport]) -> list[int]:
        """Note what ranks have written and read. Return loaded caches that no request needs."""
        failed = [rank for rank, report in enumerate(reports) if report.write_error]
        if failed and not self.stopped:
            self._stop(reports[failed[0]].write_error, failed[0])
        if not self.stopped:
            self._note_written(min(report.blocks_written for report in reports))
        ended = [request for request in self.loaded if request.cancelled or request.finish_reason is not None]
        unused = [self.loaded.pop(request).source for request in ended]
        return self._end_loading(reports) + [cache_id for cache_id in unused if cache_id is not None]

    def _note_written(self, count: int) -> None:
        """Note blocks in the folder that all ranks have written: `count` is the least number of all ranks."""
        while self.written_blocks < count:
            self.written_blocks += 1
            block, went_to_folder = self.tiers.pop_written()
            if went_to_folder and (nbytes := self.folder.size(block)):
                self.tiers.add(self.tiers.disk, block, TierEntry(nbytes))
                self.counts["store_blocks_written"] += 1
        while self.finishing and self.finishing[0].last not in self.tiers.writing:
            saving = self.finishing.popleft()  # first blocks stay longest: without them later ones are of no use
            self._touch(self.tiers.prefix_blocks(saving.names, saving.ids, saving.stop))
        self.tiers.make_room(self.tiers.disk, 0)

    def _stop(self, error_number: int, rank: int) -> None:
        """Store no more blocks, and warn once."""
        self.stopped = True
        self.saving.clear()
        self.finishing.clear()
        self.tiers.forget_writing()
        why = f"rank {rank} cannot write to {self.folder_path} ({os.strerror(error_number)})"
        warn_once(f"no more prefixes are stored: {why}")

    def _end_loading(self, reports: Sequence[RankReport]) -> list[int]:
        """End the loading once each rank has read all blocks, or found a damaged one. Return a useless cache.

        Ranks 0 and 1 read 8 blocks, and rank 1 cannot read the sixth: the cache keeps the first 5 on both. If layers
        forget, it keeps none: its state is that after all 8.
        """
        loading = self.loading
        if loading is None or self.opening is not None or self.closing is not None:
            return []
        total = len(loading.blocks)
        if any(report.blocks_read < total and not report.is_damaged for report in reports):
            return []
        good = min(report.blocks_read for report in reports)
        if good < total:
            self.counts["store_blocks_damaged"] += 1
            self._drop_damaged(loading, good)
        length = min(max((block.stop for block, _ in loading.blocks[:good]), default=0), loading.max_tokens)
        if self.forgets and good < total:
            length = 0
        self.closing = CloseStored(loading.cache_id, length)
        self.loading = None
        self.tiers.pin(())
        if loading.request.cancelled or loading.request.finish_reason is not None or not length:
            return [loading.cache_id]
        for block, read_from in loading.blocks[:good]:
            tier = "memory" if read_from == ReadFrom.MEMORY else "disk"
            self.counts[f"store_{tier}_tokens"] += min(block.stop, length) - block.start
        self.loaded[loading.request] = Origin(loading.cache_id, length, moves=True)
        return []

    def _drop_damaged(self, loading: LoadingCache, good: int) -> None:
        """Forget block number `good`, which could not be read, and later ones that were to be kept in memory."""
        for index, (block, read_from) in enumerate(loading.blocks):
            if index == good or (read_from == ReadFrom.DISK_TO_MEMORY and index > good):
                self.tiers.drop(self.tiers.memory, block)
        self.tiers.drop(self.tiers.disk, loading.blocks[good][0])

    def apply_results(self, results: StepResults) -> None:
        """Apply the results of a step: the speed of copies, and whether a cache could be made."""
        if (error := results.error_of(SaveBlocks)) is not None:
            raise error  # caches are not as rank 0 knows them
        seconds = results.seconds.get(SaveBlocks)
        if seconds and self.copied:
            self.copy_rate += PACE_EMA_WEIGHT * (self.copied / seconds - self.copy_rate)
        if results.error_of(OpenStored) is not None:  # there was no memory: all ranks have raised
            self.loading = None
            self.tiers.pin(())

    # --- names ---

    def _count_loadable(self, request: EngineRequest) -> int:
        """Return how many first tokens of a request a cache may have when its prompt begins."""
        apart = request.images is not None or self.worker.recomputes_by_token
        return len(request.prompt if apart else request.ids) - self.worker.left_to_decode

    def _names(self, request: EngineRequest) -> BlockNames:
        if request not in self.names:
            images = None if request.images_digest is None else request.images_digest.hex()
            self.names[request] = BlockNames(self.name, request.salt, images, self._rope(request))
        return self.names[request]

    def _rope(self, request: EngineRequest) -> tuple[int, ...]:
        return rope_regime(self.template.config, len(request.prompt))


def _row_bytes(config: CacheConfig) -> int:
    return config.kv_heads * sum(config.row_widths) * config.row_dtype.itemsize
