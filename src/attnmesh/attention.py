"""Attention over a mesh of devices, as a layer of a model calls it; on one device it is `attend` and its sinks."""

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.errors import DtypeError, KernelError, LayoutError, ShapeError
from attnmesh.inputs import check_one_device, check_qkv, check_scale, check_tensor
from attnmesh.kernel.attend import attend_op
from attnmesh.kernel.choose import check_kernel
from attnmesh.layout import Layout, Zigzag
from attnmesh.mask import FAR, Causal, Mask, check_mask

EXCHANGES = ("auto", "bulk", "pipelined", "ring")


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: DeviceMesh | None = None,
    mask: Mask = Causal(),
    layout: Layout = Zigzag(),
    exchange: str = "auto",
    scale: float | None = None,
    kernel: str = "auto",
    sinks: Tensor | None = None,
    length: int | None = None,
    key_layout: Layout | None = None,
    key_length: int | None = None,
) -> Tensor:
    """Attention of this rank's queries over the keys of every rank: shards in, the same shard out.

    The mask is causal unless another is given. `sinks` is one learned logit a query head, which takes a share of the
    softmax and gives nothing. Keys of another sequence, cross-attention, say so by their `key_length`; the last queries
    of a longer sequence are a case for `attend`, which takes positions.

    On one device the shard is the whole, every layout is the order of the tokens and there is nothing to exchange. A
    mesh of several ranks is refused for now.

    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 2, 8, 4).unbind()
    >>> expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> torch.allclose(attention(q, k, v), expected, atol=1e-6)
    True
    """
    check_qkv("attention", q, k, v)
    check_mask("attention mask", mask, q.shape[2], k.shape[2])
    _check_mesh(mesh, exchange, layout, key_layout)
    _check_length("length", length, q)
    _check_length("key_length", key_length, k)
    _check_sinks(sinks, q)
    if q.shape[2] != k.shape[2] and key_length is None and min(mask.left, mask.right) < FAR:
        given = f"{q.shape[2]} queries, {k.shape[2]} keys and the mask {mask}"
        fix = f"use attend with q_positions, or say key_length={k.shape[2]} if the keys are another sequence from 0 on"
        raise ShapeError("attention", "as many queries as keys under a mask of positions", given, fix)
    scale = check_scale("attention", scale, q)
    check_kernel(kernel)
    out: Tensor = attend_op(q, k, v, sinks, None, None, mask.encode(), scale, kernel)[0]
    return out


def _check_mesh(mesh: DeviceMesh | None, exchange: str, layout: Layout, key_layout: Layout | None) -> None:
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        fix = "make one with torch.distributed.device_mesh.init_device_mesh"
        raise LayoutError("attention mesh", "a DeviceMesh or None", type(mesh).__name__, fix)
    if mesh is not None and mesh.size() > 1:
        given = f"a mesh of {mesh.size()} ranks"
        raise KernelError("attention mesh", "None or a mesh of one rank", given, "call attend on each shard and merge")
    if not isinstance(exchange, str) or exchange not in EXCHANGES:
        raise KernelError("attention exchange", f"one of {', '.join(EXCHANGES)}", repr(exchange), 'leave it at "auto"')
    for name, value in (("layout", layout), ("key_layout", layout if key_layout is None else key_layout)):
        if isinstance(value, type) or not hasattr(value, "positions"):
            fix = "make one by calling it, as in Zigzag()"
            raise LayoutError(f"attention {name}", "Contiguous(), Zigzag() or Striped()", repr(value), fix)


def _check_length(name: str, length: int | None, x: Tensor) -> None:
    if length is not None and (not isinstance(length, int) or length != x.shape[2]):
        given = f"{name}={length!r} with {x.shape[2]} tokens"
        raise ShapeError("attention", f"{name} to count the tokens given", given, f"leave {name} out on one device")


def _check_sinks(sinks: Tensor | None, q: Tensor) -> None:
    if sinks is None:
        return
    check_tensor("attention sinks", sinks)
    if not sinks.is_floating_point():
        raise DtypeError("attention sinks", "a tensor of floats", str(sinks.dtype), "give each query head one logit")
    if tuple(sinks.shape) != (q.shape[1],):
        fix = "give each query head one logit"
        raise ShapeError("attention sinks", f"shape ({q.shape[1]},)", f"shape {tuple(sinks.shape)}", fix)
    check_one_device("attention sinks", {"sinks": sinks, "q": q})
