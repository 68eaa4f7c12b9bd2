"""Names of the merges across ranks."""

COLLECTIVE = ("gather", "allreduce")
"""Merges by collectives of the backend. They cannot detect a wrong message, so ranks compare their calls first."""


MERGES = ("tree", "direct", *COLLECTIVE)
