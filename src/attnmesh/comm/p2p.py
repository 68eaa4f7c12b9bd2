"""Point-to-point exchanges along an axis: gather tokens, return results, swap heads, merge along a tree.

`gather`, `return_to_owners`, `begin_swap` and `exchange_messages` begin at once and return a function that finishes
them, so that a kernel can run in between. The other exchanges block. Gathers and returns send only tokens that the
schedule names.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from attnmesh.comm.failures import awaited, collective, failure
from attnmesh.comm.mailbox_queue import Letter, begin_letters, finish_letter
from attnmesh.comm.shared_memory import SLOT, CallsDifferError, PeerLostError
from attnmesh.comm.topology import mailboxes_of
from attnmesh.mesh.axes import Axis, backends
from attnmesh.mesh.reduction_tree import Round
from attnmesh.mesh.schedule import Step
from attnmesh.runtime.caches import on_device
from attnmesh.runtime.counters import Tensors, bytes_of, count_messages, count_received
from attnmesh.runtime.ranges import EXCHANGE, is_profiled, named
from attnmesh.runtime.world import cached_per_world

PIECES = 2
"""Letters of a message at most: 512 kB, which 256 tokens of a small model take."""

Wait = Callable[[], None]
"""Waits until a message has come or gone, and raises RankFailure at the deadline."""

Post = tuple[Callable[..., Any], int, Tensor]
"""`dist.isend` or `dist.irecv`, the peer, and the tensor."""

OUT_OF_TURN = 1 << 15
"""Bytes of a message up to which it does not wait for its turn."""


def gather(tensors: Tensors, step: Step, axis: Axis, *, in_turn: bool = False) -> Callable[[], Tensors]:
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
    finish = exchange_messages(sends, wanted, axis, tensors[0].device, "gathering", in_turn=in_turn)
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


def return_to_owners(
    tensors: Tensors, step: Step, axis: Axis, *, in_turn: bool = False
) -> Callable[[], list[tuple[Tensor, Tensors]]]:
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
    finish = exchange_messages(shares, wanted, axis, tensors[0].device, "returning results", in_turn=in_turn)

    def finished() -> list[tuple[Tensor, Tensors]]:
        arrived = finish()
        if mine is not None:
            arrived[axis.index] = mine
        return [(tokens, arrived[peer]) for peer, tokens in step.return_from]

    return finished


def swap(parts: Sequence[Tensors], wanted: Sequence[Tensors], axis: Axis) -> list[Tensors]:
    """Send `parts[p]` to each rank p. Return what comes from rank p, shaped like `wanted[p]`."""
    return begin_swap(parts, wanted, axis, in_turn=True)()


def swap_tokens(parts: Sequence[Tensor], counts: Sequence[int], axis: Axis, dim: int = 2) -> list[Tensor]:
    """Send `parts[p]` to each rank p. Return what comes from rank p: `counts[p]` tokens, else like this rank's own."""
    wanted = [(meta_like(parts[axis.index], count, dim),) for count in counts]
    return [x for (x,) in swap([(part,) for part in parts], wanted, axis)]


def begin_swap(
    parts: Sequence[Tensors], wanted: Sequence[Tensors], axis: Axis, *, in_turn: bool = False
) -> Callable[[], list[Tensors]]:
    """Begin to send `parts[p]` to each rank p. The result lists what comes from rank p, shaped like `wanted[p]`."""
    sends, receives = dict(enumerate(parts)), dict(enumerate(wanted))
    mine, _ = sends.pop(axis.index), receives.pop(axis.index)
    finish = exchange_messages(sends, receives, axis, mine[0].device, "swapping", in_turn=in_turn)

    def finished() -> list[Tensors]:
        arrived = finish()
        arrived[axis.index] = mine
        return list(map(arrived.__getitem__, range(axis.size)))

    return finished


