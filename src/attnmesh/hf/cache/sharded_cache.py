"""Cache of transformers whose keys and values are sharded over the ranks of a mesh, one `KVCache` per layer."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy, deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedConfig

from attnmesh.cache.cache import KVCache
from attnmesh.cache.saved_cache import Saving
from attnmesh.core.layout import Striped
from attnmesh.decoding.decode_call import decode
from attnmesh.errors import KernelError, ShapeError
from attnmesh.guard.agreement import Agreement, Fields
from attnmesh.hf.cache.folder_layers import open_layers, recover_cache, restore_cache, save_cache
from attnmesh.hf.cache.history import CacheHistory
from attnmesh.hf.cache.layer import ShardedLayer, TailLayer
from attnmesh.hf.cache.rank_shares import agreed_rank_shares, prompt_layout
from attnmesh.hf.cache.settings import CacheSettings
from attnmesh.hf.cache.state_layer import StateLayer, make_layers
from attnmesh.hf.cache.stored_layers import StoredLayers
from attnmesh.hf.models import window_of
from attnmesh.mesh.axes import RankMesh

BLOCK, LONG_BLOCK = 16, 128
"""Consecutive tokens that one rank holds, of a short and of a long prompt."""

PREFILL_ROUNDS = 6
"""Rounds of blocks in a long prompt, at least: ranks differ by less than a sixth of their tokens."""


class ShardedCache(StoredLayers):
    """Sharded `past_key_values` of a model with `attn_implementation="attnmesh"`.

    Every rank holds a share of the tokens and makes the same calls.

    Args:
        config: The model's configuration.
        mesh: The mesh that shares the tokens; None for one device.
        capacity: Tokens to allocate for; None to grow as tokens come, by copying.
        block: Consecutive tokens that one rank holds. By default 16, or 128 if the first prompt is long: runs of 128
            tokens attend faster.
        merge: How `attnmesh.decode` merges partial results of ranks.
        output: "heads" if the same ranks share weights by `tensor_parallel(output="heads")`.
        reproducible: True for bits that do not depend on the number of ranks, as in `attnmesh.decode`. All ranks read
            a prompt together, 16 tokens at a time.
        kernel: The kernel of `attnmesh.decode` and `attnmesh.attention`.
        exchange: How `attnmesh.attention` exchanges keys in prefill.
        checked: When ranks compare their calls, as in `attnmesh.attention` and `attnmesh.KVCache`.
        copies: Ranks that hold each token, as in `attnmesh.KVCache`.
        windows: True to keep no more tokens of a sliding or chunked layer than its window. False keeps all tokens, so
            that a turn can branch off at any token without computing its prefix again.
        keep: Tokens that `crop` may remove from a layer that keeps its window; more, within the last forward pass.
        storage: "int8" or "fp8_e4m3" to store keys and values in 8 bits, as in `attnmesh.KVCache`. The first forward
            pass attends its own keys before they are rounded; later tokens attend the stored ones.
        window_storage: The `storage` of layers with a window of 1,024 tokens or less: they lose most and hold least.
        shares: Ratios of the tokens of each rank along queries and keys, as in `attnmesh.KVCache`; "auto" to measure
            them. A prompt's tokens are computed in this ratio too. With `capacity`, "auto" gives no rank more keys than
            its memory holds.
        folder: Folder whose files are the keys and values, as in `attnmesh.KVCache`. The cache begins with the tokens
            that are there, and layers with a window keep all of theirs.
        hot: Newest tokens to hold on the device, as in `attnmesh.KVCache`, in each layer that keeps all tokens.

    Raises:
        InputError: A layer of the model is not supported, or ranks differ in an argument.

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
        block: int | None = None,
        merge: str = "auto",
        output: str = "replicated",
        reproducible: bool = False,
        kernel: str = "auto",
        exchange: str = "auto",
        checked: bool | None = None,
        copies: int = 1,
        windows: bool = True,
        keep: int = 0,
        storage: str | None = None,
        window_storage: str | None = None,
        shares: Sequence[float] | str | None = None,
        folder: str | Path | None = None,
        hot: int | None = None,
    ) -> None:
        given = CacheSettings(
            capacity=capacity,
            block=block,
            merge=merge,
            output=output,
            reproducible=reproducible,
            kernel=kernel,
            exchange=exchange,
            checked=checked,
            copies=copies,
            windows=windows,
            keep=keep,
            storage=storage,
            window_storage=window_storage,
            shares=shares,
            folder=folder,
            hot=hot,
        )
        rank_mesh = RankMesh.of(mesh)
        with Agreement(rank_mesh, "ShardedCache", vars(given)):
            given.check(config, rank_mesh.shape)
        self.config = config.get_text_config(decoder=True)
        self.stock_window = None if getattr(self.config, "layer_types", None) else window_of(config)
        """Tokens that the model's stock cache keeps in all layers; None if it keeps all, or differs by layer."""
        self.mesh, self.ranks = mesh, rank_mesh.ranks
        self.block_is_free = block is None and not reproducible
        tokens = None if capacity is None else int(capacity)
        rank_shares = agreed_rank_shares(config, mesh, shares, tokens, storage)
        in_windows = windows and folder is None
        in_use = replace(given, capacity=tokens, block=int(block or BLOCK), windows=in_windows, shares=rank_shares)
        self.settings = replace(in_use, folder=None)
        self.history = CacheHistory()
        self._length = 0
        """Tokens of a model without attention, whose layers count none."""
        super().__init__(layers=make_layers(self.config, self))
        if folder is not None:
            open_layers(self, folder)

    def choose_block(self, tokens: int) -> None:
        """Choose the block, if it was not given, by the length of the first prompt."""
        if self.block_is_free and not self.kv_caches:
            block = LONG_BLOCK if tokens >= PREFILL_ROUNDS * LONG_BLOCK * self.ranks else BLOCK
            self.settings = replace(self.settings, block=block)

    @property
    def layout(self) -> Striped:
        """Layout of a prompt, in which each rank keeps the keys that it computes."""
        return prompt_layout(self.block, self.ranks, self.shares)

    @property
    def round_tokens(self) -> int:
        """Tokens that all ranks compute in turn before the first one computes again."""
        return self.layout.turns(self.ranks)[0].period

    @property
    def head_ranks(self) -> int:
        """Ranks that split the heads of an output; 1 if each rank gets those of its queries."""
        return self.ranks if self.settings.output == "heads" else 1

    # --- lengths ---

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of cached tokens, over all ranks."""
        layers = self.attention_layers
        if not layers:
            return self._length
        layer = self.layers[layer_idx]
        return (layer if isinstance(layer, ShardedLayer) else layers[0]).get_seq_length()

    def set_length(self, tokens: int) -> None:
        """Set the number of cached tokens of a model without attention."""
        self._length = tokens

    @property
    def next_position(self) -> int:
        """Position of the next token, if it is text. Images before it may have shifted it."""
        return int(self.get_seq_length()) + (0 if self.history.shift is None else self.history.shift.shift)

    @property
    def batch_size(self) -> int:
        """Number of sequences; -1 before the first tokens."""
        sizes = [layer.kv_cache.config.batch for layer in self.attention_layers if layer.is_made]
        return next(iter([*sizes, *map(len, self.states.values())]), -1)

    @property
    def held(self) -> int:
        """Tokens of each sequence that this rank holds, in the layer that holds most."""
        return max((layer.kv_cache.used for layer in self.attention_layers if layer.is_made), default=0)

    @property
    def held_bytes(self) -> int:
        """Bytes of keys, values and recurrent states that this rank holds, over all layers."""
        keys = sum(kv_cache.own_shard.token_bytes for kv_cache in self.kv_caches)
        keys += sum(layer.held_bytes for layer in self.cross_layers)
        return keys + sum(x.numel() * x.element_size() for x in self.states.values())

    # --- attending ---

    @property
    def is_linear(self) -> list[bool]:
        """Return for each layer whether it holds recurrent states alone, as masks of transformers ask."""
        return [isinstance(layer, StateLayer) and not isinstance(layer, ShardedLayer) for layer in self.layers]

    def attend(self, q: Tensor, kv_cache: KVCache, **options: Any) -> Tensor:
        """Return attention of the last tokens over all tokens of one layer's cache, on all ranks.

        `options` are the arguments of `decode` that the model sets: mask, scale, softcap and sinks.
        """
        return decode(q, kv_cache, **self.decode_options(q), **options)

    def decode_options(self, q: Tensor) -> dict[str, Any]:
        """Return the options of `decode` that the cache sets. Raise if ranks share heads and q has not all of them."""
        if self.head_ranks > 1:
            heads = self.config.num_attention_heads
            if q.shape[1] != heads:
                fix = 'shard the model by tensor_parallel(output="heads")'
                raise ShapeError('ShardedCache output="heads"', f"queries of all {heads} heads", f"{q.shape[1]}", fix)
        settings = self.settings
        options = {"merge": settings.merge, "output": settings.output, "kernel": settings.kernel}
        return {**options, "reproducible": settings.reproducible}

    # --- changing ---

    @property
    def crops_anywhere(self) -> bool:
        """True if the cache can be cropped to any of its tokens: no layer has a state, or forgets."""
        forget_masks = [kv_cache.local_shards.forget_mask for kv_cache in self.kv_caches]
        return not self.irreversible_layers and all(mask is None for mask in forget_masks)

    def restorable_length(self, length: int) -> int:
        """Return `length` if all layers can go back to as many tokens, and 0 if a layer cannot."""
        if self.history.is_mixed:
            return 0
        if self.irreversible_layers:
            return length if length == self.get_seq_length() else 0
        serves = all(kv_cache.local_shards.serves(length) for kv_cache in self.kv_caches)
        return length if serves and length >= self.history.lowest else 0

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last tokens of all layers.

        Args:
            tokens_to_remove: The number of tokens, negated, as transformers passes it.

        Raises:
            ShapeError: The number is positive, or no int, or a layer has forgotten what it needs there.
        """
        length = self.get_seq_length()
        with self._agreement("crop", {"by": tokens_to_remove}):
            if type(tokens_to_remove) is not int or tokens_to_remove > 0:
                fix = "pass length - cache.get_seq_length() to keep so many tokens"
                raise ShapeError("crop", "0 or a negative number", repr(tokens_to_remove), fix)
            remaining = max(0, length + tokens_to_remove)
            if self.restorable_length(remaining) != remaining:
                expected = "tokens that layers with a window still know"
                fix = "make the cache with windows=False, or a larger keep="
                if self.irreversible_layers:
                    expected, fix = "all tokens or none, as states cannot go back", "make a new cache"
                raise ShapeError("ShardedCache crop", expected, f"{remaining} of {length} tokens", fix)
        if (self.irreversible_layers or self.cross_layers) and not remaining:
            self.reset()
            return
        super().crop(tokens_to_remove)
        if self.tokens is not None:
            self.tokens = self.tokens[:, : self.get_seq_length()]

    def reset(self) -> None:
        """Drop all tokens."""
        if self.folder is None:
            super().reset()
        for kv_cache in self.kv_caches:  # caches in a folder stay
            kv_cache.truncate(0)
        self.tokens = None  # in a folder, too
        self.history, self._length = CacheHistory(), 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace sequence b by sequence `beam_idx[b]`. The batch may grow or shrink.

        Args:
            beam_idx: Indices into the batch.

        Raises:
            InputError: An index is out of range, or ranks differ. No layer has changed then.
        """
        kv_caches = self.kv_caches
        index = beam_idx.long() if isinstance(beam_idx, Tensor) else beam_idx
        with self._agreement("reorder", lambda: {"to": beam_idx.tolist()}):
            for kv_cache in kv_caches:
                kv_cache.check_order(index)
        for kv_cache in kv_caches:
            kv_cache.saved_pieces.finish_writing()
        if self.history.image_fingerprints is not None and self.batch_size > 1:
            self.tokens = None  # fingerprints of images do not say which sequence each belongs to
        self._reorder_layers(index)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence. The beams of one prompt share its keys.

        Args:
            repeats: How often each sequence stands in the new batch.
        """
        if self.get_seq_length() and repeats > 1:
            if self.kv_caches and self.kv_caches[0].config.batch == 1 and self.kv_caches[0].saved_pieces.at_rest:
                if self.folder is not None:
                    self.flush()  # its own tokens stay there
                for layer in self.attention_layers:
                    layer.map_kv_caches(KVCache.fork)
                self.settings = replace(self.settings, folder=None)  # the new tokens are in memory
            self.reorder_cache(torch.arange(self.batch_size, device="cpu").repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some sequences.

        Args:
            indices: Their indices in the batch.
        """
        self.reorder_cache(indices)

    def fork(self) -> "ShardedCache":
        """Return a cache of the same tokens for another turn, which shares memory as `KVCache.fork` does.

        Returns:
            The other cache.

        >>> from transformers import LlamaConfig
        >>> cache = ShardedCache(LlamaConfig(num_hidden_layers=2, attn_implementation="attnmesh"), None)
        >>> len(cache.fork())
        2
        """
        return self._copy(KVCache.fork)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShardedCache":
        """Return an independent cache on the same mesh, for two continuations of one prefix."""
        return self._copy(lambda kv_cache: deepcopy(kv_cache, memo))

    def _agreement(self, name: str, fields: Fields) -> AbstractContextManager[object]:
        """Return the agreement on a call; without layers that share tokens there is none."""
        kv_caches = self.kv_caches
        return kv_caches[0].guard.agreement(name, fields) if kv_caches else nullcontext()

    def _copy(self, copy_layer: Callable[[KVCache], KVCache]) -> "ShardedCache":
        """Return a cache whose layers are copies."""
        copied = object.__new__(type(self))
        settings = replace(self.settings, folder=None)
        copied.__dict__ = {**self.__dict__, "layers": [], "settings": settings, "history": copy(self.history)}
        for layer in self.layers:
            layer_copy = copy(layer)
            if isinstance(layer, ShardedLayer):
                layer_copy.cache = copied
                layer_copy.map_kv_caches(copy_layer)
            if isinstance(layer, (StateLayer, TailLayer)):
                layer_copy.set_tensors(layer.tensors)
            copied.layers.append(layer_copy)
        return copied

    # --- saving ---

    def save(
        self, path: str | Path, *, more: Mapping[str, Tensor] | None = None, note: str = "", wait: bool = True
    ) -> Saving:
        """Write all layers to a folder, as `KVCache.save` writes one.

        Args:
            path: A folder that all ranks can write to.
            more: Further tensors, which `restore` returns.
            note: Text, which `restore` returns.
            wait: False to return while the files are written.

        Returns:
            The running save. Its `wait` returns when the files are complete.

        Raises:
            InputError: A layer is empty, the folder cannot be written, or ranks differ.
        """
        return save_cache(self, path, more, note=note, wait=wait)

    def restore(
        self, path: str | Path, *, device: torch.device | str | None = None, capacity: int | None = None
    ) -> tuple[dict[str, Tensor], str]:
        """Replace the cached tokens by those in a folder. Every rank calls it, on any number of ranks.

        Args:
            path: A folder that `save` wrote.
            device: The device of the tensors; None for the mesh's device.
            capacity: Tokens to allocate for; None for the cache's capacity.

        Returns:
            The further tensors and the note that were saved.

        Raises:
            InputError: The folder has no complete save of a cache of this model, or ranks differ.
        """
        return restore_cache(self, path, device, capacity)

    def flush(self) -> None:
        """Write the tokens on the device to the folder too, as `KVCache.flush` does. Every rank calls it."""
        for kv_cache in self.kv_caches if self.hot is not None else ():
            kv_cache.flush()

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
        """Return the cache on another mesh after ranks were lost, as `attnmesh.recover` does.

        Continue with `generate(model, cache.tokens, cache=cache)`.

        Args:
            cache: The cache of a surviving rank; None on a new rank.
            config: The configuration of the cache's model.
            mesh: The new mesh.
            device: The device of the tensors; None for the mesh's device.
            options: Options of the new `ShardedCache`.

        Returns:
            The new cache. Its `tokens` are the ids to continue from; None if the prompt had not been computed.

        Raises:
            InputError: Tokens were lost with their ranks, or the cache is of another model.
        """
        for name in ("folder", "hot"):
            if options.get(name) is not None:
                raise KernelError("ShardedCache.recover", "a cache in one memory", f"{name}=", f"leave {name}= out")
        recovered = cls(config, mesh, **options)
        recover_cache(cache, recovered, config, device)
        return recovered
