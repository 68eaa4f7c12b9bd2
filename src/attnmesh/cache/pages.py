"""The blocks of a `KVCache` for engines with paged kernels: handed out as views, and taken from an engine's pool."""

from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.cache.cache_shard import CacheShard
from attnmesh.cache.call_checks import check_dtype_and_device, check_eager_tensors
from attnmesh.cache.frozen_piece import FrozenPiece
from attnmesh.cache.local_shards import LocalShards
from attnmesh.checks.argument_checks import check_readable, check_tensor
from attnmesh.errors import DtypeError, KernelError, ShapeError, type_and_shape
from attnmesh.guard.agreement import CallGuard


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


def pages_of(shard: CacheShard) -> list[Pages]:
    """Return the blocks of a shard as `KVCache.pages` does."""
    if shard.padding is not None:
        fix = "cache sequences without padding"
        raise KernelError("pages", "a batch without padding", "a padded batch", fix)
    shard.check_in_one_memory("pages")
    # One more slot follows, as in each piece.
    own_piece = FrozenPiece(shard.kv_tensors, shard.token_index[: shard.used_slots + 1], None)
    return [_pages(piece, shard) for piece in (*shard.earlier_pieces, own_piece)]


def append_pool_blocks(shards: LocalShards, guard: CallGuard, pools: tuple[Tensor, ...], table: Tensor) -> None:
    """Add blocks of an engine's pools, of keys and of values if they are separate, as `KVCache.append_pages` does."""
    config = shards.own.config
    with guard.agreement("append_pages", lambda: {"blocks": table.shape[1]}, always=True):
        _check_pools(shards.own, pools, table)
        shards.own.check_in_one_memory("append_pages")
        _check_takes_blocks(shards)
        new_count = table.shape[1] * config.block * shards.axis.size
        shards.check_fits("append_pages", new_count)
    with torch.no_grad():
        tensors = pools if config.storage is None else tuple(pool.view(torch.int8) for pool in pools)
        _append_table(shards, tensors, table.long())


def _check_takes_blocks(shards: LocalShards) -> None:
    """Raise unless each rank alone keeps all tokens of its blocks, of which all ranks have as many."""
    subject, shard = "append_pages", shards.own
    if shards.keepers:
        fix = "append copies of the tokens with append"
        raise KernelError(subject, "a cache without copies", "copies=2 or more", fix)
    if not shard.block_cyclic.is_even:
        fix = "leave shares= out, or copy the tokens with append"
        raise KernelError(subject, "as many blocks on every rank", f"shares={shard.block_cyclic.shares}", fix)
    if shard.config.mask is not None:
        given = f"a cache with mask={shard.config.mask}"
        raise KernelError(subject, "a cache that keeps every token", given, "leave mask= out")