@cached_per_world()
def connect(axis: Axis, device: torch.device) -> None:
    """Let all ranks of an axis make mailboxes, or join NCCL's communicator, also those that exchange nothing now.

    On NCCL messages between some of them would wait for the others.
    """
    mailboxes_of(axis, device)
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
        for x in tensors:
            parts.append(x.index_select(2, on_device(tokens, x.device)))
    return tuple(parts)


def exchange_messages(
    sends: Mapping[int, Tensors],
    wanted: Mapping[int, Tensors],
    axis: Axis,
    device: torch.device,
    what: str,
    *,
    in_turn: bool = False,
) -> Callable[[], dict[int, Tensors]]:
    """Begin to send and receive one message per peer. `wanted` are shaped like the tensors to receive.

    Receives are posted first. Gloo announces a receive on the connection that carries this rank's own message; behind
    that message the announcement would wait, and the link would serve one direction at a time.

    With `in_turn` gloo sends long messages to three or more ranks one after the other when the exchange is finished: to
    the next rank, to the one after it, and so on. Each link then carries one message each way at a time. All at once
    take longer, since what a rank acknowledges waits behind all that it sends. No other exchange along the axis may
    begin before.
    """
    connect(axis, device)
    posts: list[Post] = []
    turns: list[Post] = []
    for peer, shapes in wanted.items():
        posts.append((dist.irecv, peer, torch.empty(bytes_of(shapes), dtype=torch.uint8, device=device)))
    packed: dict[int, Tensor] = {}
    for peer, tensors in sends.items():
        if id(tensors) not in packed:  # the same for several peers is packed once
            packed[id(tensors)] = _pack(tensors)
        message = packed[id(tensors)]
        is_long = in_turn and len(sends) > 2 and message.nbytes > OUT_OF_TURN
        waits_its_turn = is_long and _goes_by_gloo(message, peer, axis, PIECES)
        (turns if waits_its_turn else posts).append((dist.isend, peer, message))
    packed.clear()
    turns.sort(key=lambda turn: (turn[1] - axis.index) % axis.size)
    post = named(EXCHANGE, post_messages) if is_profiled() else post_messages
    waits = post(posts, axis, what, exact=True)
    count_received(wanted)

    def finished() -> dict[int, Tensors]:
        try:
            while turns:
                waits.extend(post([turns.pop(0)], axis, what, exact=True))
                waits.pop()()
            while waits:
                waits.pop()()
        except CallsDifferError as error:  # its messages are out of step with this rank's from now on
            why = RuntimeError("it compares its call, while this rank waits for a message of another call")
            raise failure(axis, what, error.peer, why) from error
        arrived = {}
        for (_, peer, message), shapes in zip(posts, wanted.values(), strict=False):  # receives come first
            arrived[peer] = _unpack(message, shapes)
        posts.clear()  # messages had to live until they were sent
        return arrived

    return named(EXCHANGE, finished) if is_profiled() else finished


