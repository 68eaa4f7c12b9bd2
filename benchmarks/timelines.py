"""A figure of one training step under each exchange, from the ranges in profiles of two ranks on hosts of this machine.

`python -m benchmarks.timelines` traces the steps and draws docs/figures/timelines.png. It needs Linux, root and
matplotlib.
"""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.profiler import profile

import attnmesh as am
from attnmesh.mesh.schedule import EXCHANGE_MODES
from attnmesh.runtime.ranges import ATTENTION_RANGE, EXCHANGE_RANGE, MERGE_RANGE
from benchmarks.mesh_figures import DPI, FAINT, INK
from benchmarks.netns import Hosts, run_on_hosts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HOSTS, LENGTH, HEADS = Hosts.parse("2x1@1gbit"), 3072, 8

COLOURS = {ATTENTION_RANGE: "#2f7fc1", EXCHANGE_RANGE: "#d9772b", MERGE_RANGE: "#4a9b5b"}

MESSAGE = ("gloo:recv", "gloo:send")
"""Events of messages under way."""


class Span(NamedTuple):
    """A range of a profile, in microseconds."""

    name: str
    start: float
    end: float


def spans_of(profiled: profile) -> list[Span]:
    """Return the named ranges and the messages of a profile, from the first range on."""
    spans = [Span(event.name, event.time_range.start, event.time_range.end) for event in profiled.events()]
    spans = [span for span in spans if span.name in (*COLOURS, *MESSAGE)]
    start = min(span.start for span in spans)
    return sorted(Span(span.name, span.start - start, span.end - start) for span in spans)


def trace(exchange: str, length: int = LENGTH) -> list[Span]:
    """Return the ranges of a step, forward and backward, of this rank. Both ranks call it."""
    mesh, layout = am.init_mesh("cpu", (1, 2, 1)), am.Zigzag()
    torch.manual_seed(0)
    qkv = torch.randn(3, 1, HEADS, length, 64).unbind()
    q, k, v = (am.shard(x, mesh, layout=layout).requires_grad_() for x in qkv)

    def step() -> None:
        am.attention(q, k, v, mesh=mesh, layout=layout, exchange=exchange).sum().backward()

    for _ in range(2):
        step()
    with profile() as profiled:
        step()
    return spans_of(profiled)


def draw_timelines(traces: dict[str, list[Span]]) -> "Figure":
    """Return a figure of the ranges of each exchange, on one scale. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure((8.4, 1.35 * len(traces) + 0.5), dpi=DPI, facecolor="white", layout="constrained")
    rows, end = list(COLOURS), max(span.end for spans in traces.values() for span in spans) / 1e3
    for axes, (exchange, spans) in zip(figure.subplots(len(traces), 1, sharex=True), traces.items(), strict=True):
        for span in spans:
            row = rows.index(EXCHANGE_RANGE if span.name in MESSAGE else span.name)
            colour, above = ("#f3d5bd", 1) if span.name in MESSAGE else (COLOURS[span.name], 2)
            left, width = span.start / 1e3, (span.end - span.start) / 1e3
            axes.barh(-row, width, left=left, height=0.7, color=colour, edgecolor=colour, linewidth=0.8, zorder=above)
        axes.set_yticks([-row for row in range(len(rows))], [name.removeprefix("attnmesh: ") for name in rows])
        axes.set_title(f'exchange="{exchange}"', loc="left", fontsize=9, color=INK)
        axes.tick_params(labelsize=8, colors=FAINT, length=0)
        axes.set_xlim(0, end)
        for side in axes.spines.values():
            side.set_visible(False)
    axes.set_xlabel("ms of rank 0", fontsize=8, color=FAINT)
    return figure


def main() -> None:
    """Trace the steps, and draw them."""
    traces = {name: run_on_hosts(HOSTS, trace, name)[0] for name in EXCHANGE_MODES}
    file = Path(__file__).parents[1] / "docs" / "figures" / "timelines.png"
    draw_timelines(traces).savefig(file, metadata={"Software": None})


if __name__ == "__main__":
    from benchmarks.timelines import main as draw  # ranks find functions by the module's name

    draw()
