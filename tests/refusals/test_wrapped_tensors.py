"""Tensors that PyTorch wraps, as torch.vmap, torch.func and DTensor do: kernels and messages would read no numbers.

Each call is refused by name. On ranks one of them alone passes such a tensor, and all raise the same error.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import attnmesh as am
from attnmesh.errors import DeviceError, InputError, KernelError
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # of its jvp

X = torch.ones(1, 2, 8, 4)
LSE = torch.ones(1, 2, 8)
Call = Callable[[Tensor], Any]


def new_cache(mesh: DeviceMesh | None = None, *, filled: bool = True) -> am.KVCache:
    cache = am.KVCache(mesh, batch=1, kv_heads=2, head_dim=4, capacity=32, dtype=torch.float32)
    if filled:
        cache.append(X, X)
    return cache


def calls(mesh: DeviceMesh | None, group: Any) -> dict[str, Call]:
    """Return calls that need all ranks, of a tensor of the shape of `X`."""
    cache, where = new_cache(mesh), {"mesh": mesh, "layout": am.Contiguous()}
    return {
        "attention": lambda x: am.attention(x, X, X, **where),  # type: ignore[arg-type]
        "sinks": lambda x: am.attention(X, X, X, sinks=x[0, :, 0, 0], **where),  # type: ignore[arg-type]
        "distance_bias": lambda x: am.attention(X, X, X, distance_bias=x, **where),  # type: ignore[arg-type]
        "decode": lambda x: am.decode(x, cache),
        "partial": lambda x: am.decode(X, cache, partial=am.Partial(x, LSE)),
        "merge_across": lambda x: am.merge_across(am.Partial(x, LSE), group).out,
        "top_k_across": lambda x: am.top_k_across(x, torch.arange(4), 2, group)[0],
        "halo": lambda x: am.halo(x, 2, group, dim=2),
        "scan_across": lambda x: am.scan_across(x[..., 0], x, group).bias,
        "unshard": lambda x: am.unshard(x, mesh, layout=am.Contiguous()),
    }


def local_calls() -> dict[str, Call]:
    """Return calls that a rank makes alone."""
    cache, pages = new_cache(), new_cache(filled=False)
    table = torch.zeros(1, 1, dtype=torch.int64)
    return {
        "attend": lambda x: am.attend(x, X, X).out,
        "append": lambda x: cache.append(x, x),
        "append_shard": lambda x: cache.append_shard(x, x, torch.arange(8, 16)),
        "append_pages": lambda x: pages.append_pages(x, x, table),
        "decode_rows": lambda x: am.decode_rows(x, [cache]),
        "decode k": lambda x: am.decode(X, cache, k=x, v=x),
    }


def mapped(call: Call, x: Tensor) -> None:
    torch.vmap(call)(x.expand(2, *x.shape))


def differentiated(call: Call, x: Tensor) -> None:
    torch.func.grad(lambda x: call(x).sum())(x)


def dual(call: Call, x: Tensor) -> None:
    with forward_ad.dual_level():
        call(forward_ad.make_dual(x, x))


WRAPPERS: dict[str, tuple[Callable[[Call, Tensor], None], str]] = {
    "vmap": (mapped, "outside of torch.vmap, given one inside. Fix: call it outside, with the mapped dim in the batch"),
    "grad": (differentiated, "expected a tensor outside of torch.func.grad and vjp, given one inside. Fix: call it"),
    "dual": (dual, "expected a tensor without a forward-mode tangent, given a dual number. Fix: leave the tangent out"),
}
"""Transforms of PyTorch, and what an error says of each."""

IN_TRANSFORM = "expected a call outside of torch.func's transforms, given one inside"
"""What a call on a cache says of another argument than its queries or its new keys."""


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", [*calls(None, None), *local_calls()])
def test_a_transformed_tensor_is_refused_by_name(name: str, wrapper: str) -> None:
    run, text = WRAPPERS[wrapper]
    with pytest.raises(KernelError) as raised:
        run({**calls(None, None), **local_calls()}[name], X)
    assert text in str(raised.value) or (name == "partial" and IN_TRANSFORM in str(raised.value))


@on_each_rank
def catch_errors_of_the_last_rank() -> list[str]:
    """Return the error of each call whose tensor is wrapped on the last rank alone."""
    mesh = named_mesh(Shape(1, 1, 2), AXES)
    placed: dict[str, tuple[Any, str]] = {"DTensor": (lambda call, x: call(DTensor.from_local(x, mesh)), "")}
    texts = []
    for name, call in calls(mesh, dist.group.WORLD).items():
        for wrapper, (run, _) in {**WRAPPERS, **placed}.items():
            if (name, wrapper) in (("attention", "DTensor"), ("partial", "grad")):
                continue  # the first is served, and the second has another error, of gradients
            with pytest.raises(InputError) as raised:
                run(call, X) if dist.get_rank() == 1 else call(X)
            texts.append(f"{name} of {wrapper}: {raised.value}")
    return texts


def test_a_wrapped_tensor_of_one_rank_is_refused_on_all(pool: Pool) -> None:
    first, second = pool.run(2, catch_errors_of_the_last_rank)
    assert first == second
    for text in first:
        wrapper = text.split(":")[0].split()[-1]
        expected = WRAPPERS[wrapper][1] if wrapper in WRAPPERS else "expected a plain tensor, given a DTensor. Fix: "
        assert expected in text or (text.startswith("partial") and IN_TRANSFORM in text)


@on_each_rank
def refuse_placed() -> list[str]:
    mesh = named_mesh(Shape(1, 1, 1), AXES)
    cache = new_cache()

    def placed(x: Tensor) -> DTensor:
        return DTensor.from_local(x, mesh)

    refused: list[Callable[[], Any]] = [
        *(lambda call=call: call(placed(X)) for call in local_calls().values()),
        lambda: am.shard(placed(X), mesh, layout=am.Contiguous()),
        lambda: cache.reorder(placed(torch.tensor([0]))),
        lambda: cache.append_shard(X, X, placed(torch.arange(8, 16))),
        lambda: cache.append(X, X, token_mask=placed(torch.ones(1, 8, dtype=torch.bool))),
        lambda: am.attend(X, X, X, q_positions=placed(torch.arange(8))),
        lambda: am.attend(X, X, X, key_lengths=placed(torch.tensor([3]))),
    ]
    texts = []
    for call in refused:
        with pytest.raises(InputError) as raised:
            call()
        texts.append(str(raised.value))
    return texts


def test_a_dtensor_is_refused_by_name(pool: Pool) -> None:
    (texts,) = pool.run(1, refuse_placed)
    assert all("a plain tensor, given a DTensor" in text for text in texts)


NUMBERS = {
    "q_positions": lambda wrap: am.attend(X, X, X, q_positions=wrap(torch.arange(8))).out,
    "key_lengths": lambda wrap: am.attention(X, X, X, key_lengths=wrap(torch.tensor([3]))),
    "token_mask": lambda wrap: new_cache().append(X, X, token_mask=wrap(torch.ones(1, 8, dtype=torch.bool))),
    "reorder": lambda wrap: new_cache().reorder(wrap(torch.tensor([0]))),
    "append_shard positions": lambda wrap: new_cache().append_shard(X, X, wrap(torch.arange(8, 16))),
    "block_table": lambda wrap: am.KVCache(
        None, batch=1, kv_heads=2, head_dim=4, capacity=32, block=8, dtype=torch.float32
    ).append_pages(*torch.zeros(2, 1, 8, 2, 4), wrap(torch.tensor([[0]]))),
}
"""Arguments whose numbers the CPU reads."""


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_cannot_be_read_are_refused_by_name(name: str) -> None:
    with pytest.raises(DeviceError, match=f"{name}: expected a tensor with values, given one on the meta device"):
        NUMBERS[name](lambda x: x.to("meta"))
    with pytest.raises(
        KernelError,
        match=f"({name}: expected a tensor outside of torch.vmap|a call outside of torch.func's transforms)",
    ):
        torch.vmap(lambda zero: NUMBERS[name](lambda x: (x + zero).to(x.dtype)))(torch.zeros(2, dtype=torch.int64))


def test_the_energy_is_transformed_as_operators_of_pytorch_are() -> None:
    q, k, v, source = torch.randn(4, 1, 2, 5, 4).unbind()
    expected = am.attend(q, k, v).out
    gradient = torch.func.grad(lambda source: am.energy(q, k, v, source).sum())(torch.zeros_like(source))
    torch.testing.assert_close(gradient, expected)
    both = torch.vmap(lambda source: am.energy(q, k, v, source))(torch.stack((source, 2 * source)))
    torch.testing.assert_close(both[1], am.energy(q, k, v, 2 * source))
    assert am.energy(*(x.to("meta") for x in (q, k, v, source))).shape == (1, 2, 5)


def test_a_batch_of_gradients_is_refused_and_one_by_one_they_are_right() -> None:
    q, k, v = (torch.randn(1, 2, 5, 4, requires_grad=True) for _ in range(3))
    douts = torch.randn(3, 1, 2, 5, 4)
    out = am.attention(q, k, v)
    with pytest.raises(KernelError, match=r"expected one gradient of the output, given a batch.* Fix: call torch"):
        torch.autograd.grad(out, q, douts, is_grads_batched=True)
    for dout in douts:
        torch.autograd.grad(out, q, dout, retain_graph=True)
    with pytest.raises(KernelError, match=r"Fix: .* or jacobian without vectorize"):
        torch.autograd.functional.jacobian(lambda q: am.attend(q, k, v).lse, q, vectorize=True)
    torch.autograd.functional.jacobian(lambda q: am.attend(q, k, v).lse, q, vectorize=False)


def test_a_cache_has_memory() -> None:
    with pytest.raises(DeviceError, match="KVCache device: expected a device with memory, given 'meta'"):
        am.KVCache(None, batch=1, kv_heads=2, head_dim=4, capacity=32, dtype=torch.float32, device="meta")
