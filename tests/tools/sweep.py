"""Every causal model type of transformers, tiny and random, on ranks of gloo and beside stock transformers.

    python -m tests.tools.sweep --quick
    python -m tests.tools.sweep --json rows.jsonl --table models.md
    python -m tests.tools.sweep --only 'llama*,gpt_oss'

Each check of each type ends as right, as refused by name on every rank alike, as wrong, as crashed, or as something
that stock transformers itself cannot do. The command fails if anything is wrong or crashed.
"""

import argparse
import ast
import multiprocessing as mp
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from attnmesh.errors import InputError
from attnmesh.mesh.shapes import Shape
from tests.support.pool import Lost, Pool
from tests.tools import checks, compare
from tests.tools.checks import DTYPES, REFERENCES, Failed, Made
from tests.tools.rows import Row, counted, faults, table, told
from tests.tools.tiny_models import Case, all_types
from tests.tools.variants import VARIANTS

SURROUNDINGS = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore"}
"""Environment of the ranks."""

PRELOADED = ["tests.support.interpreted", "torch._dynamo", "tests.tools.checks"]
"""Modules that are imported once, and not by each rank."""

DEADLINE = 120.0
"""Seconds for one check: a rank that takes longer hangs."""

MESHES: dict[str, Shape | None] = {
    "plain-1": None,
    "plain": Shape(1, 1, 2),
    "padded": Shape(1, 2, 1),
    "chunked": Shape(1, 1, 2),
    "turns": Shape(1, 2, 1),
    "beams": Shape(1, 1, 2),
    "training": Shape(1, 2, 1),
}
"""The checks, and the mesh of each: none is one rank alone."""

QUICK = (
    *("llama", "gpt_oss", "gemma3_text", "mistral", "qwen3_moe", "deepseek_v3", "gpt2", "falcon", "bert"),
    *("gemma3n_text", "qwen3_next", "bamba", "mamba", "llama+dynamic-crossed"),
)


class Sweep:
    """Worlds of one and of two ranks that are kept over cases, and started anew after a crash."""

    def __init__(self) -> None:
        self.pools = {size: Pool() for size in (1, 2)}
        self.known: dict[tuple[Any, ...], Made | Row] = {}
        """What stock transformers made of the case at hand."""

    def close(self) -> None:
        """End all ranks."""
        for pool in self.pools.values():
            pool.close()

    def run(self, case: Case, check: str) -> Row:
        """One check of one case."""
        begun = time.monotonic()
        row = self._trained(case) if check == "training" else self._generated(case, check)
        return replace(row, case=case.name, kind=case.kind, check=check, seconds=round(time.monotonic() - begun, 2))

    def _trained(self, case: Case) -> Row:
        expected = self._stock(checks.stock_training, case)
        if isinstance(expected, Row):
            return expected
        given = self._ask(2, checks.our_training, case, expected.dtype, MESHES["training"])
        row = given if isinstance(given, Row) else _row(compare.judge_training(expected, given))
        return replace(row, dtype=_name(expected), reach=round(expected.reach, 3))

    def _generated(self, case: Case, check: str) -> Row:
        """Judge by the first reference that stock transformers can give, and where that disagrees by the others."""
        shape, check = MESHES[check], check.partition("-")[0]
        first: Row | None = None
        given: list[Made] = []
        for reference in REFERENCES[check]:
            expected = self._stock(checks.stock_generation, case, check, reference)
            if isinstance(expected, Row):
                first = first or expected
                continue
            if not given or given[0].dtype != expected.dtype:
                answer = self._ask(2 if shape else 1, checks.our_generation, case, check, expected.dtype, shape)
                if isinstance(answer, Row):
                    return replace(answer, dtype=_name(expected))
                given = answer
            row = replace(_row(compare.judge_generation(expected, given)), dtype=_name(expected))
            if row.status == "right":
                how = "" if reference == "fresh" else f"as stock {reference}"
                return replace(row, words="; ".join(filter(None, (how, row.words))))
            first = row if first is None or first.status == "stock-fails" else first
        assert first is not None
        return first

    def _stock(self, function: Callable[..., Made], case: Case, *arguments: Any) -> Made | Row:
        """Ask stock transformers in the most exact dtype that it can, or say why it cannot."""
        asked = (case.name, function.__name__, *arguments)
        if asked not in self.known:
            self.known = {key: made for key, made in self.known.items() if key[0] == case.name}
            self.known[asked] = self._by_stock(function, case, *arguments)
        return self.known[asked]

    def _by_stock(self, function: Callable[..., Made], case: Case, *arguments: Any) -> Made | Row:
        failed: Row | None = None
        for dtype in DTYPES:
            answer = self._ask(1, function, case, *arguments, dtype)
            if not isinstance(answer, Row):
                made: Made = answer[0]
                return made
            failed = answer
        assert failed is not None
        return replace(failed, status="stock-fails")

    def _ask(self, ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any] | Row:
        """Ask each rank, and return the answers or a row that says why there are none."""
        try:
            answers = self.pools[ranks].ask(ranks, function, *arguments, deadline=DEADLINE)
        except Lost as lost:
            return _hung(str(lost))
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        if not errors:
            return answers
        words = {f"{type(error).__name__}: {error}" for error in errors}
        refused = isinstance(errors[0], InputError) and len(errors) == ranks and len(words) == 1
        step = len(errors) == ranks and self._in_step(ranks)
        if not step:
            self.pools[ranks].close()  # nobody knows any more what the ranks are at
        if refused and not step:
            return _blank("crashed", f"out of step after a refusal: {words.pop()}")
        return _blank("refused", words.pop()) if refused else _crashed(errors, ranks)

    def _in_step(self, ranks: int) -> bool:
        """Tell whether the ranks still understand each other."""
        try:
            self.pools[ranks].run(ranks, checks.in_step, deadline=30.0)
        except Exception:
            return False
        return True


