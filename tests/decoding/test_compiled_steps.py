"""Compiled decode steps: one graph for all lengths and masks, whose outputs are NaN where an eager step would raise."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import attnmesh as am
from attnmesh.errors import KernelError, ShapeError
from attnmesh.kernels.native.build import library
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.caches.make import empty_cache, random_cache
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh
from tests.support.truth.problems import numbers
from tests.support.truth.seeds import some
from tests.support.truth.tolerances import FLOAT32, assert_near

HEADS, WIDTH = (4, 2), 8
QUERY = numbers(1, HEADS[0], 1, WIDTH, seed=1)


def two_ranks() -> DeviceMesh:
    """Return a mesh of two ranks along keys."""
    return named_mesh(Shape(1, 1, 2), AXES)


@on_each_rank
def check_one_graph(shape: tuple[int, ...]) -> None:
    caches = [random_cache(30, named_mesh(Shape(*shape), AXES)) for _ in range(2)]
    new = torch.randn(6, 2, 1, HEADS[1], 1, WIDTH, generator=torch.Generator().manual_seed(2))
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    def step(cache: am.KVCache, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache.append(k, v)
        return am.decode(q * 2, cache) + 1

    compiled_step = torch.compile(step, fullgraph=True, backend=backend)
    with torch.no_grad():
        pairs = [(step(caches[0], QUERY, *kv), compiled_step(caches[1], QUERY, *kv)) for kv in new]
    for pair in pairs:
        assert_near(*pair)
    assert (len(graphs), caches[1].length) == (1, 36), (graphs, caches)


@pytest.mark.parametrize("shape", some([(1, 1, 1), (1, 1, 2), (2, 1, 1)], (1, 1, 2)))
def test_step_is_one_graph_for_all_lengths(pool: Pool, shape: tuple[int, ...]) -> None:
    """Lengths live on the device, so a growing cache causes no new trace."""
    pool.run(Shape(*shape).ranks, check_one_graph, shape)


@on_each_rank
def check_compiled_masks() -> None:
    cache = random_cache(30, two_ranks())
    step = torch.compile(lambda mask: am.decode(QUERY, cache, mask=mask), fullgraph=True, backend="aot_eager")
    for mask in (am.Causal(), am.Window(3), am.Window(5), am.Window(7)):
        assert_near(step(mask), am.decode(QUERY, cache, mask=mask))


def test_a_compiled_step_takes_one_mask_after_another(pool: Pool) -> None:
    """PyTorch traces the second value of a number as a symbol, and a mask takes none."""
    pool.run(2, check_compiled_masks)


@on_each_rank
def decode_compiled_with_lengths(odd: int) -> str:
    """On a rank: the output of a graph in which rank 1 has `odd` more real keys."""
    cache = random_cache(30, two_ranks())
    step = torch.compile(lambda q, lengths: am.decode(q, cache, key_lengths=lengths), fullgraph=True, backend="eager")
    with torch.no_grad():
        out = step(QUERY, torch.tensor([20 + odd * dist.get_rank()]))
    return "NaN" if bool(out.isnan().all()) else "numbers" if bool(out.isfinite().all()) else "some NaN"


@pytest.mark.parametrize(("odd", "found"), [(0, "numbers"), (1, "NaN")])
def test_key_lengths_that_differ_in_a_graph_give_nan(odd: int, found: str, pool: Pool) -> None:
    assert pool.run(2, decode_compiled_with_lengths, odd) == [found] * 2


def test_a_padded_step_is_one_graph_before_any_eager_one() -> None:
    mask = am.Window(4)  # which no other test has used: nothing of it is cached
    sizes = {"batch": 2, "kv_heads": HEADS[1], "head_dim": WIDTH, "capacity": 20}
    cache = am.KVCache(None, **sizes, dtype=torch.float32)
    new = torch.randn(2, 2, HEADS[1], 6, WIDTH, generator=torch.Generator().manual_seed(2))
    token_mask = torch.ones(2, 6, dtype=torch.bool)
    token_mask[0, :2] = False
    cache.append(*new, token_mask=token_mask)
    q = torch.randn(2, HEADS[0], 1, WIDTH, generator=torch.Generator().manual_seed(3))
    compiled = torch.compile(lambda q: am.decode(q, cache, mask=mask), fullgraph=True, backend="eager")(q)
    assert compiled.equal(am.decode(q, cache, mask=mask))


@on_each_rank
def decode_compiled_with_histories(change: str) -> list[str]:
    """Return the outputs of a graph on equal caches, on ones that rank 1 has changed otherwise, and on equal ones."""
    cache, rank = empty_cache(two_ranks(), batch=2), dist.get_rank()
    new = torch.randn(2, 2, HEADS[1], 6, WIDTH, generator=torch.Generator().manual_seed(2))
    q = torch.randn(2, HEADS[0], 1, WIDTH, generator=torch.Generator().manual_seed(3))
    step = torch.compile(lambda q: am.decode(q, cache), fullgraph=True, backend="eager")
    token_mask = torch.ones(2, 6, dtype=torch.bool)
    token_mask[0, 0] = False
    cache.append(*new, token_mask=token_mask)
    outs = [step(q)]
    if change == "padding":
        odd_mask = token_mask.clone()
        odd_mask[0, rank] = False
        cache.append(*new, token_mask=odd_mask)
    else:
        cache.reorder(torch.tensor([0, 1]))
        cache.reorder(torch.tensor([rank, 1 - rank]))
    outs.append(step(q))
    cache.truncate(0)
    cache.append(*new)
    if change == "padding":
        outs.append(step(q))
    return [
        "NaN" if bool(out.isnan().all()) else "numbers" if bool(out.isfinite().all()) else "some NaN" for out in outs
    ]


@pytest.mark.parametrize(
    ("change", "found"), [("padding", ["numbers", "NaN", "numbers"]), ("order", ["numbers", "NaN"])]
)
def test_histories_that_differ_in_a_graph_give_nan(change: str, found: list[str], pool: Pool) -> None:
    assert pool.run(2, decode_compiled_with_histories, change) == [found] * 2


@on_each_rank
def check_compiled_latent_steps() -> None:
    sizes = {"batch": 1, "kv_heads": 1, "head_dim": WIDTH, "value_dim": WIDTH - 2, "capacity": 40, "values": "prefix"}
    caches = [am.KVCache(two_ranks(), dtype=torch.float32, **sizes) for _ in range(2)]

    def step(cache: am.KVCache, q: Tensor, latents: Tensor) -> Tensor:
        cache.append(latents)
        return am.decode(q, cache)

    compiled_step = torch.compile(step, fullgraph=True, backend="eager")
    new = torch.randn(20, 1, 1, 1, WIDTH, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        for x in new:
            assert_near(step(caches[0], QUERY, x), compiled_step(caches[1], QUERY, x))


def test_a_step_over_latents_compiles(pool: Pool) -> None:
    pool.run(2, check_compiled_latent_steps)


@on_each_rank
def decode_compiled_past_capacity() -> list[bool]:
    cache = random_cache(30, two_ranks(), capacity=32)

    @torch.compile(fullgraph=True, backend="eager")
    def step(q: Tensor, k: Tensor) -> Tensor:
        cache.append(k, k)
        return am.decode(q, cache)

    with torch.no_grad():
        outs = [step(QUERY, torch.randn(1, HEADS[1], 1, WIDTH)) for _ in range(4)]
    return [bool(out.isnan().all()) for out in outs]


def test_compiled_step_past_capacity_returns_nan(pool: Pool) -> None:
    assert pool.run(2, decode_compiled_past_capacity) == [[False, False, True, True]] * 2


@pytest.mark.skipif(library().attend is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("kernel", ["native", "cpu", "auto"])
def test_a_step_of_a_named_kernel_compiles_to_one_graph(kernel: str) -> None:
    cache = random_cache(10)
    step = torch.compile(lambda q: am.decode(q, cache, kernel=kernel), fullgraph=True, backend="aot_eager")
    assert_near(step(QUERY), am.decode(QUERY, cache, kernel=kernel), FLOAT32)


# --- caches that a graph cannot take ---

WINDOW = am.Window(4)
NEW = numbers(2, 1, HEADS[1], 1, WIDTH, seed=2)


def decode_twice(cache: am.KVCache, q: Tensor) -> Tensor:
    return am.decode(q, cache) * 2


def append_and_decode(cache: am.KVCache, q: Tensor) -> Tensor:
    return am.decode(q, cache, k=NEW[0], v=NEW[1], mask=WINDOW) * 2


@pytest.fixture
def fresh_traces() -> Iterator[None]:
    """Let PyTorch forget its traces: a function that has left a graph is not traced again, nor after many traces."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def special_cache(kind: str, folder: Path) -> am.KVCache:
    """Return a cache of ten tokens that forgets, has two memories, is in a folder, or is forked."""
    options: dict[str, dict[str, Any]] = {"mask": {"mask": WINDOW}, "hot": {"hot": 4}, "folder": {"folder": folder}}
    sizes = {"batch": 1, "kv_heads": HEADS[1], "head_dim": WIDTH, "capacity": 40}
    cache = am.KVCache(None, **sizes, dtype=torch.float32, **options.get(kind, {}))
    cache.append(*numbers(2, 1, HEADS[1], 10, WIDTH))
    return cache.fork() if kind == "fork" else cache


