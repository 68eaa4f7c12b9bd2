"""Figures of ranks: what each holds, and what travels between them, computed by the library's own layouts and trees."""

import colorsys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnmesh.core.layout import Layout, Packed, Zigzag
from attnmesh.core.mask import Causal, Documents
from attnmesh.mesh.schedule import Problem
from attnmesh.mesh.shapes import Shape, share_evenly
from attnmesh.store.layer_files import PIECE_TOKENS
from benchmarks.mesh_figures import (
    BETWEEN_HOSTS,
    DPI,
    FAINT,
    HUES,
    INK,
    INSIDE_HOST,
    UNSEEN,
    pairs_of_ranks,
    tree_messages,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SMALL: dict[str, Any] = {"fontsize": 8, "color": FAINT}

TITLE: dict[str, Any] = {"fontsize": 10, "color": INK, "loc": "left"}

ARROW: dict[str, Any] = {"arrowstyle": "<|-|>", "linewidth": 1.2, "shrinkA": 0, "shrinkB": 0}


def colours(count: int) -> Tensor:
    """Return a colour for each rank or document, and one for nothing as the last."""
    shades = (0.56, 0.42, 0.70)
    palette = [colorsys.hls_to_rgb(HUES[i % 6], shades[i // 6 % 3], 0.62) for i in range(count)]
    return torch.tensor([*palette, UNSEEN])


def draw_folder() -> "Figure":
    """Draw where the tokens of a rank are in a folder that grows, and what a step reads when."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    figure = Figure(figsize=(7.6, 2.4), dpi=DPI, layout="constrained")
    axes = figure.subplots()
    shades = colours(6)
    kept, left, ahead = (tuple(shades[number].tolist()) for number in (1, 6, 2))
    pieces = 9
    for number in range(pieces):
        colour = kept if number < 3 else ahead if number in (5, 6) else left
        now = number == 4
        edge: dict[str, Any] = {"edgecolor": INK if now else "white", "linewidth": 2.0 if now else 1.0}
        axes.add_patch(Rectangle((number, 0), 0.96, 1, facecolor=tuple(shades[0].tolist()) if now else colour, **edge))
        axes.text(number + 0.48, 0.5, f"{number * PIECE_TOKENS:,}", ha="center", va="center", fontsize=7, color=INK)
    axes.add_patch(Rectangle((pieces, 0), 0.96, 1, fill=False, edgecolor=FAINT, linestyle="--"))
    axes.add_patch(Rectangle((pieces, 0), 0.4, 1, facecolor=kept, edgecolor="white"))
    for start, stop, text in (
        (0, 2.96, "stay in memory\nonce they are read"),
        (3, 3.96, "left\nbehind"),
        (4, 4.96, "attended\nnow"),
        (5, 6.96, "being read\nfrom the disk"),
        (7, 8.96, "in the file\nalone"),
        (9, 9.96, "filled by\nappend"),
    ):
        axes.annotate("", (start, -0.12), (stop, -0.12), arrowprops={"arrowstyle": "-", "color": FAINT})
        axes.text((start + stop) / 2, -0.2, text, ha="center", va="top", **SMALL)
    axes.set_title("one rank's keys and values of a layer: pieces of 4,096 tokens, each a file", **TITLE)
    axes.set(xlim=(-0.1, pieces + 1.1), ylim=(-0.55, 1.1))
    axes.set_axis_off()
    return figure


def draw_tiers() -> "Figure":
    """Draw where the tokens of a rank are if the newest alone are on the device, and what a step does with each."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    figure = Figure(figsize=(7.6, 3.0), dpi=DPI, layout="constrained")
    axes, shades = figure.subplots(), colours(6)
    old, hot, leaving = (tuple(shades[number].tolist()) for number in (2, 0, 1))
    blocks, first_hot = 14, 9  # of all tokens, and the first one that is on the device
    for number in range(blocks):
        on_device = number >= first_hot
        colour = leaving if number == first_hot else hot if on_device else old
        axes.add_patch(Rectangle((number, 1.25 if on_device else 0), 0.94, 0.7, facecolor=colour, edgecolor="white"))
    axes.add_patch(Rectangle((blocks, 1.25), 0.94, 0.7, fill=False, edgecolor=FAINT, linestyle="--"))
    down = {"arrowstyle": "-|>", "color": FAINT, "linewidth": 1.2, "linestyle": "--"}
    axes.annotate("", (first_hot + 0.47, 0.35), (first_hot + 0.47, 1.2), arrowprops=down)
    axes.text(first_hot + 0.65, 0.72, "the oldest blocks leave in one copy", va="center", **SMALL)
    axes.text(first_hot - 0.2, 1.6, "the device: hot= newest tokens", ha="right", va="center", fontsize=9, color=INK)
    axes.text(0, 0.82, "host memory, or files of folder=", va="bottom", fontsize=9, color=INK)
    axes.text(blocks + 0.47, 2.0, "append", ha="center", va="bottom", **SMALL)
    for start, stop, text in (
        (0, 3.94, "attended where they lie,\nby the host's kernel"),
        (4, 8.94, "or brought to the device part by part:\none is copied while another is attended"),
    ):
        axes.annotate("", (start, -0.12), (stop, -0.12), arrowprops={"arrowstyle": "-", "color": FAINT})
        axes.text((start + stop) / 2, -0.2, text, ha="center", va="top", **SMALL)
    axes.set_title(
        "one rank's keys and values of a layer in two memories: each gives a partial, and they merge", **TITLE
    )
    axes.set(xlim=(-0.1, blocks + 1.1), ylim=(-0.85, 2.25))
    axes.set_axis_off()
    return figure


def holders(layout: Layout, length: int, ranks: int) -> Tensor:
    """Return the rank that holds each token.

    >>> holders(Zigzag(), 8, 2).tolist()
    [0, 0, 1, 1, 1, 1, 0, 0]
    """
    holder = torch.empty(length, dtype=torch.long)
    for rank in range(ranks):
        holder[layout.positions(length, ranks, rank)] = rank
    return holder


def owners(holder: Tensor, key_ranks: int) -> Tensor:
    """Return the rank that computes each pair: it has the r of the query's holder and the c of the key's.

    >>> owners(torch.arange(4), 2)
    tensor([[0, 1, 0, 1],
            [0, 1, 0, 1],
            [2, 3, 2, 3],
            [2, 3, 2, 3]])
    """
    return holder[:, None] // key_ranks * key_ranks + holder % key_ranks


def strips(axes: "Axes", rows: Tensor, palette: Tensor, names: Sequence[str]) -> None:
    """Draw each row of indices as a strip of cells in the palette's colours; the last colour is that of nothing."""
    axes.imshow(palette[rows].numpy(), extent=(0, rows.shape[1], len(rows), 0), aspect="auto")
    axes.vlines(range(1, rows.shape[1]), 0, len(rows), colors="white", linewidth=0.6)
    axes.hlines(range(1, len(rows)), 0, rows.shape[1], colors="white", linewidth=5)
    axes.set_yticks([row + 0.5 for row in range(len(rows))], names)
    axes.set_xticks([])
    axes.tick_params(length=0, labelsize=8, labelcolor=INK)
    axes.spines[:].set_visible(False)


def blank(width: float, height: float) -> "Figure":
    """Return an empty figure of so many inches."""
    from matplotlib.figure import Figure

    return Figure((width, height), dpi=DPI, facecolor="white", layout="constrained")


def draw_keys_tp(hosts: int = 2, tp: int = 8, q_heads: int = 64, kv_heads: int = 8) -> "Figure":
    """Return a figure of `tp=8,keys=2`: ranks of a host share the heads, hosts share the context."""
    from matplotlib.patches import FancyBboxPatch

    assert share_evenly(kv_heads, tp)
    figure = blank(9.2, 3.4)
    axes, palette, queries = figure.subplots(), colours(hosts), q_heads // tp
    for rank in range(hosts * tp):
        host, place = divmod(rank, tp)
        xy, y = (1.25 * place, -2 * host), -2 * host
        axes.add_patch(
            FancyBboxPatch(xy, 1.0, 0.9, boxstyle="round,pad=0.04", fc=palette[host].tolist(), ec="none", alpha=0.8)
        )
        text = f"rank {rank}\nq {place * queries}-{(place + 1) * queries - 1}\nk {place * kv_heads // tp}"
        axes.text(xy[0] + 0.5, y + 0.45, text, ha="center", va="center", fontsize=8, color="white")
        if host:
            axes.annotate(
                "",
                (xy[0] + 0.5, y + 1.0),
                (xy[0] + 0.5, y + 1.95),
                arrowprops={**ARROW, "color": BETWEEN_HOSTS},
            )
    for host in range(hosts):
        line = -2 * host - 0.3 if host else 1.2
        axes.text(-0.2, -2 * host + 0.45, f"host {host}\n1/{hosts} of\nthe keys", ha="right", va="center", **SMALL)
        axes.annotate("", (0, line), (1.25 * tp - 0.25, line), arrowprops={**ARROW, "color": INSIDE_HOST})
    axes.text(0, 1.36, "tp: all-reduces inside a host, two a layer", fontsize=9, color=INSIDE_HOST)
    axes.text(1.25 * tp, -0.55, "keys: one merge\nof partials a layer", fontsize=9, color=BETWEEN_HOSTS, va="center")
    axes.set(xlim=(-1.2, 1.25 * tp + 2.2), ylim=(-2 * hosts + 1.5, 1.75))
    axes.set_axis_off()
    return figure


def draw_prefill_decode(hosts: Sequence[Sequence[int]] = ((0, 1), (2, 3)), tokens: int = 32) -> "Figure":
    """Return a figure of a prompt in shards, and of the messages in which a new token's partials are merged."""
    ranks = sum(map(len, hosts))
    figure = blank(9.2, 2.6)
    prefill, decode = figure.subplots(1, 2, width_ratios=(1.25, 1))
    holder = holders(Zigzag(), tokens, ranks)
    rows = torch.stack([torch.where(holder == rank, rank, ranks) for rank in range(ranks)])
    strips(prefill, rows, colours(ranks), [f"rank {rank}" for rank in range(ranks)])
    prefill.set_title("prefill: each rank computes its tokens of the prompt", **TITLE)
    prefill.set_xlabel("token of the prompt; its key stays on this rank", **SMALL)
    rounds, host_of = tree_messages(hosts), {rank: number for number, host in enumerate(hosts) for rank in host}
    for rank in range(ranks):
        decode.plot((0, len(rounds)), (rank + 0.5, rank + 0.5), color=colours(ranks)[rank].tolist(), linewidth=2)
    for number, pairs in enumerate(rounds):
        kind = INSIDE_HOST if host_of[pairs[0][0]] == host_of[pairs[0][1]] else BETWEEN_HOSTS
        where = "inside hosts" if kind == INSIDE_HOST else "between hosts"
        decode.text(number + 0.5, 0.05, where, ha="center", fontsize=8, color=kind)
        for sender, receiver in pairs:
            arrow = {"arrowstyle": "-|>", "color": kind, "linewidth": 1.2}
            decode.annotate("", (number + 0.8, receiver + 0.5), (number + 0.2, sender + 0.5), arrowprops=arrow)
    decode.set(xlim=(0, len(rounds)), ylim=(ranks, -0.2))
    decode.set_title("decoding: partials merge along a tree", **TITLE)
    decode.set_axis_off()
    return figure


def draw_data_context(data: int = 2, context: int = 4, tokens: int = 32) -> "Figure":
    """Return a figure of packs along data, and of the ranks along context that share each."""
    figure = blank(9.2, 2.5)
    holder = holders(Zigzag(), tokens, context)
    for pack, axes in enumerate(figure.subplots(1, data)):
        ranks = [pack * context + rank for rank in range(context)]
        rows = torch.stack([torch.where(holder == i, rank, data * context) for i, rank in enumerate(ranks)])
        strips(axes, rows, colours(data * context), [f"rank {rank}" for rank in ranks])
        axes.set_title(f"data {pack}: pack {pack} on ranks {ranks[0]} to {ranks[-1]}, the context axis", **TITLE)
        axes.set_xlabel("token of the pack", **SMALL)
    figure.supxlabel(
        "Keys and queries travel inside a pack's ranks, gradients over all ranks, which share the weights", **SMALL
    )
    return figure


def draw_joint(text: int = 8, image: int = 40, rows: int = 2, columns: int = 2) -> "Figure":
    """Return a figure of text and image tokens that attend together: who holds each, and who computes each pair."""
    from attnmesh.diffusers.tokens import run_sizes

    ranks = rows * columns
    sizes = (torch.tensor(run_sizes(tokens, ranks)) for tokens in (text, image))
    holder, palette = torch.cat([torch.arange(ranks).repeat_interleave(size) for size in sizes]), colours(ranks)
    figure = blank(8.4, 4.2)
    strip, pairs = figure.subplots(1, 2)
    strip_rows = torch.stack([torch.where(holder == rank, rank, ranks) for rank in range(ranks)])
    strips(strip, strip_rows, palette, [f"rank {rank}" for rank in range(ranks)])
    strip.set_title("each rank holds a part of the text and of the image", **TITLE)
    pairs.imshow(palette[owners(holder, columns)].numpy(), extent=(0, len(holder), len(holder), 0), aspect="auto")
    pairs.set_title(f"the rank that computes each pair, {rows} x {columns}", **TITLE)
    pairs.hlines(text, 0, len(holder), colors=INK, linewidth=1)
    pairs.set_yticks([text / 2, text + image / 2], ["text", "image"])
    pairs.set_ylabel("query", **SMALL)
    for axes in (strip, pairs):
        axes.vlines(text, 0, axes.get_ylim()[0], colors=INK, linewidth=1)
        axes.set_xticks([text / 2, text + image / 2], ["text", "image"])
        axes.tick_params(length=0, labelsize=8, labelcolor=INK)
    pairs.set_xlabel("key", **SMALL)
    return figure


def draw_shards(documents: Sequence[int], shape: Shape) -> "Figure":
    """Return a figure of each rank's tokens in the colours of their documents, and its share of the work, by layout."""
    mask, length = Causal() & Documents(documents), sum(documents)
    document, palette = torch.arange(len(documents)).repeat_interleave(torch.tensor(documents)), colours(len(documents))
    figure = blank(9.2, 2.4)
    layouts: list[tuple[str, Layout]] = [("Zigzag()", Zigzag()), ("Packed", Packed(tuple(documents), shape))]
    for axes, (name, layout) in zip(figure.subplots(1, 2), layouts, strict=True):
        pairs = pairs_of_ranks(Problem(mask, shape, layout, layout, length, length))
        counts = pairs[pairs >= 0].bincount(minlength=shape.ranks)
        shards = [document[layout.positions(length, shape.ranks, rank)] for rank in range(shape.ranks)]
        rows = torch.full((shape.ranks, max(map(len, shards))), len(documents))
        for rank, shard in enumerate(shards):
            rows[rank, : len(shard)] = shard
        strips(axes, rows, palette, [f"rank {rank}" for rank in range(shape.ranks)])
        for rank, count in enumerate(counts.tolist()):
            share = f"{100 * count / int(counts.sum()):.0f} %"
            axes.text(rows.shape[1] + 0.2, rank + 0.5, share, va="center", **SMALL)
        axes.set_title(f"{name}: tokens by document, and the share of pairs", **TITLE)
    return figure
