"""The workload that is planned for: heads, tokens, layers, dtype, phase and mask; recurrent layers beside attention."""

from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from attnmesh.core.layout import Contiguous, Layout, Zigzag
from attnmesh.core.mask import Causal, Full, Mask, check_mask
from attnmesh.core.partial import DTYPES
from attnmesh.errors import ClusterError, DtypeError, ShapeError, check_choice, check_count, require, short

MAX_COUNT = 10**15
"""Largest count that a workload takes, of tokens, heads, layers or anything else."""

PHASES = ("training", "prefill", "decode")

TRANSITIONS = ("matrix", "diagonal", "scalar")
"""Forms of a recurrent layer's `A` per head."""


@dataclass(frozen=True)
class Recurrent:
    """Equal recurrent layers, such as those of Gated DeltaNet, Mamba-2, Lightning attention or RG-LRU.

    The tokens of a shard map each state by `S -> A S + B`. A convolution needs the last tokens of the shard before.

    Args:
        heads: States per layer. 0 for a convolution without a state, with `key_dim` and `value_dim` 0.
        key_dim: Rows of a state.
        value_dim: Columns of a state.
        layers: Layers.
        transition: The form of `A` per head: "matrix" (`key_dim` squared numbers), "diagonal" (`key_dim`) or "scalar".
        conv_channels: Channels of the short causal convolution. 0 for none.
        conv_width: Tokens that an output of the convolution sees. 1 for none.

    Raises:
        ClusterError: A count is no integer, is too small, or is above 1e15.
        KernelError: The transition is unknown.
        ShapeError: Some of a state's counts are 0 and others not, one of the two `conv` counts is missing, or the
            layer has neither a state nor a convolution.

    >>> import attnmesh as am
    >>> deltanet = Recurrent(32, 128, 128, layers=36, conv_channels=8192, conv_width=4)
    >>> qwen3_next = am.Workload(16, 2, 256, 131072, layers=12, recurrent=deltanet)
    >>> qwen3_next.scan_bytes(8, am.Zigzag()), qwen3_next.halo_bytes(8, am.Zigzag()), qwen3_next.state_bytes
    (1811939328, 7077888, 77266944)
    """

    heads: int
    key_dim: int
    value_dim: int
    _: KW_ONLY
    layers: int = 1
    transition: str = "matrix"
    conv_channels: int = 0
    conv_width: int = 1

    def __post_init__(self) -> None:
        for name in ("heads", "key_dim", "value_dim", "layers", "conv_channels", "conv_width"):
            least = 1 if name in ("layers", "conv_width") else 0
            object.__setattr__(self, name, _checked_count(f"Recurrent {name}", getattr(self, name), least))
        check_choice("Recurrent transition", self.transition, TRANSITIONS, 'pass "matrix"')
        state, given = (self.heads, self.key_dim, self.value_dim), f"{self.heads} heads of {self.key_dim}"
        fits, given = len({count > 0 for count in state}) == 1, f"{given} x {self.value_dim}"
        fix = "pass Recurrent(heads, key_dim, value_dim), or 0, 0, 0 for a convolution alone"
        require(fits, ShapeError, "Recurrent", "a state of 1 or more in each count, or 0 in all", given, fix)
        fits, given = (self.conv_channels > 0) == (self.conv_width > 1), f"{self.conv_channels} x {self.conv_width}"
        expected, fix = "conv_channels of 1 or more and conv_width of 2 or more, or neither", "pass both or neither"
        require(fits, ShapeError, "Recurrent", expected, given, fix)
        fits, fix = self.heads > 0 or self.conv_channels > 0, "pass heads, or conv_channels= and conv_width="
        require(fits, ShapeError, "Recurrent", "a state or a convolution", "neither", fix)

    @property
    def state_numbers(self) -> int:
        """Numbers of the states of one layer and sequence."""
        return self.heads * self.key_dim * self.value_dim

    @property
    def map_numbers(self) -> int:
        """Numbers of the affine maps of one layer and sequence: `A` and `B` of each head."""
        linear = {"matrix": self.key_dim**2, "diagonal": self.key_dim, "scalar": 1}[self.transition]
        return self.heads * linear + self.state_numbers

    @property
    def halo_numbers(self) -> int:
        """Numbers of the halo of one layer and sequence: the tokens before a shard that its convolution needs."""
        return (self.conv_width - 1) * self.conv_channels

    @property
    def title(self) -> str:
        """The layers in a few words.

        >>> Recurrent(32, 128, 128, layers=36).title
        '36 recurrent layers of 32 states of 128x128'
        """
        layers = f"{self.layers} recurrent layer{'s' * (self.layers > 1)}"
        states = f"{self.heads} state{'s' * (self.heads > 1)} of {self.key_dim}x{self.value_dim}"
        return f"{layers} of {states if self.heads else f'a convolution of {self.conv_channels}x{self.conv_width}'}"


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
        recurrent: Recurrent layers, a `Recurrent` for each kind. One alone needs no tuple.

    Raises:
        ClusterError: A count is not a positive integer, or is above 1e15, or `recurrent` holds another type.
        ShapeError: `kv_heads` does not divide `q_heads`, `q_len` is given outside decoding, or `latent` is no pair.
        DtypeError: The dtype is not supported.
        KernelError: The phase is unknown.
        MaskError: The mask does not fit `length`.

    >>> Workload(32, 8, 128, 131072, phase="decode").kept_bytes
    536870912
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
    recurrent: tuple[Recurrent, ...] | Recurrent = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", str(self.dtype).removeprefix("torch."))
        for name in ("q_heads", "kv_heads", "head_dim", "length", "value_dim", "batch", "q_len", "layers"):
            given = getattr(self, name)
            if given is None and name in ("value_dim", "q_len"):
                continue
            object.__setattr__(self, name, _checked_count(f"Workload {name}", given))
        given, fix = f"{self.q_heads} query heads on {self.kv_heads} key heads", "pass the model's head counts"
        require(self.q_heads % self.kv_heads == 0, ShapeError, "Workload", "whole groups of query heads", given, fix)
        expected, fix = f"one of {', '.join(DTYPES)}", "name the dtype of q, k and v"
        require(self.dtype in DTYPES, DtypeError, "Workload dtype", expected, repr(self.dtype), fix)
        check_choice("Workload phase", self.phase, PHASES, 'pass "training"')
        fits, given = self.q_len is None or self.phase == "decode", f"q_len={self.q_len} in {self.phase}"
        require(fits, ShapeError, "Workload", "q_len in decode only", given, "leave it out: all tokens are queries")
        check_mask("Workload mask", self.mask, self.length)
        if self.latent is not None:
            self._check_latent(self.latent)
        kinds = (self.recurrent,) if isinstance(self.recurrent, Recurrent) else self.recurrent
        fits = isinstance(kinds, (tuple, list)) and all(isinstance(kind, Recurrent) for kind in kinds)
        given, fix = repr(self.recurrent)[:60], "pass recurrent=am.Recurrent(heads, key_dim, value_dim)"
        require(fits, ClusterError, "Workload recurrent", "a Recurrent, or a tuple of them", given, fix)
        object.__setattr__(self, "recurrent", tuple(kinds))

    def _check_latent(self, latent: Any) -> None:
        pair, fix = isinstance(latent, (tuple, list)) and len(latent) == 2, "pass (kv_lora_rank, qk_rope_head_dim)"
        require(pair, ShapeError, "Workload latent", "two numbers of columns", repr(latent), fix)
        rank, rotated = (_checked_count("Workload latent", count) for count in latent)
        given, fix = f"{rotated} of {self.head_dim}", "pass head_dim=qk_nope_head_dim + qk_rope_head_dim"
        fits = rotated < self.head_dim
        require(fits, ShapeError, "Workload latent", "fewer rotated columns than head_dim", given, fix)
        object.__setattr__(self, "latent", (rank, rotated))

    @property
    def values(self) -> int:
        """Columns of a value."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def item(self) -> int:
        """Bytes of an element of q, k and v."""
        return int(getattr(torch, str(self.dtype)).itemsize)

    @property
    def wide(self) -> int:
        """Bytes of an element of partials and gradients, which are summed in float32 or wider."""
        return max(4, self.item)

    @property
    def kept(self) -> int:
        """Tokens whose keys and values are kept: in decoding those that new tokens see, as in `KVCache(mask=)`."""
        if self.phase != "decode":
            return self.length
        return min(self.length, min(self.mask.left + 1, *self.mask.chunks, MAX_COUNT) + (self.q_len or 1) - 1)

    @property
    def travelling(self) -> tuple[int, int]:
        """Key heads that travel and are cached, and their columns, those of values included."""
        if self.latent is None or self.phase == "training":
            return self.kv_heads, self.head_dim + self.values
        return 1, sum(self.latent)

    @property
    def decoded(self) -> tuple[int, int]:
        """Columns of a cached key and of a cached value that a decode step reads."""
        return (self.head_dim, self.values) if self.latent is None else (sum(self.latent), self.latent[0])

    @property
    def kept_bytes(self) -> int:
        """Bytes of the keys and values, or latents, that are kept in all layers."""
        heads, columns = self.travelling
        return self.layers * self.batch * self.kept * heads * columns * self.item

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
            kind.layers * (kind.state_numbers * self.wide + kind.halo_numbers * self.item)
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
        rounds = (_checked_count("scan_bytes ranks", ranks) - 1).bit_length()
        numbers = sum(kind.layers * kind.map_numbers for kind in self.recurrent_kinds)
        return self.passes * runs_per_shard("scan_bytes", layout) * rounds * self.batch * numbers * self.wide

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
        peers = min(runs_per_shard("halo_bytes", layout), _checked_count("halo_bytes ranks", ranks) - 1)
        numbers = sum(kind.layers * kind.halo_numbers for kind in self.recurrent_kinds)
        return self.passes * peers * self.batch * numbers * self.item

    @property
    def title(self) -> str:
        """The workload in a few words.

        >>> Workload(32, 8, 128, 5_000_000, phase="decode", batch=4).title
        'decode, 5,000,000 tokens, 32/8 heads of 128, bfloat16, causal, batch of 4'
        """
        width = f"{self.head_dim}" if self.value_dim is None else f"{self.head_dim} and {self.value_dim}"
        mask = {Causal(): "causal", Full(): "no mask"}.get(self.mask, repr(self.mask))
        counts = {"batch of {}": self.batch, "{} layers": self.layers, "{} new tokens": self.q_len or 1}
        more = [words.format(count) for words, count in counts.items() if count > 1]
        heads = f"{self.q_heads}/{self.kv_heads} heads of {width}"
        heads += "" if self.latent is None else f", latents of {self.latent[0]} and {self.latent[1]}"
        more += [kind.title for kind in self.recurrent_kinds]
        return ", ".join((self.phase, f"{self.length:,} tokens", heads, str(self.dtype), mask, *more))


def runs_per_shard(subject: str, layout: Layout) -> int:
    """Return the runs of consecutive tokens of a shard, each of which needs a scan: 1, or 2 in `Zigzag`."""
    fix = "pass Contiguous() or Zigzag(): a state passes through tokens in order"
    fits = isinstance(layout, Contiguous | Zigzag)
    require(fits, ShapeError, f"{subject} layout", "one or two runs of tokens per rank", short(layout), fix)
    return 2 if isinstance(layout, Zigzag) else 1


def _checked_count(subject: str, given: Any, least: int = 1) -> int:
    """Return a count. Raise unless it is an integer from `least` to `MAX_COUNT`."""
    fix = "pass a positive integer" if least else "pass 0 or a positive integer"
    count = check_count(subject, given, fix, least=least, error=ClusterError)
    expected = f"no more than {MAX_COUNT:.0e}"
    require(count <= MAX_COUNT, ClusterError, subject, expected, "a larger number", "check the unit")
    return count
