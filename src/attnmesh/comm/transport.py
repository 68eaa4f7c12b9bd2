"""Transports: how messages travel along an axis. Each axis has one for each device.

`Transport`       the process group, over sockets with gloo
`HostTransport`   mailboxes for short messages inside a host, and sockets for all others
`DeviceTransport` GPUs; a merge is one launch where these see each other's memory

A transport posts messages, gathers them, merges partials, and gathers numbers that CPUs hold. A step of decoding inside
a host uses none: `host_merge.py` makes its native call, once all ranks of an axis are known to share mailboxes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from functools import partial as partial_of

import torch
import torch.distributed as dist
from torch import Tensor

from attnmesh.comm.failures import disconnect_and_diagnose, run_collective, wait_for
from attnmesh.comm.host_merge import merge_in_host
from attnmesh.comm.mailbox_queue import PendingMessage, begin_pending, finish_pending
from attnmesh.comm.mailboxes import MAX_NUMBERS, MESSAGE_BYTES, Mailboxes, PeerLostError
from attnmesh.comm.merge_trials import agreed_fastest_merge
from attnmesh.comm.merges import Merge, P2PMessage, PartialWithChecksum, Pattern, Wait
from attnmesh.comm.message import MessageForm
from attnmesh.comm.peer_memory import PeerMemory, agreed_peer_memory
from attnmesh.comm.topology import (
    agreed_best_merge,
    agreed_host_mailboxes,
    agreed_hosts,
    agreed_merge_rounds,
    dist_all_gather_ints,
)
from attnmesh.core.partial import Partial
from attnmesh.mesh.axes import Axis, backends
from attnmesh.mesh.reduction_tree import Round
from attnmesh.runtime.counters import count_messages
from attnmesh.runtime.world import collective_once

MAX_FRAGMENTS = 16
"""Fragments of a message at most: 4 MB, as long as 2,700 tokens of a small model. Sockets send these more slowly."""


class Transport:
    """Messages along an axis by its process group. The other transports take what they do not override from it."""

    posts_ahead = True
    """True if receives may be posted before messages of earlier rounds have come: a merge takes half the time."""

    max_mismatch_bytes: float = MESSAGE_BYTES
    """Bytes of a message that still arrives at a rank that expects another size. There its checksum shows that."""

    def __init__(self, axis: Axis, device: torch.device) -> None:
        self.axis, self.device = axis, device
        if axis.size > 1:
            # Collective, so called here: in a first merge only ranks that merge by a tree would call it.
            agreed_hosts(axis)

    def post(self, posts: Sequence[P2PMessage], activity: str, *, is_fixed_size: bool = False) -> list[Wait]:
        """Begin to send and receive all messages at once. Return a wait for each of them; with NCCL one for all.

        `is_fixed_size` tells that messages have no checksum, so that only their size can show that a peer makes another
        call. Mailboxes look at the size then; a process group does not.
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
        return [partial_of(wait_for, work, self.device.type, self.axis, activity, peer) for work, peer in pairs]

    def gather(self, message: Tensor) -> Tensor:
        """Return the messages of all ranks, one a row, by a collective."""
        received = list(message.new_empty(self.axis.size, len(message)))
        run_collective(self.axis, "merging", dist.all_gather, received, message)
        count_messages(self.axis.size - 1, len(message))
        return torch.stack(received)

    def all_gather_ints(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the int64 values of all ranks, which CPUs hold."""
        return dist_all_gather_ints(numbers, [self.axis])

    def direct(self, message: Tensor, form: MessageForm) -> PartialWithChecksum:
        """Send a message to every other rank, and merge all at once."""
        return form.merge(self.all_to_all([message] * self.axis.size))

    def tree(self, message: Tensor, form: MessageForm, reproducible: bool, rounds_done: int = 0) -> PartialWithChecksum:
        """Merge messages in each round after the first `rounds_done`.

        The two messages of a round merge to the same bits in either order, so both ranks go on with equal ones.
        """
        own_rounds = agreed_merge_rounds(self.axis, reproducible=reproducible)[self.axis.index]
        return form.unpack(self.reduce(message, own_rounds[rounds_done:], form.merge_to_message))

    def all_reduce(self, message: Tensor, form: MessageForm) -> PartialWithChecksum:
        """Merge by three all-reduces, as Algorithm 3 of Tree Attention does: maximum, numerator and denominator."""
        checksum, (out, lse) = form.unpack(message)
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
        """Return whether one native call merges all heads. That is faster than a merge of each rank's own heads."""
        return False

    def agreed_fastest(self) -> Merge:
        """Return the fastest merge, alike on all ranks. Collective at its first call."""
        return agreed_fastest_merge(self)

    def sends_in_turn(self, peer: int, message: Tensor) -> bool:
        """Return whether long messages to several ranks arrive sooner if they are sent one after the other.

        With gloo they do: a rank's acknowledgements of what it receives wait behind all that it sends.
        """
        return True

    def receive_bytes(self, peer: int, message: Tensor) -> int:
        """Return the bytes to reserve for a peer's message, which is as long as this rank's if calls are equal.

        Gloo accepts any message that fits. With room for `MESSAGE_BYTES`, ranks whose messages differ in size still
        receive each other's checksums.
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
        """Send `messages[p]` to each rank p. Return the message of rank p in row p, as long as this rank's own."""
        index = self.axis.index
        own_message = messages[self.axis.index]
        sizes = {peer: self.receive_bytes(peer, own_message) for peer in range(self.axis.size) if peer != index}
        received = own_message.new_empty(self.axis.size, max([len(own_message), *sizes.values()]))
        posts: list[P2PMessage] = [(dist.irecv, peer, received[peer, :size]) for peer, size in sizes.items()]
        posts += [(dist.isend, peer, messages[peer]) for peer in sizes]
        waits = self.post(posts, "merging")
        received[index, : len(own_message)] = own_message
        for wait in waits:
            wait()
        count_messages(len(sizes), len(own_message))
        return received[:, : len(own_message)]


class HostTransport(Transport):
    """Short messages inside a host by mailboxes, others by sockets. Short messages in float32 merge in native calls."""

    def __init__(self, axis: Axis, device: torch.device, mailboxes: Mailboxes) -> None:
        super().__init__(axis, device)
        self.mailboxes = mailboxes
        self.holds_all_ranks = len(mailboxes.members) == axis.size

    def serves(self, peer: int, size: int, fragments: int = 1) -> bool:
        """Return whether mailboxes take a message to or from a rank: of `size` bytes, in up to `fragments` parts."""
        return size <= fragments * MESSAGE_BYTES and peer in self.mailboxes.members

    def post(self, posts: Sequence[P2PMessage], activity: str, *, is_fixed_size: bool = False) -> list[Wait]:
        """Post messages as `Transport.post` does. One of a fixed size is cut into up to `MAX_FRAGMENTS` fragments."""
        max_fragments = MAX_FRAGMENTS if is_fixed_size else 1
        far = list[P2PMessage]()
        pending = list[PendingMessage]()
        on_lost_peer = partial_of(disconnect_and_diagnose, self.axis, activity)
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
            waits.append(partial_of(finish_pending, message))
        return waits

    def all_gather_ints(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the values of all ranks, by the boards of one host."""
        if not self.holds_all_ranks or len(numbers) > MAX_NUMBERS:
            return super().all_gather_ints(numbers)
        try:
            return self.mailboxes.all_gather(numbers)
        except PeerLostError as error:
            raise disconnect_and_diagnose(self.axis, "comparing calls", error.peer, error) from error

    def direct(self, message: Tensor, form: MessageForm) -> PartialWithChecksum:
        """Merge all messages of a host in one native call."""
        if not self.merges_all_heads(form):
            return super().direct(message, form)
        merge_in_host(message, *form.sizes, self.axis, self.mailboxes, None)
        return form.unpack(message)

    def tree(self, message: Tensor, form: MessageForm, reproducible: bool, rounds_done: int = 0) -> PartialWithChecksum:
        """Merge messages by the rounds inside the host, which come first, in one native call."""
        if form.fits_native and not reproducible:
            own_rounds = agreed_merge_rounds(self.axis, reproducible=reproducible)[self.axis.index]
            rounds_done = next(
                (i for i, own_round in enumerate(own_rounds) if not self.mailboxes.holds(own_round)), len(own_rounds)
            )
            merge_in_host(message, *form.sizes, self.axis, self.mailboxes, own_rounds[:rounds_done])
        return super().tree(message, form, reproducible, rounds_done)

    def merges_all_heads(self, form: MessageForm) -> bool:
        """Return whether all ranks share the host, and the native library merges messages of this form."""
        return self.holds_all_ranks and form.fits_native

    def sends_in_turn(self, peer: int, message: Tensor) -> bool:
        """Return whether a message goes by sockets."""
        return not self.serves(peer, message.nbytes, MAX_FRAGMENTS)

    def receive_bytes(self, peer: int, message: Tensor) -> int:
        """Return the message's own length. A mailbox has room for every message that it takes."""
        return len(message) if self.serves(peer, message.nbytes) else super().receive_bytes(peer, message)


class DeviceTransport(Transport):
    """Messages between GPUs, by NCCL, or by gloo where there is no NCCL.

    Collective: all ranks make it at once, and join NCCL's group by a first all-gather. NCCL connects all ranks of a
    group in its first exchange. If that were a message from rank A to rank B, both would wait for rank C, which has
    nothing to exchange yet.
    """

    posts_ahead = False  # with NCCL a wait for the first round would be one for the receives of all rounds
    max_mismatch_bytes = math.inf

    def __init__(self, axis: Axis, device: torch.device) -> None:
        super().__init__(axis, device)
        if axis.group is not None and backends(axis.group).get(device.type) == "nccl":
            zero = torch.zeros(1, device=device, dtype=torch.float32)
            run_collective(
                axis, "connecting", dist.all_gather, [torch.empty_like(zero) for _ in range(axis.size)], zero
            )

    def agreed_fastest(self) -> Merge:
        """Return the fastest merge by the constants of the ranks' machines."""
        return agreed_best_merge(self.axis, self.device)

    def sends_in_turn(self, peer: int, message: Tensor) -> bool:
        """Return False: messages to several GPUs are posted at once."""
        return False

    def receive_bytes(self, peer: int, message: Tensor) -> int:
        """Return the message's own length: NCCL accepts no other."""
        return len(message)

    @cached_property
    def agreed_memory(self) -> PeerMemory | None:
        """The memory that all GPUs write to, if there is one. Collective at its first call."""
        return agreed_peer_memory(self.axis, self.device)

    def memory_for(self, form: MessageForm) -> PeerMemory | None:
        """Return symmetric memory if it takes messages of this form, with `out` in float32; otherwise None."""
        if form.lse_dtype != torch.float32 or self.agreed_memory is None:
            return None
        return self.agreed_memory if _wide(form).size <= self.agreed_memory.longest else None

    def form_of(self, form: MessageForm, merge: Merge) -> MessageForm:
        """Return the form in which a partial travels: with `out` in float32 where symmetric memory takes it."""
        return _wide(form) if merge.pattern is Pattern.ALL_TO_ALL and self.memory_for(form) is not None else form

    def merges_all_heads(self, form: MessageForm) -> bool:
        """Return whether symmetric memory merges messages of this form."""
        return self.memory_for(form) is not None

    def direct(self, message: Tensor, form: MessageForm) -> PartialWithChecksum:
        """Merge all messages in one launch."""
        memory = self.memory_for(form)
        return super().direct(message, form) if memory is None else memory.merge(message, form.shape)


def _wide(form: MessageForm) -> MessageForm:
    return form if form.out_dtype == form.lse_dtype else replace(form, out_dtype=form.lse_dtype)


@collective_once
def agreed_transport(axis: Axis, device: torch.device) -> Transport:
    """Return the transport of an axis for tensors of a device. Collective at its first call."""
    if device.type != "cpu":
        return DeviceTransport(axis, device)
    mailboxes = agreed_host_mailboxes(axis)
    return Transport(axis, device) if mailboxes is None else HostTransport(axis, device, mailboxes)
