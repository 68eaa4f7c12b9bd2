"""Random problems for a mesh of ranks: any shape, exchange, mask, layout, dtype, lengths and widths, told by a seed."""

from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import attnmesh as am
from attnmesh.core.layout import Layout
from attnmesh.core.mask import FAR, Mask
from attnmesh.mesh.axes import RankMesh
from attnmesh.mesh.shapes import AXES, Shape
from attnmesh.mesh_attention.attention import attend_shards
from attnmesh.mesh_attention.attention_arguments import AttentionArguments, AttentionOptions
from attnmesh.mesh_attention.latents import Latents, Projection
from tests.support.ranks.pool import on_each_rank
from tests.support.truth.dense import truth
from tests.support.truth.problems import CAPS, DTYPES, LAYOUTS, draw_key_lengths, draw_mask, selected_pairs, selection

EXCHANGE_MODES = ("bulk", "pipelined", "ring", "auto")
LENGTHS = (0, 1, 2, 5, 13, 40, 63, 96, 130, 257)


@dataclass(frozen=True)
class MeshProblem:
    """One call of `attention` on every rank of a mesh."""

    seed: int
    shape: Shape
    exchange: str
    dtype: torch.dtype
    mask: Mask
    layouts: tuple[Layout, Layout]
    lengths: tuple[int, int]
    heads: tuple[int, int]
    widths: tuple[int, int]
    batch: int
    sinks: bool
    scale: float | None
    say_length: bool
    axes: tuple[str, ...]
    latent: bool = False  # keys and values are expanded from latents, which travel; forward alone
    softcap: float | None = None
    key_lengths: Tensor | None = None
    selected: am.Selection | None = None

    RANK = 6

    def latents(self) -> Latents:
        """Latents of all tokens. Each column of a key or value is one of a latent's, so expanding does not round."""
        generator = torch.Generator().manual_seed(self.seed)
        plain, values = self.widths[0] - self.widths[0] // 2, self.widths[1]
        rows = torch.randn(self.batch, 1, self.lengths[1], self.RANK + self.widths[0] // 2, generator=generator)
        columns = torch.randint(self.RANK, (self.heads[1], plain + values), generator=generator)
        matrix = torch.nn.functional.one_hot(columns, self.RANK).to(self.dtype)
        return Latents(rows.to(self.dtype), Projection(matrix[:, :plain], matrix[:, plain:]))

    def options(self, length: int | None = None, key_length: int | None = None) -> AttentionOptions:
        """Options of the call, with lengths if it says any."""
        layouts = dict(zip(("layout", "key_layout"), self.layouts, strict=True))
        scores = {"scale": self.scale, "softcap": self.softcap, "length": length, "key_length": key_length}
        return call_options(mask=self.mask, exchange=self.exchange, **layouts, **scores)

    def whole(self) -> list[Tensor]:
        """q, k, v and dout of all tokens, and the sinks if any."""
        generator = torch.Generator().manual_seed(self.seed)
        (n, m), (hq, hk), (d, e) = self.lengths, self.heads, self.widths
        shapes = [(hq, n, d), (hk, m, d), (hk, m, e), (hq, n, e)]
        tensors = [torch.randn(self.batch, *shape, generator=generator) for shape in shapes]
        if self.latent:
            latents = self.latents()
            tensors[1:3] = latents.projection.expand(latents.rows)
        return [x.to(self.dtype) for x in [*tensors, *([torch.randn(hq, generator=generator)] if self.sinks else [])]]


def call_options(**given: Any) -> AttentionOptions:
    """Return the options of a call: what is not given is left to it."""
    named: dict[str, Any] = dict.fromkeys(AttentionOptions._fields)
    return AttentionOptions(**named | {"exchange": "auto", "kernel": "auto"} | given)


def draw(seed: int, ranks: int) -> MeshProblem:
    """The problem of a seed on `ranks` ranks."""
    random = Random(seed)
    shape = random.choice(
        [s for h in range(1, 9) for r in range(1, 9) for c in range(1, 9) if (s := Shape(h, r, c)).ranks == ranks]
    )
    h = shape.heads
    kv_heads = random.choice((h, h + h // 2, 2 * h, 3 * h - h // 2))  # of which ranks may have more than others
    length = random.choice(LENGTHS)
    cross = random.random() < 0.2
    width = random.choice((1, 4, 8, 16))
    # In order and complete, or the other way round and without the axes of size 1: each mesh has groups of its own.
    named = [name for name, size in zip(AXES, shape, strict=True) if size > 1] or ["keys"]
    axes = list(AXES) if random.random() < 0.7 else named[::-1]
    heads = (kv_heads * random.choice((1, 1, 2, 4)), kv_heads)
    problem = MeshProblem(
        seed=seed,
        shape=shape,
        exchange=random.choice(EXCHANGE_MODES),
        dtype=random.choice(DTYPES),
        mask=am.Window(random.choice((3, 50)), 7) if cross else draw_mask(random, length),
        layouts=(first := random.choice(LAYOUTS), random.choice(LAYOUTS) if cross else first),
        lengths=(length, random.choice(LENGTHS) if cross else length),
        heads=heads,
        widths=(width, random.choice((width, width, 4, 16))),
        batch=random.choice((1, 1, 2)),
        sinks=random.random() < 0.2,
        scale=random.choice((None, None, 0.3, -0.5)),
        say_length=cross or random.random() < 0.5,
        axes=tuple(axes),
        latent=shape.heads == 1 and heads[0] == heads[1] and width > 1 and random.random() < 0.3,
        softcap=random.choice(CAPS),
    )
    if random.random() < 0.15:
        layouts = [_split(random, length, ranks) for length in problem.lengths]
        problem = replace(problem, layouts=(layouts[0], layouts[1] if cross else layouts[0]))
    if random.random() < 0.25:
        first = _packed(random, problem.lengths[0], shape, problem.mask)
        second = _packed(random, problem.lengths[1], shape, problem.mask) if cross else first
        problem = replace(problem, layouts=(first, second))
    few = draw_key_lengths(random, problem.batch, problem.lengths[1])
    return replace(problem, key_lengths=few) if not problem.latent and random.random() < 0.3 else problem


SAMPLES: dict[int, tuple[tuple[int, ...], int]] = {
    1: ((0, 1, 3, 4, 5, 6, 7, 18), 20),
    2: ((2, 9, 15, 16, 20, 21, 24, 25, 29, 30, 37, 44), 60),
    3: ((0, 3, 13, 17, 19, 21, 26, 28, 29, 51, 53, 54), 60),
    4: ((2, 3, 6, 7, 32, 38, 53, 93), 120),
    6: ((0, 2, 8, 19, 30, 38, 39, 42, 45, 48), 80),
    8: ((8, 10, 12, 13, 16, 30, 31, 33, 49, 53), 60),
}
"""Problems by their number of ranks: the seeds of a sample that has all traits, and the number of all seeds."""


def draw_selected(seed: int, ranks: int) -> MeshProblem:
    """The problem of that seed, with keys selected for each query; of latents for all heads alike."""
    problem, random = draw(seed, ranks), Random(seed)
    sizes = problem.batch, 1 if problem.latent else problem.heads[1]
    return replace(problem, selected=selection(random, sizes, *problem.lengths))


def traits(problem: MeshProblem) -> set[object]:
    """Return what a sample of problems should have: each value of a choice, and each exchange along each axis."""
    mask, first = problem.mask, problem.layouts[0]
    edges = {"documents": mask.ends, "spans": mask.spans, "chunks": mask.chunks, "window": mask.left < FAR}
    chosen = {name: bool(found) for name, found in edges.items()} | {
        "latent": problem.latent,
        "capped": problem.softcap is not None,
        "lengths of keys": problem.key_lengths is not None,
        "sinks": problem.sinks,
        "other keys": problem.lengths[0] != problem.lengths[1],
        "grouped": problem.heads[0] != problem.heads[1],
        "wider values": problem.widths[0] != problem.widths[1],
        "axes in another order": problem.axes != AXES,
        "layout": type(first),
        "scale": problem.scale,
        "batch": problem.batch,
        "shape": problem.shape,
        "exchange": problem.exchange,
        "dtype": problem.dtype,
    }
    several = {(problem.exchange, name) for name, size in zip(AXES, problem.shape, strict=True) if size > 1}
    return {*chosen.items(), *several}


def _split(random: Random, length: int, ranks: int) -> am.Split:
    cuts = sorted(random.randint(0, length) for _ in range(ranks - 1))
    return am.Split(tuple(stop - start for start, stop in zip((0, *cuts), (*cuts, length), strict=True)))


def _packed(random: Random, length: int, shape: Shape, mask: Mask) -> am.Packed:
    """Return a layout for the documents of the mask, or for others."""
    cuts = sorted(random.randint(0, length) for _ in range(random.randint(0, 6)))
    edges = mask.ends if mask.ends and random.random() < 0.8 else (*cuts, length)
    return am.Packed(tuple(stop - start for start, stop in pairwise((0, *edges))), shape)


@on_each_rank
def run_problem(problem: MeshProblem, bias: Tensor | None = None) -> list[Tensor]:
    """On one rank: its out and the gradients of its shard and its bias; out alone if latents travel."""
    mesh = named_mesh(problem.shape, problem.axes)
    q, k, v, dout, *sinks = (x.to(device()) for x in problem.whole())
    mine = shard_positions(problem, mesh)
    inputs = [x[:, :, p].requires_grad_() for x, p in zip((q, k, v), (mine[0], mine[1], mine[1]), strict=True)]
    inputs += [x.requires_grad_() for x in sinks]
    lengths = dict(zip(("length", "key_length"), problem.lengths, strict=True)) if problem.say_length else {}
    options = {
        "mask": problem.mask,
        "layout": problem.layouts[0],
        "key_layout": problem.layouts[1],
        "scale": problem.scale,
        "softcap": problem.softcap,
        "key_lengths": problem.key_lengths,
    }
    whole = problem.selected
    selected = None if whole is None else am.Selection(whole.indices[:, :, mine[0]].to(device()), whole.block)
    sink = inputs[3] if sinks else None
    if problem.latent:
        said = lengths.get("length"), lengths.get("key_length")
        arguments = AttentionArguments(*inputs[:3], sink, None, problem.options(*said), selected)
        rows, projection = problem.latents()
        return [attend_shards(arguments, RankMesh.of(mesh), None, Latents(rows[:, :, mine[1]], projection)).cpu()]
    options |= {"exchange": problem.exchange, "sinks": sink, "selected": selected, "distance_bias": bias}
    learned = inputs if bias is None else [*inputs, bias]
    out = am.attention(*inputs[:3], mesh=mesh, **options, **lengths)
    return [x.cpu() for x in (out.detach(), *torch.autograd.grad(out, learned, dout[:, :, mine[0]]))]


def device() -> str:
    """Where this world of ranks computes."""
    return "cuda" if dist.is_initialized() and dist.get_backend() == "nccl" else "cpu"


_meshes: dict[tuple[Shape, tuple[str, ...]], DeviceMesh] = {}


def named_mesh(shape: Shape, axes: tuple[str, ...]) -> DeviceMesh:
    """A mesh of that shape, its axes in any order: made once, since each has process groups of its own."""
    if (shape, axes) not in _meshes:
        sizes = tuple(shape[AXES.index(name)] for name in axes)
        _meshes[shape, axes] = init_device_mesh(device(), sizes, mesh_dim_names=axes)
    return _meshes[shape, axes]


def shard_positions(problem: MeshProblem, mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    """Where this rank's queries and keys stand."""
    place = {name: mesh.get_local_rank(name) if name in problem.axes else 0 for name in AXES}
    shard = problem.shape.shard(**place)
    q, k = (
        layout.positions(n, dist.get_world_size(), shard)
        for layout, n in zip(problem.layouts, problem.lengths, strict=True)
    )
    return q, k


def check(problem: MeshProblem, results: list[list[Tensor]]) -> dict[str, float]:
    """Put the ranks' shards together and hold them against float64; say what share of its allowance each used."""
    q, k, v, dout, *sinks = problem.whole()
    positions = [torch.arange(n) for n in problem.lengths]
    scale = problem.widths[0] ** -0.5 if problem.scale is None else problem.scale
    visible = problem.mask.visible(*positions)
    if problem.key_lengths is not None:
        visible = visible & (positions[1] < problem.key_lengths[:, None, None, None])
    if problem.selected is not None:
        visible = visible & selected_pairs(problem.selected, positions[1], problem.heads[0])
    expected = truth([q, k, v, *sinks], visible, scale, dout, softcap=problem.softcap)
    ranks = problem.shape.ranks
    places = _places(problem)
    shares = {}
    columns = {"out": 0, "dq": 0, "dk": 1, "dv": 1}
    for number, (name, column) in enumerate([*columns.items()][: len(results[0])]):
        layout, length = problem.layouts[column], problem.lengths[column]
        given = torch.empty_like(expected.values[name], dtype=problem.dtype)
        for rank in range(ranks):
            given[:, :, layout.positions(length, ranks, places[rank])] = results[rank][number]
        shares[name] = expected.check(name, given, problem)
    if len(results[0]) > 4:
        shares["dsinks"] = expected.check("dsinks", sum(result[4].double() for result in results), problem)
    return shares


def _places(problem: MeshProblem) -> list[int]:
    """The shard that each rank of the world holds: ranks are laid over the mesh in the order of its axes."""
    sizes = [problem.shape[AXES.index(name)] for name in problem.axes]
    places = []
    for rank in range(problem.shape.ranks):
        place, rest = dict.fromkeys(AXES, 0), rank
        for name, size in zip(reversed(problem.axes), reversed(sizes), strict=True):
            rest, place[name] = divmod(rest, size)
        places.append(problem.shape.shard(**place))
    return places
