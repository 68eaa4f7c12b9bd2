"""Run every causal model type of transformers, tiny and random, on gloo ranks and compare with stock transformers.

    python -m tools.sweep --quick
    python -m tools.sweep --json rows.jsonl --table models.md
    python -m tools.sweep --only 'llama*,gpt_oss'
    python -m tools.sweep --images

Each check of each type is right, refused with the same error on every rank, wrong, crashed, or stock-fails, where
stock transformers itself raises. The command fails if anything is wrong or crashed.
"""

import argparse
import ast
import multiprocessing as mp
import os
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from attnmesh.errors import InputError
from attnmesh.mesh.shapes import Shape
from tests.support.images import image_checks
from tests.support.images.image_models import image_types
from tests.support.images.video_models import takes_videos
from tests.support.models import checks
from tests.support.models.checks import DTYPES, REFERENCES, Failed, Result
from tests.support.models.tiny_models import Case, all_types
from tests.support.models.variants import VARIANTS
from tests.support.ranks.pool import Lost, Pool
from tools import compare
from tools.rows import Row, counted, faults, summary, table

SURROUNDINGS = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore"}
"""Environment variables of the ranks."""

PRELOADED = ["tests.support.emulation.interpreted", "torch._dynamo", "tests.support.models.checks"]
"""Modules that the forkserver imports once for all ranks."""

DEADLINE = 120.0
"""Timeout of one check in seconds."""

MESHES: dict[str, Shape | None] = {
    "plain-1": None,
    "plain": Shape(1, 1, 2),
    "padded": Shape(1, 2, 1),
    "chunked": Shape(1, 1, 2),
    "conversation": Shape(1, 2, 1),
    "beams": Shape(1, 1, 2),
    "rows": Shape(1, 1, 2),
    "shared": Shape(1, 1, 2),
    "training": Shape(1, 2, 1),
}
IMAGE_MESHES: dict[str, Shape | None] = {
    "images-1": None,
    "images": Shape(1, 1, 2),
    "images-queries": Shape(1, 2, 1),
    "training-images": Shape(1, 2, 1),
    "videos": Shape(1, 1, 2),
    "videos-queries": Shape(1, 2, 1),
    "videos-training": Shape(1, 2, 1),
}
"""Mesh of each check; None for one rank."""

QUICK = (
    *("llama", "gpt_oss", "gemma3_text", "mistral", "deepseek_v3", "falcon", "bert"),
    *("gemma3n_text", "qwen3_next", "minimax", "rwkv", "llama+dynamic-crossed"),
)


Check = Callable[..., Result]

UNFIT = "expected images that fit"
"""Part of the error about a prompt that was not made for its image. It says nothing about the type."""


