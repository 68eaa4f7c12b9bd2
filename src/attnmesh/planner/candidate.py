"""One way to run attention, its predicted cost, and its predicted bytes per rank in prefill and training."""

from dataclasses import dataclass, field
from typing import NamedTuple

from attnmesh.core.layout import Layout, Zigzag
from attnmesh.core.mask import Full
from attnmesh.mesh.schedule import EXCHANGES, Exchange
from attnmesh.mesh.shapes import Shape
from attnmesh.planner.workload import Workload

EXPANDED_BYTES = 1 << 28
"""Bytes of keys and values that a rank expands from latents at once."""

INDEX_BYTES = 4
"""Bytes of a selected index."""


class Candidate(NamedTuple):
    """One way to run attention: mesh shape, tile of the mesh per host, token layout and exchange.

    `exchange` is "bulk", "pipelined" or "ring"; in decoding it is "tree", "direct", "gather" or "allreduce".
    """

    shape: Shape
    tile: Shape
    layout: Layout
    exchange: str


@dataclass
class Cost:
    """Predicted cost of a candidate: `parts` has the seconds of each stage, `memory` the bytes per rank."""

    seconds: float = 0.0
    inside: float = 0.0
    between: float = 0.0
    messages: float = 0.0  # between hosts
    memory: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)

    def add_stage(self, name: str, seconds: float) -> None:
        """Add the seconds of a stage; stages of the same name add up."""
        self.seconds += seconds
        self.parts[name] = self.parts.get(name, 0.0) + seconds

    def add_traffic(self, inside: float, between: float, messages: float) -> None:
        """Add bytes inside hosts, bytes between hosts, and messages between hosts."""
        self.inside += inside
        self.between += between
        self.messages += messages

    def add(self, other: "Cost") -> None:
        """Add the stages, the traffic and the memory of another cost."""
        for name, seconds in other.parts.items():
            self.add_stage(name, seconds)
        self.add_traffic(other.inside, other.between, other.messages)
        self.memory += other.memory

    def of_layers(self, layers: int) -> "Cost":
        """Return the cost of `layers` such layers. `memory` already counts all layers."""
        parts = {name: layers * seconds for name, seconds in self.parts.items()}
        inside, between, messages = layers * self.inside, layers * self.between, layers * self.messages
        return Cost(layers * self.seconds, inside, between, messages, self.memory, parts)


def rank_memory(candidate: Candidate, workload: Workload) -> float:
    """Return the bytes per rank: tensors kept by all layers, and the peak of one exchange.

    A prefill keeps the keys and values of all layers, but under a full mask those of one: no token follows that would
    attend to them. Training keeps all inputs of the backward pass.
    The peak is that of the backward pass, which is an upper bound for the forward pass. Latents are expanded in parts.
    """
    tokens = workload.batch * workload.length / candidate.shape.ranks
    q, (k, columns), width = workload.q_heads, workload.travelling, workload.head_dim + workload.values
    queries, keys = q * (width * workload.item + workload.wide), k * columns * workload.item
    layers = 1 if workload.phase == "prefill" and workload.mask == Full() else workload.layers
    kept = layers * keys + queries * (workload.layers if workload.phase == "training" else 1)
    peak = peak_activations(candidate.shape, q, k, EXCHANGES[candidate.exchange]) * workload.wide * width / 2
    expanded = EXPANDED_BYTES if workload.latent is not None and workload.phase == "prefill" else 0
    return tokens * (kept + peak) + expanded


def index_memory(shape: Shape, workload: Workload) -> float:
    """Return the bytes per rank of index keys. Beyond decoding, of those that arrive and of the selected indices, too.

    Index keys have no gradients, so training keeps the indices alone.
    """
    selected, phase = workload.selected, workload.phase
    if selected is None:
        return 0.0
    kept = 0.0 if phase == "training" else workload.index_bytes / shape.ranks
    if phase == "decode":
        return kept
    arriving = workload.batch * workload.length * selected.index_dim * workload.item
    indices = workload.batch * workload.length / shape.ranks * selected.heads * selected.k * INDEX_BYTES
    return kept + arriving + indices * (workload.indexers if phase == "training" else 1)


def min_memory(workload: Workload) -> float:
    """Return the bytes of all ranks together in the candidate that needs least: a ring, on many ranks."""
    if workload.phase == "decode":
        return workload.kept_bytes + workload.index_bytes
    ring = Shape(1, 4, 1)
    attention = rank_memory(Candidate(ring, Shape(1, 1, 1), Zigzag(), "ring"), workload)
    return ring.ranks * (attention + index_memory(ring, workload))


def peak_activations(shape: Shape, q_heads: int, kv_heads: int, exchange: Exchange) -> float:
    """Return the peak of the backward pass beyond its inputs, under a full mask, with values as wide as keys.

    The unit is float32 elements per token of a rank's shard and per column of a head. Let f be the share of the heads
    that are exchanged at once, q and k the head counts, C the ranks along keys and R the ranks along queries.
    Each term is counted where its axis is longer than 1:

        gradients of the shard                q + 2k, and f as many of the group, of 3 groups or more
        rows: q, dout, out                    f 3C q      out alone without a keys axis
        made by a kernel: dq, dk, dv          f (C q + 2R k)
        gathered keys and values              f 2R k      while the kernel runs, and C q of dout masked
        sent, received and kept of dk, dv     f (4R - 2) k    after the kernel
        sent, received and kept of dq         f (2C - 1) q    after that, while the next group's kernel runs
        the next group's gathers              f (2C q + 2R k)

    Of 2 groups the one has no return beside it, and the other no gathers. Not counted: buffers of the heads axis, and
    copies that put gathered tokens in order.
    In a ring, R is 1 for the tensors that a kernel reads and writes. It also holds one chunk being sent, one being
    received, and the same of their gradients, while dq is summed over the steps.
    """
    _, rows, columns = shape
    q, k = q_heads, kv_heads  # a heads axis divides the heads and multiplies the tokens, so the product stays
    groups = exchange.head_groups(shape, kv_heads)
    share = 1 / groups
    at_once = 1 if exchange.ring else rows
    row = share * columns * q
    standing = (q + 2 * k) * (1 + share * (groups > 2)) + row * (3 if columns > 1 else 1)
    made, gathered = row + share * 2 * at_once * k, share * 2 * at_once * k if rows > 1 else 0
    back = share * (2 * columns - 1) * q if columns > 1 else 0
    coming = share * (2 * columns * q * (columns > 1) + 2 * rows * k * (rows > 1)) if groups > 1 else 0
    in_flight = 0.0
    if exchange.ring and rows > 1:
        in_flight = row + share * (8 * k if rows > 2 else 2 * k)
    both = {1: 0, 2: max(coming, back)}.get(groups, coming + back)
    moments = (
        standing + row + made + gathered + in_flight + both,
        standing + made + coming + (share * (4 * rows - 2) * k if rows > 1 and not exchange.ring else 0),
        standing + row + coming + back,
    )
    return max(moments)
