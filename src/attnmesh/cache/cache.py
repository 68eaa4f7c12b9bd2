"""Keys and values of a growing sequence, sharded over the ranks of a mesh.

Blocks of tokens go to ranks round robin (block-cyclic), so shards stay even as the cache grows, or in the ratio of
unequal `shares`. After a sharded prefill tokens stay on the rank that computed them: each slot records its token index,
so nothing moves. Memory is reserved once and lengths live on the device: a step neither copies the cache nor waits.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import partial as partial_of
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.cache.cache_config import CacheConfig
from attnmesh.cache.cache_properties import CacheProperties
from attnmesh.cache.history_digest import HistoryDigest
from attnmesh.cache.make_shards import FolderLayer, agreed_token_axis, check_shards, make_shards
from attnmesh.cache.new_tokens import (
    NewTokens,
    append_signature,
    swap_tokens_for_heads,
    tensors_to_append,
    try_append_known,
)
from attnmesh.cache.pages import Pages, append_pool_blocks, pages_of
from attnmesh.cache.saved_cache import LayersToLoad, SavedPieces, Saving, load_caches, save_caches
from attnmesh.checks.argument_checks import check_compare_option, check_readable
from attnmesh.core.mask import Mask
from attnmesh.errors import DtypeError, ShapeError, check_count
from attnmesh.guard.agreement import Agreement, CallGuard
from attnmesh.mesh.axes import RankMesh
from attnmesh.runtime.memo import Memo
from attnmesh.runtime.unbroken import Action, unbroken
from attnmesh.setup.init_mesh import device_fault, device_for


class KVCache(CacheProperties):
    """One layer's keys and values, one shard per rank of a mesh. Every rank makes the same calls.

    A heads axis splits the key heads; tokens are sharded over the other axes together.

    By `checked`, ranks compare these calls::

        call                             None, on a CPU     None, on a GPU               True   False
        append, truncate, reorder, fork  the first of each  the first call on the cache  each   none
        decode                           each               the first of each kind       each   none
        reserve                          each               each                         each   none
        append_shard, append_pages       each               each                         each   each
        truncate, if not block-cyclic    each               each                         each   each

    If calls that ranks compare differ, all ranks raise the same `MeshError`. In other calls a bad argument raises on
    its own rank only. `decode` still detects different lengths, padding and orders. `truncate` makes lengths equal
    again.

    Args:
        mesh: Mesh of all ranks, or None for one device.
        batch: Number of sequences.
        kv_heads: Key heads on all ranks; the heads axis has to divide them.
        head_dim: Width of a key head.
        value_dim: Width of a value head; `head_dim` by default.
        capacity: Tokens on all ranks to reserve memory for.
        dtype: Dtype of keys and values.
        device: Device of this rank's shard; the mesh's by default.
        block: Consecutive tokens that go to one rank.
        checked: When ranks compare their calls: True, False or None, as in the table.
        copies: Ranks that hold each token. With 2 the next host, or on one host the next rank, holds a copy: see
            `attnmesh.recover`.
        values: "separate"; "prefix" for values that are the first columns of the keys, which alone are stored; "none"
            for keys alone, such as an indexer's, which `decode` refuses.
        mask: The widest mask under which later tokens read the cache, such as `Window(127)`. Tokens that no later query
            sees are forgotten: memory is that of the window. None keeps every token.
        keep: Tokens that `truncate` may remove from a cache that forgets, counted from its longest length so far.
        storage: "int8" or "fp8_e4m3" to store keys and values in 8 bits, with a scale for each 128 columns of a token's
            head. Attention is exact over the stored numbers. `dtype` is that of new keys, and of queries.
        shares: Ratios of the tokens of each rank along queries and keys, such as (3, 1), for ranks of unequal speed or
            memory; "auto" to measure them, in half a second. Ranks take turns of about `block` tokens, long or short as
            their shares, which are kept within 1%. None for even shares.
        folder: Folder whose files are the keys and values: the cache may exceed memory, and goes on where the folder
            ends. What `append` has returned from stays when the process ends; with `hot`, what `flush` has. On a GPU
            it takes `hot`. None for memory alone.
        hot: Newest tokens to hold on the device, on all ranks; older ones go to CPU memory, or to the files of
            `folder`, in whole blocks. There they are attended where they lie, or brought to the device in pieces.
            None for all tokens on the device, or in the files.

    Raises:
        ArgumentError: `values` or `storage` is none of them.
        ShapeError: A size is no positive integer, or odd with `storage`, the heads axis does not divide `kv_heads`,
            `copies` do not fit, or `shares` are not one positive number a rank.
        MaskError: `mask` is no mask, or has documents.
        DtypeError: The dtype is not supported.
        DeviceError: The device does not exist.
        StoreError: The folder is damaged, another one's, being written to, or of a cache of other sizes.
        KernelError: `folder` or `hot` do not go with other arguments.

    >>> cache = KVCache(None, batch=1, kv_heads=2, head_dim=4, capacity=100, dtype=torch.float32)
    >>> cache.append(*torch.randn(2, 1, 2, 5, 4))
    >>> cache.truncate(3)
    >>> cache.length
    3
    >>> sizes = {"batch": 1, "kv_heads": 1, "head_dim": 6, "value_dim": 4, "capacity": 100, "dtype": torch.float32}
    >>> latents = KVCache(None, **sizes, values="prefix")
    >>> latents.append(torch.randn(1, 1, 5, 6))
    """

    def __init__(
        self,
        mesh: DeviceMesh | None,
        *,
        batch: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
        block: int = 16,
        checked: bool | None = None,
        copies: int = 1,
        values: str = "separate",
        mask: Mask | None = None,
        keep: int = 0,
        storage: str | None = None,
        shares: Sequence[float] | str | None = None,
        folder: str | Path | FolderLayer | None = None,
        hot: int | None = None,
    ) -> None:
        columns = 0 if values == "none" else head_dim
        config = CacheConfig(
            batch=batch,
            kv_heads=kv_heads,
            head_dim=head_dim,
            value_dim=columns if value_dim is None else value_dim,
            capacity=capacity,
            block=block,
            dtype=dtype,
            values=values,
            mask=mask,
            keep=keep,
            storage=storage,
            hot=hot,
        )
        self.device_mesh = mesh
        self.rank_mesh = RankMesh.of(mesh)
        self.device = device_for(mesh, device)
        fields = {**config.arguments(), "device": self.device.type, "checked": checked, "copies": copies}
        ranks = self.rank_mesh.queries.size * self.rank_mesh.keys.size
        with Agreement(self.rank_mesh, "KVCache", {**fields, "shares": shares, "folder": folder is not None}):
            check_compare_option("KVCache", checked)
            config.check(self.rank_mesh.heads.size)
            if fault := device_fault("KVCache", self.device, device):
                raise fault
            check_shards(config, self.device, ranks, copies=copies, shares=shares, folder=folder)
        self.token_axis = agreed_token_axis(mesh, self.rank_mesh, self.device)
        self.guard = CallGuard(self.rank_mesh, self.device, checked)
        self.history = HistoryDigest(self.device)
        self.rewrites = 0  # truncations and reorders so far: `recover` needs caches that have grown alike
        self.saved_pieces = SavedPieces()
        self.known_appends = Memo[bool]()  # signatures of new tokens that this cache and its forks have checked
        self.prepared_steps = Memo[Any]()  # steps on this cache and its forks, which `decoding` prepares
        places = self.rank_mesh, self.token_axis, self.device
        fail = self.guard.raise_uncompared
        self.local_shards = make_shards(config, *places, copies=copies, shares=shares, folder=folder, fail=fail)

    def __repr__(self) -> str:
        """Return the configuration and how many tokens are cached."""
        layout = "block-cyclic" if self.is_block_cyclic else "in the layout of a sharded prefill"
        return f"KVCache({self.config}, {self.length} tokens, {self.used} on this rank, {layout})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "KVCache":
        """Return the same tokens in tensors of their own, on the same mesh."""
        other = self._twin()
        other.local_shards = self.local_shards.clone()
        return other

    def _twin(self) -> "KVCache":
        """Return a cache with the shards of this one, which the caller replaces."""
        other = copy(self)
        other.saved_pieces, other.history = SavedPieces(), self.history.copied_to(self.device)
        return other

    @torch.no_grad()
    def fork(self) -> "KVCache":
        """Return a second cache of the same tokens on the same mesh. Both continue apart, as two turns of one prompt.

        The caches share the memory of whole blocks of each rank's slots. Each rank copies its last tokens, fewer than a
        block. Later `truncate` copies the block that it cuts, and `reorder` copies the blocks of a batch, but not those
        of one sequence that it repeats. `save`, `copy.deepcopy` and `recover` copy all shared blocks. A cache with a
        mask copies its window. Graphs captured before a fork are invalid.

        Returns:
            The other cache, with memory for the rest of the capacity.

        Raises:
            StoreError: A save of the cache is still writing.

        >>> cache = KVCache(None, batch=1, kv_heads=2, head_dim=4, capacity=100, dtype=torch.float32)
        >>> cache.append(*torch.randn(2, 1, 2, 20, 4))
        >>> other = cache.fork()
        >>> other.append(*torch.randn(2, 1, 2, 3, 4))
        >>> cache.length, other.length
        (20, 23)
        """
        with self.guard.agreement("fork", lambda: {"tokens": self.length}):
            self.saved_pieces.check_written()
            other = self._twin()
            other.local_shards = self.local_shards.fork()
        return other

    def append(self, k: Tensor, v: Tensor | None = None, *, token_mask: Tensor | None = None) -> None:
        """Add new tokens, equal on all ranks. Each rank keeps its share.

        Where ranks compare the call, by the table of `KVCache`, all raise. Otherwise the rank at fault raises alone.

        Args:
            k: Keys with all heads, (batch, kv_heads, tokens, head_dim).
            v: Values with all heads, (batch, kv_heads, tokens, value_dim); None if they are a prefix of the keys, or if
                there are none.
            token_mask: False for padding, (batch, tokens); None if all tokens are real.

        Raises:
            ArgumentError: `v` is None, or is given to a cache that stores the keys alone.
            ShapeError: A shape does not fit the cache, or the tokens exceed the capacity.
            DtypeError: A dtype or a device is not the cache's.
            KernelError: A tensor requires gradients.

        >>> cache = KVCache(None, batch=2, kv_heads=1, head_dim=4, capacity=100, dtype=torch.float32)
        >>> mask = torch.tensor([[False, True, True], [True, True, True]])
        >>> cache.append(*torch.randn(2, 2, 1, 3, 4), token_mask=mask)
        >>> cache.lengths
        tensor([2, 3])
        """

        uncompared = token_mask is None and not self.guard.will_compare("append")
        if uncompared and try_append_known(self.known_appends, k, v, self.local_shards):
            return
        new = NewTokens(k, v, token_mask)
        with self.guard.agreement("append", new.fields):
            new.check(self.config, self.own_shard.device)
            self.own_shard.check_unpadded("append", token_mask)
            self.local_shards.check_fits("append", k.shape[2])
        with torch.no_grad():
            self.local_shards.append(tensors_to_append(k, v), token_mask)
        if token_mask is not None and not torch.compiler.is_compiling():
            self.history.add_padding(token_mask, self.length - k.shape[2])
        if (signature := append_signature(k, v, self.own_shard)) is not None and k.shape[2]:
            self.known_appends.keep(signature, True)

    def append_shard(
        self, k: Tensor, v: Tensor | None, positions: Tensor, *, token_mask: Tensor | None = None, queries: int = 1
    ) -> None:
        """Keep the tokens that this rank computed in a sharded prefill.

        All ranks' positions together continue the cache, each exactly once.

        Args:
            k: This rank's keys with all heads, (batch, kv_heads, tokens, head_dim).
            v: This rank's values with all heads, (batch, kv_heads, tokens, value_dim); None as in `append`.
            positions: Token indices in the whole sequence, (tokens,), as `layout.positions` returns them.
            token_mask: False for padding, (batch, tokens of all ranks), the same on every rank; None without padding.
            queries: Last tokens whose queries `decode` takes next; a cache that forgets keeps what they see.

        Raises:
            ShapeError: A shape does not fit the cache, or the tokens exceed the capacity or one rank's share of it.
            DtypeError: A dtype or a device is not the cache's.
            KernelError: A tensor requires gradients.
            LayoutError: A position is missing, or is on two ranks.

        >>> cache = KVCache(None, batch=1, kv_heads=2, head_dim=4, capacity=100, dtype=torch.float32)
        >>> cache.append_shard(*torch.randn(2, 1, 2, 5, 4), torch.tensor([4, 3, 2, 1, 0]))
        >>> cache.length
        5
        """
        start = self.length
        new = NewTokens(k, v, token_mask)

        def fields() -> dict[str, object]:
            return {"tokens": start, "capacity": self.config.capacity, "queries": queries, **new.padding_fields()}

        with self.guard.agreement("append_shard", always=True) as agreement:
            new.check_shard(self.config, self.own_shard.device, positions, self.rank_mesh.ranks)
            check_count("append_shard queries", queries, "count the last tokens to decode")
            report = self.own_shard.block_cyclic.report_of(self.token_axis.index, positions)
            table = agreement.compare(fields, payload=report)
        reports = self.own_shard.block_cyclic.reports_in(table)
        rank_counts = self.local_shards.counter.rank_counts.with_shards(start, reports)
        new_count = sum(report.token_count for report in reports)
        # All ranks raise here, or none: they have compared the padding, and have the same reports.
        new.check_token_mask("append_shard", self.config, new_count)
        self.own_shard.check_unpadded("append_shard", token_mask)
        self.local_shards.check_fits("append_shard", new_count, rank_counts)
        with torch.no_grad():
            per_shard = [report.token_count for report in reports]
            rows = tuple(map(self.config.rows_of, tensors_to_append(k, v)))
            rows, indices = swap_tokens_for_heads(rows, positions.to(self.device), per_shard, self.rank_mesh)
            with self._on_files("append_shard"):
                self.local_shards.append_rows_at(rows, indices, new_count, token_mask, queries, rank_counts)
        self.history.add_padding(token_mask, start)

    def _on_files(self, name: str) -> Agreement:
        """Return the agreement on work on files: all ranks go on once all have done the work, or all raise.

        Otherwise rank A could append, and its process end, before rank B has truncated: the folder would then have the
        new tokens of A beside the old ones of B.
        """
        return Agreement(self.rank_mesh, name, is_compared=self.own_shard.outlives_process and self.rank_mesh.ranks > 1)

    @torch.no_grad()
    def truncate(self, length: int) -> None:
        """Remove the tokens from `length` on, as after a rejected speculation. Wait first for a save that is writing.

        Where ranks compare the call, by the table of `KVCache`, all raise. Otherwise the rank at fault raises alone.

        Args:
            length: Tokens to keep.

        Raises:
            ShapeError: `length` is not an integer from 0 to the cache's length, or the cache has forgotten what the
                next token would see.

        >>> cache = KVCache(None, batch=1, kv_heads=2, head_dim=4, capacity=100, dtype=torch.float32)
        >>> cache.append(*torch.randn(2, 1, 2, 5, 4))
        >>> cache.truncate(2)
        >>> cache.length
        2
        """
        before = self.length
        always = not self.is_block_cyclic  # then only the other ranks know how many tokens they keep
        with self.guard.agreement("truncate", always=always) as agreement:
            self.local_shards.check_truncation(length, before)
            numbers = (self.token_axis.index, self.own_shard.count_before(length)) if always else ()
            table = agreement.compare({"to": length}, payload=numbers)
        self.saved_pieces.finish_writing()
        self.saved_pieces.forget(self.own_shard.count_before(length))
        with self._on_files("truncate"):
            actions = self.local_shards.actions_to_truncate(length, table)
            unbroken([*actions, self._action_to_count_rewrite(), partial_of(self._truncate_history, length)])

    def _action_to_count_rewrite(self) -> Action:
        """Return an action that counts one more truncation or reorder."""
        return partial_of(setattr, self, "rewrites", self.rewrites + 1)

    def _truncate_history(self, length: int) -> None:
        self.history.truncate(length, self.own_shard.token_mask)

    @torch.no_grad()
    def flush(self) -> None:
        """Write the tokens on the device to the folder too, where they outlive the process. They stay on the device.

        Without `hot` nothing is left to write. Every rank calls it.

        Raises:
            StoreError: The folder of a rank cannot be written to; on every rank.

        >>> import tempfile
        >>> sizes = {"batch": 1, "kv_heads": 2, "head_dim": 4, "capacity": 100, "dtype": torch.float32}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     cache = KVCache(None, **sizes, folder=folder, hot=32)
        ...     cache.append(*torch.randn(2, 1, 2, 20, 4))
        ...     cache.flush()
        ...     del cache
        ...     KVCache(None, **sizes, folder=folder).length
        20
        """
        with self._on_files("flush"):
            self.own_shard.flush()

    @torch.no_grad()
    def move_hot(self, device: torch.device) -> None:
        """Move the newest tokens of this rank to another device."""
        shard, self.device, self.history = self.own_shard, device, self.history.copied_to(device)
        self.guard = CallGuard(self.rank_mesh, device, self.guard.checked)
        self.prepared_steps = Memo[Any]()  # the steps so far have kernels of the former device
        self.local_shards.replace_own(shard.with_hot_on(device, self.guard.raise_uncompared))

    @torch.no_grad()
    def reserve(self, capacity: int) -> None:
        """Reserve memory for at least `capacity` tokens, copying one tensor at a time.

        Args:
            capacity: Tokens on all ranks.

        Raises:
            ShapeError: `capacity` is no positive integer.

        >>> cache = KVCache(None, batch=1, kv_heads=2, head_dim=4, capacity=5, dtype=torch.float32)
        >>> cache.reserve(100)
        >>> cache.append(*torch.randn(2, 1, 2, 50, 4))
        """
        config = replace(self.config, capacity=capacity)
        always = self.guard.checked is not False
        with self.guard.agreement("reserve", {"capacity": capacity}, always=always):
            config.check(self.rank_mesh.heads.size)
        with self.guard.agreement("reserve", always=always), config.allocating():
            self.local_shards.grow(config)

    @torch.no_grad()
    def reorder(self, batch_index: Tensor) -> None:
        """Replace sequence b by sequence `batch_index[b]`, as beam search does. Wait first for a save that is writing.

        Where ranks compare the call, by the table of `KVCache`, all raise. Otherwise the rank at fault raises alone.

        Args:
            batch_index: Indices of sequences, int64; there may be more or fewer than before.

        Raises:
            DtypeError: `batch_index` is not an int64 tensor.
            ShapeError: An index is out of range, or there is none.

        >>> cache = KVCache(None, batch=2, kv_heads=2, head_dim=4, capacity=100, dtype=torch.float32)
        >>> cache.reorder(torch.tensor([1, 1, 0]))
        >>> cache.config.batch
        3
        """
        with self.guard.agreement("reorder", lambda: {"to": batch_index.tolist()}):
            self.check_order(batch_index)
        self.saved_pieces.finish_writing()
        unbroken(self.actions_to_reorder(batch_index))

    def check_order(self, batch_index: Tensor) -> None:
        """Raise unless `batch_index` holds indices of sequences, and they can be put in this order."""
        check_order(self.config, batch_index)
        self.own_shard.check_order(batch_index)

    @torch.no_grad()
    def actions_to_reorder(self, batch_index: Tensor) -> list[Action]:
        """Return actions that reorder the sequences, after `check_order`. Nothing has changed where this raises.

        The first action lets later saves write all files: those of former saves are in the former order.
        """
        index = batch_index.to(self.device)
        actions = [self.saved_pieces.forget, *self.local_shards.actions_to_reorder(index)]
        return [*actions, *self.history.actions_to_add_order(index), self._action_to_count_rewrite()]

    def pages(self) -> list[Pages]:
        """Return this rank's blocks without copying them: those that forks share, if any, and then its own.

        Attention over each, merged with `merge_across` or `merge`, is attention over the whole cache. The views are
        valid until the cache changes by anything but `append`.

        Raises:
            KernelError: The batch is padded.

        >>> cache = KVCache(None, batch=2, kv_heads=1, head_dim=4, capacity=40, dtype=torch.float32)
        >>> cache.append(*torch.randn(2, 2, 1, 20, 4))
        >>> (pages,) = cache.pages()
        >>> pages.keys[pages.block_table[1].long()].flatten(0, 1)[:20, 0].equal(cache.keys[1, 0, :20])
        True
        """
        return pages_of(self.own_shard)

    def append_pages(self, keys: Tensor, values: Tensor | None, block_table: Tensor) -> None:
        """Add the first tokens from an engine's pool, which stays unchanged while the cache is in use.

        Every rank passes the blocks that it holds block-cyclic: rank i the blocks i, i + ranks, i + 2 ranks, ... of the
        sequence. If the blocks of each sequence are consecutive in the pool, and sequences follow each other at one
        distance, the cache shares all blocks but the last of each sequence. Otherwise it copies them.

        Args:
            keys: Pool of key blocks, (blocks, block, heads of this rank, head_dim); with `storage=` rows as in `pages`.
            values: Pool of value blocks; None if the cache stores the keys alone.
            block_table: int32 or int64, (batch, blocks of a sequence on this rank), the same number on every rank.

        Raises:
            ShapeError: The cache is not empty, a shape does not fit, a block is not in the pool, or the tokens
                exceed the capacity.
            DtypeError: A dtype or a device is not the cache's.
            KernelError: The cache has copies, a mask or unequal shares, or a pool requires gradients.

        >>> cache = KVCache(None, batch=1, kv_heads=1, head_dim=4, capacity=64, dtype=torch.float32)
        >>> cache.append_pages(torch.randn(9, 16, 1, 4), torch.randn(9, 16, 1, 4), torch.tensor([[5, 6, 7]]))
        >>> cache.length
        48
        """
        append_pool_blocks(self.local_shards, self.guard, tensors_to_append(keys, values), block_table)

    def save(self, path: str | Path, *, wait: bool = True) -> Saving:
        """Write the cache to a folder, each rank its own tokens. The previous save stays until this one is complete.

        Args:
            path: Folder that all ranks can write to; it is made if it is missing.
            wait: False to decode while the files are written. Every rank then calls `wait()` on the result.

        Returns:
            The save, concluded if `wait`.

        Raises:
            StoreError: The folder cannot be written to, or holds something else; or the save before, for which nobody
                has waited, failed. Then neither save is made.

        >>> import tempfile
        >>> cache = KVCache(None, batch=1, kv_heads=2, head_dim=4, capacity=100, dtype=torch.float32)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     cache.save(folder).written
        True
        """
        return save_caches([self], path, wait=wait)

    @classmethod
    def load(
        cls,
        path: str | Path,
        mesh: DeviceMesh | None,
        *,
        capacity: int | None = None,
        device: torch.device | str | None = None,
        checked: bool | None = None,
        copies: int = 1,
        shares: Sequence[float] | str | None = None,
        hot: int | None = None,
    ) -> Self:
        """Return a saved cache on any number of ranks, its tokens block-cyclic. Every rank calls it.

        Args:
            path: Folder that `save` wrote.
            mesh: Mesh of all ranks, or None for one device.
            capacity: Tokens to reserve memory for; the saved capacity by default.
            device: As in `KVCache`.
            checked: As in `KVCache`.
            copies: As in `KVCache`.
            shares: As in `KVCache`; those of the cache that was saved need not be the same.
            hot: As in `KVCache`.

        Returns:
            The cache.

        Raises:
            StoreError: The folder holds no cache, is damaged, or exceeds the device's memory.
            ShapeError: `capacity` is less than the saved tokens, or the heads axis does not divide the key heads.

        >>> import tempfile
        >>> cache = KVCache(None, batch=1, kv_heads=2, head_dim=4, capacity=100, dtype=torch.float32)
        >>> cache.append(*torch.randn(2, 1, 2, 5, 4))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saved = cache.save(folder)
        ...     KVCache.load(folder, None).length
        5
        """
        options = {"device": device, "checked": checked, "copies": copies, "shares": shares}
        [cache], _, _ = load_caches(cls, path, mesh, LayersToLoad(1, capacity, hot=hot), **options)
        replace(cache.config, hot=hot).check(cache.own_shard.heads_axis.size)  # a window takes no hot=
        return cast(Self, cache)


def check_order(config: CacheConfig, batch_index: Tensor) -> None:
    """Raise unless `batch_index` holds indices of sequences."""
    if not isinstance(batch_index, Tensor) or batch_index.dtype != torch.int64:
        given = str(batch_index.dtype) if isinstance(batch_index, Tensor) else type(batch_index).__name__
        raise DtypeError("reorder", "a tensor of torch.int64", given, "pass torch.tensor([...])")
    check_readable("reorder", batch_index, "pass torch.tensor([...])")
    indices = batch_index.ndim == 1 and len(batch_index) > 0
    if not indices or not bool(((batch_index >= 0) & (batch_index < config.batch)).all()):
        expected = f"a number of a sequence below {config.batch} for each"
        raise ShapeError(
            "reorder", expected, f"{batch_index.tolist()}"[:60], f"pass indices from 0 to {config.batch - 1}"
        )
