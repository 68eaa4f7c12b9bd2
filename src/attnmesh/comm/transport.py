"""Transports: how messages travel along an axis. One is chosen for an axis and a device.

`Transport`       the process group, over sockets with gloo
`HostTransport`   mailboxes for short messages inside a host, and sockets for all others
`DeviceTransport` GPUs; a merge is one launch where these see each other's memory

A transport posts messages, gathers them, merges partials, and gathers numbers that CPUs hold. `all_gather_ints` does
the last along all axes of a mesh. `flat_axis` makes one axis of several. Others ask one thing alone: whether all ranks
of an axis share mailboxes (`mailboxes_of_all_ranks`), which native calls need.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.comm.failures import disconnect_and_diagnose, run_collective, wait_for
from attnmesh.comm.host_merge import merge_in_host
from attnmesh.comm.mailbox_queue import PendingMessage, begin_pending, finish_pending
from attnmesh.comm.mailboxes import MAX_NUMBERS, MESSAGE_BYTES, Mailboxes, PeerLostError
from attnmesh.comm.message import MessageForm
from attnmesh.comm.peer_memory import PeerMemory, peer_memory_of
from attnmesh.comm.topology import best_merge, dist_all_gather_ints, host_mailboxes, hosts, merge_rounds, mesh_hosts
from attnmesh.core.partial import Partial
from attnmesh.mesh.axes import Axis, Mesh, attention_dims, axis_along, backends
from attnmesh.mesh.merges import CheckedPartial, Merge, Pattern, native_merges
from attnmesh.mesh.reduction_tree import Round
from attnmesh.runtime.counters import count_messages, current_traffic
from attnmesh.runtime.world import WORLD, cached_per_world, collective_once

CPU = torch.device("cpu")

MAX_FRAGMENTS = 16
"""Fragments of a message at most: 4 MB, as long as 2,700 tokens of a small model. Sockets send it more slowly."""

TRIAL_BATCHES = (1, 8)
"""Batches of 32 heads of 128, in float32, whose merges are timed before "auto" chooses one."""

TRIALS, TRIAL_CALLS = 5, 5
"""Times that each merge is timed, of which the first is not counted, and its calls in a row inside one host."""

Wait = Callable[[], None]
"""Waits until a message has come or gone, and raises RankFailure at the deadline."""

P2PMessage = tuple[Callable[..., Any], int, Tensor]
"""`dist.isend` or `dist.irecv`, the peer, and the tensor."""


class Transport:
    """Messages along an axis by its process group. The other transports take what they do not override from it."""

    posts_ahead = True
    """True if receives may be posted before the messages of earlier rounds have come: in half the time."""

    max_mismatch_bytes: float = MESSAGE_BYTES
    """Bytes up to which a message of another size than is expected still arrives, and its checksum tells."""

    def __init__(self, axis: Axis, device: torch.device) -> None:
        self.axis, self.device = axis, device
        if axis.size > 1:
            hosts(axis)  # exchanged now rather than in the first merge

    def post(self, posts: Sequence[P2PMessage], activity: str, *, is_fixed_size: bool = False) -> list[Wait]:
        """Post messages all at once. Return their waits, which have a deadline; one wait for all with NCCL.

        With `is_fixed_size` a message of another size is one of another call; else its checksum shows that.
        """
        posts = [post for post in posts if post[2].numel()]
        if not posts:
            return []
        peers: list[int | None] = [peer for _, peer, _ in posts]
        try:
            works = dist.batch_isend_irecv(
                [dist.P2POp(op, x, group=self.axis.group, group_peer=peer) for op, peer, x in posts]
            )
        except RuntimeError as error:
            raise disconnect_and_diagnose(self.axis, activity, peers[0], error) from error
        pairs = zip(works, peers if len(works) == len(peers) else [None], strict=True)
        return [partial(wait_for, work, self.device.type, self.axis, activity, peer) for work, peer in pairs]

    def gather(self, message: Tensor) -> Tensor:
        """Return the messages of all ranks as rows, by a collective."""
        rows = list(message.new_empty(self.axis.size, len(message)))
        run_collective(self.axis, "merging", dist.all_gather, rows, message)
        count_messages(self.axis.size - 1, len(message))
        return torch.stack(rows)

    def all_gather_ints(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the int64 values of all ranks, which CPUs hold."""
        return dist_all_gather_ints(numbers, [self.axis])

    def direct(self, message: Tensor, form: MessageForm) -> CheckedPartial:
        """Send a message to every other rank, and merge all at once."""
        return form.merged_partial(self.all_to_all([message] * self.axis.size))

    def tree(self, message: Tensor, form: MessageForm, reproducible: bool, done: int = 0) -> CheckedPartial:
        """Merge two messages in each round of a tree that is not done. Which comes first makes no difference."""
        own_rounds = merge_rounds(self.axis, reproducible=reproducible)[self.axis.index]
        return form.unpacked(self.reduce(message, own_rounds[done:], form.merged_message))

    def all_reduce(self, message: Tensor, form: MessageForm) -> CheckedPartial:
        """Merge by three all-reduces, as Algorithm 3 of Tree Attention does: maximum, numerator and denominator."""
        checksum, (out, lse) = form.unpacked(message)
        peaks = torch.cat((checksum, lse.flatten()))
        run_collective(self.axis, "merging", dist.all_reduce, peaks, dist.ReduceOp.MAX)
        peak = peaks[2:].view(lse.shape)
        denominator = torch.exp(lse - peak.masked_fill(peak == -torch.inf, 0.0))
        numerator = out * denominator.unsqueeze(-1)
        run_collective(self.axis, "merging", dist.all_reduce, numerator)
        run_collective(self.axis, "merging", dist.all_reduce, denominator)
        sent = sum(x.numel() * x.element_size() for x in (peaks, numerator, denominator))
        count_messages(1, 2 * (self.axis.size - 1) * sent // self.axis.size)  # bytes of a bandwidth-optimal all-reduce
        out = numerator / denominator.masked_fill(denominator == 0, 1.0).unsqueeze(-1)
        return peaks[:2], Partial(out, peak + denominator.log())

    def form_of(self, form: MessageForm, merge: Merge) -> MessageForm:
        """Return the form in which a partial travels."""
        return form

    def merges_all_heads(self, form: MessageForm) -> bool:
        """Return whether one call merges all heads directly, sooner than each rank its own."""
        return False

    def fastest(self) -> Merge:
        """Return the fastest merge, alike on all ranks. All ranks call it at once, the first time."""
        return fastest_by_time(self)

    def sends_in_turn(self, peer: int, message: Tensor) -> bool:
        """Return whether messages to several ranks go sooner one after the other.

        With gloo what a rank acknowledges waits behind all that it sends.
        """
        return True

    def receive_bytes(self, peer: int, message: Tensor) -> int:
        """Return the bytes to reserve for a peer's message that should be as long as this rank's.

        Gloo accepts any message that fits. With room for `MESSAGE_BYTES`, ranks with messages of different sizes still
        receive each other's first bytes, and compare checksums.
        """
        return max(len(message), MESSAGE_BYTES)

    def reduce(self, message: Tensor, own_rounds: Sequence[Round], merge: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the merge of all messages: each round merges this rank's message with one that it receives.

        `merge` takes the two messages as rows of bytes and returns one message of the same size.
        """
        size = len(message)
        buffers = [message.new_empty(2, self.receive_bytes(own_round.recv, message)) for own_round in own_rounds]
        receives: list[P2PMessage] = [
            (dist.irecv, own_round.recv, into[1]) for own_round, into in zip(own_rounds, buffers, strict=True)
        ]
        arrivals = [self.post([receive], "merging") for receive in receives] if self.posts_ahead else []
        sent: list[tuple[Tensor, list[Wait]]] = []  # a message has to live until it is sent
        for index, (own_round, buffer) in enumerate(zip(own_rounds, buffers, strict=True)):
            buffer[0, :size] = message
            posts: list[P2PMessage] = [(dist.isend, peer, message) for peer in own_round.send]
            waits = self.post(posts if self.posts_ahead else [receives[index], *posts], "merging")
            sent.append((message, waits))
            for wait in arrivals[index] if self.posts_ahead else waits:
                wait()
            message = merge(buffer[:, :size])
        for _, waits in sent if self.posts_ahead else []:
            for wait in waits:
                wait()
        count_messages(len(own_rounds), size)
        return message

    def all_to_all(self, messages: Sequence[Tensor]) -> Tensor:
        """Send `messages[p]` to each rank p. Return what comes from rank p in row p, as long as this rank's own."""
        index = self.axis.index
        own_message = messages[self.axis.index]
        sizes = {peer: self.receive_bytes(peer, own_message) for peer in range(self.axis.size) if peer != index}
        rows = own_message.new_empty(self.axis.size, max([len(own_message), *sizes.values()]))
        posts: list[P2PMessage] = [(dist.irecv, peer, rows[peer, :size]) for peer, size in sizes.items()]
        posts += [(dist.isend, peer, messages[peer]) for peer in sizes]
        waits = self.post(posts, "merging")
        rows[index, : len(own_message)] = own_message
        for wait in waits:
            wait()
        count_messages(len(sizes), len(own_message))
        return rows[:, : len(own_message)]


class HostTransport(Transport):
    """Short messages inside a host by its mailboxes, others by sockets. Messages in float32 merge in native calls."""

    def __init__(self, axis: Axis, device: torch.device, mailboxes: Mailboxes) -> None:
        super().__init__(axis, device)
        self.mailboxes = mailboxes
        self.holds_all_ranks = len(mailboxes.members) == axis.size

    def serves(self, peer: int, size: int, fragments: int = 1) -> bool:
        """Return whether mailboxes take a message to or from a rank. It has so many fragments at most."""
        return size <= fragments * MESSAGE_BYTES and peer in self.mailboxes.members

    def post(self, posts: Sequence[P2PMessage], activity: str, *, is_fixed_size: bool = False) -> list[Wait]:
        """Post messages all at once. Longer ones of a fixed size are cut in up to `MAX_FRAGMENTS`."""
        max_fragments = MAX_FRAGMENTS if is_fixed_size else 1
        far = list[P2PMessage]()
        pending = list[PendingMessage]()
        on_lost_peer = partial(disconnect_and_diagnose, self.axis, activity)
        for op, peer, x in posts:
            if not self.serves(peer, x.nbytes, max_fragments):
                far.append((op, peer, x))
            elif x.numel():
                for part in x.split(MESSAGE_BYTES) if x.nbytes > MESSAGE_BYTES else (x,):
                    sends = op is dist.isend
                    pending.append(PendingMessage(self.mailboxes, peer, part, on_lost_peer, sends, is_fixed_size))
        waits = super().post(far, activity) if far else []
        if pending:
            try:
                begin_pending(pending)
            except PeerLostError as error:
                raise on_lost_peer(error.peer, error) from error
        for message in pending:
            waits.append(partial(finish_pending, message))
        return waits

    def all_gather_ints(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the values of all ranks, by the boards of one host."""
        if not self.holds_all_ranks or len(numbers) > MAX_NUMBERS:
            return super().all_gather_ints(numbers)
        try:
            return self.mailboxes.all_gather(numbers)
        except PeerLostError as error:
            raise disconnect_and_diagnose(self.axis, "comparing calls", error.peer, error) from error

    def direct(self, message: Tensor, form: MessageForm) -> CheckedPartial:
        """Merge all messages of a host in one native call."""
        if not self.merges_all_heads(form):
            return super().direct(message, form)
        merge_in_host(message, *form.sizes, self.axis, self.mailboxes, None)
        return form.unpacked(message)

    def tree(self, message: Tensor, form: MessageForm, reproducible: bool, done: int = 0) -> CheckedPartial:
        """Merge messages by the rounds inside the host, which come first, in one native call."""
        if form.is_native and not reproducible:
            own_rounds = merge_rounds(self.axis, reproducible=reproducible)[self.axis.index]
            done = next(
                (i for i, own_round in enumerate(own_rounds) if not self.mailboxes.holds(own_round)), len(own_rounds)
            )
            merge_in_host(message, *form.sizes, self.axis, self.mailboxes, own_rounds[:done])
        return super().tree(message, form, reproducible, done)

    def merges_all_heads(self, form: MessageForm) -> bool:
        """Return whether all ranks share the host and merge natively. The native library has to take such messages."""
        return self.holds_all_ranks and form.is_native

    def sends_in_turn(self, peer: int, message: Tensor) -> bool:
        """Return whether a message goes by sockets."""
        return not self.serves(peer, message.nbytes, MAX_FRAGMENTS)

    def receive_bytes(self, peer: int, message: Tensor) -> int:
        """Return the message's own length. A mailbox has room for every message that it takes."""
        return len(message) if self.serves(peer, message.nbytes) else super().receive_bytes(peer, message)


class DeviceTransport(Transport):
    """Messages between GPUs, also by gloo where there is no NCCL. All ranks make it at once, and join NCCL's group.

    Else messages between some of them would wait for the others, which exchange nothing yet.
    """

    posts_ahead = False  # NCCL would wait for all of them in the first round
    max_mismatch_bytes = math.inf

    def __init__(self, axis: Axis, device: torch.device) -> None:
        super().__init__(axis, device)
        if axis.group is not None and backends(axis.group).get(device.type) == "nccl":
            number = torch.zeros(1, device=device, dtype=torch.float32)
            run_collective(
                axis, "connecting", dist.all_gather, [torch.empty_like(number) for _ in range(axis.size)], number
            )

    def fastest(self) -> Merge:
        """Return the fastest merge by the constants of the ranks' machines."""
        return best_merge(self.axis, self.device)

    def sends_in_turn(self, peer: int, message: Tensor) -> bool:
        """Return False: messages are posted at once."""
        return False

    def receive_bytes(self, peer: int, message: Tensor) -> int:
        """Return the message's own length: NCCL accepts no other."""
        return len(message)

    @cached_property
    def memory(self) -> PeerMemory | None:
        """The memory that all GPUs write to, if there is one. All ranks ask for it at once, the first time."""
        return peer_memory_of(self.axis, self.device)

    def memory_for(self, form: MessageForm) -> PeerMemory | None:
        """Return the memory if it takes such messages, with `out` in float32."""
        if form.lse_dtype != torch.float32 or self.memory is None:
            return None
        return self.memory if _wide(form).size <= self.memory.longest else None

    def form_of(self, form: MessageForm, merge: Merge) -> MessageForm:
        """Return the form of symmetric memory, if that takes the message."""
        return _wide(form) if merge.pattern is Pattern.ALL_TO_ALL and self.memory_for(form) is not None else form

    def merges_all_heads(self, form: MessageForm) -> bool:
        """Return whether symmetric memory merges such messages."""
        return self.memory_for(form) is not None

    def direct(self, message: Tensor, form: MessageForm) -> CheckedPartial:
        """Merge all messages in one launch."""
        memory = self.memory_for(form)
        return super().direct(message, form) if memory is None else memory.merge(message, form.shape)


def _wide(form: MessageForm) -> MessageForm:
    """Return the form whose `out` has the dtype of lse."""
    return form if form.out_dtype == form.lse_dtype else replace(form, out_dtype=form.lse_dtype)


@collective_once
def transport_of(axis: Axis, device: torch.device) -> Transport:
    """Return the transport of an axis for tensors of a device. All ranks of the axis make the first call at once."""
    if device.type != "cpu":
        return DeviceTransport(axis, device)
    mailboxes = host_mailboxes(axis)
    return Transport(axis, device) if mailboxes is None else HostTransport(axis, device, mailboxes)


@collective_once
def fastest_by_time(transport: Transport) -> Merge:
    """Return the fastest merge of a transport, measured at the first call, alike on all ranks.

    One is chosen for all sizes of messages: a rank that sends poison does not know the size of the others' messages. It
    has the smallest worst-case slowdown over short and long messages. Ranks that do not all share a host time short
    ones alone, once a turn.
    """
    forms = [MessageForm((batch, 32, 1, 128), torch.float32, torch.float32) for batch in TRIAL_BATCHES]
    in_one_host = transport.merges_all_heads(forms[0])
    losses = []
    for form in forms if in_one_host else forms[:1]:
        own = _time_merges(transport, form, TRIAL_CALLS if in_one_host else 1)
        slowest = [max(column) for column in zip(*dist_all_gather_ints(own, [transport.axis]), strict=True)]
        losses.append([count / min(slowest) for count in slowest])
    most = dict(zip(native_merges(), map(max, zip(*losses, strict=True)), strict=True))
    return min(most, key=lambda merge: most[merge])


def _time_merges(transport: Transport, form: MessageForm, calls: int) -> list[int]:
    """Return this rank's median nanoseconds of each native merge. They take turns of so many calls."""
    nanoseconds: dict[Merge, list[float]] = {merge: [] for merge in native_merges()}
    token = current_traffic.set(None)
    try:
        for _ in range(TRIALS):
            for merge, times in nanoseconds.items():
                start = perf_counter()
                for _ in range(calls):
                    merge.run(transport, torch.zeros(form.size, dtype=torch.uint8, device="cpu"), form, False)
                times.append(1e9 * (perf_counter() - start) / calls)
    finally:
        current_traffic.reset(token)
    return [int(median(times[1:])) for times in nanoseconds.values()]


def flat_axis(device_mesh: DeviceMesh | None, names: Sequence[str]) -> Axis:
    """Return several axes of a mesh as one: the ranks that share an index along all other axes.

    The group of two axes is made at the first call, in which every rank of the world takes part. PyTorch could make it
    among its own ranks, but would name it by the number of groups that each of them knows, which may differ.
    """
    if device_mesh is None:
        return Axis()
    dims = attention_dims(device_mesh)
    long = tuple(name for name, dim in dims.items() if name in names and device_mesh.size(dim) > 1)
    if len(long) < 2:
        return axis_along(device_mesh, long[0], dims[long[0]]) if long else Axis()
    flat = device_mesh[long]._flatten()
    return Axis(flat.size(), flat.get_local_rank(), flat.get_group(), " x ".join(long))


def all_gather_ints(numbers: Sequence[int], mesh: Mesh) -> list[list[int]]:
    """Return the int64 values of all ranks of a mesh by shard. Inside a host `dist_all_gather_ints` takes longer.

    All ranks make the first call at once.
    """
    flat = [*numbers]
    for transport in _transports(mesh):
        flat = list(chain.from_iterable(transport.all_gather_ints(flat)))
    return [flat[start : start + len(numbers)] for start in range(0, len(flat), len(numbers))]


def all_gather_texts(text: str, mesh: Mesh) -> list[str]:
    """Return the texts of all ranks by shard. A text may be a path that no encoding has."""
    encoded = text.encode(errors="backslashreplace")
    lengths = [row[0] for row in all_gather_ints([len(encoded)], mesh)]
    padded = [*encoded, *[0] * (max(lengths) - len(encoded))]
    return [bytes(row[:n]).decode() for row, n in zip(all_gather_ints(padded, mesh), lengths, strict=True)]


@collective_once
def _transports(mesh: Mesh) -> list[Transport]:
    """Return the transports along the axes of several ranks, the innermost first."""
    mesh_hosts(mesh)  # cached now: after a failure the hosts of lost ranks cannot be found
    return [transport_of(axis, CPU) for axis in reversed(mesh.axes) if axis.size > 1]


def announce_comparison(mesh: Mesh) -> None:
    """Tell the mesh that this rank begins to compare its call. Ranks that wait for another call's message learn it."""
    for mailboxes in _mailboxes_of(mesh, len(WORLD.mailboxes)):
        mailboxes.announce_comparison()


def drop_unreceived(mesh: Mesh) -> None:
    """Drop the messages that no call has received, between two exchanges of numbers."""
    for mailboxes in _mailboxes_of(mesh, len(WORLD.mailboxes)):
        mailboxes.drop_unreceived()


@cached_per_world(1024)
def _mailboxes_of(mesh: Mesh, _: int) -> list[Mailboxes]:
    """Return the mailboxes between ranks of the mesh: those of one of its axes, or of all its ranks.

    They are found anew where the process has got more mailboxes: their number is a part of the key.
    """
    lines = [frozenset(dist.get_process_group_ranks(axis.group)) for axis in mesh.axes if axis.group is not None]
    return [boxes for boxes in tuple(WORLD.mailboxes) if boxes.ranks in lines or _are_all(boxes.ranks, mesh, lines)]


def _are_all(ranks: frozenset[int], mesh: Mesh, lines: Sequence[frozenset[int]]) -> bool:
    return len(ranks) == mesh.ranks and all(line <= ranks for line in lines)
