"""What crosses ranks, and nothing else does: gather, give back, swap heads for tokens, share, trade.

Each takes off at once and is finished by calling what it returns, so that a kernel can run meanwhile. All messages go
directly from rank to rank, all of an exchange at the same time, and only the tokens that a schedule names travel.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from attnmesh.comm.counters import Tensors, bytes_of, count_messages, count_received
from attnmesh.comm.failures import Watched, awaited, collective
from attnmesh.comm.shared_memory import SLOT, Mailboxes
from attnmesh.mesh.axes import Axis, backends
from attnmesh.mesh.reduction_tree import Round
from attnmesh.mesh.schedule import Step


def gather(tensors: Tensors, step: Step, axis: Axis) -> Callable[[], Tensors]:
    """The tokens that a step brings, beside those that it keeps, in order of position: (batch, heads, tokens, ...)."""
    parts = {id(tokens): tuple(take(x, tokens) for x in tensors) for _, tokens in step.send}
    wanted = {peer: tuple(blank(x, count) for x in tensors) for peer, count in step.receive}
    finish = exchange_messages(
        {peer: parts[id(tokens)] for peer, tokens in step.send}, wanted, axis, tensors[0].device, "gathering"
    )
    staying = [tensors] if len(step.keep) or not wanted else []  # or what was sent would live until others have come

    def finished() -> Tensors:
        arrived = finish()
        pieces = [tuple(take(x, step.keep) for x in some) for some in staying]
        pieces += [arrived[peer] for peer, _ in step.receive]
        joined = pieces[0] if len(pieces) == 1 else tuple(torch.cat(x, dim=2) for x in zip(*pieces, strict=True))
        return joined if step.order is None else tuple(x.index_select(2, step.order.to(x.device)) for x in joined)

    return finished


def return_to_owners(tensors: Tensors, step: Step, axis: Axis) -> Callable[[], list[tuple[Tensor, Tensors]]]:
    """What was made for the tokens held goes to their owners: for this rank, which of its tokens, and what for them."""
    shares = {peer: tuple(take(x, tokens) for x in tensors) for peer, tokens in step.return_to}
    mine = shares.pop(axis.index, None)
    if mine is not None and shares:  # a copy: a view would keep all that was made for others
        mine = tuple(x.clone() for x in mine)
    wanted = {peer: tuple(blank(x, len(t)) for x in tensors) for peer, t in step.return_from if peer != axis.index}
    finish = exchange_messages(shares, wanted, axis, tensors[0].device, "giving back")

    def finished() -> list[tuple[Tensor, Tensors]]:
        arrived = finish() | ({} if mine is None else {axis.index: mine})
        return [(tokens, arrived[peer]) for peer, tokens in step.return_from]

    return finished


def swap(parts: Sequence[Tensors], wanted: Sequence[Tensors], axis: Axis) -> list[Tensors]:
    """All to all: `parts[p]` goes to rank p, and what comes from p is shaped like `wanted[p]`."""
    others = [peer for peer in range(axis.size) if peer != axis.index]
    device = parts[axis.index][0].device
    finish = exchange_messages({p: parts[p] for p in others}, {p: wanted[p] for p in others}, axis, device, "swapping")
    arrived = {axis.index: parts[axis.index]} | finish()
    return [arrived[peer] for peer in range(axis.size)]


def all_gather_ints(numbers: Sequence[int], axes: Sequence[Axis]) -> list[list[int]]:
    """Every rank's numbers, by number of shard: `axes` from the outermost to the innermost."""
    by_host = all("cpu" in backends(axis.group) for axis in axes if axis.group is not None)
    table = torch.tensor([numbers], dtype=torch.int64, device="cpu" if by_host else "cuda")
    for axis in reversed(axes):
        if axis.group is not None:
            tables = [torch.empty_like(table) for _ in range(axis.size)]
            collective(axis, "agreeing", dist.all_gather, tables, table)
            table = torch.cat(tables)
    rows: list[list[int]] = table.tolist()
    return rows


def take(x: Tensor, tokens: Tensor) -> Tensor:
    """Some of the tokens, by ascending indices: a view where they are one run."""
    if len(tokens) and int(tokens[-1]) - int(tokens[0]) == len(tokens) - 1:
        return x.narrow(2, int(tokens[0]), len(tokens))
    return x.index_select(2, tokens.to(x.device))


def exchange_messages(
    sends: Mapping[int, Tensors], wanted: Mapping[int, Tensors], axis: Axis, device: torch.device, what: str
) -> Callable[[], dict[int, Tensors]]:
    """Post all messages at once, one a peer; finishing waits for them. `wanted` are shaped like what will come.

    What is to come is posted first: a rank tells the other that it may send on the line that carries its own message,
    and behind that the word would wait until all of it has gone: the link would serve one way at a time.
    """
    packed = {id(tensors): _pack(tensors) for tensors in sends.values()}  # the same for several peers is packed once
    letters = {peer: packed[id(tensors)] for peer, tensors in sends.items()}
    boxes = {peer: torch.empty(bytes_of(x), dtype=torch.uint8, device=device) for peer, x in wanted.items()}
    posts = [(post, *each) for post, pile in ((dist.irecv, boxes), (dist.isend, letters)) for each in pile.items()]
    works = _posted(posts, axis, what)
    count_received(wanted)

    def traded() -> dict[int, Tensors]:
        while works:
            works.pop().wait()
        letters.clear()  # they had to live until they were sent
        return {peer: _unpack(boxes.pop(peer), tensors) for peer, tensors in wanted.items()}

    return traded


