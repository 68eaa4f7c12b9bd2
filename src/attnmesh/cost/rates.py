"""Rates of devices and links."""

from dataclasses import KW_ONLY, dataclass, fields, replace

from attnmesh.errors import ClusterError

BOUNDLESS, DAY = 1e30, 86_400
"""The highest rate or size, and the longest time in seconds, that a device or a link takes."""

TIME_FIELDS = ("call", "run", "wait", "latency", "short", "step", "message")
"""Fields in seconds. All others are rates or sizes."""


@dataclass(frozen=True)
class Device:
    """Device of one rank.

    Args:
        forward_rate: Flop/s of attention's forward pass.
        backward_rate: Flop/s of attention's backward pass.
        memory_rate: Bytes/s that attention reads.
        memory: Bytes of memory.
        copy_rate: Bytes/s that copies read and write. `memory_rate` by default.
        call: Seconds to start a kernel.
        run: Seconds of each further run of tokens, which a kernel attends by itself. `call` by default.
        alone: Speed of a rank while the other ranks rest, over its speed while all compute. 1 without shared cores.
        wait: Seconds that a merge waits for a core besides, where ranks that share one come to it from their work.
    """

    forward_rate: float
    backward_rate: float
    memory_rate: float
    memory: float
    _: KW_ONLY
    copy_rate: float | None = None
    call: float = 0.0
    run: float | None = None
    alone: float = 1.0
    wait: float = 0.0

    def __post_init__(self) -> None:
        _check_numbers(self)

    def of_cores(self, times: float) -> "Device":
        """Return the device of a rank that has `times` times the share of its host's cores.

        >>> device = Device(4e9, 4e9, 8e9, 1e9, call=1e-4, alone=2.0)
        >>> device.of_cores(2).memory_rate, device.of_cores(2).alone
        (16000000000.0, 1.0)
        """
        copy = None if self.copy_rate is None else times * self.copy_rate
        rates = {name: times * getattr(self, name) for name in ("forward_rate", "backward_rate", "memory_rate")}
        alone = max(1.0, self.alone / times)
        wait = self.wait if alone > 1 else 0.0
        return replace(self, **rates, copy_rate=copy, call=self.call * alone / self.alone, alone=alone, wait=wait)


@dataclass(frozen=True)
class Link:
    """One class of links: those inside a host, or those between hosts.

    Args:
        latency: Seconds before the first byte of a message.
        rate: Bytes/s of one rank.
        host_rate: Bytes/s of all ranks of a host together.
        short: Seconds before the first byte of a short message in a merge. `latency` by default.
        step: Seconds of each further step of a collective. `short` by default.
        message: Seconds of each further message that is sent at the same time.
        peer_rate: Bytes/s from one rank to one other. `rate` by default.
    """

    latency: float
    rate: float
    host_rate: float
    _: KW_ONLY
    short: float | None = None
    step: float | None = None
    message: float = 0.0
    peer_rate: float | None = None

    def __post_init__(self) -> None:
        _check_numbers(self)

    @property
    def merge_latency(self) -> float:
        """Seconds before the first byte of a short message in a merge."""
        return self.latency if self.short is None else self.short

    @property
    def collective_step(self) -> float:
        """Seconds of each further step of a collective."""
        return self.merge_latency if self.step is None else self.step


def _check_numbers(rates: Device | Link) -> None:
    """Raise unless each field is a number within its limits, or None where None is the default."""
    for field in fields(rates):
        number = getattr(rates, field.name)
        subject = f"{type(rates).__name__} {field.name}"
        if number is None and field.default is None:
            continue
        least, most, fix = 1.0, BOUNDLESS, "measure it with attnmesh probe"
        expected = f"a rate or size of 1 to {most:.0e}"
        if field.name in TIME_FIELDS:
            least = 0.0
            most = DAY
            fix = f"{fix}, or leave it at 0"
            expected = f"seconds, 0 to {most:,}"
        if not isinstance(number, int | float) or isinstance(number, bool) or not least <= number <= most:
            raise ClusterError(subject, expected, f"{number!r:.40}", fix)


NO_LINK = Link(0.0, 1e18, 1e18)
"""The links between hosts of a single host, and the links inside hosts of one rank each."""
