"""What is said of memory, held against the tensors that live while a backward pass runs."""

import sys
from weakref import finalize

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import attnmesh as am
from attnmesh.cli import bench_prefill
from attnmesh.mesh.schedule import EXCHANGES
from attnmesh.mesh.shapes import Shape
from attnmesh.planner.auto import best_exchange
from attnmesh.planner.candidate import Candidate
from attnmesh.planner.cost import cost
from attnmesh.planner.memory import peak_activations
from tests.support.pool import Pool

pytestmark = pytest.mark.quick

TOKENS, WIDTH = 32, 64
SHAPES = [Shape(1, r, c) for r in (1, 2, 3, 6) for c in (1, 2, 3, 6) if r * c == 6]


class Living(TorchDispatchMode):
    """The bytes of all tensors that operators made and that live; the most of them at once."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):  # type: ignore[no-untyped-def]
        made = operator(*arguments, **(options or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((arguments, options)) if isinstance(x, Tensor)}
        for x in tree_leaves(made):
            if isinstance(x, Tensor) and x.device.type != "meta":
                storage = x.untyped_storage()
                if storage._cdata not in given and storage._cdata not in self.sizes:
                    self.sizes[storage._cdata] = storage.nbytes()
                    finalize(storage, self.sizes.pop, storage._cdata)
        self.most = max(self.most, sum(self.sizes.values()))
        return made


def most_held(shape: Shape, exchange: str, kv_heads: int) -> float:
    """In elements for each token of a shard and each column of a head, as the formula counts."""
    module = sys.modules["attnmesh.attention.operator"]
    living, backward = Living(), module.backward

    def watched(*arguments: object) -> object:
        with living:
            return backward(*arguments)

    case = bench_prefill.Case("full", am.Full(), am.Contiguous(), (8, kv_heads), TOKENS * shape.ranks, WIDTH)
    module.backward = watched
    try:
        bench_prefill._ours(case, bench_prefill._whole(case), bench_prefill.Contender(shape, shape, exchange))()
    finally:
        module.backward = backward
    return living.most / 4 / TOKENS / WIDTH


def all_held(kv_heads: int) -> list[float]:
    return [most_held(shape, exchange, kv_heads) for exchange in EXCHANGES for shape in SHAPES]


@pytest.mark.parametrize("kv_heads", [8, 2])
def test_the_formula_for_memory(pool: Pool, kv_heads: int) -> None:
    """It leaves out lse and delta, a column in 64 each, and takes all that a rank may hold at a moment for held."""
    foretold = [peak_activations(shape, 8, kv_heads, exchange) for exchange in EXCHANGES.values() for shape in SHAPES]
    for living, said in zip(pool.run(6, all_held, kv_heads)[0], foretold, strict=True):
        assert living == pytest.approx(said, rel=0.15)


@pytest.mark.parametrize("heads", [(8, 8), (32, 8), (32, 32)])
def test_pipelined_holds_about_what_a_ring_does(heads: tuple[int, int]) -> None:
    for ranks in (2, 3, 4, 6, 8, 16):
        pipelined, ring = (
            peak_activations(Shape(1, ranks, 1), *heads, EXCHANGES[name]) for name in ("pipelined", "ring")
        )
        assert pipelined <= 1.3 * ring


@pytest.mark.parametrize(("batch", "leanest"), [(1, False), (4096, True)])
def test_auto_takes_the_fastest_of_those_that_hold_little(batch: int, leanest: bool) -> None:
    shape = Shape(1, 4, 1)
    workload = am.Workload(8, 8, 64, 4096, batch=batch, dtype="float32")
    cluster = am.Cluster.preset("local")
    costs = {name: cost(Candidate(shape, shape, am.Zigzag(), name), workload, cluster) for name in EXCHANGES}
    picked = best_exchange(cluster, shape, shape, am.Zigzag(), workload)
    first = min(costs, key=lambda name: costs[name].memory if leanest else costs[name].seconds)
    assert picked == EXCHANGES[first]
