"""The attention backend of one model, in diffusers' registry under a name of its own while the model is on the mesh."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.comm.topology import dist_all_gather_ints
from attnmesh.core.layout import Split
from attnmesh.core.mask import Causal, Full
from attnmesh.diffusers.diffusers_names import AttentionBackendName, BackendRegistry, dispatch_attention_fn
from attnmesh.diffusers.tokens import Streams
from attnmesh.errors import KernelError, MaskError
from attnmesh.guard.agreement import Agreement
from attnmesh.mesh_attention.attention import attention

SUBJECT = "attnmesh.diffusers attention"

Backend = Callable[..., Tensor]


def register(name: str, backend: Backend) -> Any:
    """Add a backend to diffusers' registry. Return its name, in the type that diffusers asks for.

    The enumeration of diffusers' names is fixed, so the member is made beside it.
    """
    member = str.__new__(AttentionBackendName, name)
    member._name_, member._value_ = name.upper(), name
    BackendRegistry.register(member, supports_context_parallel=True)(backend)
    return member


def unregister(member: Any) -> None:
    """Remove a backend from diffusers' registry."""
    for table in (BackendRegistry._backends, BackendRegistry._constraints, BackendRegistry._supported_arg_names):
        table.pop(member, None)
    BackendRegistry._supports_context_parallel.discard(member.value)


def backend_of(
    device_mesh: DeviceMesh | None, streams: Streams, exchange: str, kernel: str, checked: bool | None
) -> Backend:
    """Return the backend of a model whose tokens are split over the ranks of a mesh."""
    options: dict[str, Any] = {"mesh": device_mesh, "exchange": exchange, "kernel": kernel, "checked": checked is True}

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        _parallel_config: Any = None,
    ) -> Tensor:
        """Return attention of this rank's queries over all ranks' keys; tensors are (batch, tokens, heads, dim)."""
        if _parallel_config is None:  # the layer has whole keys
            arguments = attn_mask, dropout_p, is_causal, scale, enable_gqa
            out: Tensor = dispatch_attention_fn(query, key, value, *arguments, backend=None)
            return out
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        _check_call(dropout_p, attn_mask, is_causal=is_causal, streams=len(streams.lengths))
        q_sizes, k_sizes = streams.sizes(q.shape[2], k.shape[2])
        mask = Causal() if is_causal else Full()
        call = options | {"mask": mask, "layout": Split(q_sizes), "length": sum(q_sizes), "scale": scale}
        if attn_mask is None:
            out = attention(q, k, v, key_layout=Split(k_sizes), key_length=sum(k_sizes), **call)
        else:
            out = _attend_visible(q, k, v, attn_mask, streams, call)
        return out.transpose(1, 2)

    return attend


def _check_call(dropout: float, mask: Tensor | None, *, is_causal: bool, streams: int) -> None:
    if dropout:
        raise KernelError(SUBJECT, "dropout_p=0: attention is exact", f"{dropout}", "set the model's dropout to 0")
    if mask is not None and is_causal:
        raise MaskError(SUBJECT, "a mask of keys or is_causal=True", "both", "pass one of them")
    if is_causal and streams > 1:
        given, fix = f"{streams} streams, of which each rank holds parts", "take the model off the mesh"
        raise MaskError(SUBJECT, "tokens of one stream under is_causal=True", given, fix)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend_visible(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor, streams: Streams, options: dict[str, Any]
) -> Tensor:
    """Return attention over the keys that a mask shows. Keys that it hides do not travel.

    Sequences with different masks are attended one after the other.
    """
    with Agreement(streams.mesh, SUBJECT, {"mask": [attn_mask.ndim, attn_mask.dtype], "batch": len(q)}):
        visible = visible_keys(attn_mask, len(q), q.shape[2], k.shape[2])
    is_equal = bool((visible == visible[:1]).all())
    table = dist_all_gather_ints([is_equal, *visible.sum(1).tolist()], streams.mesh.axes)
    rows = [slice(None)] if all(row[0] for row in table) else [slice(b, b + 1) for b in range(len(q))]
    outputs = []
    for index, row in enumerate(rows):
        sizes = tuple(counts[1 + index] for counts in table)
        indices = visible[row][0].nonzero().flatten()
        keys, values = (x[row].index_select(2, indices) if len(indices) < x.shape[2] else x[row] for x in (k, v))
        outputs.append(attention(q[row], keys, values, key_layout=Split(sizes), key_length=sum(sizes), **options))
    return torch.cat(outputs)


def visible_keys(attn_mask: Tensor, batch: int, queries: int, keys: int) -> Tensor:
    """Return which of this rank's keys each sequence sees, (batch, keys). Raise unless a mask is one of keys.

    A mask of keys is boolean, (batch, keys) or (batch, 1, 1, keys). A square one, (batch, 1, queries, keys), may also
    hide padded queries. Their outputs are not used.
    """
    mask = attn_mask[:, None, None] if attn_mask.ndim == 2 else attn_mask[:, None] if attn_mask.ndim == 3 else attn_mask
    given, fix = f"{attn_mask.dtype} {list(attn_mask.shape)}", "pass the model a boolean mask of keys, (batch, keys)"
    expected = f"a boolean mask of {keys} keys of {batch} sequences"
    fits = mask.ndim == 4 and mask.dtype == torch.bool and mask.shape[1] == 1 and mask.shape[3] == keys
    if not fits or mask.shape[0] not in (1, batch) or mask.shape[2] not in (1, queries):
        raise MaskError(SUBJECT, expected, given, fix)
    mask = mask[:, 0].expand(batch, -1, -1)
    if mask.shape[1] == 1:
        return mask[:, 0]
    visible = mask.any(1)
    is_padding = ~mask.any(2, keepdim=True)  # rows of padding see nothing, which changes no row that is seen
    if not bool((is_padding | (mask == visible[:, None])).all()):
        raise MaskError(SUBJECT, expected, f"{given}, in which queries see different keys", fix)
    return visible