class Sweep:
    """Pools by their ranks, which are reused over cases and restarted after a crash."""

    def __init__(self) -> None:
        self.pools: defaultdict[int, Pool] = defaultdict(Pool)
        self.stock_results: dict[tuple[Any, ...], Result | Row] = {}
        """Results of stock transformers for the current case."""

    def close(self) -> None:
        """Stop all ranks."""
        for pool in self.pools.values():
            pool.close()

    def run(self, case: Case, check: str) -> Row:
        """Return the row of one check of one case."""
        begun, videos = time.monotonic(), check.startswith("videos")
        if check in ("training-images", "videos-training"):
            row = self.run_image_training(case, IMAGE_MESHES[check], videos)
        elif check in IMAGE_MESHES:
            row = self.run_images(case, IMAGE_MESHES[check], videos)
        elif check == "training":
            row = self._run_training(case, MESHES[check], checks.train_by_stock, checks.train_by_attnmesh)
        else:
            row = self._run_generation(case, check)
        return replace(row, case=case.name, kind=case.kind, check=check, seconds=round(time.monotonic() - begun, 2))

    def run_image_training(self, case: Case, shape: Shape | None, videos: bool = False) -> Row:
        """Compare loss and gradients with stock transformers. What it cannot train may be refused in any case."""
        assert shape is not None
        functions = image_checks.train_on_images_by_stock, image_checks.train_on_images_by_attnmesh
        row = self._run_training(case, shape, *functions, videos)
        if row.status == "stock-fails":
            refused = self._run_on_ranks(shape.ranks, image_checks.train_unless_refused, case, DTYPES[-1], shape)
            return refused if isinstance(refused, Row) and refused.status == "refused" else row
        return row

    def run_images(self, case: Case, shape: Shape | None, videos: bool = False) -> Row:
        """Compare the tokens after a prompt with images, and a video if `videos`, with stock transformers."""
        expected = self._stock(image_checks.generate_from_images_by_stock, case, videos)
        if isinstance(expected, Row):
            row = self._run_on_ranks(
                shape.ranks if shape else 1, image_checks.generate_unless_refused, case, DTYPES[-1], shape
            )
            refused = isinstance(row, Row) and row.status == "refused" and UNFIT not in row.message
            return row if refused else expected
        arguments = image_checks.generate_from_images_by_attnmesh, case, videos, expected.dtype, shape
        given = self._run_on_ranks(shape.ranks if shape else 1, *arguments)
        row = given if isinstance(given, Row) else _row(compare.compare_generation(expected, given))
        return replace(row, dtype=_dtype_name(expected))

    def _run_training(self, case: Case, shape: Shape | None, stock: Check, ours: Check, *arguments: Any) -> Row:
        """Compare loss and gradients with stock transformers."""
        assert shape is not None
        expected = self._stock(stock, case, *arguments)
        if isinstance(expected, Row):
            return expected
        given = self._run_on_ranks(shape.ranks, ours, case, *arguments, expected.dtype, shape)
        row = given if isinstance(given, Row) else _row(compare.compare_training(expected, given))
        return replace(row, dtype=_dtype_name(expected), reach=round(expected.reach, 3))

    def _run_generation(self, case: Case, check: str) -> Row:
        """Compare tokens with stock transformers: right if they match any of the check's references."""
        shape, check = MESHES[check], check.partition("-")[0]
        first: Row | None = None
        given: list[Result] = []
        for reference in REFERENCES[check]:
            expected = self._stock(checks.generate_by_stock, case, check, reference)
            if isinstance(expected, Row):
                first = first or expected
                continue
            if not given or given[0].dtype != expected.dtype:
                results = self._run_on_ranks(
                    2 if shape else 1, checks.generate_by_attnmesh, case, check, expected.dtype, shape
                )
                if isinstance(results, Row):
                    return replace(results, dtype=_dtype_name(expected))
                given = results
            row = replace(_row(compare.compare_generation(expected, given)), dtype=_dtype_name(expected))
            if row.status == "right":
                note = "" if reference == "fresh" else f"as stock {reference}"
                return replace(row, message="; ".join(filter(None, (note, row.message))))
            first = row if first is None or first.status == "stock-fails" else first
        assert first is not None
        return first

    def _stock(self, function: Callable[..., Result], case: Case, *arguments: Any) -> Result | Row:
        """Return the result of stock transformers, computed once; or a row with its error."""
        key = (case.name, function.__name__, *arguments)
        if key not in self.stock_results:
            self.stock_results = {
                known: result for known, result in self.stock_results.items() if known[0] == case.name
            }
            self.stock_results[key] = self._run_stock(function, case, *arguments)
        return self.stock_results[key]

    def _run_stock(self, function: Callable[..., Result], case: Case, *arguments: Any) -> Result | Row:
        """Return the result of stock transformers in the first dtype that works."""
        failed: Row | None = None
        for dtype in DTYPES[-1:] if "shared" in arguments else DTYPES:  # layers in float64 are not shared
            results = self._run_on_ranks(1, function, case, *arguments, dtype)
            if not isinstance(results, Row):
                result: Result = results[0]
                return result
            failed = results
        assert failed is not None
        return replace(failed, status="stock-fails")

    def _run_on_ranks(self, ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any] | Row:
        """Return the results of all ranks, or a row with their error."""
        try:
            results = self.pools[ranks].ask(ranks, function, *arguments, deadline=DEADLINE)
        except Lost as lost:
            return _row_of_timeout(str(lost))
        errors = [result for result in results if isinstance(result, BaseException)]
        if not errors:
            return results
        messages = {f"{type(error).__name__}: {error}" for error in errors}
        refused = isinstance(errors[0], InputError) and len(errors) == ranks and len(messages) == 1
        in_step = len(errors) == ranks and self._in_step(ranks)
        if not in_step:
            self.pools[ranks].close()  # the ranks are in an unknown state
        if refused and not in_step:
            return _blank("crashed", f"out of step after a refusal: {messages.pop()}")
        return _blank("refused", messages.pop()) if refused else _row_of_errors(errors, ranks)

    def _in_step(self, ranks: int) -> bool:
        """Return True if the ranks can still run a collective."""
        try:
            self.pools[ranks].run(ranks, checks.check_in_step, deadline=30.0)
        except Exception:
            return False
        return True