def tree_exchange(
    message: Tensor,
    rounds: Sequence[Round],
    axis: Axis,
    join: Callable[[Tensor], Tensor],
    mailboxes: Mailboxes | None = None,
) -> Tensor:
    """Round by round `join` what is held and what is heard, two rows of bytes, to what is held next.

    Gloo is told of all that will be heard at once, as what is expected comes in half the time. On other backends a
    receipt would hold up what is sent after it. Gloo takes a message into any box that is not too small for it:
    boxes have room for a `SLOT`, so ranks that do not agree on what is sent still hear how messages begin. Ranks of a
    host exchange messages of up to that length by the `board`, if there is one.
    """
    size, early = len(message), message.device.type == "cpu"

    def near(peer: int) -> bool:
        return mailboxes is not None and mailboxes.serves(peer, size)

    boxes = [message.new_empty(2, size if near(step.recv) or not early else max(size, SLOT)) for step in rounds]
    receipts = [
        [] if near(step.recv) else [(dist.irecv, step.recv, box[1])] for step, box in zip(rounds, boxes, strict=True)
    ]
    coming = [_posted(receipt, axis, "merging") if early else [] for receipt in receipts]
    going = []
    for step, box, receipt, works in zip(rounds, boxes, receipts, coming, strict=True):
        box[0, :size] = message
        posted = _posted(
            [(dist.isend, p, message) for p in step.send if not near(p)] + ([] if early else receipt), axis, "merging"
        )
        going += [(message, work) for work in posted]  # messages have to live until they are sent
        if mailboxes is not None:
            for peer in filter(near, step.send):
                with Watched(axis, "merging", peer):
                    mailboxes.send(peer, message)
            if near(step.recv):
                with Watched(axis, "merging", step.recv):
                    mailboxes.recv(step.recv, box[1])
        for work in works if early else posted:
            work.wait()
        message = join(box[:, :size])
    for _, work in going:
        work.wait()
    count_messages(len(rounds), size)
    return message


def all_to_all_bytes(messages: Sequence[Tensor], axis: Axis, mailboxes: Mailboxes | None = None) -> Tensor:
    """All to all: `messages[p]` goes to rank p, and row p is what came from it, as long as this rank's own."""
    mine = messages[axis.index]
    others = [peer for peer in range(axis.size) if peer != axis.index]
    near = [p for p in others if mailboxes is not None and mailboxes.serves(p, max(len(mine), len(messages[p])))]
    far = [p for p in others if p not in near]
    rows = mine.new_empty(axis.size, max(len(mine), SLOT if far and mine.device.type == "cpu" else 0))
    posts = [(dist.irecv, p, rows[p]) for p in far] + [(dist.isend, p, messages[p]) for p in far]
    works = _posted(posts, axis, "merging")
    count_messages(len(others), len(mine))
    rows[axis.index, : len(mine)] = mine
    if mailboxes is not None:
        for peer in near:
            with Watched(axis, "merging", peer):
                mailboxes.send(peer, messages[peer])
        for peer in near:
            with Watched(axis, "merging", peer):
                mailboxes.recv(peer, rows[peer, : len(mine)])
    for work in works:
        work.wait()
    return rows[:, : len(mine)]


@dataclass(frozen=True)
class _Post:
    """A message under way; waiting for it has a deadline."""

    work: Any
    axis: Axis
    what: str
    peer: int | None
    kind: str

    def wait(self) -> None:
        """Until it has come or gone."""
        awaited(self.work, self.kind, self.axis, self.what, self.peer)


def _posted(posts: Sequence[tuple[Callable[..., Any], int, Tensor]], axis: Axis, what: str) -> list[_Post]:
    """Post all at once; each is what to do, with whom, and with which tensor."""
    real = [(post, peer, x) for post, peer, x in posts if x.numel()]
    operations = [dist.P2POp(post, x, group=axis.group, group_peer=peer) for post, peer, x in real]
    with Watched(axis, what, real[0][1] if real else None):
        works = dist.batch_isend_irecv(operations) if operations else []
    together = len(works) < len(real)  # NCCL's are one
    return [
        _Post(work, axis, what, None if together else peer, x.device.type)
        for work, (_, peer, x) in zip(works, real)  # noqa: B905
    ]


def _pack(tensors: Tensors) -> Tensor:
    """One message of bytes, which every backend sends, whatever they are of."""
    if all(x.dtype == tensors[0].dtype for x in tensors):
        return torch.cat([x.reshape(-1) for x in tensors]).view(torch.uint8)
    message = torch.empty(bytes_of(tensors), dtype=torch.uint8, device=tensors[0].device)
    for place, x in zip(_unpack(message, tensors), tensors, strict=True):
        place.copy_(x)
    return message


def _unpack(message: Tensor, shapes: Tensors) -> Tensors:
    """The tensors in a message, as views: the widest dtype comes first, so that each lies on a multiple of its size."""
    if all(x.dtype == shapes[0].dtype for x in shapes):
        flat = message[: bytes_of(shapes)].view(shapes[0].dtype).split([x.numel() for x in shapes])
        return tuple(part.view(x.shape) for part, x in zip(flat, shapes, strict=True))
    places, start = [message] * len(shapes), 0
    for index in sorted(range(len(shapes)), key=lambda i: -shapes[i].element_size()):
        x = shapes[index]
        stop = start + x.numel() * x.element_size()
        places[index] = message[start:stop].view(x.dtype).view(x.shape)
        start = stop
    return tuple(places)


def blank(x: Tensor, tokens: int, dim: int = 2) -> Tensor:
    """The shape and dtype of so many tokens, without any memory."""
    return torch.empty((*x.shape[:dim], tokens, *x.shape[dim + 1 :]), dtype=x.dtype, device="meta")
