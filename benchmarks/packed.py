"""`python -m benchmarks packed`: layouts of packed batches, counted from the schedule and timed on ranks.

Batches are drawn from the lengths of documents in training corpora. A layout is counted by the pairs of its busiest
rank, over the mean, and by the tokens of q, out, k and v that its busiest rank receives, over all tokens.
"""

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from os.path import isfile
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
import torch.distributed as dist

import attnmesh as am
from attnmesh.cli.launch import Send
from attnmesh.cli.probe_command import measured
from attnmesh.core.layout import Layout
from attnmesh.core.mask import Mask
from attnmesh.core.packing import pack_documents
from attnmesh.cost.machine_constants import keep_machine, measured_machine
from attnmesh.cost.traffic import count_tokens, divisors
from attnmesh.errors import ArgumentError, short
from attnmesh.mesh.axes import RankMesh
from attnmesh.mesh.schedule import Problem
from attnmesh.mesh.shapes import Shape
from attnmesh.mesh_attention.auto_choices import agreed_price
from benchmarks.netns import Hosts, World, run_on, send_rows
from benchmarks.peers import PEERS, Case, inputs, wrong_gradients
from benchmarks.prefill import Contender, attention_call, between_barriers, mesh_of
from benchmarks.timing import Timing, race

LENGTHS = Path(__file__).parent / "document_lengths"

TOKENS = 8192
"""Tokens of a rank for which documents are drawn. Timed batches are shorter, with all lengths divided alike."""

SHAPES = (
    Shape(1, 8, 1),
    Shape(1, 1, 8),
    Shape(1, 2, 4),
    Shape(1, 16, 1),
    Shape(1, 4, 4),
    Shape(1, 64, 1),
    Shape(1, 8, 8),
)
"""Meshes on which layouts are counted."""

HEADS = 8, 8


@dataclass(frozen=True)
class Count:
    """A layout on batches of one corpus and mesh: the worst imbalance, and the mean of the tokens received."""

    case: str
    shape: str
    layout: str
    imbalance: float
    received: float
    beside_least: float | None
    """Largest ratio of the tokens received over the least of any layout with an imbalance under 1.1."""
    made_ms: float | None
    tokens: int = TOKENS


@dataclass(frozen=True)
class Row:
    """A contender on one batch; `note` is why it does not run."""

    case: str
    contender: str
    timing: Timing | None = None
    beside_packed: float | None = None
    """Time over that of `Packed` on the 2D mesh."""
    note: str | None = None


class Request(NamedTuple):
    """Files of lengths, tokens of a rank that are timed, rounds, and the hosts, if any."""

    files: tuple[Path, ...]
    tokens: int
    rounds: int
    hosts: Hosts | None = None


def corpora(files: Sequence[Path] | None) -> tuple[Path, ...]:
    """Return the files given, or those of this folder."""
    paths = tuple(files or sorted(LENGTHS.glob("*.json")))
    for file in paths:
        if not isfile(file):
            raise ArgumentError("--lengths", "a file of shares by length", short(str(file)), "correct its path")
        _shares(file)
    return paths


def _shares(file: Path) -> dict[tuple[int, int], float]:
    """Return the share of documents by their least length and the length that all are below."""
    shares: dict[tuple[int, int], float] = {}
    try:
        for key, share in json.loads(file.read_text()).items():
            start, stop = (int(float(edge)) for edge in key.strip("[)").split(","))
            shares[start, stop] = float(share)
        valid = sum(shares.values()) > 0 and min(shares.values()) >= 0
        valid = valid and all(0 <= start < stop for start, stop in shares)
    except (AttributeError, OSError, OverflowError, TypeError, ValueError):
        valid = False
    if not valid:
        fix = 'write {"[0,512)": 0.7, "[512,4096)": 0.3}'
        raise ArgumentError("--lengths", "an object of shares by length", short(str(file)), fix)
    return shares


def draw(file: Path, total: int, random: Random) -> list[int]:
    """Return lengths of documents that fill a batch."""
    shares = _shares(file)
    documents: list[int] = []
    remaining = total
    while remaining:
        start, stop = random.choices([*shares], weights=[*shares.values()])[0]
        documents.append(min(remaining, random.randrange(max(1, start), max(stop, 2))))
        remaining -= documents[-1]
    return documents


def counts(files: Sequence[Path], batches: int, add: Send) -> None:
    """Count the layouts on each mesh, on some batches of each corpus."""
    for file in files:
        for shape in SHAPES:
            random = Random(shape.ranks)
            drawn = [draw(file, TOKENS * shape.ranks, random) for _ in range(batches)]
            for row in _counts(file.stem, shape, drawn):
                add(row)


