"""Random histories of a cache, drawn from a seed: appends, truncations, reorders, saves, loads and decodes."""

from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

import attnmesh as am
from attnmesh.core.mask import Mask
from attnmesh.core.partial import sum_dtype
from attnmesh.core.selection import NO_INDEX
from attnmesh.core.storage import STORAGES
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.emulation.interpreted import interpreting
from tests.support.ranks.pool import SIZES, Pool, on_each_rank
from tests.support.truth.dense import truth
from tests.support.truth.mesh_problems import device, named_mesh
from tests.support.truth.problems import CAPS, DTYPES

LAYOUTS = (am.Contiguous(), am.Zigzag(), am.Striped(), am.Striped(4))


@dataclass(frozen=True)
class Event:
    """One call on the cache."""

    kind: str  # append, shard, truncate, reorder, fork or decode
    number: int  # tokens, the length to truncate to, the sequences after a reorder, or 1 to continue with the fork
    seed: int
    batch: int  # sequences so far
    padded: bool = False
    mask: Mask = Mask(right=0)
    options: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Phase:
    """Events on one mesh. Each phase but the first begins with a load, each but the last ends with a save."""

    shape: Shape
    events: tuple[Event, ...]
    shares: tuple[float, ...] | None = None

    @staticmethod
    def draw_shares(random: Random, shape: Shape) -> tuple[float, ...] | None:
        """Return shares of the ranks that hold tokens, some of them small; None in three of five."""
        ranks = shape.queries * shape.keys
        shares = tuple(random.choice((1, 1, 2, 3, 0.3, 0.04)) for _ in range(ranks))
        return shares if random.random() < 0.4 else None


