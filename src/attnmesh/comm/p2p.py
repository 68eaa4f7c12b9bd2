"""Point-to-point exchanges along an axis: gather tokens, return results, swap tokens for heads.

A method of `Channel` begins an exchange and returns a function that awaits its end: a kernel can run in between.
`all_to_all` and `all_to_all_tokens` block. Gathers and returns send only tokens that the schedule names.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from attnmesh.comm.failures import disconnect_and_diagnose
from attnmesh.comm.merges import P2PMessage
from attnmesh.comm.mismatch import CallsDifferError
from attnmesh.comm.transport import agreed_transport
from attnmesh.mesh.axes import Axis
from attnmesh.mesh.schedule import GatherStep
from attnmesh.runtime.counters import current_traffic
from attnmesh.runtime.memo import index_on
from attnmesh.runtime.ranges import EXCHANGE_RANGE, is_profiled, profiled_as
from attnmesh.runtime.tensors import Tensors, bytes_of

Returned = list[tuple[Tensor, Tensors]]
"""Results for this rank's tokens: pairs of the indices of some tokens, and the results for these."""

LONG_MESSAGE_BYTES = 1 << 15
"""Bytes above which messages to several ranks are sent one after the other (`Transport.sends_in_turn` says why).

Shorter ones are sent at once: to wait until the one before is sent would cost more time than a short message saves by
its turn. The number is a choice: no bench measures it.
"""


class Channel(NamedTuple):
    """An axis along which tensors of one device travel."""

    axis: Axis
    device: torch.device
    one_at_a_time: bool = False
    """True if each exchange to three or more ranks ends before another begins along the axis.

    Its long messages may then be sent one after the other as the exchange ends: to the next rank, to the one after it,
    and so on. Each link carries one message each way at a time. Messages to fewer ranks are sent at once, and these
    exchanges may overlap, as those of a ring do.
    """

    def begin_gather(self, tensors: Tensors, step: GatherStep) -> Callable[[], Tensors]:
        """Begin to gather the tokens of a step. The result has the tokens kept and received, in order of position."""
        if not step.send and not step.receive:
            agreed_transport(self.axis, self.device)  # collective at its first call: also on ranks that send nothing
            kept = select_tokens(tensors, step.keep)
            return lambda: kept
        parts: dict[int, Tensors] = {}  # tokens for several peers are taken once
        for _, indices in step.send:
            if id(indices) not in parts:
                parts[id(indices)] = select_tokens(tensors, indices)
        receives = {peer: tuple(map(meta_like, tensors, repeat(count))) for peer, count in step.receive}
        sends = {peer: parts[id(indices)] for peer, indices in step.send}
        finish_messages = self.begin_messages(sends, receives, "gathering")
        source = [tensors] if len(step.keep) or not receives else []  # without kept tokens their memory is freed now

        def finish() -> Tensors:
            arrived = finish_messages()
            pieces = [select_tokens(source.pop(), step.keep)] if source else []
            for peer, _ in step.receive:
                pieces.append(arrived[peer])
            gathered = pieces[0] if len(pieces) == 1 else tuple(map(_join, zip(*pieces, strict=True)))
            return gathered if step.permutation is None else select_tokens(gathered, step.permutation, ascending=False)

        return finish

    def begin_return(self, tensors: Tensors, step: GatherStep) -> Callable[[], Returned]:
        """Begin to send results back to the owners of their tokens.

        The result lists, for each rank that computed results for tokens of this rank, these tokens and results.
        """
        own = self.axis.index
        shares = {peer: select_tokens(tensors, indices) for peer, indices in step.return_to}
        own_results = shares.pop(own, None)
        if own_results is not None and shares:  # a view would keep the results for all other ranks alive
            own_results = tuple(map(torch.clone, own_results))
        receives = {
            peer: tuple(map(meta_like, tensors, repeat(len(indices))))
            for peer, indices in step.return_from
            if peer != own
        }
        finish_messages = self.begin_messages(shares, receives, "returning results")

        def finish() -> Returned:
            arrived = finish_messages()
            if own_results is not None:
                arrived[own] = own_results
            return [(indices, arrived[peer]) for peer, indices in step.return_from]

        return finish

    def begin_all_to_all(self, parts: Sequence[Tensors], shapes: Sequence[Tensors]) -> Callable[[], list[Tensors]]:
        """Begin to send `parts[p]` to each rank p. The result has rank p's tensors at p, shaped like `shapes[p]`."""
        axis = self.axis
        sends, receives = dict(enumerate(parts)), dict(enumerate(shapes))
        own_part, _ = sends.pop(axis.index), receives.pop(axis.index)
        finish_messages = self.begin_messages(sends, receives, "swapping")

        def finish() -> list[Tensors]:
            arrived = finish_messages()
            arrived[axis.index] = own_part
            return list(map(arrived.__getitem__, range(axis.size)))

        return finish

    def begin_messages(
        self, sends: Mapping[int, Tensors], receives: Mapping[int, Tensors], activity: str
    ) -> Callable[[], dict[int, Tensors]]:
        """Begin to send and receive one message per peer. `receives` are shaped like the tensors to receive.

        `activity` names the operation in a `RankFailure`.

        Receives are posted first. Gloo announces a receive to the sender, on the connection that also carries messages
        to the sender. If rank A posted its own message first, the announcement would wait behind it. Rank B would begin
        to send only when A's message has arrived, and the link would carry one direction at a time.
        """
        axis, device, one_at_a_time = self
        transport = agreed_transport(axis, device)
        receiving: list[tuple[int, Tensor, Tensors]] = []
        posts: list[P2PMessage] = []
        queued: list[P2PMessage] = []
        for peer, shapes in receives.items():
            message = torch.empty(bytes_of(shapes), dtype=torch.uint8, device=device)
            receiving.append((peer, message, shapes))
            posts.append((dist.irecv, peer, message))
        packed: dict[int, Tensor] = {}
        for peer, tensors in sends.items():
            if id(tensors) not in packed:  # the same for several peers is packed once
                packed[id(tensors)] = _pack(tensors)
            message = packed[id(tensors)]
            is_long = one_at_a_time and len(sends) > 2 and message.nbytes > LONG_MESSAGE_BYTES
            is_queued = is_long and transport.sends_in_turn(peer, message)
            (queued if is_queued else posts).append((dist.isend, peer, message))
        packed.clear()  # `finish` keeps this frame: a message is freed once it is sent
        queued.sort(key=lambda post: (post[1] - axis.index) % axis.size)
        post = profiled_as(EXCHANGE_RANGE, transport.post) if is_profiled() else transport.post
        waits = post(posts, activity, is_fixed_size=True)
        if (traffic := current_traffic.get()) is not None:
            for shapes in receives.values():
                traffic.add(shapes)

        def finish() -> dict[int, Tensors]:
            try:
                while queued:
                    waits.extend(post([queued.pop(0)], activity, is_fixed_size=True))
                    waits.pop()()
                while waits:
                    waits.pop()()
            except CallsDifferError as error:  # from now on messages do not match receives: the exchange is lost
                why = RuntimeError("it compares its call, while this rank waits for a message of another call")
                raise disconnect_and_diagnose(axis, activity, error.peer, why) from error
            arrived = {}
            for peer, message, shapes in receiving:
                arrived[peer] = _unpack(message, shapes)
            receiving.clear()
            posts.clear()  # messages had to live until they were sent
            return arrived

        return profiled_as(EXCHANGE_RANGE, finish) if is_profiled() else finish


