"""`ContextParallel` and `split_mesh`: attention of plain models on a mesh equals PyTorch's on one device."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import attnmesh as am
from attnmesh import errors
from attnmesh.mesh.axes import RankMesh
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.tolerances import worst

HOW_TO = Path(__file__).parents[2] / "docs" / "howto.md"


class Layer(nn.Module):
    """Attention of grouped heads, as models of plain PyTorch have it."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(24, 24), nn.Linear(24, 16), nn.Linear(24, 24)
        self.inner = Inner(causal)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (6, 4)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (4, 4)).transpose(1, 2).chunk(2, 1)
        return x + self.o(self.inner(q, k, v).transpose(1, 2).flatten(-2))


class Inner(nn.Module):
    """The attention function as a module of its own."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=True, scale=0.7)


def make(causal: bool) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return nn.Sequential(Layer(causal), nn.RMSNorm(24), Layer(causal)).double()


def batch(length: int) -> tuple[Tensor, Tensor]:
    x, weight = torch.randn(2, 2, length, 24, generator=torch.Generator().manual_seed(5), dtype=torch.float64).unbind()
    return x, weight


def run(model: nn.Module, x: Tensor, weight: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the output, and the gradients of a loss that is a sum over tokens."""
    out = model(x)
    (out * weight).sum().backward()
    return out.detach(), [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@on_each_rank
def attend_on_mesh(
    length: int, causal: bool, plan: str, layout: Any, shape: Any, compiled: bool
) -> tuple[Tensor, list[Tensor]]:
    gc.collect()  # hooks on all modules are there as long as batches of other tests are
    world = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    model = make(causal)
    style = am.ContextParallel(layout=layout, shape=shape, q_heads=6, kv_heads=2, length=length if compiled else None)
    parallelize_module(model, world, dict.fromkeys((f"0.{plan}".rstrip("."), f"2.{plan}".rstrip(".")), style))
    run_model: Any = torch.compile(model, backend="aot_eager", fullgraph=plan == "inner") if compiled else model
    parts = [am.shard(x, world, layout=layout, dim=1) for x in batch(length)]
    out, gradients = run(run_model, *parts)
    for gradient in gradients:
        dist.all_reduce(gradient)
    return am.unshard(out, world, layout=layout, dim=1), gradients


CASES = [
    (2, 13, True, "inner", am.Zigzag(), "auto", False),
    (3, 14, False, "", am.Contiguous(), None, False),
    (4, 29, True, "", am.Zigzag(), (2, 2, 1), False),
    (2, 16, True, "inner", am.Zigzag(), (1, 2, 1), True),
    pytest.param(4, 29, True, "", am.Zigzag(), (1, 2, 2), True, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("ranks", "length", "causal", "plan", "layout", "shape", "compiled"), CASES)
def test_a_plain_model_gives_the_same_on_a_mesh_named_cp(
    ranks: int, length: int, causal: bool, plan: str, layout: Any, shape: Any, compiled: bool, pool: Pool
) -> None:
    expected, gradients = run(make(causal), *batch(length))
    for out, given in pool.run(ranks, attend_on_mesh, length, causal, plan, layout, shape, compiled):
        torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)  # float64
        for mine, theirs in zip(given, gradients, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)  # float64


class LanguageModel(nn.Module):
    """A model of tokens, which rotates nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer, self.head = nn.Embedding(50, 24), Layer(causal=True), nn.Linear(24, 50)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        assert ids.shape[1:] == positions.shape
        return self.head(self.layer(self.embed(ids)))  # type: ignore[no-any-return]


def recipe(world: Any, layout: Any) -> tuple[Tensor, list[Tensor]]:
    """Return the loss and the gradients of this rank, by the lines of the how-to."""
    (lines,) = [part for part in HOW_TO.read_text().split("```python\n") if part.startswith("losses = ")]
    with torch.random.fork_rng():
        torch.manual_seed(6)
        model, length = LanguageModel().double(), 1000
        rows = torch.randint(50, (2, length + 1))
    context = world["cp"]
    if dist.get_world_size(context.get_group()) > 1:
        parallelize_module(model, context, {"layer.inner": am.ContextParallel(layout=layout, q_heads=6, kv_heads=2)})
    ids, targets = (am.shard(x, context, layout=layout, dim=1) for x in (rows[:, :-1], rows[:, 1:]))
    positions = am.shard(torch.arange(length), context, layout=layout, dim=0)
    names = {"model": model, "ids": ids, "targets": targets, "positions": positions, "length": length, "world": world}
    names["cross_entropy"] = nn.functional.cross_entropy
    exec(lines.partition("```")[0], names)
    return names["loss"].detach(), [parameter.grad for parameter in model.parameters()]  # type: ignore[attr-defined,misc]


@on_each_rank
def train_by_the_recipe() -> list[Tensor]:
    """Return the mean over the ranks of a loss and its gradients."""
    world = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    loss, gradients = recipe(world, am.Striped(16))
    for x in (loss, *gradients):
        dist.all_reduce(x)
        x /= dist.get_world_size()
    return [loss, *gradients]


def test_the_loss_of_the_how_to_is_that_of_one_device_on_uneven_shards(pool: Pool) -> None:
    (alone,) = pool.run(1, train_by_the_recipe)
    for given in pool.run(4, train_by_the_recipe):
        for mine, theirs in zip(given, alone, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)  # float64


@on_each_rank
def check_other_uses() -> dict[str, bool]:
    """Attend and decode on a mesh of one axis with another name, and split one of two axes."""
    q, k, v = torch.randn(3, 1, 4, 23, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64).unbind()
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    sizes: dict[str, Any] = {"kv_heads": 4, "head_dim": 8, "capacity": 23, "dtype": torch.float64}
    expected = scaled_dot_product_attention(q, k, v, is_causal=True)
    right = {}
    meshes = {"one axis": world["sp"], "split": am.split_mesh(world["sp"], (1, 1, 2))}
    for name, mesh in meshes.items():
        cache = am.KVCache(mesh, batch=1, block=4, **sizes)
        cache.append(k, v)
        parts = [am.shard(x, mesh, layout=am.Zigzag()) for x in (q, k, v)]
        whole = am.unshard(am.attention(*parts, mesh=mesh, layout=am.Zigzag()), mesh, layout=am.Zigzag())
        right[f"ranks, {name}"] = RankMesh.of(mesh).shape.ranks == 2
        right[f"shares, {name}"] = cache.used < 15
        right[f"attention, {name}"] = torch.allclose(whole, expected)
        right[f"decoding, {name}"] = torch.allclose(am.decode(q[:, :, -1:], cache), expected[:, :, -1:])
    return right


def test_a_mesh_of_one_axis_may_have_any_name(pool: Pool) -> None:
    for right in pool.run(4, check_other_uses):
        assert right == dict.fromkeys(right, True)


class Plain(nn.Module):
    """PyTorch's attention with these options."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, **self.options)


class Checkpointed(nn.Module):
    """Attention in a checkpoint, which calls it again in the backward pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = Plain(is_causal=True), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, x, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]


class ManyHeads(nn.Module):
    """Attention of a mesh, and beside it PyTorch's module, which the mode would leave to one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.module = Plain(), nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x[:, None], x[:, None], x[:, None])[:, 0]
        return y + self.module(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]


@on_each_rank
def measure_errors_of_checkpoints() -> list[float]:
    """Return the largest distances from one device: of gradients of a checkpoint around, and of a forward pass."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    whole = torch.randn(1, 2, 14, 8, dtype=torch.float64, requires_grad=True)
    expected = scaled_dot_product_attention(whole, whole, whole, is_causal=True)
    (gradient,) = torch.autograd.grad(expected.sum(), whole)
    x = am.shard(whole.detach(), mesh, layout=am.Zigzag()).requires_grad_()
    around = parallelize_module(Plain(is_causal=True), mesh, am.ContextParallel())
    checkpoint(around, x, x, x, use_reentrant=True).sum().backward()
    with torch.no_grad():
        out = parallelize_module(Checkpointed(reentrant=True), mesh, am.ContextParallel())(x)
    pairs = (x.grad, gradient), (out, expected.detach())
    return [float((am.unshard(a, mesh, layout=am.Zigzag()) - b).abs().max()) for a, b in pairs]


def test_a_checkpoint_around_a_planned_module_is_right_and_one_inside_in_a_forward_pass(pool: Pool) -> None:
    for given in pool.run(2, measure_errors_of_checkpoints):
        assert worst(given) < 1e-12  # float64


# --- bad input ---


X = torch.zeros(1, 2, 4, 8)
NO_CHECKPOINT = "KernelError: ContextParallel: expected a checkpoint around the modules of the plan, given one"


def attend(mesh: DeviceMesh, module: nn.Module, *inputs: Tensor) -> object:
    return parallelize_module(module, mesh, am.ContextParallel())(*inputs)


BAD: dict[str, tuple[Callable[[DeviceMesh, bool], object], str]] = {
    "a mesh of two axes on one rank": (
        lambda whole, odd: am.split_mesh(whole if odd else whole["cp"]),
        "MeshError: split_mesh mesh: expected a DeviceMesh of one axis, given 2 axes. Fix: slice",
    ),
    "a shape of more ranks on one rank": (
        lambda whole, odd: am.split_mesh(whole["cp"], (1, 2, 2) if odd else (1, 1, 2)),
        "MeshError: split_mesh shape: expected a shape of 2 ranks, given 1x2x2. Fix: pass shape=",
    ),
    "shapes that differ": (
        lambda whole, odd: am.split_mesh(whole["cp"], (1, 1, 2) if odd else (1, 2, 1)),
        "MeshError: split_mesh: expected the same call on every rank, given:",
    ),
    "a module without attention": (
        lambda whole, odd: attend(whole["cp"], nn.Linear(8, 8), X),
        "KernelError: ContextParallel: expected a module that calls scaled_dot_product_attention, given",
    ),
    "a mask as a tensor": (
        lambda whole, odd: attend(whole["cp"], Plain(attn_mask=torch.ones(4, 4, dtype=torch.bool)), X, X, X),
        "MaskError: ContextParallel attn_mask: expected no mask tensor, given a tensor (4, 4).",
    ),
    "dropout": (
        lambda whole, odd: attend(whole["cp"], Plain(dropout_p=0.1), X, X, X),
        "KernelError: ContextParallel dropout_p: expected attention without dropout, given 0.1.",
    ),
    "groups of heads": (
        lambda whole, odd: attend(whole["cp"], Plain(), X, X[:, :1], X[:, :1]),
        "ArgumentError: ContextParallel: expected as many key heads as query heads without",
    ),
    "a mask as a tensor on one rank": (
        lambda whole, odd: attend(whole["cp"], Plain(attn_mask=torch.ones(4, 4) if odd else None), X, X, X),
        "MaskError: ContextParallel attn_mask: expected no mask tensor, given a tensor (4, 4).",
    ),
    "dropout on one rank": (
        lambda whole, odd: attend(whole["cp"], Plain(dropout_p=0.1 if odd else 0.0), X, X, X),
        "KernelError: ContextParallel dropout_p: expected attention without dropout, given 0.1.",
    ),
    "sequences without heads": (
        lambda whole, odd: attend(whole["cp"], Plain(), X[0], X[0, :, :3], X[0, :, :3]),
        "ShapeError: attention q: expected 4 dims",
    ),
    "keys of one dim": (
        lambda whole, odd: attend(whole["cp"], Plain(), X, X[0, 0, 0], X[0, 0, 0]),
        "ShapeError: attention k: expected 4 dims",
    ),
    "a module of PyTorch for attention of several heads": (
        lambda whole, odd: attend(whole["cp"], ManyHeads(), X[0]),
        "KernelError: ContextParallel: expected a module that calls scaled_dot_product_attention itself, given nn.Mult",
    ),
    "a checkpoint inside": (
        lambda whole, odd: attend(whole["cp"], Checkpointed(reentrant=False), X.clone().requires_grad_()),
        NO_CHECKPOINT,
    ),
    "a reentrant checkpoint inside": (
        lambda whole, odd: attend(whole["cp"], Checkpointed(reentrant=True), X.clone().requires_grad_()),
        NO_CHECKPOINT,
    ),
    "a layout by its name": (
        lambda whole, odd: am.ContextParallel(layout="zigzag"),  # type: ignore[arg-type]
        "LayoutError: ContextParallel layout: expected",
    ),
    "a mask of the plan as a tensor": (
        lambda whole, odd: am.ContextParallel(mask=torch.ones(2, 2)),  # type: ignore[arg-type]
        "MaskError: ContextParallel mask: expected Full()",
    ),
}


@on_each_rank
def catch_error_of(name: str) -> str:
    """Return the error of a call that is wrong, on one rank alone where ranks compare."""
    call, _ = BAD[name]
    try:
        call(init_device_mesh("cpu", (2, 1), mesh_dim_names=("cp", "tp")), dist.get_rank() == 1)
    except errors.InputError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize("name", BAD)
def test_bad_calls_raise_alike(name: str, pool: Pool) -> None:
    first, second = pool.run(2, catch_error_of, name)
    assert first == second
    assert first.startswith(BAD[name][1])
