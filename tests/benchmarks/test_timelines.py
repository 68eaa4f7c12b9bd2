"""The figure of a step's ranges: a bar for each range, and for each message under way."""

import pytest

from benchmarks.timelines import COLOURS, MESSAGE, draw_timelines, trace
from tests.support.ranks.pool import Pool, on_each_rank


def test_each_range_of_a_trace_is_a_bar(pool: Pool) -> None:
    pytest.importorskip("matplotlib")
    traces = {name: pool.run(2, on_each_rank(trace), name, 64)[0] for name in ("bulk", "ring")}
    drawn = draw_timelines(traces).axes
    for axes, (name, spans) in zip(drawn, traces.items(), strict=True):
        assert {*COLOURS} <= {one.name for one in spans} <= {*COLOURS, *MESSAGE}
        assert min(one.start for one in spans) == 0
        widths = [bar.get_width() for bar in axes.patches]  # type: ignore[attr-defined]
        assert widths == pytest.approx([(one.end - one.start) / 1e3 for one in spans])
        assert name in axes.get_title(loc="left")
