"""Keys that queries select by an indexer, as values of a workload."""

from dataclasses import KW_ONLY, dataclass

from attnmesh.planner.checks import bounded_count


@dataclass(frozen=True)
class Selected:
    """The keys that each query selects: an indexer scores all keys that the query sees, and the best are attended.

    Args:
        k: Indices that a query selects.
        index_heads: Query heads of the indexer.
        index_dim: Columns of its queries, and of its keys, which have one head.
        block: Keys per index, as in `Selection`.
        heads: Key heads with a selection of their own; 1 if all share one.
        layers: Layers that select. All by default; the others attend all keys.
        indexers: Of these layers, how many have an indexer of their own. All by default; the other ones select what an
            earlier layer has selected, and have no index keys.

    Raises:
        ClusterError: A count is not a positive integer, or is above 1e15.

    >>> import attnmesh as am
    >>> sizes = {"value_dim": 128, "latent": (512, 64), "layers": 61, "phase": "decode"}
    >>> deepseek = am.Workload(128, 128, 192, 10**6, selected=am.Selected(2048, 64, 128), **sizes)
    >>> deepseek.kept_bytes, deepseek.index_bytes
    (70272000000, 15616000000)
    """

    k: int
    index_heads: int
    index_dim: int
    _: KW_ONLY
    block: int = 1
    heads: int = 1
    layers: int | None = None
    indexers: int | None = None

    def __post_init__(self) -> None:
        for name in ("k", "index_heads", "index_dim", "block", "heads", "layers", "indexers"):
            if (given := getattr(self, name)) is not None:
                object.__setattr__(self, name, bounded_count(f"Selected {name}", given))

    @property
    def tokens(self) -> int:
        """Keys that a query selects."""
        return self.k * self.block

    @property
    def title(self) -> str:
        """The selection in a few words.

        >>> Selected(2048, 64, 128).title, Selected(16, 4, 128, block=128).title
        ('2,048 tokens selected by 64x128', '16 blocks of 128 tokens selected by 4x128')
        """
        what = "tokens" if self.block == 1 else f"blocks of {self.block} tokens"
        return f"{self.k:,} {what} selected by {self.index_heads}x{self.index_dim}"
