"""The table of what ranks called: ranks of the world, and texts that are blank."""

import re

import pytest
import torch
import torch.distributed as dist

import attnmesh as am
from attnmesh.comm.gather import all_gather_texts
from attnmesh.errors import MeshError
from attnmesh.guard.agreement import Agreement
from attnmesh.mesh.axes import RankMesh
from tests.support.ranks.pool import Pool, on_each_rank


@on_each_rank
def attend_with_an_odd_dtype(odd: int) -> str:
    """On a rank: the error of a call in which one rank of the world has another dtype."""
    mesh = am.init_mesh((1, 2, 2))  # whose shards are not in the order of ranks
    x = torch.randn(1, 2, 4, 8, dtype=torch.bfloat16 if dist.get_rank() == odd else torch.float32)
    with pytest.raises(MeshError) as caught:
        am.attention(x, x, x, mesh=mesh, layout=am.Zigzag())
    return str(caught.value)


@pytest.mark.parametrize("odd", [1, 2])
def test_a_table_of_calls_names_ranks_of_the_world(odd: int, pool: Pool) -> None:
    for message in pool.run(4, attend_with_an_odd_dtype, odd):
        assert re.search(rf"\n    {odd}  +torch\.bfloat16", message), message


@on_each_rank
def compare_a_blank_note(blank: str) -> str:
    """On a rank: the error of a call in which rank 1 has another text than blanks."""
    mesh = RankMesh.of(am.init_mesh((1, 1, 2)))
    with pytest.raises(MeshError) as caught, Agreement(mesh, "save", {"note": "b c" if mesh.keys.index else blank}):
        pass
    return str(caught.value)


@pytest.mark.parametrize("blank", ["", " ", "\n\t"])
def test_a_table_of_calls_shows_that_a_text_is_blank(blank: str, pool: Pool) -> None:
    for message in pool.run(2, compare_a_blank_note, blank):
        assert "\n    ranks  note\n    0      -\n    1      b c" in message


def test_a_text_that_no_encoding_has_is_compared() -> None:
    assert all_gather_texts("a \udce9 path", RankMesh.of(None)) == ["a \\udce9 path"]
