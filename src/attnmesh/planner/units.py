"""Seconds and bytes as text: they are rounded, and then have the largest unit of which they are 1 or more."""


def seconds_text(seconds: float, digits: int = 2) -> str:
    """Return a time in s, ms or us. A prediction has two digits.

    >>> seconds_text(1.5), seconds_text(0.0123), seconds_text(0.123, 3), seconds_text(4e-6)
    ('1.5 s', '12 ms', '123 ms', '4 us')
    """
    rounded = _rounded(seconds, digits)
    unit, size = next((one for one in (("s", 1.0), ("ms", 1e-3)) if rounded >= one[1]), ("us", 1e-6))
    return f"{rounded / size:,.15g} {unit}"


def bytes_text(count: float) -> str:
    """Return a count of bytes in kB, MB, GB, TB or PB.

    >>> bytes_text(80e9), bytes_text(999_999), bytes_text(12)
    ('80 GB', '1 MB', '12 bytes')
    """
    rounded = _rounded(count, 3)
    for unit, size in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if rounded >= size:
            return f"{rounded / size:,.15g} {unit}"
    return f"{count:.0f} bytes"


def _rounded(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")
