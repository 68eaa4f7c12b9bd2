"""The lines of the tutorial on decoding, on ranks. The suite also runs them in one process, as they stand."""

import doctest
from pathlib import Path

from tests.support.ranks.pool import Pool, on_each_rank

PAGE = Path(__file__).parents[2] / "docs" / "start.md"


@on_each_rank
def run_lines_on_a_mesh() -> list[str]:
    """On a rank: run the lines, and return what failed."""
    failed: list[str] = []
    section = PAGE.read_text().split("## 5. Decoding")[1].split("\n## ")[0]
    text = section.replace("mesh, layout = None,", "mesh, layout = am.init_mesh((1, 2, 2)),")
    assert "mesh, layout = am.init_mesh((1, 2, 2))," in text
    text = ">>> import torch, attnmesh as am\n\n" + text
    test = doctest.DocTestParser().get_doctest(text, {}, "start.md", None, None)
    assert len(test.examples) > 10
    doctest.DocTestRunner(verbose=False).run(test, out=failed.append)
    return failed


def test_the_lines_on_decoding_run_on_ranks(pool: Pool) -> None:
    assert pool.run(4, run_lines_on_a_mesh) == [[]] * 4
