"""Rows of how checks ended: in a file, in counts, and in a table for the documentation."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

STATUSES = ("right", "refused", "wrong", "crashed", "stock-fails")

WORST = ("crashed", "wrong", "refused", "right", "stock-fails")
"""What a type counts as, by the first of these that one of its checks is."""


@dataclass(frozen=True)
class Row:
    """How one check of one case ended."""

    case: str
    kind: str
    check: str
    status: str
    error: float = 0.0
    words: str = ""
    """Of a refusal or a crash; or what is to be said of what was made."""
    where: str = ""
    """The innermost line of attnmesh and of transformers in which it was raised."""
    dtype: str = ""
    reach: float = 0.0
    """How much a token ten places before the last matters to it, where that was measured."""
    seconds: float = 0.0

    def write(self, path: Path) -> None:
        """Add it to a file of one JSON object a line."""
        with path.open("a") as file:
            file.write(json.dumps(asdict(self)) + "\n")

    def __str__(self) -> str:
        return f"{self.check} {self.status}" + (f" (off by {self.error:.0e})" if self.status == "wrong" else "")


def told(rows: Sequence[Row]) -> str:
    """Say how training and generation of one case ended, check by check where checks ended differently."""
    parts: dict[str, list[Row]] = next(iter(kinds_of(rows).values()), {})
    alike = {kind: len({row.status for row in some}) == 1 and some[0].status != "wrong" for kind, some in parts.items()}
    words = (f"{kind} {some[0].status}" if alike[kind] else ", ".join(map(str, some)) for kind, some in parts.items())
    return ", ".join(words)


def status_of(rows: Sequence[Row]) -> str:
    """Sum up several checks of one case."""
    return next(status for status in WORST if any(row.status == status for row in rows))


def kinds_of(rows: Sequence[Row]) -> dict[str, dict[str, list[Row]]]:
    """Sort the rows by case, apart for training and generation."""
    found: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        kind = "training" if row.check == "training" else "generation"
        found.setdefault(row.case, {}).setdefault(kind, []).append(row)
    return found


def counted(rows: Sequence[Row]) -> str:
    """Count how types, and how their variants, ended."""
    lines = []
    for name, wanted in (("types", False), ("variants", True)):
        cases = kinds_of([row for row in rows if (row.case != row.kind) == wanted]).values()
        for kind in ("generation", "training"):
            count = Counter(status_of(case[kind]) for case in cases if kind in case)
            if count:
                told = ", ".join(f"{count[status]} {status}" for status in STATUSES if count[status])
                lines.append(f"{name} in {kind}: {told} (of {count.total()})")
    return "\n".join(lines)


def faults(rows: Sequence[Row]) -> str:
    """List what is wrong or crashed, a line for each case and what there is to be said of it."""
    found: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        if row.status in ("wrong", "crashed"):
            said = row.words + (f" [{row.where}]" if row.where else "")
            found.setdefault((row.case, row.status, said), []).append(str(row).replace(f" {row.status}", "", 1))
    return "\n".join(f"{case} {status} in {', '.join(names)}: {said}" for (case, status, said), names in found.items())


def table(rows: Sequence[Row]) -> str:
    """Write in Markdown whether each type is right in generation and in training, or the words of its refusal."""
    lines = ["| type | generation | training |", "|---|---|---|"]
    for case, parts in sorted(kinds_of(rows).items()):
        cells = [_cell(parts.get(kind, [])) for kind in ("generation", "training")]
        lines.append(f"| `{case}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(rows: Sequence[Row]) -> str:
    """Give one answer if all checks ended alike, else each answer after the names of its checks."""
    by_words: dict[str, list[str]] = {}
    for row in rows:
        by_words.setdefault(_words(row), []).append(row.check)
    if len(by_words) <= 1:
        return next(iter(by_words), "")
    return "; ".join(f"{', '.join(checks)}: {words}" for words, checks in by_words.items())


def _words(row: Row) -> str:
    told = row.words.partition(" Fix: ")[0].replace("|", "\\|").replace("\n", " ")
    if row.status in ("refused", "crashed"):
        return f"{row.status}: {told}"
    return {"stock-fails": "not in stock transformers"}.get(row.status, row.status)
