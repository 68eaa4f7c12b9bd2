"""Hosts of ranks and the links between them: by name, by hand, or measured."""

from dataclasses import KW_ONLY, dataclass, fields, replace

import torch
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.errors import ClusterError
from attnmesh.planner.hardware import NOWHERE, PRESETS, Device, Link


@dataclass(frozen=True)
class Cluster:
    """So many hosts of so many ranks each; `sources` says where each constant is from.

    >>> cluster = Cluster.preset("dgx-h100", hosts=16)
    >>> cluster.world, cluster.between.host_rate
    (128, 384000000000.0)
    """

    name: str
    hosts: int
    ranks: int
    device: Device
    inside: Link
    between: Link
    _: KW_ONLY
    short_collectives: str = "tree"  # how the library's all-reduce of a short message goes: by a tree, or round a ring
    sources: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        paired = isinstance(self.sources, tuple) and all(isinstance(x, tuple) and len(x) == 2 for x in self.sources)
        words = (self.name, *(word for pair in self.sources for word in pair)) if paired else ()
        if not paired or not all(isinstance(word, str) and word.isprintable() for word in words):
            expected, given = (
                "a name, and pairs of what and where from, each on one line",
                f"{words or self.sources!r:.60}",
            )
            raise ClusterError("Cluster", expected, given, "write them in letters, digits and signs")
        for name in ("hosts", "ranks"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                fix = "count them: a single machine is 1 host"
                raise ClusterError(f"Cluster {name}", "a whole number, 1 or more", repr(value), fix)
        for name, kind in (("device", Device), ("inside", Link), ("between", Link)):
            if not isinstance(getattr(self, name), kind):
                given, fix = type(getattr(self, name)).__name__, "as in Cluster.preset"
                raise ClusterError(f"Cluster {name}", f"a {kind.__name__}", given, fix)
        for count, link, where in ((self.hosts, self.between, "between hosts"), (self.ranks, self.inside, "in a host")):
            if count > 1 and link == NOWHERE:
                fix = "say what they do, or take as many as were measured"
                raise ClusterError(f"Cluster {self.name}", f"links {where} for {count} of them", "none", fix)
        if self.short_collectives not in ("tree", "ring"):
            given, fix = repr(self.short_collectives), "ring for gloo, tree for NCCL"
            raise ClusterError("Cluster short_collectives", "tree or ring", given, fix)

    @property
    def world(self) -> int:
        """All ranks."""
        return self.hosts * self.ranks

    def sized(self, hosts: int, ranks: int) -> "Cluster":
        """The same machines, another number of them."""
        return replace(self, hosts=hosts, ranks=ranks)

    @staticmethod
    def preset(name: str, hosts: int | None = None, ranks: int | None = None) -> "Cluster":
        """A cluster by name, with as many hosts, and ranks a host, as wanted."""
        if not isinstance(name, str) or name not in PRESETS:
            fix = "take one of these, describe yours as a Cluster, or measure it with attnmesh probe"
            raise ClusterError("Cluster.preset", f"one of {', '.join(PRESETS)}", repr(name), fix)
        found = Cluster(name, **PRESETS[name]._asdict())
        most = found.ranks if name != "local" else None
        if most is not None and isinstance(ranks, int) and ranks > most:
            given, fix = f"{ranks} ranks a host", "take more hosts"
            raise ClusterError(f"Cluster.preset {name}", f"at most {most} ranks a host", given, fix)
        return found.sized(found.hosts if hosts is None else hosts, found.ranks if ranks is None else ranks)

    @staticmethod
    def measure(mesh: DeviceMesh | None, dtype: torch.dtype | None = None) -> "Cluster":
        """The cluster that the ranks of a mesh are on, by measurement: all its ranks ask at once, for some seconds."""
        from attnmesh.comm.measure import measure  # ranks exchange messages here

        return measure(mesh, dtype)

    def record(self) -> dict[str, object]:
        """As JSON holds it."""
        return {**_plain(self), "sources": dict(self.sources)}

    @staticmethod
    def of_record(record: object) -> "Cluster":
        """The cluster that `record` wrote."""
        if not isinstance(record, dict):
            fix = "write one with attnmesh probe --out"
            raise ClusterError("Cluster file", "a JSON object that probe wrote", type(record).__name__, fix)
        try:
            given = dict(record)
            parts = {"device": Device(**given.pop("device"))} | {k: Link(**given.pop(k)) for k in ("inside", "between")}
            return Cluster(**given | parts | {"sources": tuple(dict(given.get("sources", {})).items())})
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            if isinstance(error, ClusterError):
                raise
            fix = "write one with attnmesh probe --out"
            raise ClusterError("Cluster file", "the fields that probe writes", str(error), fix) from None


def _plain(value: object) -> dict[str, object]:
    found = {field.name: getattr(value, field.name) for field in fields(value)}  # type: ignore[arg-type]
    return {name: _plain(x) if isinstance(x, Device | Link) else x for name, x in found.items()}
