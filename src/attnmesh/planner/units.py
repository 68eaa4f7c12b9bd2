"""Seconds and bytes as text."""


def in_seconds(seconds: float, digits: int = 2) -> str:
    """Return a time in s, ms or us. A prediction has two digits.

    >>> in_seconds(1.5), in_seconds(0.0123), in_seconds(0.123, 3), in_seconds(4e-6)
    ('1.5 s', '12 ms', '123 ms', '4 us')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{_rounded(seconds / size, digits):g} {unit}"
    return f"{_rounded(seconds / 1e-6, digits):g} us"


def _rounded(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")


def in_bytes(count: float) -> str:
    """Return a count of bytes in kB, MB, GB or TB.

    >>> in_bytes(80e9), in_bytes(12)
    ('80 GB', '12 bytes')
    """
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} bytes"
