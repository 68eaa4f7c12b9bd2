"""The blocks of a `KVCache` for engines with paged kernels: handed out as views, and taken from an engine's pool."""

from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.cache.cache_properties import CacheProperties
from attnmesh.cache.cache_shard import CacheShard
from attnmesh.cache.call_checks import check_dtype_and_device, check_no_gradients
from attnmesh.cache.frozen_piece import FrozenPiece
from attnmesh.cache.local_shards import LocalShards
from attnmesh.errors import DtypeError, KernelError, ShapeError, type_and_shape
from attnmesh.guard.agreement import ComparedCalls
from attnmesh.guard.argument_checks import check_tensor


class Pages(NamedTuple):
    """Blocks of one rank's tokens, as views of the cache's memory. Blocks of several tables may be the same."""

    keys: Tensor
    """(blocks, block, heads, dim)."""
    values: Tensor
    """(blocks, block, heads, value dim)."""
    block_table: Tensor
    """int32, (batch, blocks of a sequence): indices into `keys` and `values`."""
    lengths: Tensor
    """int32, (batch,): tokens of each sequence."""
    tokens: Tensor
    """Index of each token in the whole sequence, the same for all sequences, (tokens,)."""


class PagedCache(CacheProperties):
    """A cache whose blocks an engine reads and provides."""

    calls: ComparedCalls

    def pages(self) -> list[Pages]:
        """Return this rank's blocks without copying them: those that forks share, if any, and then its own.

        Attention over each, merged with `merge_across` or `merge`, is attention over the whole cache. The views are
        valid until the cache changes by anything but `append`.

        Raises:
            KernelError: The batch is padded.

        >>> import attnmesh as am
        >>> cache = am.KVCache(None, batch=2, kv_heads=1, head_dim=4, capacity=40, dtype=torch.float32)
        >>> cache.append(*torch.randn(2, 2, 1, 20, 4))
        >>> (pages,) = cache.pages()
        >>> pages.keys[pages.block_table[1].long()].flatten(0, 1)[:20, 0].equal(cache.keys[1, 0, :20])
        True
        """
        if self.padding is not None:
            fix = "cache sequences without padding"
            raise KernelError("pages", "a batch without padding", "a padded batch", fix)
        shard = self.shard
        _check_in_memory("pages", shard)
        # One more slot follows, as in each piece.
        own_piece = FrozenPiece(shard.stored, shard.token_index[: shard.used_slots + 1], None)
        return [_pages(piece, shard) for piece in (*shard.earlier_pieces, own_piece)]

    def append_pages(self, keys: Tensor, values: Tensor | None, block_table: Tensor) -> None:
        """Add the first tokens from an engine's pool, which stays unchanged while the cache is in use.

        Every rank passes the blocks that it holds block-cyclic: rank i the blocks i, i + ranks, i + 2 ranks, ... of the
        sequence. Blocks that are consecutive in the pool, for all sequences at one distance, are shared and not copied,
        but for the last one of a sequence.

        Args:
            keys: Pool of key blocks, (blocks, block, heads of this rank, head_dim); with `storage=` rows as in `pages`.
            values: Pool of value blocks; None if the cache stores the keys alone.
            block_table: int32 or int64, (batch, blocks of a sequence on this rank), the same number on every rank.

        Raises:
            ShapeError: The cache is not empty, a shape does not fit, a block is not in the pool, or they exceed the
                capacity.
            DtypeError: A dtype or a device is not the cache's.
            KernelError: The cache has copies, a mask or unequal shares, or a pool requires gradients.

        >>> import attnmesh as am
        >>> cache = am.KVCache(None, batch=1, kv_heads=1, head_dim=4, capacity=64, dtype=torch.float32)
        >>> cache.append_pages(torch.randn(9, 16, 1, 4), torch.randn(9, 16, 1, 4), torch.tensor([[5, 6, 7]]))
        >>> cache.length
        48
        """
        pools = (keys,) if values is None else (keys, values)
        bytewise = self.sizes.storage is not None
        with self.calls.agreement("append_pages", lambda: {"blocks": block_table.shape[1]}, always=True):
            _check_pools(self.shard, pools, block_table)
            _check_in_memory("append_pages", self.shard)
            _check_takes_blocks(self.shards)
            new_count = block_table.shape[1] * self.sizes.block * self.shards.axis.size
            self.shards.check_fits("append_pages", new_count, self.shards.rank_counts)
        with torch.no_grad():
            rows = tuple(pool.view(torch.int8) for pool in pools) if bytewise else pools
            _append(self.shards, rows, block_table.long())


def _check_in_memory(subject: str, shard: CacheShard) -> None:
    """Raise for a cache in a folder, or in two memories, whose pieces are no pages of an engine."""
    if shard.sizes.hot is not None:
        fix = "make the cache without hot="
        raise KernelError(subject, "a cache in one memory", f"hot={shard.sizes.hot}", fix)
    if shard.is_in_files:
        raise KernelError(subject, "a cache in memory", "one in a folder", "call cache.fork() first")


def _check_takes_blocks(shards: LocalShards) -> None:
    """Raise unless each rank alone keeps all tokens of its blocks, of which all ranks have as many."""
    subject, shard = "append_pages", shards.own
    if shards.keepers:
        fix = "append copies of the tokens with append"
        raise KernelError(subject, "a cache without copies", "copies=2 or more", fix)
    if not shard.block_cyclic.is_even:
        fix = "leave shares= out, or copy the tokens with append"
        raise KernelError(subject, "as many blocks on every rank", f"shares={shard.block_cyclic.shares}", fix)
    if shard.sizes.mask is not None:
        given = f"a cache with mask={shard.sizes.mask}"
        raise KernelError(subject, "a cache that keeps every token", given, "leave mask= out")


