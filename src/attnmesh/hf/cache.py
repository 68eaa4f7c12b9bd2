"""A cache of transformers whose keys and values are spread over the ranks of a mesh, one `KVCache` a layer."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import Cache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin

from attnmesh.comm.consensus import agree, describe_call, run_agreed
from attnmesh.comm.merge import check_merge
from attnmesh.comm.p2p import all_gather_ints
from attnmesh.core.checks import check_checked
from attnmesh.core.mask import Mask
from attnmesh.decode.cache import KVCache
from attnmesh.decode.checkpoint import load_layers
from attnmesh.decode.checkpoint_writer import Saving, save_layers
from attnmesh.decode.decode import check_reproducible, decode
from attnmesh.decode.recover import recover
from attnmesh.decode.replicas import check_copies
from attnmesh.decode.tensor_file import check_more
from attnmesh.errors import InputError, KernelError, ShapeError, StoreError
from attnmesh.hf.models import NAME, check_keys, check_layers
from attnmesh.hf.opaque import Opaque
from attnmesh.kernels.select import check_kernel
from attnmesh.mesh.axes import Mesh
from attnmesh.mesh.schedule import check_exchange
from attnmesh.mesh.shapes import Shape


@dataclass(frozen=True)
class PendingKV(Opaque):
    """New keys and values on their way from the cache's `update` to the attention function, which stores them.

    Only there is it known which of them are padding, and whether they are the same on every rank.
    """

    k: Tensor
    v: Tensor
    layer: "ShardedLayer"


class ShardedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer: a `KVCache`, made when its first tokens come."""

    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: "ShardedCache") -> None:
        super().__init__()
        self.keys = self.values = Opaque()  # a model that reads them raises: no rank has them all
        self.cache = cache
        self.kv: KVCache | None = None

    def __repr__(self) -> str:
        """What it holds."""
        return "ShardedLayer(empty)" if self.kv is None else f"ShardedLayer({self.kv})"

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Room is made by `room`, which knows for how many tokens."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[PendingKV, PendingKV]:
        """Hand new tokens on, with the layer that is to keep them."""
        self.cache.check_model()
        pending = PendingKV(key_states, value_states, self)
        return pending, pending

    def room(self, pending: PendingKV, more: int) -> KVCache:
        """The layer's keys and values, with room for so many tokens of all ranks."""
        k, v = pending.k, pending.v
        kv = self._before(pending)
        if kv is None:
            capacity = self.cache.capacity or _grown(more)
            sizes = {"batch": k.shape[0], "kv_heads": k.shape[1], "head_dim": k.shape[3], "value_dim": v.shape[3]}
            where = {"dtype": k.dtype, "device": k.device, "block": self.cache.block}
            where |= {"checked": self.cache.checked, "copies": self.cache.copies}
            kv = self.kv = KVCache(self.cache.mesh, capacity=capacity, **sizes, **where)  # type: ignore[arg-type]
            self.is_initialized = True
        elif self._grows(kv, more):
            kv.reserve(_grown(kv.length + more))
        return kv

    def _before(self, pending: PendingKV) -> KVCache | None:
        """What these tokens are added to; None if room is made anew for them."""
        other = self.kv is not None and self.kv.sizes.batch != len(pending.k) and not self.kv.length
        return None if other else self.kv

    def _grows(self, kv: KVCache, more: int) -> bool:
        """Whether there has to be more room for so many tokens."""
        return self.cache.capacity is None and kv.length + more > kv.sizes.capacity

    def refuse(self, error: InputError, pending: PendingKV, more: int, *, asked: bool | None = None) -> NoReturn:
        """Raise what is wrong with `more` new tokens on all ranks, if they ask each other when these come.

        As `asked` says, or else as for `append`.
        """

        def check() -> NoReturn:
            raise error

        kv = self._before(pending)
        if kv is None or asked or (self.cache.checked is not False and self._grows(kv, more)):
            agree(Mesh.of(self.cache.mesh), error)
        elif asked is None:
            kv.checker.check("append", check, dict)
        raise error

    def get_seq_length(self) -> int:
        """Tokens so far, of all ranks."""
        return 0 if self.kv is None else self.kv.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """All tokens, from the first."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """The capacity, or -1 if it grows."""
        return self.cache.capacity or -1

    def reset(self) -> None:
        """Forget all tokens."""
        self.kv, self.is_initialized = None, False

    def crop(self, tokens_to_remove: int) -> None:
        """Forget so many of the last tokens, given as a negative number."""

        def check() -> None:
            if isinstance(tokens_to_remove, bool) or not isinstance(tokens_to_remove, int) or tokens_to_remove > 0:
                fix = "pass a negative number: how many tokens to remove"
                raise ShapeError("crop", "0 or a negative number", repr(tokens_to_remove), fix)

        if self.kv is None:
            check()
            return
        self.kv.checker.check("crop", check, lambda: {"by": tokens_to_remove})
        if tokens_to_remove < 0:
            self.kv.truncate(max(0, self.kv.length + tokens_to_remove))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence b becomes what sequence `beam_idx[b]` was; there may be more or fewer."""
        if self.kv is not None:
            self.kv.reorder(beam_idx.long() if isinstance(beam_idx, Tensor) else beam_idx)


