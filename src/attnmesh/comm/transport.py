"""Transport of messages of bytes between the ranks of an axis: mailboxes inside a host, else the process group.

The merges of decoding send and receive here. A transport serves one collective exchange and is then dropped.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from attnmesh.comm.failures import Watched, awaited
from attnmesh.comm.shared_memory import SLOT, Mailboxes
from attnmesh.mesh.axes import Axis

Wait = Callable[[], None]
"""Waits until a message has come or gone, and raises RankFailure at the deadline."""

Post = tuple[Callable[..., Any], int, Tensor]
"""`dist.isend` or `dist.irecv`, the peer, and the tensor."""


class Transport:
    """Messages between this rank and its peers along an axis: `size` bytes to receive, `longest` to send or receive."""

    def __init__(
        self, axis: Axis, size: int, device: str, mailboxes: Mailboxes | None, longest: int | None = None
    ) -> None:
        self.axis, self.size, self.mailboxes = axis, size, mailboxes
        self.longest = size if longest is None else longest
        self.by_gloo = device == "cpu"
        self._queued: list[tuple[Post, list[Wait]]] = []  # receives that other backends post together with the sends

    def box_size(self, peer: int) -> int:
        """Return the bytes to reserve for a message of a peer.

        Gloo accepts any message that fits. With room for a `SLOT`, ranks that disagree on the size still receive each
        other's first bytes, and find out that they disagree.
        """
        return max(self.size, SLOT) if self.by_gloo and not self.near(peer) else self.size

    def near(self, peer: int) -> bool:
        """Return whether messages of a peer go through shared memory."""
        return self.mailboxes is not None and self.mailboxes.serves(peer, self.longest)

    def recv(self, peer: int, box: Tensor) -> Wait:
        """Begin to receive the next message of a peer. Return the wait for it.

        Gloo takes half the time for a message whose receive was posted early. Other backends post receives with the
        next sends, as a receive alone would block the sends behind it.
        """
        if self.near(peer):
            return lambda: self._recv_near(peer, box)
        post = dist.irecv, peer, box
        if self.by_gloo:
            return post_messages([post], self.axis, "merging")[0]
        posted: list[Wait] = []
        self._queued.append((post, posted))
        return lambda: self._wait_queued(posted)

    def send(self, messages: Mapping[int, Tensor]) -> list[Wait]:
        """Send messages by peer. Return waits, after which their memory may be reused."""
        far = [(dist.isend, peer, message) for peer, message in messages.items() if not self.near(peer)]
        waits = self._post([(post, []) for post in far])
        for peer, message in messages.items():
            if self.near(peer):
                assert self.mailboxes is not None
                with Watched(self.axis, "merging", peer):
                    self.mailboxes.send(peer, message)
        return waits

    def _recv_near(self, peer: int, box: Tensor) -> None:
        assert self.mailboxes is not None
        with Watched(self.axis, "merging", peer):
            self.mailboxes.recv(peer, box[: self.size])

    def _wait_queued(self, posted: list[Wait]) -> None:
        self._post([])
        for wait in posted:
            wait()

    def _post(self, sends: list[tuple[Post, list[Wait]]]) -> list[Wait]:
        """Post sends with all queued receives, which get the waits of the whole batch: NCCL has one for all."""
        posts, self._queued = self._queued + sends, []
        waits = post_messages([post for post, _ in posts], self.axis, "merging")
        for _, posted in posts:
            posted.extend(waits)
        return waits


def post_messages(posts: Sequence[Post], axis: Axis, step: str) -> list[Wait]:
    """Post messages all at once. Return their waits, which have a deadline; one wait for all with NCCL."""
    filled = [(post, peer, x) for post, peer, x in posts if x.numel()]
    operations = [dist.P2POp(post, x, group=axis.group, group_peer=peer) for post, peer, x in filled]
    with Watched(axis, step, filled[0][1] if filled else None):
        works = dist.batch_isend_irecv(operations) if operations else []
    together = len(works) < len(filled)

    def wait_for(work: Any, peer: int, x: Tensor) -> Wait:
        return lambda: awaited(work, x.device.type, axis, step, None if together else peer)

    return [wait_for(work, peer, x) for work, (_, peer, x) in zip(works, filled)]  # noqa: B905 (NCCL returns one work for all)
