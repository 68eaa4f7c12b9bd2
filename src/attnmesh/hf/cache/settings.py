"""Settings of a `ShardedCache`, and their checks."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar, overload

from transformers import PreTrainedConfig

from attnmesh.cache.cache_config import check_key_heads, check_storage
from attnmesh.cache.make_shards import check_ranks_in_folder
from attnmesh.checks.argument_checks import check_compare_option
from attnmesh.comm.merges import check_merge
from attnmesh.decoding.step_checks import check_reproducible
from attnmesh.errors import KernelError, ShapeError, check_count
from attnmesh.hf.latent_states import latent_widths
from attnmesh.hf.models import (
    check_keys,
    cross_layer_indices,
    indexed_layer_indices,
    is_compressed,
    is_recurrent,
    key_heads,
)
from attnmesh.kernels.choice import check_kernel
from attnmesh.mesh.schedule import check_exchange
from attnmesh.mesh.shapes import Shape
from attnmesh.mesh.shares import check_copies, check_even_shares, checked_shares
from attnmesh.store.kv_folder import KVFolder

T_co = TypeVar("T_co", covariant=True)

ROW_OPTIONS = frozenset(("capacity", "block", "exchange", "copies", "windows", "keep", "shares", "folder", "hot"))
"""Options in which rows of one step may differ."""


@dataclass(frozen=True)
class CacheSettings:
    """Options of a `ShardedCache`: its arguments beside the model and the mesh, as given.

    `ShardedCache.settings` are those in use, and `OptionsInUse` makes each an attribute of the cache.
    """

    capacity: int | None
    block: int | None
    merge: str
    output: str
    reproducible: bool
    kernel: str
    exchange: str
    checked: bool | None
    copies: int
    windows: bool
    keep: int
    storage: str | None
    window_storage: str | None
    shares: Sequence[float] | str | None
    folder: str | Path | KVFolder | None
    hot: int | None

    def difference_of_rows(self, other: "CacheSettings") -> str | None:
        """Return an option that two rows of one step must share, but do not; None if one step serves both."""
        shared = (name for name in vars(self) if name not in ROW_OPTIONS)
        return next((name for name in shared if getattr(self, name) != getattr(other, name)), None)

    def check(self, config: Any, shape: Shape) -> None:
        """Raise unless they are valid for a model of a configuration, on a mesh of this shape."""
        if not isinstance(config, PreTrainedConfig):
            given, fix = type(config).__name__, "pass model.config"
            raise KernelError("ShardedCache config", "a configuration of transformers", given, fix)
        check_keys(config)
        check_merge("ShardedCache", self.merge, self.output)
        self._check_heads(config, shape)
        check_kernel(self.kernel)
        check_exchange("ShardedCache exchange", self.exchange)
        check_compare_option("ShardedCache", self.checked)
        if not isinstance(self.windows, bool):
            raise KernelError("ShardedCache windows", "True or False", repr(self.windows), "leave it at True")
        check_count("ShardedCache keep", self.keep, "count the tokens that crop may remove", least=0)
        for name in ("storage", "window_storage"):
            check_storage(f"ShardedCache {name}", getattr(self, name))
        self._check_memory(config)
        self._check_ranks(config, shape.queries * shape.keys)

    def _check_heads(self, config: PreTrainedConfig, shape: Shape) -> None:
        """Raise unless the key heads can be shared as the mesh and `output` ask."""
        latents, entries = latent_widths(config) is not None, is_compressed(config)
        one_head = latents or entries or bool(indexed_layer_indices(config))
        if one_head and shape.heads > 1:
            expected = "a mesh without a heads axis for latents, index keys or entries, which have one head"
            given, fix = f"a heads axis of {shape.heads}", "give its ranks to the keys axis"
            raise ShapeError("ShardedCache mesh", expected, given, fix)
        if one_head and self.output != "replicated":
            given = f"{'entries' if entries else 'latents' if latents else 'index keys'}, which have none"
            raise KernelError("ShardedCache output", "keys and values with heads", given, 'pass output="replicated"')
        if not one_head and (heads := key_heads(config)) is not None:
            check_key_heads("ShardedCache mesh", heads, shape.heads)

    def _check_memory(self, config: PreTrainedConfig) -> None:
        """Raise unless `folder`, `hot`, `capacity` and `block` are valid."""
        if self.folder is not None:
            _check_plain(config, "ShardedCache folder", "leave folder= out")
            check_ranks_in_folder("ShardedCache folder", self.copies, self.shares)
        if self.hot is not None:
            subject, fix = "ShardedCache hot", "leave hot= out"
            check_count(subject, self.hot, "count the newest tokens to keep on the device, or leave it out")
            _check_plain(config, subject, fix)
            if self.copies != 1:
                raise KernelError(subject, "one rank of each token", f"copies={self.copies}", fix)
        if self.capacity is not None:
            check_count("ShardedCache capacity", self.capacity, "count prompt and new tokens, or leave it out")
        if self.block is not None:
            check_count("ShardedCache block", self.block, "leave it out")

    def _check_ranks(self, config: PreTrainedConfig, ranks: int) -> None:
        """Raise unless `ranks` ranks can hold the tokens, in the given copies and shares."""
        check_copies("ShardedCache", self.copies, ranks)
        for name in ("reproducible", "storage", "window_storage") if is_compressed(config) else ():
            if value := getattr(self, name):
                expected = "none for a model that compresses tokens"
                raise KernelError(f"ShardedCache {name}", expected, repr(value), "leave it out")
        check_reproducible("ShardedCache reproducible", self.reproducible, ranks, self.merge)
        shares = checked_shares("ShardedCache", self.shares, ranks)
        if self.reproducible:
            is_even = self.shares is None or (shares is not None and len({*shares}) == 1)
            check_even_shares("ShardedCache reproducible", self.shares, even=is_even)


class OptionInUse(Generic[T_co]):
    """Attribute of a cache that reads the option of this name in its `settings`, and raises if it is set.

    Layers read the options: one that was set on the cache alone would not reach them.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, cache: None, owner: type) -> "OptionInUse[T_co]": ...

    @overload
    def __get__(self, cache: "OptionsInUse", owner: type) -> T_co: ...

    def __get__(self, cache: "OptionsInUse | None", owner: type) -> Any:
        return self if cache is None else getattr(cache.settings, self.name)

    def __set__(self, cache: object, value: NoReturn) -> None:
        name = self.name
        fix = f"make a new cache with {name}={value!r}"
        raise KernelError(f"ShardedCache {name}", "options of a new cache", f"cache.{name} = {value!r}", fix)


class OptionsInUse:
    """Options of a cache as its attributes, with the types that they have in use: `CacheSettings` has those given."""

    settings: CacheSettings
    capacity = OptionInUse[int | None]()
    block = OptionInUse[int]()
    merge = OptionInUse[str]()
    output = OptionInUse[str]()
    reproducible = OptionInUse[bool]()
    kernel = OptionInUse[str]()
    exchange = OptionInUse[str]()
    checked = OptionInUse[bool | None]()
    copies = OptionInUse[int]()
    windows = OptionInUse[bool]()
    keep = OptionInUse[int]()
    storage = OptionInUse[str | None]()
    window_storage = OptionInUse[str | None]()
    shares = OptionInUse[tuple[float, ...] | None]()
    """Ratios of the tokens of each rank; None for even shares."""
    folder = OptionInUse[KVFolder | None]()
    """The open folder."""
    hot = OptionInUse[int | None]()


def _check_plain(config: PreTrainedConfig, subject: str, fix: str) -> None:
    """Raise unless a model keeps nothing but keys and values."""
    if is_recurrent(config) or is_compressed(config) or indexed_layer_indices(config) or cross_layer_indices(config):
        raise KernelError(subject, "a model that keeps keys and values alone", config.model_type, fix)
