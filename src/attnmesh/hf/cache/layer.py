"""One layer of a `ShardedCache`, and the new keys and values that it is given."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial as partial_of
from typing import Any, NoReturn

from torch import Tensor, nn

from attnmesh.cache.cache import KVCache
from attnmesh.cache.make_shards import FolderLayer
from attnmesh.core.layout import Striped
from attnmesh.core.mask import FAR, Mask, Window
from attnmesh.core.partial import Partial
from attnmesh.errors import InputError
from attnmesh.guard.agreement import Agreement, is_capturing
from attnmesh.hf.cache.layer_protocols import LayersCache, StepCache
from attnmesh.hf.latent_states import check_projection, has_weight, latent_states, projection_of
from attnmesh.hf.models import Opaque, check_implementation
from attnmesh.hf.sharded_sequence import ShardedSequence
from attnmesh.hf.transformers_names import CacheLayerMixin
from attnmesh.mesh.axes import RankMesh
from attnmesh.mesh_attention.latents import Latents, Projection
from attnmesh.mesh_attention.sharding import unshard

SHORT_WINDOW = 1024
"""Tokens of the longest window whose keys stay as they are, unless `window_storage=` is given.

Layers of shorter windows hold little, and lose most by 8 bits.
"""


@dataclass(frozen=True)
class PendingKV(Opaque):
    """New keys and values between the cache's `update` and the attention function, which stores them.

    The attention function also has the mask, so it can tell padding and shards. If the model expanded the keys and
    values from `latents`, the latents are stored instead.
    """

    k: Tensor
    v: Tensor
    layer: "ShardedLayer"
    latents: Tensor | None = None

    @property
    def tensors_to_append(self) -> tuple[Tensor, Tensor | None]:
        """Tensors for the cache to append."""
        return (self.k, self.v) if self.latents is None else (self.latents, None)

    @property
    def projected_latents(self) -> Latents | None:
        """Latents with their projection; None if there are keys and values alone."""
        if self.latents is None or self.layer.projection is None:
            return None
        return Latents(self.latents, self.layer.projection.to(self.k.dtype))


class ShardedLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer of a `ShardedCache`: a `KVCache`, made when the first tokens are stored."""

    other_formats: Mapping[str, str] = {}
    """Names of the caches that the layer makes beside `kv_cache`, and the `values=` of each."""

    entry_tokens = 1
    """Tokens for which a key in the caches of `other_formats` stands."""

    is_croppable = True
    supports_early_init = False

    def __init__(self, sharded_cache: LayersCache) -> None:
        super().__init__()
        self.keys = self.values = Opaque()  # each rank holds a share: a model that reads them raises
        self.sharded_cache = sharded_cache
        self._kv_cache: KVCache | None = None
        self.other_kv_caches: dict[str, KVCache] = {}
        """Other caches of the layer that have been made, with keys of one head."""
        self.projection: Projection | None = None
        self.latent_widths: tuple[int, int] | None = None
        """`latent_widths` of the layer, which `make_layers` sets."""

    def __repr__(self) -> str:
        """Return the sizes of the `KVCache`."""
        return f"{type(self).__name__}({'empty' if self._kv_cache is None else self._kv_cache})"

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: `reserve` allocates, with the number of tokens."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Return the new keys and values, or latents, with their layer, for the attention function to store."""
        self.sharded_cache.history.check_order("ShardedCache")
        if not self.is_made:  # once, as configurations are slow to read; another attention raises at what it gets
            check_implementation("ShardedCache", self.sharded_cache.config)
        if (key_states.shape[3], value_states.shape[3]) == self.latent_widths:
            return latent_states(key_states, value_states, self)
        pending = PendingKV(key_states, value_states, self)
        return pending, pending

    def set_projection(self, module: nn.Module, pending: PendingKV) -> None:
        """Find the projection of the layer's latents. The first time, raise unless the model expands them by it."""
        if pending.latents is None or (self.projection is not None and not has_weight(module, pending.latents)):
            return
        assert self.latent_widths is not None
        projection = projection_of(module, pending.k, pending.v, pending.latents, self.latent_widths[0])
        if self.projection is None:
            check_projection(projection, pending.k, pending.v, pending.latents)
        self.projection = projection

    def reserve(self, pending: PendingKV, tokens: int, mask: Mask) -> KVCache:
        """Return the layer's cache with space for `tokens` more, counted over all ranks. `mask` is the layer's."""
        k, v = pending.tensors_to_append
        sharded_cache = self.sharded_cache
        kv_cache = _cache_to_extend(self._kv_cache, k.shape[0])
        if kv_cache is None:
            settings = sharded_cache.settings
            window_keys = mask.max_causal_keys_of(FAR)
            storage = settings.storage if window_keys > SHORT_WINDOW else settings.window_storage
            options: dict[str, Any] = {"storage": storage}
            if v is not None:
                options["value_dim"] = v.shape[3]
            else:
                columns = k.shape[3] if self.projection is None else self.projection.latent_width
                options |= {"value_dim": columns, "values": "prefix"}
            if settings.windows and window_keys < FAR:
                # A chunk of n tokens sees no more than `Window(n - 1)`; transformers gives both by one mask function.
                options |= {"mask": Window(window_keys - 1), "keep": settings.keep}
            else:
                options["hot"] = settings.hot
            kv_cache = self._kv_cache = self._new_cache(k, tokens, **options)
            self.is_initialized = True
        elif sharded_cache.mesh is None and kv_cache.config.hot is not None and kv_cache.device.type != k.device.type:
            kv_cache.move_hot(k.device)  # a folder was opened before the model's device was known
        return self._grow_if_full(kv_cache, tokens)

    def reserve_step(self, pending: PendingKV, tokens: int, mask: Mask) -> StepCache:
        """Return what `reserve` returns, to store the tokens of a step."""
        return self.reserve(pending, tokens, mask)

    def reserve_other(self, name: str, new: Tensor, keys: int, **options: Any) -> KVCache:
        """Return the layer's cache `name` with space for `keys` more keys, counted over all ranks.

        `new` has the shape (batch, 1, keys, dim). `options` are those of `KVCache`.
        """
        kv_cache = _cache_to_extend(self.other_kv_caches.get(name), new.shape[0])
        if kv_cache is None:
            options["values"] = self.other_formats[name]
            kv_cache = self.other_kv_caches[name] = self._new_cache(new, keys, per=self.entry_tokens, **options)
        return self._grow_if_full(kv_cache, keys)

    def _new_cache(self, new: Tensor, keys: int, *, per: int = 1, **options: Any) -> KVCache:
        """Return an empty cache with space for `keys` keys of the shape of `new`. Each stands for `per` tokens."""
        settings = self.sharded_cache.settings
        limit = settings.capacity
        options["capacity"] = growth_capacity(keys) if limit is None else -(-limit // per)
        options |= {"batch": new.shape[0], "kv_heads": new.shape[1], "head_dim": new.shape[3]}
        options |= {"dtype": new.dtype, "device": new.device, "block": settings.block}
        options |= {"checked": settings.checked, "copies": settings.copies, "shares": settings.shares}
        if (folder := self.sharded_cache.folder) is not None:
            options["folder"] = FolderLayer(folder, self.sharded_cache.attention_layers.index(self))
        return KVCache(self.sharded_cache.mesh, **options)

    def _grow_if_full(self, kv_cache: KVCache, keys: int) -> KVCache:
        """Return the cache, grown if it has no space for `keys` more and no fixed capacity."""
        if self.must_grow(kv_cache, keys):
            kv_cache.reserve(growth_capacity(kv_cache.length + keys))
        return kv_cache

    @property
    def is_made(self) -> bool:
        """True if the layer has a place for keys."""
        return self._kv_cache is not None

    @property
    def kv_cache(self) -> KVCache:
        """The layer's cache, which has been made."""
        assert self._kv_cache is not None
        return self._kv_cache

    @property
    def kv_caches(self) -> list[KVCache]:
        """The caches of the layer that have been made."""
        return [kv_cache for kv_cache in (self._kv_cache, *self.other_kv_caches.values()) if kv_cache is not None]

    @property
    def token_counts(self) -> list[int]:
        """Tokens in each cache that has a key of each token. An interrupted forward pass leaves them unequal."""
        other_caches = self.other_kv_caches.values() if self.entry_tokens == 1 else ()
        return [self.get_seq_length(), *(kv_cache.length for kv_cache in other_caches)]

    @property
    def tokens_per_key(self) -> list[int]:
        """Tokens that a key of each of the layer's caches stands for."""
        return [1, *[self.entry_tokens] * len(self.other_formats)]

    def set_kv_caches(self, kv_caches: Sequence[KVCache]) -> None:
        """Set the caches of the layer."""
        self._kv_cache, *other_kv_caches = kv_caches
        self.is_initialized = True
        self.other_kv_caches = dict(zip(self.other_formats, other_kv_caches, strict=True))

    def map_kv_caches(self, function: Callable[[KVCache], KVCache]) -> None:
        """Replace each cache by a function of it."""
        self._kv_cache = None if self._kv_cache is None else function(self._kv_cache)
        self.other_kv_caches = {name: function(kv_cache) for name, kv_cache in self.other_kv_caches.items()}

    @property
    def step_cache(self) -> StepCache:
        """Cache or rows that `reserve_step` has returned."""
        return self.kv_cache

    def attend(self, q: Tensor, **options: Any) -> Tensor:
        """Return attention of the last tokens over all tokens of the layer, as the cache attends."""
        return self.sharded_cache.attend(q, self.kv_cache, **options)

    def is_first(self, pending: PendingKV) -> bool:
        """Return whether the layer's cache has no tokens but these new ones."""
        return not is_capturing(pending.k.device) and self.kv_cache.length == pending.k.shape[2]

    def must_grow(self, kv_cache: KVCache, tokens: int) -> bool:
        """Return whether a cache has no space for `tokens` more tokens, and no fixed capacity."""
        return self.sharded_cache.settings.capacity is None and kv_cache.length + tokens > kv_cache.config.capacity

    def raise_agreed(
        self, error: InputError, pending: PendingKV, tokens: int, *, is_compared: bool | None = None
    ) -> NoReturn:
        """Raise this rank's error on all ranks, if ranks compare their calls when `tokens` tokens are stored.

        `is_compared` overrides whether `KVCache.append` compares:

            ranks allocate memory, or is_compared=True              all ranks raise
            otherwise, is_compared=None, and `append` compares      all ranks raise
            otherwise, is_compared=None                             this rank raises, as `CallGuard.raise_uncompared`
            otherwise, is_compared=False                            this rank raises
        """
        kv_cache = _cache_to_extend(self._kv_cache, pending.k.shape[0])
        is_checked = self.sharded_cache.settings.checked is not False
        if kv_cache is None or is_compared or (is_checked and self.must_grow(kv_cache, tokens)):
            Agreement(RankMesh.of(self.sharded_cache.mesh), "append").raise_on_all(error)
        elif is_compared is None and kv_cache.guard.will_compare("append"):
            kv_cache.guard.agreement("append").raise_on_all(error)
        elif is_compared is None:
            kv_cache.guard.raise_uncompared("append", error)
        raise error

    def attend_other_keys(self, q: Tensor, scale: float | None) -> Partial | None:
        """Return attention over this rank's entries, which stand for several tokens each; None without entries."""
        return None

    def get_seq_length(self) -> int:
        """Return the number of cached tokens, over all ranks."""
        return 0 if self._kv_cache is None else self._kv_cache.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys after this query, and the position of the first key."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """Return the capacity; -1 if the cache grows."""
        return int(self.sharded_cache.settings.capacity or -1)

    def reset(self) -> None:
        """Drop all tokens."""
        self._kv_cache, self.other_kv_caches, self.is_initialized, self.projection = None, {}, False, None

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last tokens. Their number is given as a negative int, which the cache has checked."""
        for kv_cache in self.kv_caches if tokens_to_remove else []:
            kv_cache.truncate(max(0, kv_cache.length + tokens_to_remove))

    def actions_to_reorder(self, index: Tensor) -> list[Callable[[], Any]]:
        """Return actions that replace sequence b by sequence `index[b]`. The batch may grow or shrink."""
        return [partial_of(kv_cache.actions_to_reorder, index) for kv_cache in self.kv_caches]


def _cache_to_extend(kv_cache: KVCache | None, batch: int) -> KVCache | None:
    """Return the cache that new tokens extend; None if a new one is made, also for an empty cache of another batch."""
    return None if kv_cache is None or (kv_cache.config.batch != batch and not kv_cache.length) else kv_cache


class TailLayer(ShardedLayer):
    """A layer that also keeps tensors of the last tokens, whole on all ranks."""

    def __init__(self, sharded_cache: LayersCache) -> None:
        super().__init__(sharded_cache)
        self.tensors: dict[str, Tensor] = {}

    def keeps(self, names: Sequence[str]) -> bool:
        """Return whether these may be names of its tensors: names of recurrent states end with a digit."""
        return not any(name[-1:].isdigit() for name in names)

    def set_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Replace the tensors."""
        self.tensors = dict(tensors)

    def actions_to_reorder(self, index: Tensor) -> list[Callable[[], Any]]:
        """Return actions that replace sequence b by sequence `index[b]`. The batch may grow or shrink."""
        tensors = {name: x[index.to(x.device)] for name, x in self.tensors.items()}
        return [*super().actions_to_reorder(index), partial_of(setattr, self, "tensors", tensors)]

    def reset(self) -> None:
        """Drop all tokens."""
        super().reset()
        self.tensors = {}


def append_sequence(kv_cache: KVCache, k: Tensor, v: Tensor | None, sequence: ShardedSequence) -> None:
    """Store the keys and values of all ranks' tokens in a cache, each rank those of its blocks."""
    if isinstance(sequence.layout, Striped):
        # Without a prefix, only later tokens attend to the cache.
        queries = sequence.length if sequence.has_prefix else 1
        kv_cache.append_shard(k, v, sequence.positions(), token_mask=sequence.token_mask, queries=queries)
        return
    keys, values = (x if x is None else unshard(x, sequence.mesh, layout=sequence.layout) for x in (k, v))
    assert keys is not None
    kv_cache.append(keys, values, token_mask=sequence.token_mask)


def growth_capacity(tokens: int) -> int:
    """Return a quarter more tokens: a cache is seldom copied to grow, and at most a fifth of a long one is unused."""
    return tokens + tokens // 4 + 128