@dataclass(frozen=True)
class History:
    """Sizes of a cache, and phases of calls on it."""

    seed: int
    batch: int
    heads: tuple[int, int]
    widths: tuple[int, int]
    dtype: torch.dtype
    block: int
    sinks: bool
    grows: bool
    prefix: bool  # values are the first columns of the keys
    phases: tuple[Phase, ...]
    window: Mask | None = None  # of a cache that forgets
    keep: int = 0
    storage: str | None = None
    hot: int | None = None

    CAPACITY = 160

    def kept(self, x: Tensor) -> Tensor:
        """Return new keys or values as the cache knows them: in 8 bits they are rounded."""
        by = STORAGES.get(self.storage or "")
        return x if by is None else by.dequantize(by.quantize(x), sum_dtype(x.dtype))

    def tokens(self, event: Event) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return new keys and values, and their token mask."""
        generator = torch.Generator().manual_seed(event.seed)
        k, v = (
            torch.randn(event.batch, self.heads[1], event.number, width, generator=generator).to(self.dtype)
            for width in self.widths
        )
        v = k[..., : self.widths[1]] if self.prefix else v
        token_mask = torch.rand(event.batch, event.number, generator=generator) < 0.7 if event.padded else None
        return k, v, token_mask

    def queries(self, event: Event) -> Tensor:
        """Return the queries of a decode event."""
        generator = torch.Generator().manual_seed(event.seed)
        q = torch.randn(event.batch, self.heads[0], event.number, self.widths[0], generator=generator)
        return q.to(self.dtype)

    def selection(self, event: Event, length: int) -> am.Selection | None:
        """Return the tokens that the queries of one decode event in three select, of `length` tokens."""
        if event.seed % 3 or dict(event.options)["kernel"] != "auto":
            return None
        generator = torch.Generator().manual_seed(event.seed)
        block = 4 if event.seed // 3 % 3 == 2 else 1
        heads = self.heads[1] if event.seed // 9 % 2 else 1
        scores = torch.rand(event.batch, heads, event.number, -(-length // block), generator=generator)
        indices = scores.argsort(-1)[..., : 1 + event.seed // 27 % 30]
        none = torch.rand(indices.shape, generator=generator) < 0.1
        return am.Selection(indices.masked_fill(none, NO_INDEX).int(), block)

    def order(self, event: Event) -> Tensor:
        """Return the batch index of a reorder event."""
        generator = torch.Generator().manual_seed(event.seed)
        return torch.randint(event.batch, (event.number,), generator=generator)

    def sink(self) -> Tensor | None:
        """Return the sinks of the heads, or None without sinks."""
        if not self.sinks:
            return None
        return torch.randn(self.heads[0], generator=torch.Generator().manual_seed(self.seed)).to(self.dtype)


def draw(
    seed: int,
    sizes: tuple[int, ...] = SIZES,
    dtypes: tuple[torch.dtype, ...] = DTYPES,
    kernel: str = "auto",
    most: int = 40,
) -> History:
    """Return the history of a seed. Two of five are of a cache that forgets."""
    random, window, shares = Random(seed), Forgetting.draw(Random(~seed)), Random(seed + 0.5)
    kv_heads = random.choice((1, 2, 2, 4, 6))
    width = random.choice((4, 8, 16))
    padded = random.random() < 0.25
    batch = random.choice((1, 2, 3))
    length = 0
    rows = batch
    phases = []
    for _ in range(random.choice((1, 1, 2, 3))):
        ranks = random.choice(sizes)
        shape = random.choice(
            [
                s
                for h in range(1, 9)
                for r in range(1, 9)
                for c in range(1, 9)
                if (s := Shape(h, r, c)).ranks == ranks and kv_heads % h == 0
            ]
        )
        events = []
        for _ in range(random.randint(3, 8)):
            event = window.allowed(_event(random, length, rows, padded, kernel, most), length, padded)
            length = {"append": length + event.number, "shard": length + event.number, "truncate": event.number}.get(
                event.kind, length
            )
            rows = event.number if event.kind == "reorder" else rows
            events.append(event)
        phases.append(Phase(shape, tuple(events), Phase.draw_shares(shares, shape)))
    heads = (kv_heads * random.choice((1, 2, 4)), kv_heads)
    value_width = random.choice((width, width, 4, 16))
    return History(
        seed=seed,
        batch=batch,
        heads=heads,
        widths=(width, value_width),
        dtype=random.choice(dtypes),
        block=random.choice((1, 4, 16)),
        sinks=random.random() < 0.2,
        grows=random.random() < 0.3,
        prefix=random.random() < 0.3 and value_width <= width,
        phases=tuple(phases),
        window=window.mask,
        keep=window.keep,
    )


def in_tiers(history: History, hot: int) -> History:
    """Return the history of a cache of two memories, which keeps every token and has no padding."""
    phases = (
        replace(phase, events=tuple(replace(event, padded=False) for event in phase.events)) for phase in history.phases
    )
    return replace(history, phases=tuple(phases), window=None, keep=0, hot=hot)


@dataclass
class Forgetting:
    """Mask of a cache that forgets, and the first query that it can still serve."""

    random: Random
    mask: Mask | None
    keep: int
    floor: int = 0

    @staticmethod
    def draw(random: Random) -> "Forgetting":
        """Return a mask that forgets, or None in three of five."""
        masks = am.Window(0), am.Window(3), am.Window(20, 1), am.Causal() & am.Chunks(9), am.Window(30) & am.Chunks(40)
        mask = random.choice(masks) if random.random() < 0.4 else None
        return Forgetting(random, mask, 0 if mask is None else random.choice((0, 0, 1, 5, 40)))

    def allowed(self, event: Event, length: int, padded: bool) -> Event:
        """Return an event changed into one that the cache allows."""
        if self.mask is None:
            return event
        match event.kind:
            case "append" | "shard":
                queries = event.number
                if event.kind == "shard":
                    queries = self.random.choice((1, event.number))
                    event = replace(event, options=(*event.options, ("queries", queries)))
                self.floor = max(self.floor, length + event.number - max(queries, self.keep + 1))
            case "truncate":
                if not self._serves(event.number, padded):
                    event = replace(event, number=self.random.choice((0, self.floor, length)))
                self.floor = min(self.floor, event.number)
            case "decode":
                mask = self.mask & self.random.choice(
                    (am.Full(), am.Full(), am.Causal(), am.Window(2), *(SPANS,) * (not self.mask.right))
                )
                event = replace(event, mask=mask)
                if self.floor == length:  # after a truncation to what the next token sees
                    return replace(event, kind="reorder", number=event.batch)
                if not self._serves(length - event.number, padded):
                    event = replace(event, number=length - self.floor)
        return event

    def _serves(self, query: int, padded: bool) -> bool:
        first = [
            int(self.mask.visible(torch.tensor([n]), torch.arange(n + 1))[0].long().argmax())
            for n in (max(query, 0), self.floor)
        ]
        return query >= self.floor or first[1] == 0 or (not padded and first[0] == first[1])


SPANS = am.Spans([(2, 9), (11, 30), (30, 71), (90, 140)])


def _event(random: Random, length: int, batch: int, padded: bool, kernel: str, most: int) -> Event:
    room, seed = History.CAPACITY - length, random.getrandbits(40)
    kinds = (
        ["append"] * (room > 0)
        + ["shard"] * (room > 0)
        + (["truncate", "reorder", "fork"] + ["decode"] * 4) * (length > 0)
    )
    match random.choice(kinds):
        case "append":
            number = min(room, random.choice((1, 1, 1, 3, 20, 47)))
            return Event("append", number, seed, batch, padded=padded and random.random() < 0.5)
        case "shard":
            number = min(room, random.choice((1, 5, 30, 64)))
            layout = random.choice(LAYOUTS)
            return Event("shard", number, seed, batch, padded and random.random() < 0.5, options=(("layout", layout),))
        case "truncate":
            return Event("truncate", max(0, length - random.choice((0, 1, 2, 10, 50))), seed, batch)
        case "reorder":
            return Event("reorder", random.choice((batch, batch, random.randint(1, 3))), seed, batch)
        case "fork":
            return Event("fork", random.randint(0, 1), seed, batch)
    mask = random.choice(
        (am.Causal(), am.Causal(), am.Window(5), am.Full(), am.Window(20, 2), am.Causal() & am.Chunks(12), SPANS)
    )
    options = {
        "merge": random.choice(("auto", "auto", "tree", "direct", "gather", "allreduce")),
        "output": random.choice(("replicated", "replicated", "heads")),
        "scale": random.choice((None, None, 0.3, -0.5)),
        "kernel": kernel,
        "softcap": CAPS[seed % len(CAPS)],
        "key_lengths": (seed // 8 % (length + 1), length, 0)[-batch:] if seed % 7 == 0 else None,
    }
    return Event(
        "decode",
        random.randint(1, min(length, random.choice((1, 1, 4, most)))),
        seed,
        batch,
        False,
        mask,
        tuple(options.items()),
    )


@on_each_rank
def run_phase(history: History, phase: Phase, load_from: Path | None, save_to: Path | None) -> list[Tensor]:
    """Return one rank's outputs of all decode events of a phase."""
    mesh = named_mesh(phase.shape, AXES)
    if load_from is None:
        cache = am.KVCache(
            mesh,
            batch=history.batch,
            kv_heads=history.heads[1],
            head_dim=history.widths[0],
            value_dim=history.widths[1],
            capacity=8 if history.grows else history.CAPACITY,
            dtype=history.dtype,
            block=history.block,
            mask=history.window,
            keep=history.keep,
            storage=history.storage,
            values="prefix" if history.prefix else "separate",
            shares=phase.shares,
            hot=history.hot,
        )
    else:
        cache = am.KVCache.load(load_from, mesh, shares=phase.shares, hot=history.hot)
    outs = []
    for event in phase.events:
        if (history.grows and event.kind == "append") or event.kind == "shard":
            uneven = 1 if phase.shares is None else 100
            cache.reserve(uneven * (2 * (cache.length + event.number) + 64))  # shards may be uneven
        match event.kind:
            case "append":
                k, v, token_mask = history.tokens(event)
                cache.append(*on_device(history, k, v), token_mask=token_mask)
            case "shard":
                _append_shard(history, cache, event)
            case "truncate":
                cache.truncate(event.number)
            case "reorder":
                cache.reorder(history.order(event))
            case "fork":
                cache = _fork(history, cache, event)
            case "decode":
                options = dict(event.options)
                with interpreting(options["kernel"]):
                    sinks = None if history.sink() is None else history.sink().to(device())
                    q = history.queries(event).to(device())
                    if options["key_lengths"] is not None:
                        options["key_lengths"] = torch.tensor(options["key_lengths"])
                    if (selected := history.selection(event, cache.length)) is not None:
                        options["selected"] = am.Selection(selected.indices.to(device()), selected.block)
                    outs.append(am.decode(q, cache, mask=event.mask, sinks=sinks, **options).cpu())
    turn = cache.own_shard.turn
    assert cache.used <= turn.share(cache.length) + turn.width + len(phase.events) + 2 or not cache.is_block_cyclic
    if save_to is not None:
        cache.save(save_to)
    return outs