class ShardedCache(Cache):  # type: ignore[misc]
    """`past_key_values` for a model with `attn_implementation="attnmesh"`: each rank of the mesh keeps a share.

    Every rank makes the same calls. Without `capacity` it grows, by copying, as tokens come. `merge`, `reproducible`
    and `kernel` are those of `attnmesh.decode`; `exchange` is that of `attnmesh.attention`, for prefill; `checked` says
    when ranks ask each other whether they were called alike, in all three. `copies` are those of `KVCache`.

    >>> from transformers import LlamaConfig
    >>> cache = ShardedCache(LlamaConfig(num_hidden_layers=2, attn_implementation="attnmesh"), None)
    >>> cache.get_seq_length(), len(cache)
    (0, 2)
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        mesh: DeviceMesh | None = None,
        *,
        capacity: int | None = None,
        block: int = 16,
        merge: str = "auto",
        reproducible: bool = False,
        kernel: str = "auto",
        exchange: str = "auto",
        checked: bool | None = None,
        copies: int = 1,
    ) -> None:
        here = Mesh.of(mesh)
        options = {"capacity": capacity, "block": block, "merge": merge, "reproducible": reproducible}
        options |= {"kernel": kernel, "exchange": exchange, "checked": checked, "copies": copies}
        run_agreed(here, lambda: _check(config, here.shape, options), describe_call("ShardedCache", **options))
        self.config = config.get_text_config(decoder=True)
        self.mesh, self.ranks = mesh, here.shape.ranks
        self.capacity, self.block = capacity, block
        self.merge, self.reproducible, self.kernel, self.exchange = merge, reproducible, kernel, exchange
        self.checked, self.copies = checked, copies
        self.tokens: Tensor | None = None
        """The token ids that it holds, and if generation was broken off those to go on with; -1 for padding.

        None if it was not `attnmesh.hf.generate` that put them there.
        """
        self.rope: tuple[int, ...] | None = None
        """What the rope of its keys depends on, as `rope_regime` has it; None if `generate` did not put them there."""
        super().__init__(layers=[ShardedLayer(self) for _ in range(self.config.num_hidden_layers)])

    def check_model(self) -> None:
        """Raise if a model asks for it whose attention would not know what to do with spread keys."""
        if self.config._attn_implementation != NAME:
            given = f"{self.config._attn_implementation!r}"
            fix = f'call model.set_attn_implementation("{NAME}") after importing attnmesh.hf'
            raise KernelError("ShardedCache", f"a model with attn_implementation {NAME!r}", given, fix)

    def attend(self, q: Tensor, kv: KVCache, mask: Mask, scale: float | None, sinks: Tensor | None) -> Tensor:
        """Attention of the last tokens of a layer over all that it holds on all ranks."""
        options: dict[str, Any] = {"merge": self.merge, "reproducible": self.reproducible, "kernel": self.kernel}
        return decode(q, kv, mask=mask, scale=scale, sinks=sinks, **options)

    @property
    def held(self) -> int:
        """Tokens of each sequence that this rank holds."""
        kv = self.layers[0].kv if self.layers else None
        return 0 if kv is None else kv.used

    @property
    def held_bytes(self) -> int:
        """Bytes of keys and values that this rank holds, of all layers."""
        kvs = [layer.kv for layer in self.layers if layer.kv is not None]
        return sum(x[:, :, : kv.used].numel() * x.element_size() for kv in kvs for x in (kv.keys, kv.values))

    def level(self) -> None:
        """All layers to the tokens that each of them has: a forward pass that was broken off leaves them uneven."""
        kvs = [layer.kv for layer in self.layers if layer.kv is not None]
        lengths = [kv.length for kv in kvs] + [0] * (len(self.layers) - len(kvs))
        for kv in kvs if len(set(lengths)) > 1 else ():
            kv.truncate(min(lengths))

    def crop(self, tokens_to_remove: int) -> None:
        """Forget so many of the last tokens, given as a negative number."""
        super().crop(tokens_to_remove)
        if self.tokens is not None:
            self.tokens = self.tokens[:, : self.get_seq_length()]

    def reset(self) -> None:
        """Forget all tokens."""
        super().reset()
        self.tokens = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence b becomes what sequence `beam_idx[b]` was; there may be more or fewer."""
        super().reorder_cache(beam_idx)
        if self.tokens is not None:
            self.tokens = self.tokens[beam_idx.long().to(self.tokens.device)]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence so many times."""
        if self.get_seq_length() and repeats > 1:
            self.reorder_cache(torch.arange(self.layers[0].kv.sizes.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """These sequences alone."""
        self.reorder_cache(indices)

    def save(
        self, path: str | Path, *, more: Mapping[str, Tensor] | None = None, note: str = "", wait: bool = True
    ) -> Saving:
        """Write all layers to a folder, as `KVCache.save` does one; `more` and `note` come back by `restore`."""
        kvs = [layer.kv for layer in self.layers]

        def look() -> None:
            check_more({} if more is None else more)
            if not all(kv is not None and kv.length for kv in kvs):
                fix = "prefill a prompt first"
                raise ShapeError("ShardedCache save", "a cache with tokens in all layers", repr(self.layers[0]), fix)
            if more is not None and "held" in more:
                raise StoreError("save more", "names but held", "held", "name it otherwise")

        run_agreed(Mesh.of(self.mesh), look, "save")
        held = {"held": self.tokens.cpu()} if self.tokens is not None and kvs[0].length == self.tokens.shape[1] else {}
        return save_layers(kvs, path, more={**held, **(more or {})}, note=note, wait=wait)

    def restore(
        self, path: str | Path, *, device: torch.device | str | None = None, capacity: int | None = None
    ) -> tuple[dict[str, Tensor], str]:
        """Fill this cache, whatever it holds, from a folder; what more was saved there, and its note.

        Every rank calls it; they may be more or fewer than those that saved. The device is the mesh's, and the
        capacity the cache's, unless others are given.
        """
        where = self._options | ({} if capacity is None else {"capacity": capacity})
        kvs, more, note = load_layers(KVCache, path, self.mesh, layers=len(self.layers), device=device, **where)
        self._fill(kvs)
        self.capacity = where["capacity"]
        self.tokens = more.pop("held", None)
        return more, note

    @property
    def _options(self) -> dict[str, Any]:
        return {"capacity": self.capacity, "checked": self.checked, "copies": self.copies}

    def _fill(self, kvs: Sequence[KVCache]) -> None:
        for layer, kv in zip(self.layers, kvs, strict=True):
            layer.kv, layer.is_initialized = kv, True
        self.block = kvs[0].sizes.block

    @classmethod
    def recover(
        cls,
        cache: "ShardedCache | None",
        config: PreTrainedConfig,
        mesh: DeviceMesh | None,
        *,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> "ShardedCache":
        """The cache on another mesh, after ranks were lost, as `attnmesh.recover` does it; a new rank passes None.

        Its `tokens` are those to go on with: `generate(model, cache.tokens, cache=cache)`. `options` are a cache's.
        """
        whole = cls(config, mesh, **options)
        run_agreed(Mesh.of(mesh), lambda: _check_left(cache, len(whole.layers)), "ShardedCache.recover")
        kvs = [] if cache is None else [layer.kv for layer in cache.layers]
        left = kvs if None not in kvs else []  # where a prompt's first tokens were broken off, some have none
        whole._fill(recover(left or None, mesh, device=device, **whole._options))
        whole.tokens = _tokens_left(None if cache is None else cache.tokens, whole.layers[0].kv)
        return whole

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShardedCache":
        """A cache of its own on the same mesh: a prefix is computed once and gone on with twice."""
        twin = object.__new__(type(self))
        twin.__dict__ = {**self.__dict__, "layers": []}
        for layer in self.layers:
            twin.layers.append(ShardedLayer(twin))
            twin.layers[-1].kv, twin.layers[-1].is_initialized = deepcopy(layer.kv, memo), layer.is_initialized
        return twin


def _check_left(cache: object, layers: int) -> None:
    """Raise unless it is what is left of a cache of so many layers, if anything is."""
    if cache is not None and not isinstance(cache, ShardedCache):
        fix = "pass the cache that was there, or None on a rank that is new"
        raise KernelError("ShardedCache.recover cache", "a ShardedCache", type(cache).__name__, fix)
    if cache is not None and len(cache.layers) != layers:
        given, fix = f"one of {len(cache.layers)} layers", "pass the config of the model that it was of"
        raise KernelError("ShardedCache.recover cache", f"a cache of {layers} layers", given, fix)


def _tokens_left(tokens: Tensor | None, kv: KVCache) -> Tensor | None:
    """The tokens that all ranks know which know any, if they are all that a cache holds: some may be one ahead."""
    known = tokens if tokens is not None and len(tokens) == kv.sizes.batch else torch.empty(0, 0, dtype=torch.int64)
    lengths = [row[0] for row in all_gather_ints([known.shape[1]], kv.mesh.axes)]
    length = min((n for n in lengths if n), default=0)
    if not length or length < kv.length:
        return None
    known = known[:, :length] if len(known) else torch.zeros(kv.sizes.batch, length, dtype=torch.int64)
    rows = all_gather_ints(known.flatten().tolist(), kv.mesh.axes)
    said = next(row for row, n in zip(rows, lengths, strict=True) if n)
    return torch.tensor(said).view(kv.sizes.batch, length).to(kv.device)


def _check(config: object, shape: Shape, options: Mapping[str, Any]) -> None:
    if not isinstance(config, PreTrainedConfig):
        fix = "pass model.config"
        raise KernelError("ShardedCache config", "a configuration of transformers", type(config).__name__, fix)
    check_layers(config)
    check_keys(config)
    check_merge("ShardedCache", options["merge"], "replicated")
    check_kernel(options["kernel"])
    check_exchange("ShardedCache exchange", options["exchange"])
    check_checked("ShardedCache", options["checked"])
    for name, expected, fix in (
        ("capacity", "None or a whole number, 1 or more", "count prompt and new tokens, or leave it out"),
        ("block", "a whole number, 1 or more", "leave it at 16"),
    ):
        given = options[name]
        whole = isinstance(given, int) and not isinstance(given, bool) and given >= 1
        if not whole and (given is not None or name == "block"):
            raise ShapeError(f"ShardedCache {name}", expected, repr(given), fix)
    ranks = shape.queries * shape.keys
    check_copies(options["copies"], ranks)
    check_reproducible("ShardedCache reproducible", options["reproducible"], ranks, options["merge"])


def _grown(tokens: int) -> int:
    """Room for a quarter more: a cache that grows is copied seldom."""
    return tokens + tokens // 4 + 128
