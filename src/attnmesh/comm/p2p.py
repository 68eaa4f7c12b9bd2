"""Point-to-point exchanges along an axis: gather tokens, return results, swap heads, merge along a tree.

`gather`, `return_to_owners` and `exchange_messages` begin at once and return a function that finishes them, so that a
kernel can run in between. The other exchanges block. Messages hold only the tokens that the schedule names.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from attnmesh.comm.failures import awaited, collective, failure
from attnmesh.comm.shared_memory import SLOT, Mailboxes, PeerLostError
from attnmesh.mesh.axes import Axis, backends
from attnmesh.mesh.reduction_tree import Round
from attnmesh.mesh.schedule import Step
from attnmesh.runtime.counters import Tensors, bytes_of, count_messages, count_received
from attnmesh.runtime.kept import on_device
from attnmesh.runtime.world import cached_per_world

Wait = Callable[[], None]
"""Waits until a message has come or gone, and raises RankFailure at the deadline."""

Post = tuple[Callable[..., Any], int, Tensor]
"""`dist.isend` or `dist.irecv`, the peer, and the tensor."""


def gather(tensors: Tensors, step: Step, axis: Axis) -> Callable[[], Tensors]:
    """Begin to gather the tokens of a step. The result has the tokens kept and received, in order of position."""
    if not step.send and not step.receive:
        connect(axis, tensors[0].device)
        kept = taken(tensors, step.keep)
        return lambda: kept
    parts: dict[int, Tensors] = {}  # tokens for several peers are taken once
    for _, tokens in step.send:
        if id(tokens) not in parts:
            parts[id(tokens)] = taken(tensors, tokens)
    wanted = {peer: tuple(map(meta_like, tensors, repeat(count))) for peer, count in step.receive}
    sends = {peer: parts[id(tokens)] for peer, tokens in step.send}
    finish = exchange_messages(sends, wanted, axis, tensors[0].device, "gathering")
    source = [tensors] if len(step.keep) or not wanted else []  # else memory is freed before the messages arrive

    def finished() -> Tensors:
        arrived = finish()
        pieces = [taken(source.pop(), step.keep)] if source else []
        for peer, _ in step.receive:
            pieces.append(arrived[peer])
        whole = pieces[0] if len(pieces) == 1 else tuple(map(_joined, zip(*pieces, strict=True)))
        return whole if step.order is None else taken(whole, step.order, in_order=False)

    return finished


def _joined(pieces: tuple[Tensor, ...]) -> Tensor:
    return torch.cat(pieces, dim=2)


def return_to_owners(tensors: Tensors, step: Step, axis: Axis) -> Callable[[], list[tuple[Tensor, Tensors]]]:
    """Begin to send results back to the ranks that own their tokens.

    The result lists, for each rank that computed some, this rank's tokens and the results for them.
    """
    shares = {peer: taken(tensors, tokens) for peer, tokens in step.return_to}
    mine = shares.pop(axis.index, None)
    if mine is not None and shares:  # a view would keep the results for all other ranks alive
        mine = tuple(map(torch.clone, mine))
    wanted = {
        peer: tuple(map(meta_like, tensors, repeat(len(tokens))))
        for peer, tokens in step.return_from
        if peer != axis.index
    }
    finish = exchange_messages(shares, wanted, axis, tensors[0].device, "returning results")

    def finished() -> list[tuple[Tensor, Tensors]]:
        arrived = finish()
        if mine is not None:
            arrived[axis.index] = mine
        return [(tokens, arrived[peer]) for peer, tokens in step.return_from]

    return finished


def swap(parts: Sequence[Tensors], wanted: Sequence[Tensors], axis: Axis) -> list[Tensors]:
    """Send `parts[p]` to each rank p. Return what comes from rank p, shaped like `wanted[p]`."""
    others = [peer for peer in range(axis.size) if peer != axis.index]
    device = parts[axis.index][0].device
    finish = exchange_messages({p: parts[p] for p in others}, {p: wanted[p] for p in others}, axis, device, "swapping")
    arrived = {axis.index: parts[axis.index]} | finish()
    return [arrived[peer] for peer in range(axis.size)]


def all_gather_ints(numbers: Sequence[int], axes: Sequence[Axis]) -> list[list[int]]:
    """Return the int64 values of all ranks, by number of shard. `axes` go from the outermost to the innermost."""
    table = torch.tensor([numbers], dtype=torch.int64, device="cpu")
    for axis in reversed(axes):
        if axis.group is not None:
            tables = [torch.empty_like(table) for _ in range(axis.size)]
            collective(on_host(axis), "comparing calls", dist.all_gather, tables, table)
            table = torch.cat(tables)
    rows: list[list[int]] = table.tolist()
    return rows


@cached_per_world()
def on_host(axis: Axis) -> Axis:
    """Return the axis with a group that sends what the host holds. All ranks make the first call at once.

    A group of NCCL gets one of gloo beside it: on NCCL a rank that compares alone would hold up the device, without a
    deadline.
    """
    if axis.group is None or "cpu" in backends(axis.group):
        return axis
    ranks = dist.get_process_group_ranks(axis.group)
    return replace(axis, group=dist.new_group(ranks, backend="gloo", use_local_synchronization=True))


@cached_per_world()
def connect(axis: Axis, device: torch.device) -> None:
    """Let all ranks of an axis join NCCL's communicator: messages between some of them would wait for the others."""
    if axis.group is not None and backends(axis.group).get(device.type) == "nccl":
        mine = torch.zeros(1, device=device)
        collective(axis, "connecting", dist.all_gather, [torch.empty_like(mine) for _ in range(axis.size)], mine)


