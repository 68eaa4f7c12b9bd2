"""Prompts: all ranks choose one way to attend their tokens, and each way gives what dense attention gives."""

from dataclasses import replace
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import attnmesh as am
from attnmesh.mesh.axes import RankMesh
from attnmesh.mesh.shapes import AXES, Shape
from attnmesh.mesh_attention import prompt
from attnmesh.mesh_attention.attention_arguments import AttentionArguments
from attnmesh.mesh_attention.latents import Latents
from attnmesh.mesh_attention.prompt import agreed_mesh_and_exchange, attend_prompt
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import MeshProblem, call_options, check, draw, named_mesh, shard_positions

LAYOUTS = (am.Striped(1), am.Striped(4), am.Striped(128), am.Contiguous())
"""Layouts of prompts, with blocks of a size that a user may set."""

LENGTHS = (1, 5, 63, 130, 257, 1031)

Chosen = tuple[Shape, str]
"""Shape of the mesh and exchange of a call."""


def random_prompt(seed: int, ranks: int) -> MeshProblem:
    """Return a random prompt, whose tokens a keys axis shares, beside a heads axis if the ranks are even."""
    random, shape = Random(seed), Shape(1, 1, ranks)
    problem = draw(seed * 100 + ranks, ranks)
    if ranks % 2 == 0 and seed % 4 == 3:
        shape, problem = Shape(2, 1, ranks // 2), replace(problem, heads=(8, 4), latent=False)
    length, layout = random.choice(LENGTHS), random.choice(LAYOUTS)
    mask = random.choice((am.Causal(), am.Window(50), am.Causal() & am.Documents((length // 3, length - length // 3))))
    same = {"lengths": (length, length), "layouts": (layout, layout), "mask": mask, "axes": AXES, "shape": shape}
    return replace(problem, key_lengths=None, **same)


def attended_tokens(problem: MeshProblem, way: str) -> tuple[Tensor, Chosen]:
    """Return this rank's tokens of a prompt, attended in a way, with the way that was chosen."""
    mesh = named_mesh(problem.shape, problem.axes)
    mine, chosen = shard_positions(problem, mesh)[0], list[Chosen]()
    q, k, v, _, *sinks = problem.whole()
    options = problem.options(*problem.lengths)
    mine_of_each = {name: x[:, :, mine] for name, x in (("q", q), ("k", k), ("v", v))}
    arguments = AttentionArguments(**mine_of_each, sinks=sinks[0] if sinks else None, key_lengths=None, options=options)
    whole = problem.latents() if problem.latent else None

    def noted(place: RankMesh, *arguments: object) -> tuple[RankMesh, str]:
        found, exchange = agreed_mesh_and_exchange(place, *arguments)
        if way != "chosen":
            found = place if way == "keys" else prompt.keys_as_queries(place)
        chosen.append((found.shape, exchange))
        return found, exchange

    mode = torch.inference_mode() if problem.seed // 100 % 2 else torch.no_grad()
    with mode, mock.patch.object(prompt, "agreed_mesh_and_exchange", noted):
        latents = None if whole is None else Latents(whole.rows[:, :, mine], whole.projection)
        return attend_prompt(arguments, mesh, None, latents), chosen[0] if chosen else (problem.shape, "alone")


@on_each_rank
def attend_in_each_way(problems: list[MeshProblem]) -> list[dict[str, tuple[Tensor, Chosen]]]:
    return [{way: attended_tokens(problem, way) for way in ("keys", "queries", "chosen")} for problem in problems]


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 12), marks=pytest.mark.long)], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_each_way_gives_dense_attention_and_ranks_choose_alike(ranks: int, seeds: range, pool: Pool) -> None:
    problems = [random_prompt(seed, ranks) for seed in seeds]
    taken = set()
    for problem, found in zip(problems, zip(*pool.run(ranks, attend_in_each_way, problems), strict=True), strict=True):
        for way in found[0]:
            outs, chosen = zip(*(answer[way] for answer in found), strict=True)
            assert len({*chosen}) == 1, problem
            check(problem, [[out] for out in outs])
            taken.add((way, chosen[0][0].queries > 1))
    assert ranks == 1 or {("keys", False), ("queries", True)} <= taken


@on_each_rank
def choose_way(heads: tuple[int, int], length: int, exchange: str) -> Chosen:
    """Return the way that a rank takes for a long prompt of so many heads."""
    mesh = RankMesh.of(named_mesh(Shape(1, 1, 4), AXES))
    same: dict[str, Any] = {"layout": (layout := am.Striped(128)), "key_layout": layout}
    options = call_options(mask=am.Causal(), exchange=exchange, length=length, key_length=length, **same)
    problem = options.problem(mesh, (length, length))
    found, how = agreed_mesh_and_exchange(
        mesh, torch.device("cpu"), torch.float32, (1, *heads, 64, 64), problem, None, exchange
    )
    return found.shape, how


@pytest.mark.parametrize(
    ("heads", "length", "exchange", "expected"),
    [
        ((9, 3), 4093, "auto", (Shape(1, 4, 1), ("bulk", "pipelined"))),  # by the prices of this machine
        ((9, 3), 4093, "ring", (Shape(1, 4, 1), ("ring",))),
        ((9, 3), 0, "ring", (Shape(1, 1, 4), ("ring",))),
    ],
)
def test_grouped_keys_are_gathered(
    heads: tuple[int, int], length: int, exchange: str, expected: tuple[Shape, tuple[str, ...]], pool: Pool
) -> None:
    first, *others = pool.run(4, choose_way, heads, length, exchange)
    assert first[0] == expected[0]
    assert first[1] in expected[1]
    assert others == [first] * 3