def tree_exchange(message: Tensor, rounds: Sequence[Round], axis: Axis, merge: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the merge of the messages of all ranks: each round merges this rank's message with one that it receives.

    `merge` takes the two messages as rows of bytes and returns one message of the same size.
    """
    size = len(message)
    connect(axis, message.device)
    buffers = [message.new_empty(2, room_for(each.recv, message, axis)) for each in rounds]
    receives: list[Post] = [(dist.irecv, each.recv, into[1]) for each, into in zip(rounds, buffers, strict=True)]
    early = message.device.type == "cpu"  # Gloo takes half the time; NCCL would wait for all of them in the first round
    arrivals = [post_messages([receive], axis, "merging") for receive in receives] if early else []
    sent: list[tuple[Tensor, list[Wait]]] = []  # a message has to live until it is sent
    for index, (each, buffer) in enumerate(zip(rounds, buffers, strict=True)):
        buffer[0, :size] = message
        posts: list[Post] = [(dist.isend, peer, message) for peer in each.send]
        waits = post_messages(posts if early else [receives[index], *posts], axis, "merging")
        sent.append((message, waits))
        for wait in arrivals[index] if early else waits:
            wait()
        message = merge(buffer[:, :size])
    for _, waits in sent if early else []:
        for wait in waits:
            wait()
    count_messages(len(rounds), size)
    return message


def all_to_all_bytes(messages: Sequence[Tensor], axis: Axis) -> Tensor:
    """Send `messages[p]` to each rank p. Return what comes from rank p in row p, as long as this rank's own message."""
    mine, others = messages[axis.index], [peer for peer in range(axis.size) if peer != axis.index]
    connect(axis, mine.device)
    rooms = {peer: room_for(peer, mine, axis) for peer in others}
    rows = mine.new_empty(axis.size, max([len(mine), *rooms.values()]))
    posts: list[Post] = [(dist.irecv, peer, rows[peer, :room]) for peer, room in rooms.items()]
    posts += [(dist.isend, peer, messages[peer]) for peer in others]
    waits = post_messages(posts, axis, "merging")
    rows[axis.index, : len(mine)] = mine
    for wait in waits:
        wait()
    count_messages(len(others), len(mine))
    return rows[:, : len(mine)]


def room_for(peer: int, message: Tensor, axis: Axis) -> int:
    """Return the bytes to reserve for a peer's message that should be as long as this rank's.

    Gloo accepts any message that fits. With room for a `SLOT`, ranks with messages of different sizes still receive
    each other's first bytes, and compare checksums.
    """
    return max(len(message), SLOT) if _goes_by_gloo(message, peer, axis) else len(message)


def _goes_by_gloo(message: Tensor, peer: int, axis: Axis, letters: int = 1) -> bool:
    """Return whether gloo sends a message, and not the mailboxes of a host in so many letters."""
    mailboxes = mailboxes_of(axis, message.device)
    far = mailboxes is None or not mailboxes.serves(peer, message.nbytes, letters)
    return far and message.device.type == "cpu"


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


def post_messages(posts: Sequence[Post], axis: Axis, what: str, *, exact: bool = False) -> list[Wait]:
    """Post messages all at once: short ones inside a host by its mailboxes, others by the process group.

    Return their waits, which have a deadline; one wait for all with NCCL. With `exact`, longer messages are cut in up
    to `PIECES` letters, and a letter of another size is one of another call; else its checksum shows that.
    """
    if not posts:
        return []
    device, most = posts[0][2].device, PIECES if exact else 1
    mailboxes, operations, peers, letters = mailboxes_of(axis, device), [], list[int | None](), list[Letter]()
    for post, peer, x in posts:
        if mailboxes is not None and x.numel() and mailboxes.serves(peer, x.nbytes, most):
            for part in x.split(SLOT) if x.nbytes > SLOT else (x,):
                letters.append(Letter(mailboxes, peer, part, sends=post is dist.isend, exact=exact))
        elif x.numel():
            operations.append(dist.P2POp(post, x, group=axis.group, group_peer=peer))
            peers.append(peer)
    waits = list[Wait]()
    if operations:
        try:
            works = dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            raise failure(axis, what, peers[0], error) from error
        if len(works) < len(peers):
            peers = [None]
        pairs = zip(works, peers, strict=True)
        waits = [partial(awaited, work, device.type, axis, what, peer) for work, peer in pairs]
    if letters:
        try:
            begin_letters(letters)
        except PeerLostError as error:
            raise failure(axis, what, error.peer, error) from error
    for letter in letters:
        waits.append(partial(deliver, letter, axis, what))
    return waits


def deliver(letter: Letter, axis: Axis, what: str) -> None:
    """Wait for a letter, or raise the failure of its peer."""
    try:
        finish_letter(letter)
    except PeerLostError as error:
        raise failure(axis, what, error.peer, error) from error
