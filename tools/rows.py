"""Results of checks: as a file, as counts, and as a table for the documentation."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

STATUSES = ("right", "refused", "wrong", "crashed", "stock-fails")

WORST = ("crashed", "wrong", "refused", "right", "stock-fails")
"""Order of severity: a type counts as the first of these that one of its checks has."""


KINDS = ("generation", "rows", "shared", "images", "training", "videos")
"""Kinds of checks, each a column of the table. Generation has several checks."""


@dataclass(frozen=True)
class Row:
    """Result of one check of one case."""

    case: str
    kind: str
    check: str
    status: str
    error: float = 0.0
    message: str = ""
    """Message of the error, or a note on the result."""
    where: str = ""
    """Innermost lines of attnmesh and of transformers in the traceback."""
    dtype: str = ""
    reach: float = 0.0
    """`checks.Result.reach`, in training."""
    seconds: float = 0.0

    def write(self, path: Path) -> None:
        """Append the row to a file with one JSON object per line."""
        with path.open("a") as file:
            file.write(json.dumps(asdict(self)) + "\n")

    def __str__(self) -> str:
        return f"{self.check} {self.status}" + (f" (off by {self.error:.0e})" if self.status == "wrong" else "")


def summary(rows: Sequence[Row]) -> str:
    """Return the statuses of one case, check by check where they differ."""
    parts: dict[str, list[Row]] = next(iter(kinds_of(rows).values()), {})
    uniform = {
        kind: len({row.status for row in some}) == 1 and some[0].status != "wrong" for kind, some in parts.items()
    }
    texts = (f"{kind} {some[0].status}" if uniform[kind] else ", ".join(map(str, some)) for kind, some in parts.items())
    return ", ".join(texts)


def status_of(rows: Sequence[Row]) -> str:
    """Return the most severe status."""
    return next(status for status in WORST if any(row.status == status for row in rows))


def kinds_of(rows: Sequence[Row]) -> dict[str, dict[str, list[Row]]]:
    """Return the rows by case, and by kind of check."""
    found: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        kind = row.check.partition("-")[0]
        kind = kind if kind in KINDS else "generation"
        found.setdefault(row.case, {}).setdefault(kind, []).append(row)
    return found


def counted(rows: Sequence[Row]) -> str:
    """Return the number of types and variants with each status."""
    lines = []
    for name, wanted in (("types", False), ("variants", True)):
        cases = kinds_of([row for row in rows if (row.case != row.kind) == wanted]).values()
        for kind in KINDS:
            count = Counter(status_of(case[kind]) for case in cases if kind in case)
            if count:
                counts = ", ".join(f"{count[status]} {status}" for status in STATUSES if count[status])
                lines.append(f"{name} in {kind}: {counts} (of {count.total()})")
    return "\n".join(lines)


def faults(rows: Sequence[Row]) -> str:
    """Return the cases that are wrong or crashed, one per line with its message."""
    found: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        if row.status in ("wrong", "crashed"):
            text = row.message + (f" [{row.where}]" if row.where else "")
            found.setdefault((row.case, row.status, text), []).append(str(row).replace(f" {row.status}", "", 1))
    return "\n".join(f"{case} {status} in {', '.join(names)}: {text}" for (case, status, text), names in found.items())


def table(rows: Sequence[Row]) -> str:
    """Return a Markdown table of each type's status in each kind of check, with the message of refusals."""
    found = kinds_of(rows)
    kinds = [kind for kind in KINDS if any(kind in parts for parts in found.values())]
    lines = [f"| type | {' | '.join(kinds)} |", "|---" * (len(kinds) + 1) + "|"]
    for case, parts in sorted(found.items()):
        cells = [_cell(parts.get(kind, [])) for kind in kinds]
        lines.append(f"| `{case}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(rows: Sequence[Row]) -> str:
    """Return the status if all checks have the same, else each status after the names of its checks."""
    by_status: dict[str, list[str]] = {}
    for row in rows:
        by_status.setdefault(_status_text(row), []).append(row.check)
    if len(by_status) <= 1:
        return next(iter(by_status), "")
    return "; ".join(f"{', '.join(checks)}: {status}" for status, checks in by_status.items())


def _status_text(row: Row) -> str:
    """Return the status of a row, with the message of a refusal or crash."""
    message = row.message.partition(" Fix: ")[0].replace("|", "\\|").replace("\n", " ")
    if row.status in ("refused", "crashed"):
        return f"{row.status}: {message}"
    if row.status == "stock-fails":
        return (
            f"not built: {message[:90]}"
            if "images" in row.check or "videos" in row.check
            else "not in stock transformers"
        )
    return row.status
