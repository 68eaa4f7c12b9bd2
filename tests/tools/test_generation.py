"""The table of `generate`'s arguments: complete, right on two ranks, and the one that docs/models.md shows."""

from pathlib import Path

import pytest

from tests.support.ranks.pool import Pool
from tools.generation import EXAMPLES, compare_all, documented, table

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def test_each_argument_of_transformers_has_an_example() -> None:
    assert sorted(EXAMPLES) == documented()


@pytest.mark.long
def test_each_argument_works_as_in_transformers_or_is_refused_by_name(pool: Pool) -> None:
    rows, others = pool.run(2, compare_all, 2, list(EXAMPLES))
    assert rows == others
    assert not {name: row for name, row in rows.items() if row.status == "wrong"}
    assert "\n".join(table(rows)) in PAGE.read_text()
