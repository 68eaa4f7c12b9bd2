"""Prepared steps: their three parts in a graph and out of it, the heads of a rank, and what ranks compare."""

import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import attnmesh as am
from attnmesh.core.scaling import Scaling
from attnmesh.decoding.prepared_step import (
    HostMergedStep,
    LoneStep,
    PreparedStep,
    TransportMergedStep,
    new_prepared_step,
)
from attnmesh.decoding.step_arguments import StepInputs, StepOptions, StepSpec
from attnmesh.decoding.step_op import run_in_graph
from attnmesh.kernels.cache_runs import CachedAttention
from attnmesh.kernels.native.build import library
from attnmesh.mesh.axes import Axis
from attnmesh.mesh.shapes import Shape
from tests.support.caches.make import along_keys, mesh_or_none, random_cache
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.problems import numbers
from tests.support.truth.tolerances import largest_difference

needs_library = pytest.mark.skipif(library().attend is None, reason="there is no C++ compiler")

HEADS, WIDTH = 6, 8


def query() -> Tensor:
    return numbers(2, HEADS, 1, WIDTH, seed=1)


SPEC = StepSpec(
    heads_axis=Axis(2, 1),
    token_axis=Axis(4, 3),
    block=5,
    capacity=6,
    value_dim=7,
    options=StepOptions(am.Window(8), 0.9, math.inf, "tree", "heads", reproducible=True, kernel="native"),
    index_block=10,
)
"""A step whose numbers and texts all differ."""


def test_ranks_compare_each_field_of_a_step_but_those_of_its_cache() -> None:
    *of_cache, options, _ = StepSpec._fields
    assert of_cache == ["heads_axis", "token_axis", "block", "capacity", "value_dim"]
    assert options == "options"
    assert SPEC.fields_to_compare == SPEC.options._asdict() | {"index_block": SPEC.index_block}


@pytest.mark.parametrize("softcap", [math.inf, 0.1])
@pytest.mark.parametrize("index_block", [None, 10])
@pytest.mark.parametrize("reproducible", [True, False])
def test_a_graph_carries_each_field_of_a_step(softcap: float, index_block: int | None, reproducible: bool) -> None:
    options = SPEC.options._replace(softcap=softcap, reproducible=reproducible)
    spec = SPEC._replace(options=options, index_block=index_block)
    assert StepSpec.from_code(*spec.to_code()) == spec


@on_each_rank
def run_out_of_a_graph_and_in_it(shape: Shape, dtype: torch.dtype, reproducible: bool) -> tuple[str, float]:
    """On a rank: the class of a step, and by how much its output in a graph differs from that of `run`."""
    cache = random_cache(40, mesh_or_none(shape), batch=2, dtype=dtype)
    options = StepOptions(am.Causal(), None, None, "auto", "replicated", reproducible, "auto")
    inputs = StepInputs(query().to(dtype), (cache,), torch.linspace(-1, 1, HEADS, dtype=dtype))
    spec = options.spec_on(cache, Scaling(WIDTH**-0.5))
    view = cache.own_shard.view
    step: PreparedStep = new_prepared_step(inputs.q, view, spec, inputs.values_to_hash(spec), cache.config)
    return type(step).__name__, largest_difference(step.run(inputs), run_in_graph(step, inputs, view))


@needs_library
@pytest.mark.parametrize(
    ("shape", "dtype", "reproducible", "of"),
    [
        (Shape(1, 1, 1), torch.float32, False, LoneStep),
        (Shape(1, 1, 1), torch.float32, True, LoneStep),
        (Shape(1, 1, 3), torch.float32, False, HostMergedStep),
        (Shape(1, 1, 3), torch.float64, False, TransportMergedStep),
        (Shape(2, 1, 2), torch.float32, True, TransportMergedStep),
    ],
)
def test_a_step_gives_the_same_bits_in_a_graph(
    shape: Shape, dtype: torch.dtype, reproducible: bool, of: type[PreparedStep], pool: Pool
) -> None:
    for found in pool.run(shape.ranks, run_out_of_a_graph_and_in_it, shape, dtype, reproducible):
        assert found == (of.__name__, 0)


@on_each_rank
def compare_heads_of_ranks() -> dict[str, float]:
    """On a rank: by how much its share of the heads, in steps and in a merge, differs from those of all heads."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    cache = random_cache(40, along_keys(ranks), batch=2)
    outs = [am.decode(query(), cache, output="heads") for _ in range(3)]
    share = am.decode(query(), cache, merge="direct").tensor_split(ranks, 1)[rank]
    assert all(out.is_contiguous() for out in outs)
    assert len(cache.prepared_steps) == 2
    own = am.attend(query(), *numbers(2, 2, 2, 5, WIDTH, seed=rank))
    merged = am.merge_across(own, dist.group.WORLD, output="heads")
    whole = am.merge_across(own, dist.group.WORLD, how="direct")
    found = {f"step {number}": largest_difference(share, out) for number, out in enumerate(outs)}
    for name, part, x in zip(("out", "lse"), merged, whole, strict=True):
        found[name] = largest_difference(part, x.tensor_split(ranks, 1)[rank])
    return found


@needs_library
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_heads_of_a_rank_are_a_share_of_all_heads(ranks: int, pool: Pool) -> None:
    for differences in pool.run(ranks, compare_heads_of_ranks):
        assert differences == dict.fromkeys(differences, 0)


@on_each_rank
def step_over_infinite_keys(odd: int) -> tuple[bool, Tensor]:
    """On a rank: a known step in which the keys of one rank are not finite: it alone computes without a launch."""
    cache = random_cache(12, along_keys(dist.get_world_size()), batch=2)
    for _ in range(3):
        am.decode(query(), cache)
    if dist.get_rank() == odd:
        cache.values[0, 0, 0] = torch.nan
    with mock.patch.object(
        CachedAttention, "_compute", autospec=True, side_effect=CachedAttention._compute
    ) as computed:
        out = am.decode(query(), cache)
    return computed.called, out


@needs_library
def test_a_rank_may_compute_alone_without_a_launch(pool: Pool) -> None:
    computed, outs = zip(*pool.run(3, step_over_infinite_keys, 1), strict=True)
    assert computed == (False, True, False)
    assert bool(outs[0][0, :3].isnan().all())
    assert bool(outs[0][0, 3:].isfinite().all())
    for out in outs[1:]:
        assert torch.equal(out.nan_to_num(7.0), outs[0].nan_to_num(7.0))


class OnGPU(Tensor):
    """A tensor of the CPU that says it is on a GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda")

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


def test_lengths_on_another_device_that_the_cache_does_not_have_give_nan() -> None:
    """No check reads them: a CPU would wait for their device."""
    cache = random_cache(10, batch=2)
    lengths = torch.tensor([5, 50]).as_subclass(OnGPU)
    out = am.decode(query(), cache, key_lengths=lengths).as_subclass(Tensor)
    assert out.isnan().flatten(1).any(1).tolist() == [False, True]
