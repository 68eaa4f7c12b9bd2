"""Curves of published schemes in the page of `attnmesh plan` and in figures: their styles, and their points."""

from itertools import cycle
from typing import NamedTuple

from attnmesh.comm.merges import MERGES


class CurveStyle(NamedTuple):
    """Colour and dashes of a scheme's curve."""

    colour: str
    dashed: bool = False


MERGE_COLOURS = ("#3b7dd8", "#e07b2a", "#2e9e6b", "#c2408f")
"""Colours of the merges' schemes, in order of their records; further ones take them again."""

MERGE_SCHEME_COLOURS = dict(
    zip(dict.fromkeys(merge.known_as for merge in MERGES.values()), cycle(MERGE_COLOURS), strict=False)
)

SCHEME_STYLES = {
    "one device": CurveStyle("#8a8f98"),
    "Ring Attention": CurveStyle("#3b7dd8"),
    "KV all-gather": CurveStyle("#e07b2a"),
    "query all-gather": CurveStyle("#a8862a"),
    "Ulysses": CurveStyle("#2e9e6b"),
    "USP": CurveStyle("#c2408f"),
    "ATTENTION2D": CurveStyle("#d64545"),
    "rectangular 2D": CurveStyle("#8463d1"),
    "heads x queries x keys": CurveStyle("#1795a6"),
    **{name: CurveStyle(colour) for name, colour in MERGE_SCHEME_COLOURS.items()},
    **{f"{name} with split heads": CurveStyle(colour, dashed=True) for name, colour in MERGE_SCHEME_COLOURS.items()},
}
"""Styles of all values of `Plan.known_as`, in the order of figures: training, then decoding."""


def curve_lengths(length: int) -> list[int]:
    """Return the lengths of a curve: 8,192 times powers of 4 until beyond `length`, and `length`.

    >>> curve_lengths(100_000)
    [8192, 32768, 100000, 131072]
    """
    powers = [8192]
    while powers[-1] < length:
        powers.append(4 * powers[-1])
    return sorted({*powers, length})


def powers_of_two_to(limit: int) -> list[int]:
    """Return powers of 2 up to `limit`, and `limit`.

    >>> powers_of_two_to(12)
    [1, 2, 4, 8, 12]
    """
    return sorted({*(1 << n for n in range(limit.bit_length())), limit})
