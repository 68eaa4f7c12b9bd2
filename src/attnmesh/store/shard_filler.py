"""Fill shards with rows of files, whichever ranks wrote them: each token of each head once."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from attnmesh.cache.cache_shard import CacheShard
from attnmesh.errors import StoreError
from attnmesh.mesh.axes import Axis, intersect
from attnmesh.store.layer_files import kv_names
from attnmesh.store.tensor_file import DAMAGED_FIX

ReadTensor = Callable[[str, torch.dtype, tuple[int, ...]], Tensor]
"""Function that reads a tensor of a file by its name, and raises unless it has this dtype and shape."""


class ShardFiller:
    """Shards of layers that keep the same tokens and key heads, which take those from `start` up to `stop`.

    The first slot of a shard is that of `oldest_kept_token`, or of the first token after it that the rank holds.
    """

    def __init__(self, shards: Mapping[int, CacheShard], start: int, stop: int, oldest_kept_token: int) -> None:
        self.shards = shards
        self.start = start
        self.stop = stop
        self.first_shard = next(iter(shards.values()))
        self.turn = self.first_shard.turn
        self.own_heads = self.first_shard.heads_axis.slice_of(self.first_shard.config.kv_heads)
        self.forgotten = self.turn.count(oldest_kept_token)
        token_count = self.turn.count(stop) - self.turn.count(start)
        head_count = self.own_heads.stop - self.own_heads.start
        self.is_filled = torch.zeros(head_count, token_count, dtype=torch.bool, device="cpu")

    def put(self, token_index: Tensor, file_axis: Axis, read: ReadTensor, file_name: str) -> None:
        """Copy this rank's heads and tokens of a file written at `file_axis` of the heads."""
        file_heads = file_axis.slice_of(self.first_shard.config.kv_heads)
        to, source = intersect(self.own_heads, file_heads)
        is_wanted = self.turn.holds(token_index) & (token_index >= self.start) & (token_index < self.stop)
        own_indices = is_wanted.nonzero().flatten()
        if to.start >= to.stop or not len(own_indices):
            return
        own_token_index = token_index[own_indices]
        columns = self.turn.slot(own_token_index) - self.turn.count(self.start)
        if bool(self.is_filled[to, columns].any()) or len(columns.unique()) < len(columns):
            raise StoreError("load", "every token once", f"some twice in {file_name}", DAMAGED_FIX)
        self.is_filled[to, columns] = True
        file_head_count = file_heads.stop - file_heads.start
        device = self.first_shard.device
        slots = (self.turn.slot(own_token_index) - self.forgotten).to(device)
        for layer, shard in self.shards.items():
            for name, x in zip(kv_names(layer), shard.kv_tensors, strict=False):
                rows = read(name, x.dtype, (len(x), file_head_count, len(token_index), x.shape[3]))
                x[:, to].index_copy_(2, slots, rows[:, source, own_indices].to(device))
            shard.token_index.index_copy_(0, slots, own_token_index.to(device))

    def check_all_filled(self, name: str) -> None:
        """Raise unless each of this rank's heads and tokens was put."""
        if not bool(self.is_filled.all()):
            given = f"{int(self.is_filled.all(0).sum())} of this rank's {self.is_filled.shape[1]} tokens in {name}"
            raise StoreError("load", "every token once", given, DAMAGED_FIX)