def taken(tensors: Tensors, tokens: Tensor, *, in_order: bool = True) -> Tensors:
    """Return the tokens at some indices, ascending unless `in_order` is False: views where they are consecutive."""
    count, first = len(tokens), int(tokens[0]) if len(tokens) else 0
    parts = []
    if in_order and count and int(tokens[-1]) - first == count - 1:
        for x in tensors:
            parts.append(x if x.shape[2] == count else x.narrow(2, first, count))
    else:
        index = on_device(tokens, tensors[0].device)
        for x in tensors:
            parts.append(x.index_select(2, index))
    return tuple(parts)


def exchange_messages(
    sends: Mapping[int, Tensors], wanted: Mapping[int, Tensors], axis: Axis, device: torch.device, what: str
) -> Callable[[], dict[int, Tensors]]:
    """Begin to send and receive one message per peer. `wanted` are shaped like the tensors to receive.

    Receives are posted first. Gloo announces a receive on the connection that carries this rank's own message; behind
    that message the announcement would wait, and the link would serve one direction at a time.
    """
    connect(axis, device)
    posts: list[Post] = []
    for peer, shapes in wanted.items():
        posts.append((dist.irecv, peer, torch.empty(bytes_of(shapes), dtype=torch.uint8, device=device)))
    packed: dict[int, Tensor] = {}
    for peer, tensors in sends.items():
        if id(tensors) not in packed:  # the same for several peers is packed once
            packed[id(tensors)] = _pack(tensors)
        posts.append((dist.isend, peer, packed[id(tensors)]))
    packed.clear()
    waits = post_messages(posts, axis, what)
    count_received(wanted)

    def finished() -> dict[int, Tensors]:
        while waits:
            waits.pop()()
        arrived = {}
        for (_, peer, box), shapes in zip(posts, wanted.values(), strict=False):  # receives come first
            arrived[peer] = _unpack(box, shapes)
        posts.clear()  # messages had to live until they were sent
        return arrived

    return finished


def tree_exchange(
    message: Tensor,
    rounds: Sequence[Round],
    axis: Axis,
    merge: Callable[[Tensor], Tensor],
    mailboxes: Mailboxes | None = None,
) -> Tensor:
    """Return the merge of the messages of all ranks: each round merges this rank's message with one that it receives.

    `merge` takes the two messages as rows of bytes and returns one message of the same size.
    """
    size = len(message)
    transport = Transport(axis, size, message.device, mailboxes)
    boxes = [message.new_empty(2, transport.box_size(step.recv)) for step in rounds]
    arrivals: Iterable[Wait] = (transport.recv(step.recv, box[1]) for step, box in zip(rounds, boxes, strict=True))
    if transport.by_gloo:  # all receives at once. Other backends would wait for all of them in the first round.
        arrivals = list(arrivals)
    sent: list[tuple[Tensor, Wait]] = []  # a message has to live until it is sent
    for step, box, arrived in zip(rounds, boxes, arrivals, strict=True):
        box[0, :size] = message
        sent += [(message, wait) for wait in transport.send(dict.fromkeys(step.send, message))]
        arrived()
        message = merge(box[:, :size])
    for _, wait in sent:
        wait()
    count_messages(len(rounds), size)
    return message


def all_to_all_bytes(messages: Sequence[Tensor], axis: Axis, mailboxes: Mailboxes | None = None) -> Tensor:
    """Send `messages[p]` to each rank p. Return what comes from rank p in row p, as long as this rank's own message."""
    mine, others = messages[axis.index], [peer for peer in range(axis.size) if peer != axis.index]
    transport = Transport(axis, len(mine), mine.device, mailboxes, max(map(len, messages)))
    rows = mine.new_empty(axis.size, max([len(mine), *map(transport.box_size, others)]))
    arrivals = [transport.recv(peer, rows[peer]) for peer in others]
    sent = transport.send({peer: messages[peer] for peer in others})
    rows[axis.index, : len(mine)] = mine
    for wait in [*arrivals, *sent]:
        wait()
    count_messages(len(others), len(mine))
    return rows[:, : len(mine)]


