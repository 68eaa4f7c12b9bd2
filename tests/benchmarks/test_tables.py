"""Tables of the benches, made from the rows of published results: each fits a terminal of 80 columns."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from benchmarks import (
    decode,
    diffusion,
    folder,
    latent,
    model,
    packed,
    plan,
    prefill,
    recurrent,
    selected,
    serve,
    storage,
    tables,
    unequal,
)
from benchmarks.timing import Comparison, Timing

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def row_of(kind: type, record: dict[str, Any]) -> Any:
    """Return the row whose record is in a file; properties are computed again, and fields since removed left out."""
    names = kind.__dataclass_fields__  # type: ignore[attr-defined]
    timings = {name: Timing(**value) for name, value in record.items() if isinstance(value, dict)}
    return kind(**{name: timings.get(name, value) for name, value in record.items() if name in names})


def plan_tables(record: dict[str, Any]) -> list[Table]:
    rows = []
    for given in record["rows"]:
        row, crossed = row_of(plan.Ran, {**given, "between": None}), given["between"]
        rows.append(row if crossed is None else replace(row, between=plan.Crossed(*crossed)))
    return tables.by_case(partial(tables.plan_table, record["world"]), rows, "workload")


FILES = sorted(
    set(RESULTS.glob("*.json")) - {file for name in ("chaos", "fuzz", "papers") for file in RESULTS.glob(f"{name}*")}
)
REQUEST = recurrent.Request(8192, 8, 128, 3)
TABLES: dict[str, tuple[type, Callable[[list[Any]], list[Table]]]] = {
    "kernel": (Comparison, lambda rows: [tables.rows_table(rows)]),
    "gpu": (Comparison, lambda rows: [tables.rows_table(rows)]),
    "faults": (Comparison, lambda rows: [tables.rows_table(rows)]),
    "prefill": (prefill.Row, lambda rows: tables.by_case(tables.prefill_table, rows)),
    "decode": (decode.Row, lambda rows: tables.by_case(partial(tables.decode_table, 16), rows)),
    "latent": (latent.Row, lambda rows: [tables.latent_table(latent.Request(32768, "float32", 7), rows)]),
    "selected": (selected.Row, lambda rows: [tables.selected_table(rows)]),
    "storage": (storage.Row, lambda rows: [tables.storage_table(rows)]),
    "folder": (folder.Row, lambda rows: [tables.folder_table(rows)]),
    "serve": (serve.Row, lambda rows: tables.by_case(tables.served_table, rows, "context")),
    "model": (model.Row, lambda rows: [tables.model_table(rows, 4093)]),
    "recurrent": (recurrent.Row, lambda rows: tables.by_case(partial(tables.recurrent_table, REQUEST), rows)),
    "packed": (packed.Row, lambda rows: tables.by_case(tables.packed_table, rows)),
    "unequal": (unequal.Row, lambda rows: [tables.unequal_table(rows)]),
    "diffusion": (diffusion.Row, lambda rows: tables.by_case(tables.diffusion_table, rows)),
}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem.split("_")[0])
def test_the_tables_of_results_fit_a_terminal_of_80(file: Path) -> None:
    name, record = file.name.split("-")[0].split("_")[0], json.loads(file.read_text())
    if name == "plan":
        shown = [table for world in record["worlds"] for table in plan_tables(world)]
    elif name in TABLES:
        record = record["bench"]["said"] if name == "gpu" else record
        kind, make = TABLES[name]
        shown = make([row_of(kind, row) for row in record["rows"]])
    else:
        pytest.fail(f"no table is known for {file.name}")
    console = Console(width=80)
    with console.capture() as captured:
        console.print(*shown)
    text = captured.get()
    print(text)
    assert "…" not in text
    assert max(map(len, text.splitlines()), default=0) <= 80