def _blank(status: str, message: str, where: str = "") -> Row:
    """Return a row that names no case and no check yet."""
    return Row("", "", "", status, message=message, where=where)


def _row(verdict: compare.Verdict) -> Row:
    return replace(_blank("right" if verdict.right else "wrong", verdict.note), error=verdict.error)


def _dtype_name(result: Result) -> str:
    return str(result.dtype).removeprefix("torch.")


def _row_of_errors(errors: Sequence[BaseException], ranks: int) -> Row:
    """Return a row with the first error that attnmesh did not raise, if any."""
    error = next((error for error in errors if not isinstance(error, InputError)), errors[0])
    some = "" if len(errors) == ranks else f" (on {len(errors)} of {ranks} ranks)"
    if not isinstance(error, Failed):
        return _blank("crashed", f"{type(error).__name__}: {error}{some}; ranks differ")
    kind, message, where = error.args
    return _blank("crashed", f"{kind}: {message}{some}", where)


def _row_of_timeout(report: str) -> Row:
    """Return a row with the error of a rank that finished, and the line at which another one waits."""
    failures = [ast.literal_eval(text) for text in re.findall(r"answered Failed(\(.*\))$", report, re.MULTILINE)]
    lines = re.findall(r'File "[^"]*/((?:attnmesh|transformers)/[^"]+)", line (\d+) in (\w+)', report)
    where = "{}:{} {}".format(*lines[0]) if lines else ""
    if failures:
        kind, message, raised = failures[0]
        return _blank("crashed", f"{kind}: {message} (while others wait at {where})", raised)
    results = re.findall(r"^rank \d+ answered (.{,200})", report, re.MULTILINE) or [report.splitlines()[0]]
    return _blank("crashed", f"timeout: {results[0]}", where)


def chosen(only: str | None, quick: bool, images: bool = False) -> list[Case]:
    """Return the cases that match one of the comma-separated patterns; all cases by default."""
    types = image_types() if images else all_types()
    cases = [Case(kind, kind) for kind in types] + ([] if images else [*VARIANTS])
    patterns = only.split(",") if only else QUICK if quick else ("*",)
    return [case for case in cases if any(fnmatch(case.name, pattern) for pattern in patterns)]


def checks_of(kind: str, wanted: Iterable[str]) -> list[str]:
    """Return the checks that a model type can have: those of videos need a model that takes them."""
    return [check for check in wanted if not check.startswith("videos") or takes_videos(kind)]


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="comma-separated names or patterns of types and variants")
    parser.add_argument("--quick", action="store_true", help="about a dozen different types")
    parser.add_argument(
        "--images", action="store_true", help="types of text and images, with two images each, and a video"
    )
    parser.add_argument("--checks", help="comma-separated checks; all by default")
    parser.add_argument("--json", type=Path, help="append one JSON object per row to this file")
    parser.add_argument("--table", type=Path, help="write a table in Markdown to this file")
    return parser.parse_args(arguments)


def _start() -> None:
    """Start the forkserver of the ranks."""
    os.environ.update(SURROUNDINGS)
    mp.get_context("forkserver").set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()


def _run_cases(cases: Sequence[Case], wanted: Sequence[str], file: Path | None) -> Iterator[Row]:
    """Yield the row of each check, and print a line per case."""
    sweep = Sweep()
    try:
        for number, case in enumerate(cases, 1):
            begun, found = time.monotonic(), []
            for check in checks_of(case.kind, wanted):
                found.append(row := sweep.run(case, check))
                if file is not None:
                    row.write(file)
                yield row
            print(f"{number}/{len(cases)} {case.name}: {summary(found)} ({time.monotonic() - begun:.1f} s)", flush=True)
    finally:
        sweep.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sweep. Return 1 if a check is wrong or crashed."""
    options = _options(arguments)
    if options.json:
        options.json.write_text("")
    _start()
    wanted = options.checks.split(",") if options.checks else [*(IMAGE_MESHES if options.images else MESHES)]
    rows = list(_run_cases(chosen(options.only, options.quick, options.images), wanted, options.json))
    if options.table:
        options.table.write_text(table(rows))
    print(*filter(None, (faults(rows), counted(rows))), sep="\n")
    return int(any(row.status in ("wrong", "crashed") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
