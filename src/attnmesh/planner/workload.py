"""The workload that is planned for: heads, tokens, layers, dtype, phase and mask."""

from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from attnmesh.core.layout import Contiguous, Layout, Zigzag
from attnmesh.core.mask import Causal, Full, Mask, check_mask
from attnmesh.core.partial import DTYPE_NAMES
from attnmesh.core.storage import STORAGES
from attnmesh.cost.exchange_cost import LayerWork
from attnmesh.errors import ClusterError, DtypeError, ShapeError, check_choice, short
from attnmesh.planner.checks import MAX_COUNT, bounded_count
from attnmesh.planner.recurrent import Recurrent
from attnmesh.planner.selected import Selected

PHASES = ("training", "prefill", "decode")


@dataclass(frozen=True)
class Workload:
    """Attention of one or more equal layers, which run one after the other, and recurrent layers beside them.

    Args:
        q_heads: Query heads, a multiple of `kv_heads`.
        kv_heads: Key heads.
        head_dim: Columns of a query and of a key.
        length: Tokens of a sequence on all ranks together; in decoding, cached tokens.
        value_dim: Columns of a value. `head_dim` by default.
        batch: Sequences at once.
        q_len: New tokens per sequence in a decode step. 1 by default; given in decoding only.
        layers: Attention layers.
        dtype: The dtype of q, k and v, as a name or a `torch.dtype`.
        phase: "training" (forward and backward), "prefill" (forward) or "decode" (one step).
        mask: The attention mask.
        latent: In multi-head latent attention, the columns of a latent that are projected to all heads and its rotated
            columns, as (512, 64). Latents are cached, travel in prefill and are attended in decoding. In training
            keys and values travel.
        storage: "int8" or "fp8_e4m3" for a cache that stores 8 bits, as `KVCache` does. In decoding only.
        recurrent: Recurrent layers, a `Recurrent` for each kind. One alone needs no tuple.
        selected: The keys that each query selects by an indexer, a `Selected`. All that it sees by default.

    Raises:
        ClusterError: A count is not a positive integer, or is above 1e15, or `recurrent` or `selected` has another
            type.
        ShapeError: `kv_heads` does not divide `q_heads`, `q_len` or `storage` is given outside decoding, `latent` is
            no pair, or `selected` has more layers or other heads than there are.
        DtypeError: The dtype is not supported.
        KernelError: The phase or the storage is unknown.
        MaskError: The mask does not fit `length`.

    >>> Workload(32, 8, 128, 131072, phase="decode").kept_bytes
    536870912
    >>> Workload(32, 8, 128, 131072, phase="decode", storage="int8").kept_bytes
    272629760
    >>> import attnmesh as am
    >>> Workload(32, 8, 128, 131072, phase="decode", mask=am.Window(4095)).kept_bytes
    16777216
    >>> Workload(128, 128, 192, 131072, value_dim=128, latent=(512, 64), phase="decode").kept_bytes
    150994944
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    length: int
    _: KW_ONLY
    value_dim: int | None = None
    batch: int = 1
    q_len: int | None = None
    layers: int = 1
    dtype: str | torch.dtype = "bfloat16"
    phase: str = "training"
    mask: Mask = Causal()
    latent: tuple[int, int] | None = None
    storage: str | None = None
    recurrent: tuple[Recurrent, ...] | Recurrent = ()
    selected: Selected | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", str(self.dtype).removeprefix("torch."))
        for name in ("q_heads", "kv_heads", "head_dim", "length", "value_dim", "batch", "q_len", "layers"):
            given = getattr(self, name)
            if given is None and name in ("value_dim", "q_len"):
                continue
            object.__setattr__(self, name, bounded_count(f"Workload {name}", given))
        if self.q_heads % self.kv_heads:
            given = f"{self.q_heads} query heads on {self.kv_heads} key heads"
            raise ShapeError("Workload", "whole groups of query heads", given, "pass the model's head counts")
        check_choice("Workload dtype", str(self.dtype), DTYPE_NAMES, "name the dtype of q, k and v", DtypeError)
        check_choice("Workload phase", self.phase, PHASES, 'pass "training"')
        if self.q_len is not None and self.phase != "decode":
            given, fix = f"q_len={self.q_len} in {self.phase}", "leave it out: all tokens are queries"
            raise ShapeError("Workload", "q_len in decode only", given, fix)
        if self.storage is not None:
            check_choice("Workload storage", self.storage, tuple(STORAGES), "leave it out")
            if self.phase != "decode":
                given = f"storage={self.storage!r} in {self.phase}"
                fix = "leave it out: only a cache is stored in 8 bits"
                raise ShapeError("Workload", "storage in decode only", given, fix)
        check_mask("Workload mask", self.mask, self.length)
        if self.latent is not None:
            self._check_latent(self.latent)
        kinds = (self.recurrent,) if isinstance(self.recurrent, Recurrent) else self.recurrent
        if not (isinstance(kinds, (tuple, list)) and all(isinstance(kind, Recurrent) for kind in kinds)):
            given, fix = repr(self.recurrent)[:60], "pass recurrent=am.Recurrent(heads, key_dim, value_dim)"
            raise ClusterError("Workload recurrent", "a Recurrent, or a tuple of them", given, fix)
        object.__setattr__(self, "recurrent", tuple(kinds))
        if self.selected is not None:
            self._check_selected(self.selected)

    def _check_latent(self, latent: Any) -> None:
        if not (isinstance(latent, (tuple, list)) and len(latent) == 2):
            fix = "pass (kv_lora_rank, qk_rope_head_dim)"
            raise ShapeError("Workload latent", "two numbers of columns", repr(latent), fix)
        latent_rank, rotated = (bounded_count("Workload latent", count) for count in latent)
        if rotated >= self.head_dim:
            given, fix = f"{rotated} of {self.head_dim}", "pass head_dim=qk_nope_head_dim + qk_rope_head_dim"
            raise ShapeError("Workload latent", "fewer rotated columns than head_dim", given, fix)
        object.__setattr__(self, "latent", (latent_rank, rotated))

    def _check_selected(self, selected: Any) -> None:
        if not isinstance(selected, Selected):
            fix = "pass selected=am.Selected(k, index_heads, index_dim)"
            raise ClusterError("Workload selected", "a Selected", repr(selected)[:60], fix)
        if selected.heads not in (1, self.kv_heads):
            given, fix = f"heads={selected.heads}", "pass heads=1 if all heads share the selected keys"
            raise ShapeError("Workload selected", f"1 or {self.kv_heads} key heads", given, fix)
        if not self.layers >= self.selecting >= self.indexers:
            given, fix = f"layers={selected.layers}, indexers={selected.indexers}", "leave out what counts all layers"
            raise ShapeError("Workload selected", f"at most {self.layers} layers, and indexers", given, fix)

    @property
    def value_width(self) -> int:
        """Columns of a value."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def itemsize(self) -> int:
        """Bytes of an element of q, k and v."""
        return int(getattr(torch, str(self.dtype)).itemsize)

    @property
    def sum_itemsize(self) -> int:
        """Bytes of an element of partials and gradients, which are summed in float32 or wider."""
        return max(4, self.itemsize)

    @property
    def one_layer(self) -> LayerWork:
        """Attention of one layer, in training or prefill."""
        return LayerWork(
            q_heads=self.q_heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            value_dim=self.value_width,
            length=self.length,
            itemsize=self.itemsize,
            mask=self.mask,
            batch=self.batch,
            backward=self.phase == "training",
            latent=self.latent,
            selected=None if self.selected is None else self.selected.tokens,
        )

    @property
    def kept(self) -> int:
        """Tokens whose keys and values are kept: in decoding those that new tokens see, as in `KVCache(mask=)`."""
        if self.phase != "decode":
            return self.length
        return min(self.length, self.mask.max_causal_keys_of(MAX_COUNT) + (self.q_len or 1) - 1)

    @property
    def travelling_heads(self) -> int:
        """Key heads that travel and are cached. Latents are one head, but in training they are expanded first."""
        return self.kv_heads if self.latent is None or self.phase == "training" else 1

    @property
    def travelling_width(self) -> int:
        """Columns of a key head that travels, those of its value included."""
        return self.head_dim + self.value_width if self.latent is None or self.phase == "training" else sum(self.latent)

    @property
    def cached_widths(self) -> tuple[int, int]:
        """Columns of a cached key and of a cached value that a decode step reads."""
        return (self.head_dim, self.value_width) if self.latent is None else (sum(self.latent), self.latent[0])

    @property
    def kept_bytes(self) -> int:
        """Bytes of the keys and values, or latents, that are kept in all layers."""
        row = self.travelling_width * self.itemsize
        if self.storage is not None:
            widths = self.cached_widths if self.latent is None else (sum(self.latent),)
            row = sum(map(STORAGES[self.storage].row_width, widths))
        return self.layers * self.batch * self.kept * self.travelling_heads * row

    @property
    def selecting(self) -> int:
        """Layers whose queries select their keys."""
        return 0 if self.selected is None else self.selected.layers or self.layers

    @property
    def indexers(self) -> int:
        """Layers with an indexer of their own."""
        return 0 if self.selected is None else self.selected.indexers or self.selecting

    @property
    def index_bytes(self) -> int:
        """Bytes of the index keys that are kept in all layers."""
        columns = 0 if self.selected is None else self.selected.index_dim
        is_quantized = self.storage is not None and columns % 2 == 0  # the scales of others would not be aligned
        row = STORAGES[self.storage].row_width(columns) if self.storage and is_quantized else columns * self.itemsize
        return self.indexers * self.batch * self.kept * row

    @property
    def recurrent_kinds(self) -> tuple[Recurrent, ...]:
        """The kinds of recurrent layers."""
        return (self.recurrent,) if isinstance(self.recurrent, Recurrent) else self.recurrent

    @property
    def passes(self) -> int:
        """Passes over a sharded sequence: forward and backward, forward, or none in decoding."""
        return {"training": 2, "prefill": 1, "decode": 0}[self.phase]

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of all recurrent layers and their convolutions. Every rank holds all of them."""
        return self.batch * sum(
            kind.layers * (kind.state_numbers * self.sum_itemsize + kind.halo_numbers * self.itemsize)
            for kind in self.recurrent_kinds
        )

    def scan_bytes(self, ranks: int, layout: Layout) -> int:
        """Return the most bytes that a rank sends in the scans of all recurrent layers: one message per round.

        A scan has ceil(log2 ranks) rounds. `Zigzag` needs two scans per pass, the second in reverse. `Plan.bytes` has
        the exact sum over all ranks.

        Args:
            ranks: Ranks that share the tokens.
            layout: `Contiguous` or `Zigzag`.

        Raises:
            ClusterError: `ranks` is not a positive integer.
            ShapeError: The layout has more than two runs of tokens per rank.

        >>> Workload(1, 1, 64, 4096, phase="prefill", recurrent=Recurrent(2, 8, 4)).scan_bytes(8, Contiguous())
        2304
        """
        rounds = (bounded_count("scan_bytes ranks", ranks) - 1).bit_length()
        numbers = sum(kind.layers * kind.map_numbers for kind in self.recurrent_kinds)
        return self.passes * runs_per_shard("scan_bytes", layout) * rounds * self.batch * numbers * self.sum_itemsize

    def halo_bytes(self, ranks: int, layout: Layout) -> int:
        """Return the most bytes that a rank sends in the halos of all convolutions.

        Args:
            ranks: Ranks that share the tokens.
            layout: `Contiguous` or `Zigzag`.

        Raises:
            ClusterError: `ranks` is not a positive integer.
            ShapeError: The layout has more than two runs of tokens per rank.

        >>> short = Recurrent(0, 0, 0, conv_channels=2048, conv_width=3)
        >>> Workload(1, 1, 64, 4096, phase="prefill", recurrent=short).halo_bytes(8, Contiguous())
        8192
        """
        peers = min(runs_per_shard("halo_bytes", layout), bounded_count("halo_bytes ranks", ranks) - 1)
        numbers = sum(kind.layers * kind.halo_numbers for kind in self.recurrent_kinds)
        return self.passes * peers * self.batch * numbers * self.itemsize

    @property
    def title(self) -> str:
        """The workload in a few words.

        >>> Workload(32, 8, 128, 5_000_000, phase="decode", batch=4).title
        'decode, 5,000,000 tokens, 32/8 heads of 128, bfloat16, causal, batch of 4'
        """
        width = f"{self.head_dim}" if self.value_dim is None else f"{self.head_dim} and {self.value_dim}"
        mask = {Causal(): "causal", Full(): "no mask"}.get(self.mask, repr(self.mask))
        counts = {"batch of {}": self.batch, "{} layers": self.layers, "{} new tokens": self.q_len or 1}
        extras = [words.format(count) for words, count in counts.items() if count > 1]
        extras += [] if self.storage is None else [f"cached in {self.storage}"]
        heads = f"{self.q_heads}/{self.kv_heads} heads of {width}"
        heads += "" if self.latent is None else f", latents of {self.latent[0]} and {self.latent[1]}"
        extras = [*([] if self.selected is None else [self.selected.title]), *extras]
        extras += [kind.title for kind in self.recurrent_kinds]
        return ", ".join((self.phase, f"{self.length:,} tokens", heads, str(self.dtype), mask, *extras))


def runs_per_shard(subject: str, layout: Layout) -> int:
    """Return the runs of consecutive tokens of a shard, each of which needs a scan: 1, or 2 in `Zigzag`."""
    if not isinstance(layout, Contiguous | Zigzag):
        fix = "pass Contiguous() or Zigzag(): a state passes through tokens in order"
        raise ShapeError(f"{subject} layout", "one or two runs of tokens per rank", short(layout), fix)
    return 2 if isinstance(layout, Zigzag) else 1
