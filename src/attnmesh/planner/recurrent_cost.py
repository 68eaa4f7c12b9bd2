"""Predicted messages of recurrent layers: scans of their states and halos of their convolutions.

Ranks that share a sequence compose their maps `S -> A S + B` in ceil(log2 p) rounds. A message holds `A` and `B` of all
heads, so its bytes do not depend on the length. The backward pass scans messages of the same form the other way.

Not priced: the computation of the local rule, the composition of maps, and the last state of a prompt on its way to
all ranks. Shards are taken to be at least as long as a halo.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnmesh.cost.candidate_mesh import CandidateMesh, Cost
from attnmesh.cost.cluster import Cluster
from attnmesh.cost.traffic import Load
from attnmesh.mesh.shapes import Shape, rank_grid
from attnmesh.planner.workload import Workload, runs_per_shard

Messages = tuple[Load, Load]
"""Messages of one exchange, inside hosts and between hosts. The unit of each load is one message."""


class RecurrentCost(NamedTuple):
    """Predicted scans and halos of all recurrent layers, and the bytes of their states per rank."""

    scan: Cost
    halo: Cost
    memory: float

    def add_to(self, total: Cost) -> None:
        """Add the stages "scan" and "halo", their traffic, and the states."""
        for name, price in (("scan", self.scan), ("halo", self.halo)):
            total.add_stage(name, price.seconds)
            total.add_traffic(price.inside, price.between, price.messages)
        total.memory += self.memory

    def record(self) -> dict[str, Any]:
        """Return the figures as a JSON object."""
        exchanges = {
            name: {"seconds": price.seconds, "bytes": {"inside": price.inside, "between": price.between}}
            for name, price in (("scan", self.scan), ("halo", self.halo))
        }
        return {**exchanges, "memory": self.memory}


def recurrent_cost(candidate: CandidateMesh, workload: Workload, cluster: Cluster) -> RecurrentCost:
    """Return the cost of all recurrent layers. Decoding sends nothing: each rank steps all states."""
    cost = RecurrentCost(Cost(), Cost(), workload.state_bytes)
    if workload.phase == "decode":
        return cost
    both_ways = runs_per_shard("plan", candidate.layout) == 2
    for backward in (False, True)[: workload.passes]:
        directions = (False, True) if both_ways else (backward,)
        scans = [scan for reverse in directions for scan in _scan_rounds(candidate.shape, candidate.tile, reverse)]
        halos = [_halo(candidate.shape, candidate.tile, directions)]
        for kind in workload.recurrent_kinds:
            map_bytes = workload.batch * kind.map_numbers * workload.sum_itemsize
            _add_exchanges(scans, map_bytes, kind.layers, cluster, cost.scan)
            _add_exchanges(
                halos, workload.batch * kind.halo_numbers * workload.itemsize, kind.layers, cluster, cost.halo
            )
    return cost


def _add_exchanges(exchanges: Iterable[Messages], size: int, layers: int, cluster: Cluster, total: Cost) -> None:
    """Add exchanges of messages of `size` bytes, made in each layer. Each costs one more kernel launch."""
    for inside, between in exchanges:
        seconds = [0.0]
        for load, link in ((inside, cluster.inside), (between, cluster.between)):
            if load.total:
                rates = (link.rate / load.rank, link.host_rate / load.host, link.peer_rate or link.rate)
                seconds.append(link.latency + (load.rank - 1) * link.message + size / min(rates))
        if size and max(seconds):
            total.seconds += layers * (max(seconds) + cluster.device.call)
            total.add_traffic(layers * size * inside.total, layers * size * between.total, layers * between.total)


@lru_cache(maxsize=4096)
def _scan_rounds(shape: Shape, tile: Shape, reverse: bool) -> tuple[Messages, ...]:
    """Return the rounds of a scan over all ranks in the order of their shards, or in reverse.

    In each round a rank and its peer exchange the maps of the ranks behind them. In the last round only later ranks
    receive.
    """
    ranks = shape.ranks
    hosts = _hosts(shape, tile)
    order = torch.arange(ranks, device="cpu").flip(0) if reverse else torch.arange(ranks, device="cpu")
    rank = torch.arange(ranks, device="cpu")
    rounds = []
    for step in (1 << number for number in range((ranks - 1).bit_length())):
        sends = (rank ^ step) < ranks
        if 2 * step >= ranks:
            sends &= rank < rank ^ step
        rounds.append(_messages(order[rank[sends]], order[rank[sends] ^ step], hosts))
    return tuple(rounds)


@lru_cache(maxsize=4096)
def _halo(shape: Shape, tile: Shape, directions: tuple[bool, ...]) -> Messages:
    """Return one exchange of halos: to the next rank, to the rank before, or both."""
    first = torch.arange(shape.ranks - 1, device="cpu")
    pairs = [(first + 1, first) if reverse else (first, first + 1) for reverse in directions]
    sources, targets = (torch.cat(side) for side in zip(*pairs, strict=True))
    return _messages(sources, targets, _hosts(shape, tile))


def _hosts(shape: Shape, tile: Shape) -> Tensor:
    """Return the host of each shard."""
    return rank_grid(shape, tile).flatten() // tile.ranks


def _messages(sources: Tensor, targets: Tensor, hosts: Tensor) -> Messages:
    """Return the loads of messages from each source to its target."""
    near = hosts[sources] == hosts[targets]

    def load(subset: Tensor) -> Load:
        sides = sources[subset], targets[subset]
        total = float(subset.sum())
        rank, host = (
            max((float(torch.bincount(side).max()) for side in ends if len(side)), default=0.0)
            for ends in (sides, [hosts[side] for side in sides])
        )
        return Load(total, rank, host, total)

    return load(near), load(~near)
