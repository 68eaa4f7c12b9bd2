"""What a rank's device does, and what a class of links carries.

Rates are bytes a second each way. A link's `rate` is what one rank gets at the most, its `host_rate` what all ranks of
a host get together: eight ranks behind one card share it, eight ranks with a card each do not.
"""

from dataclasses import KW_ONLY, dataclass

from attnmesh.errors import ClusterError

BOUNDLESS, DAY = 1e30, 86_400
"""What takes no time, and what nobody waits for."""


@dataclass(frozen=True)
class Device:
    """One rank's device: flop/s that attention reaches, bytes/s and bytes of memory, seconds to start a call."""

    forward_rate: float
    backward_rate: float
    memory_rate: float
    memory: float
    _: KW_ONLY
    copy_rate: float | None = None  # bytes/s read and written, where copies go slower than attention reads
    call: float = 0.0
    alone: float = 1.0  # times faster than that a rank computes while others rest: of ranks that share cores

    def __post_init__(self) -> None:
        rates = "forward_rate", "backward_rate", "memory_rate", "memory", "alone"
        _check_positive("Device", self, rates, ("copy_rate",))
        _check_seconds("Device", self, ("call",))


@dataclass(frozen=True)
class Link:
    """One class of links: seconds before a message's first byte, and before that of a short one in a merge; rates."""

    latency: float
    rate: float
    host_rate: float
    _: KW_ONLY
    short: float | None = None
    step: float | None = None  # seconds of each further step of a collective, where its first costs more
    message: float = 0.0  # seconds that each further message takes which is sent at the same time
    peer_rate: float | None = None  # what goes to any one other rank, where that is less than what goes to all

    def __post_init__(self) -> None:
        _check_positive("Link", self, ("rate", "host_rate"), ("peer_rate",))
        _check_seconds("Link", self, ("latency", "message"), ("short", "step"))

    @property
    def merge_latency(self) -> float:
        """Seconds before the first byte of a short message in a merge."""
        return self.latency if self.short is None else self.short

    @property
    def collective_step(self) -> float:
        """Seconds of each further step of a collective."""
        return self.merge_latency if self.step is None else self.step


def _check_positive(subject: str, value: object, names: tuple[str, ...], optional: tuple[str, ...] = ()) -> None:
    for name in (*names, *optional):
        given = getattr(value, name)
        if not ((given is None and name in optional) or (_is_number(given) and 1 <= given <= BOUNDLESS)):
            fix = "say what the link or the device does; a link that is not there needs no ranks beyond it"
            raise ClusterError(f"{subject} {name}", f"a rate or size of 1 to {BOUNDLESS:.0e}", _told(given), fix)


def _check_seconds(subject: str, value: object, names: tuple[str, ...], optional: tuple[str, ...] = ()) -> None:
    for name in (*names, *optional):
        given = getattr(value, name)
        if not ((given is None and name in optional) or (_is_number(given) and 0 <= given <= DAY)):
            expected, fix = f"seconds, 0 to {DAY:,}", "measure it, or leave it at 0"
            raise ClusterError(f"{subject} {name}", expected, _told(given), fix)


def _told(given: object) -> str:
    return f"{given!r:.40}"


def _is_number(given: object) -> bool:
    return isinstance(given, int | float) and not isinstance(given, bool)


NOWHERE = Link(0.0, 1e18, 1e18)
"""Links of a class that a world has none of."""
