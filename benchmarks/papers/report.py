"""A published figure, what the model predicts for it, and why the two differ where they do."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import attnmesh as am
from attnmesh.cli import output
from benchmarks import bench

TOLERATED = 0.25
"""Relative error up to which a prediction of a published figure needs no reason."""

Span = tuple[float, float]
"""The least and the most of several cases; both the same where there is one."""


@dataclass(frozen=True)
class Row:
    """One figure; `published` is None where the paper's figure is not known here, `best` is of attnmesh's best plan."""

    case: str
    unit: str
    published: Span | None
    predicted: Span
    best: Span | None = None
    plan: str = ""
    why: str = ""
    source: str = "the paper"

    @property
    def ratio(self) -> Span | None:
        """Predicted over published, end by end."""
        if self.published is None:
            return None
        return self.predicted[0] / self.published[0], self.predicted[1] / self.published[1]

    @property
    def off(self) -> bool:
        """True if the prediction differs by so much that a reason is owed."""
        return self.ratio is not None and any(abs(end - 1) > TOLERATED for end in self.ratio)

    def record(self) -> dict[str, Any]:
        """Return the row as JSON holds it."""
        return {
            "case": self.case,
            "unit": self.unit,
            "published": _rounded(self.published),
            "source": self.source,
            "predicted": _rounded(self.predicted),
            "ratio": _rounded(self.ratio),
            "best": _rounded(self.best),
            "plan": self.plan,
            "off": self.off,
            "why": self.why,
        }


@dataclass(frozen=True)
class Report:
    """All rows of a paper, each prediction by itself, and the clusters that they are for."""

    title: str
    paper: str
    rows: tuple[Row, ...]
    details: tuple[dict[str, Any], ...]
    clusters: tuple[am.Cluster, ...]

    def record(self) -> dict[str, Any]:
        """Return the report as JSON holds it."""
        clusters = [cluster.record() for cluster in self.clusters]
        rows = [row.record() for row in self.rows]
        return {"paper": self.paper, "rows": rows, "details": list(self.details), "clusters": clusters}

    def show(self) -> None:
        """The table, and under it the reasons by number."""
        whys = list(dict.fromkeys(row.why for row in self.rows if row.why))
        table = output.titled(
            f"{self.title} ({self.paper})", "case", "published", "predicted", "ratio", "attnmesh", "why"
        )
        for row in self.rows:
            published_text = "unpublished here" if row.published is None else _told(row.published, row.unit)
            source = "" if row.source == "the paper" else f" ({row.source})"
            best_text = "" if row.best is None else f"{_told(row.best, row.unit)}\n{row.plan}".strip()
            why = str(whys.index(row.why) + 1) if row.why else ""
            ratio = "" if row.ratio is None else _told(row.ratio, "")
            table.add_row(row.case, published_text + source, _told(row.predicted, row.unit), ratio, best_text, why)
        output.console.print(table)
        for number, why in enumerate(whys, 1):
            output.console.print(f"{number}. {why}", highlight=False, markup=False)


def published(command: str, reports: Iterable[Report], as_json: bool, out: Any = None) -> None:
    """Print the reports, as tables or as one JSON object, and write them to the file asked for."""
    reports = list(reports)
    record = {
        "command": command,
        "attnmesh": am.__version__,
        "papers": [report.record() for report in reports],
    }
    if not bench.published(record, as_json, out):
        for report in reports:
            report.show()


def one(value: float) -> Span:
    """The span of one case."""
    return value, value


def span(values: Iterable[float]) -> Span:
    """The span of several cases."""
    values = list(values)
    return min(values), max(values)


def _rounded(ends: Span | None) -> list[float] | None:
    return None if ends is None else [float(f"{end:.4g}") for end in ends]


def _told(ends: Span, unit: str) -> str:
    low, high = (f"{end:.0f}" if end >= 100 else f"{end:.2f}" if end >= 0.1 else f"{end:.3g}" for end in ends)
    told = low if low == high else f"{low} to {high}"
    return f"{told}{unit}" if unit in ("", "x") else f"{told} {unit}"
