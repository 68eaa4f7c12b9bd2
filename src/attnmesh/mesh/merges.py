"""Names of the merges across ranks, and of what they return."""

COLLECTIVE = ("gather", "allreduce")
"""Merges by collectives of the backend. They cannot detect a wrong message, so ranks compare their calls first."""

MERGES = ("tree", "direct", *COLLECTIVE)

MERGE_CHOICES = ("auto", *MERGES)

OUTPUTS = ("replicated", "heads")