def _fork(history: History, cache: am.KVCache, event: Event) -> am.KVCache:
    """Fork a cache, change one of the two in every way, and return the other."""
    kept, other = cache, cache.fork()
    if event.number:
        kept, other = other, kept
    other.truncate(other.length // 2 if history.window is None else 0)
    sizes = other.config.batch, history.heads[1], 1
    k, v = (torch.full((*sizes, width), 100.0, dtype=history.dtype) for width in history.widths)
    other.append(*on_device(history, k, v))
    other.reorder(torch.arange(other.config.batch).flip(0))
    return kept


def _append_shard(history: History, cache: am.KVCache, event: Event) -> None:
    k, v, token_mask = history.tokens(event)
    options = dict(event.options)
    layout = options.pop("layout")
    if cache.shares is not None and event.seed % 2:
        layout = cache.layout
    mine = layout.positions(event.number, cache.rank_mesh.shape.ranks, cache.rank_mesh.shard_index)
    mine = mine[torch.randperm(len(mine), generator=torch.Generator().manual_seed(event.seed))]
    new = on_device(history, k[:, :, mine], v[:, :, mine])
    cache.append_shard(*new, mine + cache.length, token_mask=token_mask, **options)


def on_device(history: History, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return keys and values on the device; no values if they are a prefix of the keys."""
    return k.to(device()), None if history.prefix else v.to(device())


def check(history: History, pool: Pool, folder: Path) -> None:
    """Raise unless a history on ranks agrees with float64 attention over the same tokens."""
    k, v = (torch.zeros(history.batch, history.heads[1], 0, width, dtype=history.dtype) for width in history.widths)
    token_mask = torch.zeros(history.batch, 0, dtype=torch.bool)
    load_from = None
    for number, phase in enumerate(history.phases):
        save_to = folder / str(number) if number + 1 < len(history.phases) else None
        outputs = [iter(outs) for outs in pool.run(phase.shape.ranks, run_phase, history, phase, load_from, save_to)]
        for event in phase.events:
            match event.kind:
                case "append" | "shard":
                    new_k, new_v, new_mask = history.tokens(event)
                    new_k = history.kept(new_k)
                    new_v = new_k[..., : history.widths[1]] if history.prefix else history.kept(new_v)
                    k, v = torch.cat((k, new_k), 2), torch.cat((v, new_v), 2)
                    new_mask = torch.ones(event.batch, event.number, dtype=torch.bool) if new_mask is None else new_mask
                    token_mask = torch.cat((token_mask, new_mask), 1)
                case "truncate":
                    k, v, token_mask = k[:, :, : event.number], v[:, :, : event.number], token_mask[:, : event.number]
                case "reorder":
                    k, v, token_mask = (x[history.order(event)] for x in (k, v, token_mask))
                case "decode":
                    _check_decoded(history, event, [next(outs) for outs in outputs], k, v, token_mask)
        load_from = save_to


def _check_decoded(
    history: History, event: Event, outs: list[Tensor], k: Tensor, v: Tensor, token_mask: Tensor
) -> None:
    """Compare the ranks' outputs of one decode event with float64 attention."""
    positions = token_mask.cumsum(1) - 1
    visible = torch.stack([event.mask.visible(row[-event.number :].clamp(min=0), row) for row in positions])
    visible = (visible & token_mask[:, None, :] & token_mask[:, -event.number :, None])[:, None]
    few = dict(event.options)["key_lengths"]
    if few is not None:
        visible = visible & (positions < torch.tensor(few)[:, None])[:, None, None]
    if (selected := history.selection(event, k.shape[2])) is not None:
        visible = visible & chosen(selected, k.shape[2]).repeat_interleave(history.heads[0] // selected.heads, 1)
    q, sink = history.queries(event), history.sink()
    scale = dict(event.options)["scale"] or history.widths[0] ** -0.5
    tensors = [q, k, v] if sink is None else [q, k, v, sink]
    dout = torch.zeros(*q.shape[:-1], history.widths[1])
    expected = truth(tensors, visible, scale, dout, softcap=dict(event.options)["softcap"])
    if dict(event.options)["output"] == "heads":
        outs = [torch.cat(outs, dim=1)]
    for out in outs:
        given = torch.where(token_mask[:, -event.number :][:, None, :, None], out, expected.values["out"].to(out.dtype))
        expected.check("out", given, (history, event))
        assert torch.equal(out, outs[0]), (history, event)


def chosen(selected: am.Selection, keys: int) -> Tensor:
    """Return which keys each query selects, (batch, heads, queries, keys)."""
    blocks = -(-keys // selected.block)
    found = torch.zeros(*selected.indices.shape[:-1], blocks + 1, dtype=torch.bool)
    found.scatter_(-1, selected.indices.long().clamp(max=blocks), True)
    return found[..., :blocks].repeat_interleave(selected.block, -1)[..., :keys]
