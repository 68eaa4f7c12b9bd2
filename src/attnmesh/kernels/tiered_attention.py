"""Attention of a device's queries to a cache whose older tokens are in CPU memory.

The CPU's kernel attends them where they lie, or they are uploaded to the device part by part. A sample of both is
timed, and the faster one serves all steps of that kind. Selected keys are few, and always read where they lie. In each
case only the slots that some query sees are read. The device attends its own slots meanwhile.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attnmesh.core.mask import Causal
from attnmesh.core.partial import Partial, identity, merge_partials, with_sinks
from attnmesh.core.scaling import Scaling
from attnmesh.core.selection import Selection
from attnmesh.kernels.cache_runs import CachedAttention, runs_of
from attnmesh.kernels.cache_view import USED, CacheView, DecodeQuery
from attnmesh.kernels.choice import choose
from attnmesh.kernels.kernel import Kernel, KernelRequest
from attnmesh.kernels.stacked_merge import copy_into
from attnmesh.kernels.upload import PART_BYTES, uploader_to
from attnmesh.runtime.memo import Memo

SAMPLE_BYTES = 4 * PART_BYTES
"""Bytes of keys and values that both ways are timed on: parts enough that launches weigh as little as in a step."""

FEWEST = 256
"""Slots that are worth a sample. Fewer are attended where they lie: a sample would cost more than it can save."""

IS_UPLOAD_FASTER = Memo[bool](maxsize=256)
"""True for steps that are faster if keys are uploaded, by shapes and dtypes of queries and keys, and the device."""


def attention_to_cache(kernel: Kernel, scaling: Scaling, value_dim: int, device: torch.device) -> CachedAttention:
    """Return the attention of queries on a device to caches."""
    make = CachedAttention if device.type == "cpu" else TieredAttention
    return make(kernel, scaling, value_dim)


class TieredAttention(CachedAttention):
    """Steps of one signature on a device, over caches whose older tokens may be in CPU memory."""

    def __init__(self, kernel: Kernel, scaling: Scaling, value_dim: int) -> None:
        super().__init__(kernel, scaling, value_dim)
        self.cpu_attentions = Memo[CachedAttention](maxsize=64)
        """Attention on the CPU, by the shape of the queries."""

    def attend(self, query: DecodeQuery, views: Sequence[CacheView], selected: Selection | None = None) -> Partial:
        """Return the partial over one cache of the whole batch, or one for each sequence, in `query.into` if given."""
        tiers = [view.cpu_part for view in views]
        if not any(tiers):
            return super().attend(query, views, selected)
        plain = replace(query, sinks=None, into=None, other_partial=None)
        queries = [plain.sequence(index) for index in range(len(views))] if len(views) > 1 else [plain]
        begun = [self._begin(own, tier, selected) for own, tier in zip(queries, tiers, strict=True)]
        newer = super().attend(replace(plain, into=self._blank(query.q)), [v.device_part for v in views], selected)
        older = [end() for end in begun]
        parts = [newer, Partial(*(torch.cat(x) for x in zip(*older, strict=True))) if len(older) > 1 else older[0]]
        parts += [] if query.other_partial is None else [query.other_partial]
        return copy_into(with_sinks(merge_partials(parts), query.sinks), query.into)

    def _begin(self, query: DecodeQuery, tier: CacheView | None, selected: Selection | None) -> Callable[[], Partial]:
        """Copy to the CPU what it needs of a query. Return a function that attends the tier.

        Call before the device attends its own slots: a later copy would wait until it is done with them.
        """
        if tier is None:
            return lambda: identity(query.q, self.quantized_attention.value_dim, query.q.dtype)
        lengths = None if query.key_lengths is None else query.key_lengths.cpu()
        if selected is None and self._is_upload_faster(query, tier):
            return lambda: self._attend_uploaded(query, replace(query, key_lengths=lengths), tier)
        chosen = None if selected is None else Selection(selected.indices.cpu(), selected.block)
        moved = replace(query, q=query.q.cpu(), key_lengths=lengths)
        return lambda: Partial(*(x.to(query.q.device) for x in self._attend_on_cpu(moved, tier, chosen)))

    def _attend_on_cpu(self, query: DecodeQuery, tier: CacheView, selected: Selection | None = None) -> Partial:
        """Return the partial of the CPU's kernel."""
        attention = self.cpu_attentions.find(query.q.shape)
        if attention is None:
            _, scaling, value_dim = self.quantized_attention
            kernel = choose(KernelRequest.of_cache(query.q, tier, scaling), "auto" if selected is None else "reference")
            attention = self.cpu_attentions.keep(query.q.shape, CachedAttention(kernel, scaling, value_dim))
        return attention.attend(query, [tier], selected)

    def _attend_uploaded(self, query: DecodeQuery, cpu_query: DecodeQuery, tier: CacheView) -> Partial:
        """Return the partial of the slots that are seen, which come to the device part by part."""
        total = identity(query.q, self.quantized_attention.value_dim, query.q.dtype)
        for part in _uploaded(query.q.device, cpu_query, tier):
            partial = super().attend(replace(query, into=self._blank(query.q)), [part])
            total = merge_partials([total, partial])
        return total

    def _is_upload_faster(self, query: DecodeQuery, tier: CacheView) -> bool:
        """Return whether the tier is attended faster if it is uploaded, by a sample of its slots."""
        kind = query.q.shape, query.q.dtype, tier.keys.shape[:2], tier.unscaled[0].shape[3], tier.keys.dtype
        is_faster = IS_UPLOAD_FASTER.find((*kind, query.q.device))
        if is_faster is not None:
            return is_faster
        slots = int(tier.device_counts[USED])
        if slots < FEWEST:
            return False
        slot_bytes = sum(x[:, :, :1].nbytes for x in (tier.keys, tier.values))
        sample = tier.first(min(slots, max(FEWEST, SAMPLE_BYTES // slot_bytes)))
        sample_query = replace(query, mask=Causal(), key_lengths=None)
        # Launches that are prepared for a step have its mask, so the sample has launches of its own.
        sampler = TieredAttention(*self.quantized_attention)
        moved = replace(sample_query, q=sample_query.q.cpu())
        seconds = [
            _seconds(lambda: sampler._attend_on_cpu(moved, sample), sample_query.q),
            _seconds(lambda: sampler._attend_uploaded(sample_query, sample_query, sample), sample_query.q),
        ]
        return IS_UPLOAD_FASTER.keep((*kind, query.q.device), seconds[1] < seconds[0])


def _uploaded(device: torch.device, query: DecodeQuery, tier: CacheView) -> Iterator[CacheView]:
    """Yield the slots of a tier that some query sees, on the device."""
    for piece in (*tier.earlier_pieces, tier._replace(earlier_pieces=())):
        if runs := runs_of(query, [piece]):
            yield from uploader_to(device).upload(piece, min(run.start for run in runs), max(run.stop for run in runs))


def _seconds(call: Callable[[], object], q: Tensor) -> float:
    """Return the seconds of a second call, until the device is done with it. The first warms up."""
    call()
    torch.cuda.synchronize(q.device)
    start = time.perf_counter()
    call()
    torch.cuda.synchronize(q.device)
    return time.perf_counter() - start