def _blank(status: str, words: str, where: str = "") -> Row:
    return Row("", "", "", status, words=words, where=where)


def _row(judged: compare.Judged) -> Row:
    return replace(_blank("right" if judged.right else "wrong", judged.note), error=judged.error)


def _name(made: Made) -> str:
    return str(made.dtype).removeprefix("torch.")


def _crashed(errors: Sequence[BaseException], ranks: int) -> Row:
    """The error of a rank that is none of attnmesh, if there is one."""
    error = next((error for error in errors if not isinstance(error, InputError)), errors[0])
    some = "" if len(errors) == ranks else f" (on {len(errors)} of {ranks} ranks)"
    if not isinstance(error, Failed):
        return _blank("crashed", f"{type(error).__name__}: {error}{some}; ranks differ")
    kind, words, where = error.args
    return _blank("crashed", f"{kind}: {words}{some}", where)


def _hung(report: str) -> Row:
    """Tell what the ranks that answered said, and where another stands."""
    said = [ast.literal_eval(text) for text in re.findall(r"answered Failed(\(.*\))$", report, re.MULTILINE)]
    stands = re.findall(r'File "[^"]*/((?:attnmesh|transformers)/[^"]+)", line (\d+) in (\w+)', report)
    where = "{}:{} {}".format(*stands[0]) if stands else ""
    if said:
        kind, words, raised = said[0]
        return _blank("crashed", f"{kind}: {words} (while others wait at {where})", raised)
    words = re.findall(r"^rank \d+ answered (.{,200})", report, re.MULTILINE) or [report.splitlines()[0]]
    return _blank("crashed", f"no answer in time: {words[0]}", where)


def chosen(only: str | None, quick: bool) -> list[Case]:
    """The cases whose names fit one of the patterns; all without any."""
    cases = [Case(kind, kind) for kind in all_types()] + list(VARIANTS)
    patterns = only.split(",") if only else QUICK if quick else ("*",)
    return [case for case in cases if any(fnmatch(case.name, pattern) for pattern in patterns)]


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of types and variants, or patterns of them, with commas between")
    parser.add_argument("--quick", action="store_true", help="about a dozen types that differ most")
    parser.add_argument("--checks", default=",".join(MESHES), help="which checks, with commas between")
    parser.add_argument("--json", type=Path, help="write a JSON object a line to this file, as rows come")
    parser.add_argument("--table", type=Path, help="write a table in Markdown to this file")
    return parser.parse_args(arguments)


def _start() -> None:
    """Start the process that ranks are forked from."""
    os.environ.update(SURROUNDINGS)
    mp.get_context("forkserver").set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()


def _swept(cases: Sequence[Case], wanted: Sequence[str], file: Path | None) -> Iterator[Row]:
    """Run the checks of each case, and tell of it on the way."""
    sweep = Sweep()
    try:
        for number, case in enumerate(cases, 1):
            begun, found = time.monotonic(), []
            for check in wanted:
                found.append(row := sweep.run(case, check))
                if file is not None:
                    row.write(file)
                yield row
            print(f"{number}/{len(cases)} {case.name}: {told(found)} ({time.monotonic() - begun:.1f} s)", flush=True)
    finally:
        sweep.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sweep, and say how it ended."""
    options = _options(arguments)
    if options.json:
        options.json.write_text("")
    _start()
    rows = list(_swept(chosen(options.only, options.quick), options.checks.split(","), options.json))
    if options.table:
        options.table.write_text(table(rows))
    print(*filter(None, (faults(rows), counted(rows))), sep="\n")
    return int(any(row.status in ("wrong", "crashed") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
