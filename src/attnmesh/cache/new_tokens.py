"""New tokens of a cache: their checks, and those of a known signature, which are appended in one native call."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnmesh.cache.cache_config import CacheConfig
from attnmesh.cache.cache_shard import CacheShard
from attnmesh.cache.call_checks import check_captured, check_new
from attnmesh.cache.local_shards import LocalShards
from attnmesh.checks.argument_checks import check_positions, check_readable
from attnmesh.comm.p2p import all_to_all, meta_like
from attnmesh.core.digest import chained_digest, fingerprints
from attnmesh.errors import ShapeError
from attnmesh.kernels.traced import are_plain
from attnmesh.mesh.axes import RankMesh
from attnmesh.mesh.shard_marks import check_equal_cuts, check_not_cut, shard_marks
from attnmesh.runtime.memo import Memo
from attnmesh.runtime.tensors import Tensors


def tensors_to_append(k: Tensor, v: Tensor | None) -> Tensors:
    """Return the tensors of new tokens that a cache stores."""
    return (k,) if v is None else (k, v)


def swap_tokens_for_heads(
    new: Tensors, positions: Tensor, counts: Sequence[int], mesh: RankMesh
) -> tuple[Tensors, Tensor]:
    """Return this rank's heads of the tokens of all ranks along the heads axis; `counts` are tokens per shard."""
    axis, shape = mesh.heads, mesh.shape
    if axis.size == 1:
        return new, positions
    sends = [(*part, positions) for part in zip(*(x.chunk(axis.size, 1) for x in new), strict=True)]
    shards = [shape.shard(head_index, mesh.queries.index, mesh.keys.index) for head_index in range(axis.size)]
    shapes = [tuple(meta_like(x, counts[shard], 2 if x.ndim == 4 else 0) for x in sends[0]) for shard in shards]
    received = zip(*all_to_all(sends, shapes, axis), strict=True)
    *heads, positions = (torch.cat(x, dim=-2 if x[0].ndim == 4 else 0) for x in received)
    return tuple(heads), positions


class NewTokens(NamedTuple):
    """Keys and values of new tokens, without values where they are not stored, and False for padding."""

    k: Tensor
    v: Tensor | None
    token_mask: Tensor | None

    def fields(self) -> Mapping[str, object]:
        """Return what ranks compare of tokens that are the same on all."""
        return fingerprints(self._asdict())

    def padding_fields(self) -> Mapping[str, object]:
        """Return what ranks compare of the padding alone, where each has tokens of its own."""
        shape = None if self.token_mask is None else list(self.token_mask.shape)
        return {"padding": shape, "checksum": chained_digest(0, self.token_mask)}

    def check(self, config: CacheConfig, device: torch.device) -> None:
        """Raise unless these are new tokens with all heads, equal on every rank of a cache."""
        k, v, token_mask = self
        check_new("append", config, k, v, device)
        check_not_cut("append", {"k": k, "v": v}, "call append_shard with its positions, on a cache of its mesh")
        self.check_token_mask("append", config, k.shape[2])
        check_captured("append", token_mask, device)

    def check_shard(self, config: CacheConfig, device: torch.device, positions: Tensor, ranks: int) -> None:
        """Raise unless these are the new tokens of one of `ranks` ranks, at `positions`."""
        k, v, _ = self
        check_new("append_shard", config, k, v, device)
        check_positions("append_shard positions", positions, k.shape[2])
        check_equal_cuts("append_shard", {"k": k, "v": v, "positions": positions})
        if ranks == 1:
            check_not_cut("append_shard", {"k": k, "v": v}, "make the cache with the mesh of am.shard")
        self.check_token_mask("append_shard", config, None)

    def check_token_mask(self, subject: str, config: CacheConfig, tokens: int | None) -> None:
        """Raise unless the mask has one bool per token; `tokens=None` accepts any number."""
        token_mask = self.token_mask
        if token_mask is None:
            return
        shape = tuple(token_mask.shape) if isinstance(token_mask, Tensor) else ()
        expected_shape = (config.batch, shape[-1] if tokens is None and len(shape) == 2 else tokens)
        if not isinstance(token_mask, Tensor) or token_mask.dtype != torch.bool or shape != expected_shape:
            given = f"{token_mask.dtype} {shape}" if isinstance(token_mask, Tensor) else type(token_mask).__name__
            fix = "pass attention_mask.bool(), of the new tokens alone"
            raise ShapeError(f"{subject} token_mask", f"torch.bool {expected_shape}", given, fix)
        check_readable(f"{subject} token_mask", token_mask, "pass attention_mask.bool(), with its values")


def try_append_known(signatures: Memo[bool], k: Tensor, v: Tensor | None, shards: LocalShards) -> bool:
    """Append tokens of a known signature that fit, or return False: then they have to be checked."""
    if not signatures or append_signature(k, v, shards.own) not in signatures:
        return False
    if (marks := shard_marks()) and (id(k) in marks or id(v) in marks):
        return False  # a shard, which is refused
    return shards.try_append_plain(tensors_to_append(k, v))


def append_signature(k: Tensor, v: Tensor | None, shard: CacheShard) -> tuple[Any, ...] | None:
    """Return all that the checks of new tokens depend on; None for tensors that are not plain, such as traced ones."""
    if not are_plain(*tensors_to_append(k, v), on_gpu=shard.on_gpu):
        return None
    of_keys = k.shape, k.dtype, k.get_device(), shard.config
    return of_keys if v is None else (*of_keys, v.shape, v.dtype, v.get_device())