def _pages(piece: FrozenPiece, shard: CacheShard) -> Pages:
    """Return the pages of some slots. A pool's block and head may overlap in memory, since heads are the outer dim."""
    size, used = shard.sizes.block, piece.token_count
    count = -(-used // size)
    batch = shard.sizes.batch
    keys, values = shard.sizes.keys_and_values(piece.stored)
    first = torch.arange(batch, device=shard.device) * (values.stride(0) // (size * values.stride(2)))
    table = first[:, None] + torch.arange(count, device=shard.device)
    blocks_in_pool = int(table.max()) + 1 if table.numel() else 0

    def pool(x: Tensor) -> Tensor:
        _, heads, row, column = x.stride()
        return x.as_strided((blocks_in_pool, size, x.shape[1], x.shape[3]), (size * row, row, heads, column))

    lengths = torch.full((batch,), used, dtype=torch.int32, device=shard.device)
    return Pages(pool(keys), pool(values), table.int(), lengths, piece.token_index[:-1])


def _append(shards: LocalShards, pools: tuple[Tensor, ...], table: Tensor) -> None:
    """Share all blocks but the last of each sequence, and copy the last ones to the shard.

    Blocks of 2 tokens on two ranks, where a table has three blocks:

        tokens of rank 0     0 1  4 5 |  8  9
        tokens of rank 1     2 3  6 7 | 10 11
                             shared   | copied
    """
    shard, size, ranks = shards.own, shards.own.sizes.block, shards.axis.size
    count = table.shape[1]
    slots = torch.arange(count * size, device=shard.device)
    tokens = (slots // size * ranks + shard.index) * size + slots % size
    rows = [_rows(pool, table.to(pool.device)) for pool in pools]  # (batch, heads, tokens, width)
    shared_slots = max(0, count - 1) * size
    new_count = count * size * ranks
    shard.append_at(tuple(x[:, :, shared_slots:] for x in rows), tokens[shared_slots:], new_count, None)
    if shared_slots:  # with one more slot, as `FrozenPiece` says
        piece = FrozenPiece([x[:, :, : shared_slots + 1] for x in rows], tokens[: shared_slots + 1], None)
        try:
            shard.resize(shard.sizes, shard.slots - shared_slots)
        except BaseException:  # there may be no memory, and the cache is empty still
            shard.truncate(0)
            raise
        shard.earlier_pieces, shards.forked = (piece,), True
    shards.known_length += new_count


def _rows(pool: Tensor, table: Tensor) -> Tensor:
    """Return the tokens of a table's blocks, (batch, heads, tokens, width): a view if blocks are consecutive."""
    batch, count = table.shape
    starts = table[:, 0] if table.numel() else table.new_zeros(batch)
    distance = int(starts[1] - starts[0]) if batch > 1 else 0
    even = bool((starts.diff() == distance).all()) and bool((table.diff(dim=1) == 1).all())
    block, row, heads, column = pool.stride()
    if count and even and distance >= 0 and block == pool.shape[1] * row:
        shape = batch, pool.shape[2], count * pool.shape[1], pool.shape[3]
        return pool[int(starts[0]) :].as_strided(
            shape, (distance * block, heads, row, column), pool.storage_offset() + int(starts[0]) * block
        )
    return pool[table].flatten(1, 2).transpose(1, 2)


def _check_pools(shard: CacheShard, pools: tuple[Tensor, ...], table: Tensor) -> None:
    sizes = shard.sizes
    heads = shard.sizes.kv_heads // shard.heads.size
    if shard.length:
        fix = "append the pages first, or make a new cache"
        raise ShapeError("append_pages", "an empty cache", f"{shard.length} tokens", fix)
    if len(pools) != len(sizes.columns):
        fix = "pass values unless the cache has values='prefix' or 'none'"
        raise ShapeError("append_pages values", f"{len(sizes.columns)} pools", f"{len(pools)}", fix)
    for name, pool, width in zip(("keys", "values"), pools, sizes.row_widths, strict=False):
        check_tensor(f"append_pages {name}", pool)
        if pool.ndim != 4 or tuple(pool.shape[1:]) != (sizes.block, heads, width):
            expected = f"shape (blocks, {sizes.block}, {heads}, {width})"
            fix = "make the cache with the engine's block, heads and widths"
            raise ShapeError(f"append_pages {name}", expected, f"{tuple(pool.shape)}", fix)
        check_dtype_and_device(f"append_pages {name}", sizes, pool, shard.device, rows=True)
        check_no_gradients("append_pages", {name: pool})
    subject, fix = "append_pages block_table", "pass one row of block numbers for each sequence"
    if not isinstance(table, Tensor) or table.dtype not in (torch.int32, torch.int64):
        raise DtypeError(subject, "a tensor of int32 or int64", type_and_shape(table), fix)
    if table.ndim != 2 or len(table) != sizes.batch:
        raise ShapeError(subject, f"shape ({sizes.batch}, blocks)", f"{tuple(table.shape)}", fix)
    if len({len(pool) for pool in pools}) != 1:
        lengths = " and ".join(str(len(pool)) for pool in pools)
        raise ShapeError("append_pages", "pools of the same number of blocks", lengths, "pass the pools of one layer")
    if not bool(((table >= 0) & (table < len(pools[0]))).all()):
        expected = f"numbers from 0 to {len(pools[0]) - 1}"
        raise ShapeError(subject, expected, "others", "pass numbers of blocks in the pools")
