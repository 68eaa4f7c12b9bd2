"""What users do wrong: no mistake is silent, and none hangs. Each raises on all ranks alike, and names its cause."""

import pytest

from attnmesh.mesh.shapes import AXES, Shape
from tests.mistakes.cases.mended import MENDED
from tests.mistakes.table import FOLDER, HEADS, PAGE, cases_of, raised, with_table
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh
from tests.support.truth.tolerances import FLOAT32_MODEL, worst


@on_each_rank
def make_mistakes(file: str, ranks: int) -> list[tuple[str, str]]:
    """Return what this rank raises for each row of a file that is for so many ranks."""
    mesh = named_mesh(Shape(1, ranks, 1), AXES)
    return [raised(row, mesh) for row in cases_of(file) if row.ranks == ranks]


@pytest.mark.parametrize("file", HEADS)
def test_each_mistake_raises_on_all_ranks_alike(file: str, pool: Pool) -> None:
    for ranks in sorted({row.ranks for row in cases_of(file)}):
        rows = [row for row in cases_of(file) if row.ranks == ranks]
        answers = pool.run(ranks, make_mistakes, file, ranks)
        for row, *given in zip(rows, *answers, strict=True):
            assert len(set(given)) == 1, (row.what, given)
            name, message = given[0]
            assert name == row.error.__name__, (row.what, given[0])
            assert row.says in message, (row.what, message)
            assert row.fix in message.split("Fix: ")[-1], (row.what, message)


@on_each_rank
def follow_fixes() -> dict[str, float]:
    """Return, by mistake, how far what follows its fix is from one device."""
    mesh = named_mesh(Shape(1, 2, 1), AXES)
    pairs = {what: act(mesh) for what, act in MENDED.items()}
    return {what: float((found - expected).abs().max()) for what, (found, expected) in pairs.items()}


def test_what_follows_a_fix_is_exact(pool: Pool) -> None:
    assert MENDED.keys() <= {row.what for file in HEADS for row in cases_of(file)}
    for by_mistake in pool.run(2, follow_fixes):
        assert worst(by_mistake.values()) <= FLOAT32_MODEL, by_mistake


def test_there_are_many_rows_and_each_is_another_mistake() -> None:
    rows = [row for file in HEADS for row in cases_of(file)]
    assert len({row.what for row in rows}) == len(rows) >= 40


def test_each_file_of_cases_has_a_heading() -> None:
    assert {file.stem for file in FOLDER.glob("*.py")} == {*HEADS, "mended", "__init__"}


def test_the_page_shows_the_rows() -> None:
    """Write it anew by `python -m tests.mistakes.table`."""
    assert with_table(PAGE.read_text()) == PAGE.read_text()
