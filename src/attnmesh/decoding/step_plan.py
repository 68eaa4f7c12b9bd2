"""Plans of steps, by kind: one launch on the cache, and one native merge across ranks."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnmesh.cache.cache_config import Sizes
from attnmesh.cache.cache_shard import CacheShard
from attnmesh.cache.replicas import CacheProperties
from attnmesh.comm.host_merge import HostMerge, host_merge_for
from attnmesh.comm.rank_merge import chosen_merge
from attnmesh.core.band import Band
from attnmesh.core.mask import Mask
from attnmesh.core.partial import Partial, merge_unchecked, with_sinks
from attnmesh.decoding.decode_step import DecodeStep
from attnmesh.kernels.blocks import CacheLaunch, Launch, Need
from attnmesh.kernels.choice import choose
from attnmesh.kernels.stacked_merge import copy_into
from attnmesh.kernels.traced import are_plain
from attnmesh.mesh.merges import is_collective
from attnmesh.runtime.caches import Kinds


class DevicePlan(NamedTuple):
    """The launch of a kernel that reads caches in place, for a kind of steps on caches of one size."""

    launch: CacheLaunch
    step: DecodeStep
    sizes: Sizes


class StepPlan(NamedTuple):
    """The native launch and the native merge of ranks, for a kind of steps on caches of one size."""

    kind: Launch
    sequence: Launch  # a launch for one sequence of the batch
    step: DecodeStep
    sizes: Sizes
    call: tuple[Any, ...]  # the kind of the call, of which its number is made
    host_merge: HostMerge | None  # None on one rank
    heads: slice | None  # of the output; None for all

    def attend(
        self,
        q: Tensor,
        caches: Sequence[CacheProperties],
        sinks: Tensor | None,
        counts: Sequence[tuple[int, int]],
        into: Partial,
    ) -> Partial | None:
        """Return the partial of the keys on this rank, or None for a step that a launch does not serve.

        One cache has the keys of all rows, or each row of q has a cache. `counts` are the tokens of all ranks and of
        this one, of each cache. `into` is memory for the partial.
        """
        kind, row_q, row_into = self.kind, q, into
        for row, (cache, (length, used)) in enumerate(zip(caches, counts, strict=True)):
            shard = cache.shards.own
            if len(caches) > 1:
                kind, one = self.sequence, slice(row, row + 1)
                row_q, row_into = q[one], Partial(into.out[one], into.lse[one])
            if shard.shared or shard.padding is not None:
                attend = self._attend_pieces if shard.padding is None else self._attend_sequences
                if not attend(row_q, shard, row_into, used):
                    return None
                continue
            (out, lse), mask, rows = row_into, self.step.mask, q.shape[2]
            first = mask.first_seen(length - rows)
            bounds = None if rows == 1 else _bounds(mask, first, length, rows)
            start = max(0, first - length + used)  # on one rank, the tokens before these are forgotten
            if first and self.step.tokens.size > 1:
                start = int(torch.searchsorted(shard.token_index[:used], first))
            places, keys = (out.data_ptr(), lse.data_ptr()), shard.stored
            if start == used:  # the identity
                out.zero_()
                lse.fill_(-torch.inf)
            elif not kind.launch_at(row_q, keys[0], keys[-1], places, bounds, start, used - start):
                return None
        if sinks is None or self.step.tokens.index > 0:  # the first rank adds them
            return into
        return copy_into(with_sinks(into, sinks), None if self.host_merge is None else into)

    def _attend_pieces(self, q: Tensor, shard: CacheShard, into: Partial, used: int) -> bool:
        """Attend the pieces of a forked cache. Return False unless one query of each sequence sees all their keys."""
        length, kind = shard.length, self.sequence if len(q) == 1 else self.kind
        if q.shape[2] > 1 or self.step.mask.first_seen(length - 1):
            return False
        partials = []
        for keys, count in [*((blocks.stored, blocks.used) for blocks in shard.shared), (shard.stored, used)]:
            if count:
                part = kind.blank()
                if not kind.launch_at(q, keys[0], keys[-1], (part.out.data_ptr(), part.lse.data_ptr()), None, 0, count):
                    return False
                partials.append(part)
        copy_into(merge_unchecked(partials), into)
        return True

    def _attend_sequences(self, q: Tensor, shard: CacheShard, into: Partial, used: int) -> bool:
        """Attend each sequence of a padded batch by itself. Return False unless its visible keys are in one run."""
        assert shard.padding is not None
        real, position = shard.padding.last(shard.state[:1] - 1)
        places, (first, _) = shard.padding.places[:, :used], self.step.mask.bounds(position)
        seen = ((places >= first) & real).int()
        counts = seen.sum(1)
        starts, ends = (seen.argmax(1), used - seen.flip(1).argmax(1)) if used else (counts, counts)
        for row, (start, end, count) in enumerate(torch.stack((starts, ends, counts), 1).tolist()):
            out, lse, one = into.out[row], into.lse[row], slice(row, row + 1)
            keys, values, addresses = shard.stored[0][one], shard.stored[-1][one], (out.data_ptr(), lse.data_ptr())
            if not count:
                out.zero_()
                lse.fill_(-torch.inf)
            elif end - start != count or not self.sequence.launch_at(
                q[one], keys, values, addresses, None, start, count
            ):
                return False
        return True


def find_plan(
    kinds: Kinds[StepPlan | DevicePlan],
    q: Tensor,
    caches: Sequence[CacheProperties],
    sinks: Tensor | None,
    options: tuple[Any, ...],
) -> tuple[StepPlan | DevicePlan, list[tuple[int, int]]] | None:
    """Return the plan of a step, if its cache has one, and the tokens of all ranks and this one in each cache."""
    on_gpu = caches[0].shards.own.device.type == "cuda"
    if not kinds or not (are_plain(q, on_gpu=on_gpu) if sinks is None else are_plain(q, sinks, on_gpu=on_gpu)):
        return None
    plan, counts = kinds.find(_kind(q, len(caches), sinks, options)), []
    if plan is None:
        return None
    for cache in caches:
        shard, sizes = cache.shards.own, plan.sizes
        if sizes is not shard.sizes and (len(caches) == 1 or sizes.kind != shard.sizes.kind):
            return None
        length, used = (cache.shards.known_length, 0) if on_gpu else shard.state.tolist()[:2]
        if not q.shape[2] <= length <= shard.sizes.capacity:
            return None
        if shard.padding is not None and not on_gpu and (shard.shared or q.shape[2] > 1):
            return None
        if on_gpu and shard.sizes.capacity > plan.step.capacity:
            return None
        if sizes.mask is not None and not cache.shards.serves(length - q.shape[2]):
            return None
        counts.append((length, used))
    return plan, counts


def learn_plan(
    kinds: Kinds[StepPlan | DevicePlan],
    q: Tensor,
    caches: Sequence[CacheProperties],
    sinks: Tensor | None,
    options: tuple[Any, ...],
    step: DecodeStep,
    call: tuple[Any, ...],
) -> bool:
    """Make the plan of a step that was checked. Return False if no launch serves it, or it has one, which does not."""
    shard, mask, logits, axis, rows = caches[0].shards.own, step.mask, step.logits, step.tokens, q.shape[2]
    sizes = shard.sizes
    on_gpu = shard.device.type == "cuda"
    if not (are_plain(q, on_gpu=on_gpu) if sinks is None else are_plain(q, sinks, on_gpu=on_gpu)):
        return False
    kind = _kind(q, len(caches), sinks, options)
    if (known := kinds.find(kind)) and (known.sizes is sizes or (len(caches) > 1 and known.sizes.kind == sizes.kind)):
        return False
    bounds = Mask(mask.left, mask.right, chunks=mask.chunks)  # what a launch knows of a mask
    if step.reproducible or mask != bounds:
        return False
    kernel, (keys, values) = choose(Need.of_cache(q, shard.view, logits), step.kernel), shard.view.numbers
    if kernel.reads_cache:
        if is_collective(step.merge):
            return False
        kinds.keep(kind, DevicePlan(kernel.launch_of_cache(), step, sizes))
        return True
    if rows > 1 and (mask.chunks or axis.size > 1):
        return False
    whole, one = kernel.launch_of(q, keys, values, logits), kernel.launch_of(q[:1], keys[:1], values[:1], logits)
    if whole is None or one is None:
        return False
    host_merge = None
    if axis.size > 1:
        how = chosen_merge(axis, step.merge, step.output, q.device)
        host_merge = host_merge_for(axis, (*q.shape[:-1], sizes.value_dim), how)
        if host_merge is None:
            return False
    heads = None if host_merge is None else host_merge.heads(step.output)
    kinds.keep(kind, StepPlan(whole, one, step, sizes, call, host_merge, heads))
    return True


def _kind(q: Tensor, caches: int, sinks: Tensor | None, options: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return all that the checks of a step depend on, but for its caches."""
    more = None if sinks is None else (sinks.shape, sinks.dtype, sinks.layout)
    return q.shape, caches, q.dtype, more, *options, *map(type, options)  # options of equal values may differ in type


def _bounds(mask: Mask, first: int, length: int, rows: int) -> Band | None:
    """Return the keys after the first that each of the last rows sees; None if all see the same."""
    if mask.left >= length and mask.right >= rows:
        return None
    positions = range(length - rows, length)
    low = [max(0, position - mask.left) - first for position in positions]
    high = [min(length, position + mask.right + 1) - first for position in positions]
    return Band(*(torch.tensor(bounds, dtype=torch.int64, device="cpu") for bounds in (low, high)))