def _counts(case: str, shape: Shape, batches: Sequence[list[int]]) -> Iterator[Count]:
    counts_of: dict[str, list[tuple[float, float]]] = {}
    seconds = []
    for documents in batches:
        pack_documents.cache_clear()
        start = time.perf_counter()
        am.Packed(tuple(documents), shape).positions(sum(documents), shape.ranks, 0)
        seconds.append(time.perf_counter() - start)
        mask = am.Causal() & am.Documents(documents)
        layouts: dict[str, Layout] = {
            "Packed": am.Packed(tuple(documents), shape),
            "Zigzag": am.Zigzag(),
            "Contiguous": am.Contiguous(),
            "Striped": am.Striped(),
            "Striped(64)": am.Striped(64),
        }
        for name, layout in layouts.items():
            counts_of.setdefault(name, []).append(count(mask, layout, shape))
    for name, counts in counts_of.items():
        imbalances, received = zip(*counts, strict=True)
        beside, milliseconds = None, None
        if name == "Packed":
            fewest = [min(x[1] for x in of_batch if x[0] < 1.1) for of_batch in zip(*counts_of.values(), strict=True)]
            beside = round(max(own / best for own, best in zip(received, fewest, strict=True)), 2)
            milliseconds = round(1e3 * sorted(seconds)[len(seconds) // 2], 1)
        title = "x".join(map(str, shape))
        yield Count(
            case, title, name, round(max(imbalances), 3), round(sum(received) / len(received), 3), beside, milliseconds
        )


def count(mask: Mask, layout: Layout, shape: Shape) -> tuple[float, float]:
    """Return the pairs of the busiest rank over the mean, and the tokens that the busiest receives over all tokens."""
    length = mask.ends[-1]
    queries, keys, _, by_source = count_tokens(Problem(mask, shape, layout, layout, length, length))
    pairs = by_source.sum(1)
    queries, keys = (counts * (1 - torch.eye(counts.shape[-1])) for counts in (queries, keys))  # from others
    received = queries.sum(1) + queries.sum(2) + 2 * keys.sum(1).T  # q, out, and both of k and v, by (r, c)
    return float(pairs.max() / pairs.mean()), float(received.max() / length / shape.heads)


def rows(request: Request, world: World, add: Send) -> None:
    """Time the contenders on a batch of each corpus."""
    request = request._replace(hosts=None if isinstance(world, int) else world)
    run_on(world, send_rows, _contests, request, on_message=add)


def _contests(request: Request) -> Iterator[Row]:
    if request.hosts is not None:
        _probe()
    for file in request.files:
        yield from _contest(file, request)


def _probe() -> None:
    """Let "auto" take the constants of these hosts, as after `attnmesh probe`. The rates of a preset are not theirs."""
    cluster = measured()
    with TemporaryDirectory() as folder:
        os.environ["ATTNMESH_MACHINE"] = f"{folder}/machine.json"
        keep_machine(cluster, "cpu")
        measured_machine.cache_clear()
        measured_machine("cpu")


def _contest(file: Path, request: Request) -> list[Row]:
    ranks = dist.get_world_size()
    lengths = draw(file, TOKENS * ranks, Random(ranks))
    edges = [round(end * request.tokens / TOKENS) for end in accumulate(lengths, initial=0)]
    documents = [stop - start for start, stop in pairwise(edges) if stop > start]
    mask, length = am.Causal() & am.Documents(documents), edges[-1]
    case = Case(file.stem, mask, am.Contiguous(), HEADS, length)
    tensors, calls, rows = inputs(case), {}, {}
    schemes = [*contenders(ranks, documents)]
    tiles = {shape: Shape(*(1 if request.hosts else n for n in shape)) for _, shape, *_ in schemes}
    for name, shape, layout, exchange in (*schemes, chosen(case, tiles)):
        contender = Contender(shape, tiles[shape], exchange)
        layout_case = Case(file.stem, mask, layout, HEADS, length)
        calls[name], rows[name] = attention_call(layout_case, tensors, contender), Row(file.stem, name)
    for name, make in PEERS.items():
        peer = make(case, tensors)
        rows[name] = Row(file.stem, name, note=peer if isinstance(peer, str) else wrong_gradients(peer, case, tensors))
        if not isinstance(peer, str):
            calls[name] = peer.call
    timings = race({name: between_barriers(call) for name, call in calls.items()}, torch.device("cpu"), seconds=0,
                   rounds=request.rounds)  # fmt: skip
    packed_median = next(timing.median for name, timing in timings.items() if name.startswith("packed, 2D"))
    return [
        Row(row.case, name, timings[name], round(timings[name].median / packed_median, 2), row.note)
        if name in timings
        else row
        for name, row in rows.items()
    ]


def chosen(case: Case, tiles: dict[Shape, Shape]) -> tuple[str, Shape, Layout, str]:
    """Return the contender with the shape and the layout that "auto" takes, as `on_mesh(shape="auto")` does."""
    options = case.mask, case.length
    heads = *case.heads, case.width
    prices = {
        shape: agreed_price("auto", *options, RankMesh.of(mesh_of(shape, tile)), heads) for shape, tile in tiles.items()
    }
    shape = min(prices, key=lambda shape: prices[shape].seconds)
    return (
        f"auto: {'x'.join(map(str, shape))}, {type(prices[shape].layout).__name__}",
        shape,
        prices[shape].layout,
        "auto",
    )


def contenders(ranks: int, documents: Sequence[int]) -> Iterator[tuple[str, Shape, Layout, str]]:
    """Yield the name, shape, layout and exchange of each contender."""
    columns = max(n for n in divisors(ranks) if n * n <= ranks)
    heads = max(n for n in divisors(ranks) if HEADS[1] % n == 0)
    line, grid, by_heads = Shape(1, ranks, 1), Shape(1, ranks // columns, columns), Shape(heads, ranks // heads, 1)
    names = {line: "KV gather", grid: "2D", by_heads: "Ulysses" if heads == ranks else "USP"}
    for shape, name in names.items():
        title, exchange = f"{name} {'x'.join(map(str, shape))}", "bulk" if shape == line else "pipelined"
        yield f"packed, {title}", shape, am.Packed(tuple(documents), shape), exchange
        yield f"zigzag, {title}", shape, am.Zigzag(), exchange
        yield f"striped, {title}", shape, am.Striped(), exchange
    yield f"zigzag, ring {'x'.join(map(str, line))}", line, am.Zigzag(), "ring"
