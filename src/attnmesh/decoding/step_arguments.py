"""A step of decoding: its options with the axes and sizes of its cache, which an operator can carry; and its inputs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from attnmesh.cache.cache import KVCache
from attnmesh.comm.rank_merge import RequestedMerge
from attnmesh.core.digest import GOLDEN_GAMMA
from attnmesh.core.mask import Mask
from attnmesh.core.partial import Partial
from attnmesh.core.scaling import Scaling
from attnmesh.core.selection import Selection
from attnmesh.guard.call_text import hash_of_call
from attnmesh.kernels.cache_runs import CachedAttention
from attnmesh.kernels.cache_view import LENGTH, CacheView
from attnmesh.kernels.choice import choose
from attnmesh.kernels.kernel import KernelRequest
from attnmesh.kernels.tiered_attention import attention_to_cache
from attnmesh.mesh.axes import Axis, group_named
from attnmesh.runtime.world import cached_from_code, cached_per_world

LENGTH_WEIGHT = GOLDEN_GAMMA
"""Weight by which ranks add up the lengths of several caches, to compare them. It is odd, of 64 bits in no pattern."""


class StepOptions(NamedTuple):
    """Values that a caller passes beside tensors, equal on all ranks. Those of a `StepSpec` are checked."""

    mask: Mask
    scale: float | None
    """A number in a `StepSpec`, as `softcap` is: infinite for none."""
    softcap: float | None
    merge: str
    output: str
    reproducible: bool
    kernel: str

    def spec_on(self, cache: KVCache, scaling: Scaling) -> "StepSpec":
        """Return the spec of a step on a cache. `scaling` has the checked scale and cap."""
        return StepSpec(
            heads_axis=cache.rank_mesh.heads,
            token_axis=cache.token_axis,
            block=cache.config.block,
            capacity=cache.config.capacity,
            value_dim=cache.config.value_dim,
            options=self._replace(scale=scaling.scale, softcap=scaling.softcap),
        )

    def to_code(self) -> tuple[list[str], list[int]]:
        """Return the checked options as texts, in the order of the fields, and the mask as numbers."""
        scaling = [repr(self.scale), repr(self.softcap)]
        return [*scaling, self.merge, self.output, str(int(self.reproducible)), self.kernel], self.mask.to_code()

    @staticmethod
    def from_code(texts: Sequence[str], mask_code: Sequence[int]) -> "StepOptions":
        """Return the options that `to_code` wrote."""
        scale, softcap, merge, output, reproducible, kernel = texts
        is_reproducible = bool(int(reproducible))
        mask = Mask.from_code(mask_code)
        return StepOptions(mask, float(scale), float(softcap), merge, output, is_reproducible, kernel)


class StepSpec(NamedTuple):
    """A step that can be served: the axes and sizes of its cache, and the values that its caller passes."""

    heads_axis: Axis
    token_axis: Axis
    block: int
    capacity: int
    value_dim: int
    options: StepOptions
    index_block: int | None = None
    """Tokens that an index selects; None if nothing is selected."""

    @property
    def fields_to_compare(self) -> dict[str, Any]:
        """Values that the caller passes, by name, which are equal on all ranks."""
        return {**self.options._asdict(), "index_block": self.index_block}

    @property
    def scaling(self) -> Scaling:
        """The scale and the soft cap."""
        scale, softcap = self.options.scale, self.options.softcap
        assert scale is not None
        assert softcap is not None
        return Scaling(scale, softcap)

    @property
    def rank_merge(self) -> RequestedMerge:
        """The merge of the ranks that share the tokens."""
        options = self.options
        return RequestedMerge(self.token_axis, options.merge, options.output, reproducible=options.reproducible)

    def to_code(self) -> tuple[str, list[int]]:
        """Return the spec as names and numbers, which the schema of an operator can carry."""
        texts, mask_code = self.options.to_code()
        axes = [self.heads_axis.size, self.heads_axis.index, self.token_axis.size, self.token_axis.index]
        sizes = [self.block, self.capacity, self.value_dim, self.index_block or 0]
        names = [self.heads_axis.group_name, self.token_axis.group_name, *texts]
        return ",".join(names), [*axes, *sizes, *mask_code]

    @staticmethod
    def from_code(names: str, numbers: Sequence[int]) -> "StepSpec":
        """Return the spec that `to_code` wrote."""
        return cached_from_code(_spec_of_code, names, numbers)

    @staticmethod
    def hash_of_code(names: str, numbers: Sequence[int]) -> int:
        """Return a hash of what `to_code` wrote but for the axes, whose groups and indices differ between ranks."""
        return crc32(f"{numbers[4:]} {names.split(',')[2:]}".encode())

    def attention_for(self, q: Tensor, view: CacheView) -> CachedAttention:
        """Return the attention of the queries `q` over a cache. The reference kernel attends selected tokens."""
        name = self.options.kernel if self.index_block is None else "reference"
        kernel = choose(KernelRequest.of_cache(q, view, self.scaling), name)
        return attention_to_cache(kernel, self.scaling, self.value_dim, q.device)

    def output_shape(self, q: Tensor) -> tuple[int, ...]:
        """Return the shape of the output on this rank."""
        head_count = q.shape[1]
        if self.options.output == "heads":
            for axis in (self.heads_axis, self.token_axis):
                own_heads = axis.slice_of(head_count)
                head_count = own_heads.stop - own_heads.start
        return q.shape[0], head_count, q.shape[2], self.value_dim


@dataclass(eq=False, slots=True)
class StepInputs:
    """Inputs of a step: queries, the cache of all rows or one a row, and what a call may pass beside them."""

    q: Tensor
    caches: Sequence[KVCache]
    sinks: Tensor | None = None
    key_lengths: Tensor | None = None
    selected: Selection | None = None
    other_partial: Partial | None = None
    history: Tensor | None = None
    """History digest of the cache in a graph, where `caches` is empty; None outside of graphs."""

    @property
    def indices(self) -> Tensor | None:
        """Indices of the selected tokens."""
        return None if self.selected is None else self.selected.indices

    def values_to_hash(self, spec: StepSpec) -> tuple[Any, ...]:
        """Return the options of a spec, and the dtypes and shapes of its tensors, of which ranks compare a hash."""
        options, sinks = tuple(spec.fields_to_compare.values()), None if self.sinks is None else self.sinks.dtype
        indices = None if self.indices is None else self.indices.shape
        partial_field = () if self.other_partial is None else ("partial",)
        return options, self.q.dtype, self.q.shape, sinks, self.key_lengths is not None, indices, *partial_field

    def of_own_heads(self, spec: StepSpec) -> "StepInputs":
        """Return the inputs with the queries, sinks and selection of this rank's heads."""
        if spec.heads_axis.size == 1:
            return self
        own_heads = spec.heads_axis.slice_of(self.q.shape[1])
        own_sinks = None if self.sinks is None else self.sinks[own_heads]
        own_selected = self.selected and selection_of_rank(self.selected, spec.heads_axis)
        return replace(self, q=self.q[:, own_heads], sinks=own_sinks, selected=own_selected)

    def parts_to_compare(
        self, hashed_values: tuple[Any, ...], views: Sequence[CacheView]
    ) -> tuple[Sequence[Tensor], int, Tensor]:
        """Return what ranks compare of a call, as `digest_of_call` takes it: tensors, a hash, and device counts.

        The hash is of the hashed values, and of numbers that change between calls.
        """
        tensors = [self.q] if self.sinks is None else [self.q, self.sinks]
        values: list[int] = []
        for cache in self.caches:
            values.append(cache.history.digest)
        key_lengths = self.key_lengths
        if key_lengths is not None and key_lengths.is_cpu:
            values += key_lengths.tolist()
        elif key_lengths is not None:  # to read them here, the CPU would wait for the device
            tensors.append(key_lengths)
        if self.selected is not None:
            tensors.append(self.selected.indices)
        device_counts = views[0].device_counts
        for view in views[1:]:  # modulo 2^64. With small weights, lengths (3, 5) and (5, 4) could have one sum
            device_counts = torch.add(view.device_counts[LENGTH], device_counts, alpha=LENGTH_WEIGHT)
        if self.history is not None:
            device_counts = torch.add(device_counts, self.history, alpha=LENGTH_WEIGHT)
        return tensors, hash_of_call(hashed_values, *values), device_counts


@cached_per_world(1024)
def _spec_of_code(names: str, numbers: tuple[int, ...]) -> StepSpec:
    heads_group, tokens_group, *texts = names.split(",")
    block, capacity, value_dim, index_block, *mask_code = numbers[4:]
    return StepSpec(
        heads_axis=Axis(numbers[0], numbers[1], group_named(heads_group)),
        token_axis=Axis(numbers[2], numbers[3], group_named(tokens_group)),
        block=block,
        capacity=capacity,
        value_dim=value_dim,
        options=StepOptions.from_code(texts, mask_code),
        index_block=index_block or None,
    )


def selection_of_rank(selection: Selection, heads_axis: Axis) -> Selection:
    """Return the selection of a rank's heads: a part if each key head has its own, otherwise the whole."""
    return selection.of_heads(heads_axis.slice_of(selection.heads)) if selection.heads > 1 else selection
