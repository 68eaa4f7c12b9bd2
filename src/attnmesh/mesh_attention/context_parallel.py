"""Attention on a mesh as a style of PyTorch's `parallelize_module`, for models that call its attention function.

    parallelize_module(model, mesh["cp"], {"layers.*.attention": am.ContextParallel(layout=am.Zigzag())})

Inside the modules of the plan, `scaled_dot_product_attention` is attention over the shards of all ranks.
"""

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn.functional import multi_head_attention_forward, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from attnmesh.core.layout import Layout, Zigzag, check_layout
from attnmesh.core.mask import Causal, Full, Mask, check_mask
from attnmesh.errors import ArgumentError, InputError, KernelError, MaskError, short
from attnmesh.guard.agreement import Agreement, may_compare
from attnmesh.mesh.axes import RankMesh
from attnmesh.mesh_attention.attention import attention
from attnmesh.mesh_attention.auto_choices import check_auto
from attnmesh.setup.init_mesh import split_mesh

SUBJECT = "ContextParallel"


class ContextParallel(ParallelStyle):
    """Attention over shards of the sequence, in modules that call `scaled_dot_product_attention`.

    Shard the model's inputs along the sequence with `am.shard`, the positions of rotary embeddings among them. Shards
    that PyTorch's own context parallelism balances for causal masks are `Zigzag()`.

    Args:
        mask: Which keys a query sees. Left out, it is causal where the model passes `is_causal=True`, else full.
        layout: The tokens that each rank holds, or "auto" for the choice of `shard(layout="auto", mask=mask)`.
        shape: Ranks along heads, queries and keys, "auto" for the shape that sends least, or None to take the mesh as
            it is. "auto" and a shape split a mesh of one axis, which all ranks of the world do together.
        q_heads: Query heads of a rank of the model, for "auto".
        kv_heads: Key heads of a rank of the model; as many as query heads unless they are given.
        length: Tokens of the whole sequence. If it is left out, ranks count them at each call. Compiled models need it.
        exchange: How keys travel, as in `attention`.

    Raises:
        InputError: An argument is not supported. The model's forward raises it if a module does not call
            `scaled_dot_product_attention`, or calls it with a mask tensor, dropout or other dims than (batch, heads,
            tokens, dim), through `nn.MultiheadAttention`, or in a checkpoint of its own, whose backward pass would
            attend to this rank's tokens alone.

    >>> import torch
    >>> ContextParallel(mask=Causal()).layout
    Zigzag()
    """

    def __init__(
        self,
        mask: Mask | None = None,
        layout: Layout | str = Zigzag(),
        shape: Sequence[int] | str | None = "auto",
        q_heads: int = 1,
        kv_heads: int | None = None,
        *,
        length: int | None = None,
        exchange: str = "auto",
    ) -> None:
        super().__init__()
        if mask is not None:
            check_mask(f"{SUBJECT} mask", mask)
        check_layout(f"{SUBJECT} layout", layout, auto=True)
        check_auto(SUBJECT, layout, mask, ranks=2)  # on one rank too: a style is for meshes
        self.mask = mask
        self.layout = layout
        self.shape = shape
        self.heads = (q_heads, kv_heads)
        self.length, self.exchange = length, exchange
        self.device_meshes: dict[DeviceMesh, DeviceMesh] = {}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Replace the module's forward by one whose attention is over the mesh."""
        if device_mesh not in self.device_meshes:
            splits = self.shape is not None and device_mesh.ndim == 1
            split = split_mesh(device_mesh, self.shape, *self.heads) if splits else device_mesh  # type: ignore[arg-type]
            self.device_meshes[device_mesh] = split
        device_mesh = self.device_meshes[device_mesh]
        RankMesh.of(device_mesh)
        module.forward = self._on_mesh(module.forward, type(module).__name__, device_mesh)
        return module

    def _on_mesh(self, forward: Callable[..., Any], module: str, device_mesh: DeviceMesh) -> Callable[..., Any]:
        @wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            mode = _AttentionMode(self, device_mesh, torch.is_grad_enabled())
            with mode:
                out = forward(*args, **kwargs)
            if mode.calls == 0:
                given, fix = f"{module}, which does not", "plan the module whose forward calls it"
                raise KernelError(SUBJECT, "a module that calls scaled_dot_product_attention", given, fix)
            return out

        return run

    def attend(
        self,
        device_mesh: DeviceMesh,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Return what `scaled_dot_product_attention` with these arguments is on the whole sequence."""
        try:
            _check_call(query, key, attn_mask, dropout_p, enable_gqa=enable_gqa)
        except InputError as error:
            is_compared = may_compare(torch.device(device_mesh.device_type))
            Agreement(RankMesh.of(device_mesh), "attention", is_compared=is_compared).raise_on_all(error)
        mask = (Causal() if is_causal else Full()) if self.mask is None else self.mask
        options: dict[str, Any] = {"mask": mask, "layout": self.layout, "exchange": self.exchange, "scale": scale}
        return attention(query, key, value, mesh=device_mesh, length=self.length, key_length=self.length, **options)


def _check_call(query: Tensor, key: Tensor, attn_mask: Tensor | None, dropout_p: float, *, enable_gqa: bool) -> None:
    """Raise unless attention over a mesh can be what these arguments of PyTorch's function ask for."""
    if attn_mask is not None:
        fix = "pass is_causal, or mask= of ContextParallel"
        raise MaskError(f"{SUBJECT} attn_mask", "no mask tensor", short(attn_mask), fix)
    if dropout_p:
        raise KernelError(f"{SUBJECT} dropout_p", "attention without dropout", str(dropout_p), "set dropout to 0")
    has_heads = query.ndim == key.ndim == 4  # attention refuses other dims, with their cause
    if has_heads and query.shape[1] != key.shape[1] and not enable_gqa:
        given, fix = f"{query.shape[1]} and {key.shape[1]}", "pass enable_gqa=True, or repeat the key heads"
        raise ArgumentError(SUBJECT, "as many key heads as query heads without enable_gqa", given, fix)


class _AttentionMode(TorchFunctionMode):
    """Mode in which PyTorch's attention function is attention over a mesh."""

    def __init__(self, style: ContextParallel, device_mesh: DeviceMesh, with_grad: bool) -> None:
        super().__init__()
        self.style, self.device_mesh, self.with_grad, self.calls = style, device_mesh, with_grad, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is multi_head_attention_forward:  # PyTorch runs it with the mode off
            expected, fix = "a module that calls scaled_dot_product_attention itself", "call it in a module of your own"
            raise KernelError(SUBJECT, expected, "nn.MultiheadAttention, whose attention is of one rank", fix)
        if func is not scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.calls += 1
        if self.with_grad and not torch.compiler.is_compiling() and _in_checkpoint():
            expected, fix = "a checkpoint around the modules of the plan", 'plan those inside, as "layers.*.attention"'
            raise KernelError(SUBJECT, expected, "one inside, whose backward leaves it", fix)
        return self.style.attend(self.device_mesh, *args, **(kwargs or {}))  # the mode is off in here


def _in_checkpoint() -> bool:
    """Return whether a planned module calls a checkpoint, which calls attention again when the mode is off."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if file == checkpoint.__file__ or (file == __file__ and name == "run"):
            return file == checkpoint.__file__
        frame = frame.f_back
    return False
