"""One rank makes another call than the others: all raise the same error, or all get NaN, and nobody waits."""

from typing import Any

import pytest

import attnmesh as am
from tests.support.emulation.emulated_gpu import EmulatedGPU
from tests.support.emulation.emulated_nccl import world
from tests.support.emulation.interpreted import interpreting, untimed_merges
from tests.support.ranks.odd_rank import BEFORE, alert, attention_outcomes, check, decoding_outcomes, merge_outcomes
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.seeds import rotated

STEPS: list[tuple[str, tuple[int, int, int], dict[str, Any]]] = [
    ("nccl", (1, 1, 3), {"merge": "tree"}),
    ("cpu:gloo,cuda:nccl", (1, 1, 3), {"merge": "direct"}),
    ("nccl", (2, 1, 2), {"merge": "tree"}),
]
"""Backends, meshes and options of steps: along a tree, directly, and with a heads axis."""

ON_HOSTS = {
    "triton": ("triton", *STEPS[0][1:]),
    **{name: ("auto", *step[1:]) for name, step in zip(("tree", "direct", "heads"), STEPS, strict=True)},
}


@on_each_rank
def decode_beside_odd_rank(kernel: str, *arguments: Any) -> dict[str, Any]:
    am.set_deadline(60)
    with interpreting(kernel), alert():
        return decoding_outcomes("cpu", *arguments)


@pytest.mark.parametrize(("name", "before"), rotated([*ON_HOSTS], BEFORE[::-1], every=2))
def test_all_ranks_notice_an_odd_step(name: str, before: int, pool: Pool) -> None:
    """With Triton's interpreter ranks follow the policy of GPUs."""
    kernel, shape, options = ON_HOSTS[name]
    ranks = shape[0] * shape[1] * shape[2]
    check(
        pool.run(ranks, decode_beside_odd_rank, kernel, shape, before, options), before, compares_all=kernel == "auto"
    )


@on_each_rank
def attend_beside_odd_rank(*arguments: Any) -> dict[str, Any]:
    am.set_deadline(60)
    with alert():
        return attention_outcomes("cpu", *arguments)


@pytest.mark.parametrize(("shape", "before"), rotated([(1, 3, 1), (1, 1, 3), (2, 2, 1)], BEFORE, every=2))
def test_all_ranks_notice_an_odd_call(shape: tuple[int, int, int], before: int, pool: Pool) -> None:
    check(pool.run(shape[0] * shape[1] * shape[2], attend_beside_odd_rank, shape, before), before, compares_all=True)


@on_each_rank
def merge_beside_odd_rank(kernel: str, *arguments: Any) -> dict[str, Any]:
    """Each merge is the first of a group. Steps of `test_all_ranks_notice_an_odd_step` time theirs."""
    am.set_deadline(60)
    with interpreting(kernel), untimed_merges(), alert():
        return merge_outcomes("cpu", 3, *arguments)


@pytest.mark.parametrize(
    ("way", "before"), rotated([("triton", "tree"), ("auto", "tree"), ("auto", "direct")], BEFORE, every=2)
)
def test_all_ranks_notice_an_odd_merge(way: tuple[str, str], before: int, pool: Pool) -> None:
    kernel, how = way
    check(pool.run(3, merge_beside_odd_rank, kernel, before, how), before, compares_all=kernel == "auto")


@on_each_rank
def decode_on_gpu(gpu: EmulatedGPU, *arguments: Any) -> dict[str, Any]:
    am.set_deadline(60)
    with alert():
        return decoding_outcomes("cuda", *arguments)


@pytest.mark.parametrize(
    ("backend", "shape", "options", "before"),
    [(*STEPS[0], 0), *(pytest.param(*STEPS[step], 2, marks=pytest.mark.long) for step in range(3))],
)
def test_all_gpus_notice_an_odd_step(
    backend: str, shape: tuple[int, int, int], options: dict[str, Any], before: int
) -> None:
    """First steps are compared by the CPUs, as those of `test_all_ranks_notice_an_odd_step` are."""
    ranks = shape[0] * shape[1] * shape[2]
    found = world(ranks, decode_on_gpu, shape, before, options, backend=backend)
    check(found.results(), before, compares_all=False)


@on_each_rank
def attend_on_gpu(gpu: EmulatedGPU, *arguments: Any) -> dict[str, Any]:
    am.set_deadline(60)
    with alert():
        return attention_outcomes("cuda", *arguments)


@pytest.mark.parametrize(
    ("backend", "shape", "before"),
    [("nccl", (1, 3, 1), 2), pytest.param("cpu:gloo,cuda:nccl", (2, 1, 2), 0, marks=pytest.mark.long)],
)
def test_all_gpus_notice_an_odd_call(backend: str, shape: tuple[int, int, int], before: int) -> None:
    """CPUs compare every call, except `key_lengths` that are on a device."""
    found = world(shape[0] * shape[1] * shape[2], attend_on_gpu, shape, before, backend=backend)
    check(found.results(), before, compares_all=False)


@on_each_rank
def merge_on_gpu(gpu: EmulatedGPU, *arguments: Any) -> dict[str, Any]:
    am.set_deadline(60)
    with alert():
        return merge_outcomes("cuda", 3, *arguments)


@pytest.mark.parametrize(
    ("backend", "how", "before"),
    [("nccl", "tree", 2), ("cpu:gloo,cuda:nccl", "direct", 0)],
)
def test_all_gpus_notice_an_odd_merge(backend: str, how: str, before: int) -> None:
    check(world(3, merge_on_gpu, before, how, backend=backend).results(), before, compares_all=False)