@pytest.mark.usefixtures("fresh_traces")
@pytest.mark.parametrize(
    ("kind", "step", "said"),
    [
        ("mask", append_and_decode, "append: expected no graph around a cache that forgets, given one with "
         "mask=Window(4). Fix: leave torch.compile and CUDA graphs out, or make the cache without mask=."),
        ("hot", decode_twice, "decode: expected no graph around a cache that has two memories, given one with "
         "hot=4. Fix: leave torch.compile and CUDA graphs out, or make the cache without hot=."),
        pytest.param(
            "hot", append_and_decode, "append: expected no graph around a cache that has two memories, given one with "
            "hot=4. Fix: leave torch.compile and CUDA graphs out, or make the cache without hot=.",
            marks=pytest.mark.long),
        ("folder", decode_twice, "decode: expected a cache of one piece in a graph, given one in a folder. "
         "Fix: decode with copy.deepcopy(cache)."),
        ("fork", decode_twice, "decode: expected a cache of one piece in a graph, given a forked cache. "
         "Fix: decode with copy.deepcopy(cache)."),
    ],
)  # fmt: skip
def test_a_graph_and_what_replaces_it_say_why_they_refuse_a_cache(
    kind: str, step: Callable[..., Tensor], said: str, tmp_path: Path
) -> None:
    cache = special_cache(kind, tmp_path)
    with pytest.raises(torch._dynamo.exc.Unsupported) as one_graph:
        torch.compile(step, fullgraph=True, backend="eager")(cache, QUERY)
    assert said in str(one_graph.value)
    with pytest.raises(KernelError) as graphs:
        torch.compile(step, backend="eager")(cache, QUERY)
    assert str(graphs.value) == said
    assert cache.length == 10


@pytest.mark.usefixtures("fresh_traces")
@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.long), True])
def test_an_error_is_raised_outside_of_graphs(dynamic: bool) -> None:
    """Its text may have symbols, which no message of PyTorch can."""
    attend = torch.compile(am.attention, dynamic=dynamic, backend="eager")
    with pytest.raises(ShapeError, match=r"given q \(1, 4, 5, 8\), k \(1, 3, 5, 8\)"):
        attend(numbers(1, 4, 5, WIDTH), *numbers(2, 1, 3, 5, WIDTH))