def all_to_all(parts: Sequence[Tensors], shapes: Sequence[Tensors], axis: Axis) -> list[Tensors]:
    """Send `parts[p]` to each rank p. Return the tensors of rank p at p, shaped like `shapes[p]`."""
    return Channel(axis, parts[axis.index][0].device, True).begin_all_to_all(parts, shapes)()


def all_to_all_tokens(parts: Sequence[Tensor], counts: Sequence[int], axis: Axis, dim: int = 2) -> list[Tensor]:
    """Send `parts[p]` to each rank p. Return the tensor of rank p at p: `counts[p]` tokens along `dim`.

    Its dtype and other dims are those of this rank's own part.
    """
    shapes = [(meta_like(parts[axis.index], count, dim),) for count in counts]
    channel = Channel(axis, parts[axis.index].device, True)
    messages = {id(part): (part,) for part in parts}  # the same for several ranks is packed once
    return [x for (x,) in channel.begin_all_to_all([messages[id(part)] for part in parts], shapes)()]


def is_run(indices: Tensor) -> bool:
    """Return whether ascending indices are consecutive, and at least one. `select_tokens` then returns views."""
    return len(indices) > 0 and int(indices[-1]) - int(indices[0]) == len(indices) - 1


def select_tokens(tensors: Tensors, indices: Tensor, *, ascending: bool = True) -> Tensors:
    """Return the tokens at some indices. They are views if the indices are `ascending` and consecutive."""
    parts = []
    if ascending and is_run(indices):
        first, count = int(indices[0]), len(indices)
        for x in tensors:
            parts.append(x if x.shape[2] == count else x.narrow(2, first, count))
    else:
        for x in tensors:
            parts.append(x.index_select(2, index_on(indices, x.device)))
    return tuple(parts)


def put_back(selected: Tensors, indices: Tensor, into: Tensors) -> None:
    """Write tokens back that have changed.

    `select_tokens` has taken them, of ascending indices. Where they are views, they are there already.
    """
    if not is_run(indices):
        for x, whole in zip(selected, into, strict=True):
            whole.index_copy_(2, index_on(indices, x.device), x)


def _join(pieces: tuple[Tensor, ...]) -> Tensor:
    return torch.cat(pieces, dim=2)


def _pack(tensors: Tensors) -> Tensor:
    """Return the tensors as one message of bytes."""
    flat = []
    dtype = tensors[0].dtype
    for x in tensors:
        if x.dtype != dtype:
            break
        flat.append(x.reshape(-1))
    else:
        return torch.cat(flat).view(torch.uint8)
    message = torch.empty(bytes_of(tensors), dtype=torch.uint8, device=tensors[0].device)
    for view, x in zip(_unpack(message, tensors), tensors, strict=True):
        view.copy_(x)
    return message


def _unpack(message: Tensor, shapes: Tensors) -> Tensors:
    """Return the tensors of a message as views. The widest dtype comes first, so that each is aligned."""
    sizes = [-x.itemsize for x in shapes]
    views = [message] * len(shapes)
    start = 0
    for index in sorted(range(len(shapes)), key=sizes.__getitem__):
        x = shapes[index]
        stop = start + x.nbytes
        views[index] = message[start:stop].view(x.dtype).view(x.shape)
        start = stop
    return tuple(views)


def meta_like(x: Tensor, tokens: int, dim: int = 2) -> Tensor:
    """Return a tensor without memory, like x but with `tokens` tokens."""
    return torch.empty((*x.shape[:dim], tokens, *x.shape[dim + 1 :]), dtype=x.dtype, device="meta")
