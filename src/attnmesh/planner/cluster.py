"""Hosts, their ranks, and the links between them: from a preset, by hand, or measured."""

from dataclasses import KW_ONLY, dataclass, fields, replace

import torch
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.errors import ClusterError
from attnmesh.planner.hardware import NO_LINK, PRESETS, Device, Link


@dataclass(frozen=True)
class Cluster:
    """Equal hosts, each with the same number of ranks.

    Args:
        name: The name in tables and explanations, on one line.
        hosts: Hosts.
        ranks: Ranks per host.
        device: The device of each rank.
        inside: The links between ranks of a host.
        between: The links between hosts.
        short_collectives: How the backend all-reduces a short message: "tree" (NCCL) or "ring" (gloo).
        sources: Pairs of a constant's name and its source.

    Raises:
        ClusterError: A field is of a wrong type, a count is below 1, or links are missing.

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
    short_collectives: str = "tree"
    sources: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        self._check_words()
        for name in ("hosts", "ranks"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                fix = "pass a positive integer: a single machine is 1 host"
                raise ClusterError(f"Cluster {name}", "a whole number, 1 or more", repr(value), fix)
        for name, kind in (("device", Device), ("inside", Link), ("between", Link)):
            if not isinstance(getattr(self, name), kind):
                given, fix = type(getattr(self, name)).__name__, f"pass a {kind.__name__}, as Cluster.preset does"
                raise ClusterError(f"Cluster {name}", f"a {kind.__name__}", given, fix)
        for count, link, where in ((self.hosts, self.between, "between hosts"), (self.ranks, self.inside, "in a host")):
            if count > 1 and link == NO_LINK:
                fix = "pass a Link with their rates, or keep the counts that were measured"
                raise ClusterError(f"Cluster {self.name}", f"links {where} for {count} of them", "none", fix)
        if self.short_collectives not in ("tree", "ring"):
            given, fix = repr(self.short_collectives), 'pass "ring" for gloo, "tree" for NCCL'
            raise ClusterError("Cluster short_collectives", "tree or ring", given, fix)

    def _check_words(self) -> None:
        pairs = isinstance(self.sources, tuple) and all(isinstance(x, tuple) and len(x) == 2 for x in self.sources)
        words = (self.name, *(word for pair in self.sources for word in pair)) if pairs else ()
        if not pairs or not all(isinstance(word, str) and word.isprintable() for word in words):
            expected = "a name, and pairs of a constant and its source, each on one line"
            raise ClusterError("Cluster", expected, f"{words or self.sources!r:.60}", "pass printable strings")

    @property
    def world(self) -> int:
        """All ranks."""
        return self.hosts * self.ranks

    def sized(self, hosts: int, ranks: int) -> "Cluster":
        """Return a cluster of the same machines with other counts.

        Args:
            hosts: Hosts.
            ranks: Ranks per host.

        Raises:
            ClusterError: A count is below 1, or there are no links for it.

        >>> Cluster.preset("dgx-h100").sized(2, 4).world
        8
        """
        return replace(self, hosts=hosts, ranks=ranks)

    @staticmethod
    def preset(name: str, hosts: int | None = None, ranks: int | None = None) -> "Cluster":
        """Return the cluster of a preset.

        Args:
            name: "dgx-h100", "h100x1", "a100x4", "mi300x", "rtx4090", "gb200-nvl72" or "local".
            hosts: Hosts. The preset's usual number by default.
            ranks: Ranks per host. The preset's usual number by default.

        Raises:
            ClusterError: The preset is unknown, a count is below 1, or a host has fewer devices.

        >>> Cluster.preset("a100x4", hosts=2).world
        8
        """
        if not isinstance(name, str) or name not in PRESETS:
            fix = "pass one of these, describe yours as a Cluster, or measure it with attnmesh probe"
            raise ClusterError("Cluster.preset", f"one of {', '.join(PRESETS)}", repr(name), fix)
        found = Cluster(name, **PRESETS[name]._asdict())
        if name != "local" and isinstance(ranks, int) and ranks > found.ranks:
            expected, given = f"at most {found.ranks} ranks a host", f"{ranks} ranks a host"
            raise ClusterError(f"Cluster.preset {name}", expected, given, "take more hosts")
        return found.sized(found.hosts if hosts is None else hosts, found.ranks if ranks is None else ranks)

    @staticmethod
    def measure(mesh: DeviceMesh | None, dtype: torch.dtype | None = None) -> "Cluster":
        """Return the measured cluster of a mesh. All ranks of the mesh call it at once, for some seconds.

        Args:
            mesh: The mesh, or None for this process alone.
            dtype: The dtype to measure attention in. float32 on a CPU and bfloat16 on a GPU by default.

        Raises:
            ClusterError: Hosts have different numbers of ranks.
            DtypeError: The dtype is not supported.

        >>> Cluster.measure(None).world
        1
        """
        from attnmesh.comm.measure import measure  # the only import of `comm`: a measurement exchanges messages

        return measure(mesh, dtype)

    def record(self) -> dict[str, object]:
        """Return the cluster as a JSON object."""
        return {**_as_dict(self), "sources": dict(self.sources)}

    @staticmethod
    def of_record(record: object) -> "Cluster":
        """Return the cluster of a JSON object that `record` returned."""
        fix = "write one with attnmesh probe --out"
        if not isinstance(record, dict):
            raise ClusterError("Cluster file", "a JSON object that probe wrote", type(record).__name__, fix)
        try:
            given = dict(record)
            parts = {"device": Device(**given.pop("device"))} | {k: Link(**given.pop(k)) for k in ("inside", "between")}
            return Cluster(**given | parts | {"sources": tuple(dict(given.get("sources", {})).items())})
        except ClusterError:
            raise
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise ClusterError("Cluster file", "the fields that probe writes", str(error), fix) from None


def _as_dict(value: object) -> dict[str, object]:
    found = {field.name: getattr(value, field.name) for field in fields(value)}  # type: ignore[arg-type]
    return {name: _as_dict(x) if isinstance(x, Device | Link) else x for name, x in found.items()}