def _pack(tensors: Tensors) -> Tensor:
    """Return the tensors as one message of bytes."""
    flat, dtype = [], tensors[0].dtype
    for x in tensors:
        if x.dtype != dtype:
            break
        flat.append(x.reshape(-1))
    else:
        return torch.cat(flat).view(torch.uint8)
    message = torch.empty(bytes_of(tensors), dtype=torch.uint8, device=tensors[0].device)
    for place, x in zip(_unpack(message, tensors), tensors, strict=True):
        place.copy_(x)
    return message


def _unpack(message: Tensor, shapes: Tensors) -> Tensors:
    """Return the tensors of a message as views. The widest dtype comes first, so that each is aligned."""
    sizes, places, start = [-x.itemsize for x in shapes], [message] * len(shapes), 0
    for index in sorted(range(len(shapes)), key=sizes.__getitem__):
        x = shapes[index]
        stop = start + x.nbytes
        places[index] = message[start:stop].view(x.dtype).view(x.shape)
        start = stop
    return tuple(places)


def meta_like(x: Tensor, tokens: int, dim: int = 2) -> Tensor:
    """Return a tensor with the shape and dtype of so many tokens, without memory."""
    return torch.empty((*x.shape[:dim], tokens, *x.shape[dim + 1 :]), dtype=x.dtype, device="meta")


# --- transport: mailboxes inside a host, else the process group ---


class Transport:
    """Messages of one exchange with the ranks of an axis: `size` bytes to receive, `longest` to send or receive."""

    def __init__(
        self, axis: Axis, size: int, device: torch.device, mailboxes: Mailboxes | None, longest: int | None = None
    ) -> None:
        self.axis, self.size, self.mailboxes = axis, size, mailboxes
        self.longest = size if longest is None else longest
        self.by_gloo = device.type == "cpu"
        connect(axis, device)
        self._queued: list[Post] = []  # receives that other backends post together with the sends
        self._posted: list[Wait] = []

    def box_size(self, peer: int) -> int:
        """Return the bytes to reserve for a message of a peer.

        Gloo accepts any message that fits. With room for a `SLOT`, ranks with messages of different sizes still
        receive each other's first bytes, and compare checksums.
        """
        return max(self.size, SLOT) if self.by_gloo and self._near(peer) is None else self.size

    def recv(self, peer: int, box: Tensor) -> Wait:
        """Begin to receive the next message of a peer. Return the wait for it.

        Gloo takes half the time for a message whose receive was posted early. Other backends post receives with the
        next sends, as a receive alone would block the sends behind it.
        """
        mailboxes, post = self._near(peer), (dist.irecv, peer, box)
        if mailboxes is not None:
            return lambda: self._recv_near(mailboxes, peer, box)
        if self.by_gloo:
            return post_messages([post], self.axis, "merging")[0]
        self._queued.append(post)
        return self._wait_posted

    def send(self, messages: Mapping[int, Tensor]) -> list[Wait]:
        """Send messages by peer. Return waits, after which their memory may be reused."""
        far = [(dist.isend, peer, message) for peer, message in messages.items() if self._near(peer) is None]
        waits = post_messages([*self._queued, *far], self.axis, "merging")
        self._queued, self._posted = [], waits
        for peer, message in messages.items():
            if (mailboxes := self._near(peer)) is not None:
                try:
                    mailboxes.send(peer, message)
                except PeerLostError as error:
                    raise failure(self.axis, "merging", peer, error) from error
        return waits

    def _near(self, peer: int) -> Mailboxes | None:
        """Return the mailboxes if messages of a peer go through them."""
        return self.mailboxes if self.mailboxes is not None and self.mailboxes.serves(peer, self.longest) else None

    def _recv_near(self, mailboxes: Mailboxes, peer: int, box: Tensor) -> None:
        try:
            mailboxes.recv(peer, box[: self.size])
        except PeerLostError as error:
            raise failure(self.axis, "merging", peer, error) from error

    def _wait_posted(self) -> None:
        """Wait for all messages that were posted together: NCCL has one wait for them."""
        for wait in self._posted:
            wait()


def post_messages(posts: Sequence[Post], axis: Axis, step: str) -> list[Wait]:
    """Post messages all at once. Return their waits, which have a deadline; one wait for all with NCCL."""
    operations, filled = [], list[tuple[int | None, str]]()
    for post, peer, x in posts:
        if x.numel():
            operations.append(dist.P2POp(post, x, group=axis.group, group_peer=peer))
            filled.append((peer, x.device.type))
    if not operations:
        return []
    try:
        works = dist.batch_isend_irecv(operations)
    except RuntimeError as error:
        raise failure(axis, step, filled[0][0], error) from error
    if len(works) < len(filled):
        filled = [(None, filled[0][1])]
    return [partial(awaited, work, kind, axis, step, peer) for work, (peer, kind) in zip(works, filled, strict=True)]