def _pages(piece: FrozenPiece, shard: CacheShard) -> Pages:
    """Return the pages of some slots. A pool's block and head may overlap in memory, since heads are the outer dim."""
    size, used = shard.config.block, piece.token_count
    count = -(-used // size)
    batch = shard.config.batch
    keys, values = shard.config.keys_and_values(piece.kv_tensors)
    first_blocks = torch.arange(batch, device=shard.device) * (values.stride(0) // (size * values.stride(2)))
    table = first_blocks[:, None] + torch.arange(count, device=shard.device)
    blocks_in_pool = int(table.max()) + 1 if table.numel() else 0

    def pool(x: Tensor) -> Tensor:
        _, heads, token, column = x.stride()
        return x.as_strided((blocks_in_pool, size, x.shape[1], x.shape[3]), (size * token, token, heads, column))

    lengths = torch.full((batch,), used, dtype=torch.int32, device=shard.device)
    return Pages(pool(keys), pool(values), table.int(), lengths, piece.indices)


def _append_table(shards: LocalShards, pools: tuple[Tensor, ...], table: Tensor) -> None:
    """Share all blocks but the last of each sequence, and copy the last ones to the shard.

    Blocks of 2 tokens on two ranks, where a table has three blocks:

        tokens of rank 0     0 1  4 5 |  8  9
        tokens of rank 1     2 3  6 7 | 10 11
                             shared   | copied
    """
    shard, size, ranks = shards.own, shards.own.config.block, shards.axis.size
    count = table.shape[1]
    slots = torch.arange(count * size, device=shard.device)
    indices = (slots // size * ranks + shard.index) * size + slots % size
    rows = [_tokens_in(pool, table.to(pool.device)) for pool in pools]  # (batch, heads, tokens, width)
    shared_slots = max(0, count - 1) * size
    new_count = count * size * ranks
    piece = None
    if shared_slots:  # with one more slot, as `FrozenPiece` says
        piece = FrozenPiece([x[:, :, : shared_slots + 1] for x in rows], indices[: shared_slots + 1], None)
    last = tuple(x[:, :, shared_slots:] for x in rows)
    shards.append_shared_blocks(piece, last, indices[shared_slots:], new_count)


def _tokens_in(pool: Tensor, table: Tensor) -> Tensor:
    """Return the tokens of a table's blocks, (batch, heads, tokens, width): a view if blocks are consecutive."""
    batch, count = table.shape
    starts = table[:, 0] if table.numel() else table.new_zeros(batch)
    distance = int(starts[1] - starts[0]) if batch > 1 else 0
    even = bool((starts.diff() == distance).all()) and bool((table.diff(dim=1) == 1).all())
    block, token, heads, column = pool.stride()
    if count and even and distance >= 0 and block == pool.shape[1] * token:
        shape = batch, pool.shape[2], count * pool.shape[1], pool.shape[3]
        return pool[int(starts[0]) :].as_strided(
            shape, (distance * block, heads, token, column), pool.storage_offset() + int(starts[0]) * block
        )
    return pool[table].flatten(1, 2).transpose(1, 2)


def _check_pools(shard: CacheShard, pools: tuple[Tensor, ...], table: Tensor) -> None:
    config = shard.config
    heads = shard.config.kv_heads // shard.heads_axis.size
    if shard.length:
        fix = "append the pages first, or make a new cache"
        raise ShapeError("append_pages", "an empty cache", f"{shard.length} tokens", fix)
    if len(pools) != len(config.columns):
        fix = "pass values unless the cache has values='prefix' or 'none'"
        raise ShapeError("append_pages values", f"{len(config.columns)} pools", f"{len(pools)}", fix)
    for name, pool, width in zip(("keys", "values"), pools, config.row_widths, strict=False):
        check_tensor(f"append_pages {name}", pool)
        if pool.ndim != 4 or tuple(pool.shape[1:]) != (config.block, heads, width):
            expected = f"shape (blocks, {config.block}, {heads}, {width})"
            fix = "make the cache with the engine's block, heads and widths"
            raise ShapeError(f"append_pages {name}", expected, f"{tuple(pool.shape)}", fix)
        check_dtype_and_device(f"append_pages {name}", config, pool, shard.device, rows=True)
        check_eager_tensors("append_pages", {name: pool})
    subject, fix = "append_pages block_table", "pass one row of block numbers for each sequence"
    if not isinstance(table, Tensor) or table.dtype not in (torch.int32, torch.int64):
        raise DtypeError(subject, "a tensor of int32 or int64", type_and_shape(table), fix)
    check_readable(subject, table, fix)
    if table.ndim != 2 or len(table) != config.batch:
        raise ShapeError(subject, f"shape ({config.batch}, blocks)", f"{tuple(table.shape)}", fix)
    if len({len(pool) for pool in pools}) != 1:
        lengths = " and ".join(str(len(pool)) for pool in pools)
        raise ShapeError("append_pages", "pools of the same number of blocks", lengths, "pass the pools of one layer")
    if not bool(((table >= 0) & (table < len(pools[0]))).all()):
        expected = f"numbers from 0 to {len(pools[0]) - 1}"
        raise ShapeError(subject, expected, "others", "pass numbers of blocks in the pools")
