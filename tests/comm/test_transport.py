"""The rounds in which NCCL posts the messages of a merge, without GPUs."""

import pytest
import torch

from attnmesh.comm.merges import P2PMessage, Wait
from attnmesh.comm.transport import DeviceTransport
from attnmesh.mesh.axes import Axis
from attnmesh.mesh.reduction_tree import reduction_rounds


@pytest.mark.parametrize("rank", range(4))
def test_nccl_receives_only_the_messages_of_the_round_that_it_sends(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL ends no message of a batch before all of them: a receive of a later round would wait for itself."""
    batches: list[list[tuple[str, int]]] = []

    def post(self: DeviceTransport, posts: list[P2PMessage], what: str) -> list[Wait]:
        batches.append([(call.__name__, peer) for call, peer, _ in posts])
        return [lambda: None]

    monkeypatch.setattr(DeviceTransport, "post", post)
    message = torch.empty(8, dtype=torch.uint8, device="meta")
    rounds = reduction_rounds([range(4)])[rank]
    DeviceTransport(Axis(4, rank), message.device).reduce(message, rounds, lambda rows: rows[0])
    assert batches == [[("irecv", step.recv), *(("isend", peer) for peer in step.send)] for step in rounds]
