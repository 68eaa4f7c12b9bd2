"""Copies of what other ranks hold, on the next host, so that it is not lost with a rank."""

from collections.abc import Sequence

from torch import Tensor

from attnmesh.comm.p2p import all_gather_ints, blank, exchange_messages
from attnmesh.comm.topology import hosts
from attnmesh.decode.cache_shard import CacheShard
from attnmesh.errors import ShapeError
from attnmesh.mesh.axes import Axis


class Copies:
    """A rank's copies of others' tokens, and who keeps those of its own."""

    def __init__(self, axis: Axis, copies: int) -> None:
        """With so many of each token, counting the first; its `rooms` are to be made, for those `of` these ranks."""
        keepers = kept_by(hosts(axis), copies) if copies > 1 else {}
        self.axis, self.keepers = axis, keepers.get(axis.index, [])
        self.of = [index for index in keepers if axis.index in keepers[index]]
        self.rooms: dict[int, CacheShard] = {}

    def twin(self) -> "Copies":
        """The same in tensors of their own."""
        twin = object.__new__(type(self))
        twin.__dict__ = {**self.__dict__, "rooms": {index: room.twin() for index, room in self.rooms.items()}}
        return twin

    def send(self, k: Tensor, v: Tensor, tokens: Tensor, more: int, real: Tensor | None) -> None:
        """Send these tokens of its own, of `more` of all ranks, to who keeps copies, and take those that it keeps."""
        if not self.keepers and not self.rooms:
            return
        counts = [row[0] for row in all_gather_ints([len(tokens)], [self.axis])]
        sends = dict.fromkeys(self.keepers, (k, v, tokens))
        wanted = {
            index: (blank(k, counts[index]), blank(v, counts[index]), blank(tokens, counts[index], 0))
            for index in self.rooms
        }
        came = exchange_messages(sends, wanted, self.axis, k.device, "copying")()
        for index, room in self.rooms.items():
            keys, values, places = came[index]
            room.place(keys, values, places, more, real)


def kept_by(hosts: Sequence[Sequence[int]], copies: int) -> dict[int, list[int]]:
    """For each rank those that keep copies of what it holds: one on each of the next hosts, or else the next ranks.

    >>> kept_by([[0, 1], [2, 3]], 2), kept_by([[0, 1, 2]], 2)
    ({0: [2], 1: [3], 2: [0], 3: [1]}, {0: [1], 1: [2], 2: [0]})
    """
    groups = hosts if len(hosts) >= copies else [[rank] for host in hosts for rank in host]
    keepers: dict[int, list[int]] = {}
    for number, group in enumerate(groups):
        others = [groups[(number + step) % len(groups)] for step in range(1, copies)]
        keepers |= {rank: [other[place % len(other)] for other in others] for place, rank in enumerate(group)}
    return keepers


def check_copies(copies: object, ranks: int) -> None:
    """Raise unless each of so many copies can be on a rank of its own."""
    if isinstance(copies, bool) or not isinstance(copies, int) or not 1 <= copies <= ranks:
        fix = "leave it out, or use more ranks along queries and keys"
        raise ShapeError("KVCache copies", f"1 to {ranks}, the ranks that tokens are dealt to", repr(copies), fix)
