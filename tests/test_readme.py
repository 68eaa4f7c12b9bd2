"""The lines of README on ranks, with the mesh that it names. The suite also runs them in one process, as they stand."""

import doctest
from pathlib import Path

from tests.support.pool import Pool

README = Path(__file__).parents[1] / "README.md"


def lines_on_a_mesh() -> list[str]:
    """On a rank: run the lines, and return what failed."""
    failed: list[str] = []
    text = README.read_text().replace("mesh, layout = None,", "mesh, layout = am.init_mesh((1, 2, 2)),")
    assert "am.init_mesh((1, 2, 2))," in text
    test = doctest.DocTestParser().get_doctest(text, {}, "README.md", None, None)
    doctest.DocTestRunner(verbose=False).run(test, out=failed.append)
    return failed


def test_the_lines_run_on_ranks(pool: Pool) -> None:
    assert pool.run(4, lines_on_a_mesh) == [[]] * 4
