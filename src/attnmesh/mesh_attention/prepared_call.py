"""All that is settled for calls of `attention` of one signature on a mesh."""

from collections.abc import Sequence
from typing import NamedTuple

from attnmesh.mesh_attention.executor import Task
from attnmesh.mesh_attention.mesh_call import MeshCall
from attnmesh.runtime.memo import Memo
from attnmesh.runtime.world import cached_per_world


class PreparedCall(NamedTuple):
    """`MeshCall` and task of calls of one signature, settled once: no later call checks, chooses or makes them anew."""

    mesh_call: MeshCall
    task: Task | None = None
    """This rank's part. None where autograd or a graph makes it, or where key lengths or a selection change it."""
    text: str = ""
    """The text that ranks compare."""
    payload: Sequence[int] = ()
    """Numbers that this rank sends beside the text."""
    payloads_by_shard: Sequence[Sequence[int]] = ()
    """Numbers that all ranks send when they know the call; none where nobody has counted their tokens."""


@cached_per_world()
def prepared_calls() -> Memo[PreparedCall]:
    """Return what is prepared, by the signatures of calls."""
    return Memo(2048)
