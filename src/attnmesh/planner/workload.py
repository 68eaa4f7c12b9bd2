"""The workload that is planned for: heads, tokens, layers, dtype, phase and mask."""

from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from attnmesh.core.checks import DTYPES, check_choice, check_count, require
from attnmesh.core.mask import Causal, Full, Mask, check_mask
from attnmesh.errors import ClusterError, DtypeError, ShapeError

MAX_COUNT = 10**15
"""Largest count that a workload takes, of tokens, heads, layers or anything else."""

PHASES = ("training", "prefill", "decode")


@dataclass(frozen=True)
class Workload:
    """Attention of one or more equal layers, which run one after the other.

    Args:
        q_heads: Query heads, a multiple of `kv_heads`.
        kv_heads: Key heads.
        head_dim: Columns of a query and of a key.
        length: Tokens of a sequence on all ranks together; in decoding, cached tokens.
        value_dim: Columns of a value. `head_dim` by default.
        batch: Sequences at once.
        q_len: New tokens per sequence in a decode step. 1 by default; given in decoding only.
        layers: Layers.
        dtype: The dtype of q, k and v, as a name or a `torch.dtype`.
        phase: "training" (forward and backward), "prefill" (forward) or "decode" (one step).
        mask: The attention mask.
        latent: In multi-head latent attention, the columns of a latent that are projected to all heads and its rotated
            columns, as (512, 64). Latents are cached, travel in prefill and are attended in decoding. In training
            keys and values travel.

    Raises:
        ClusterError: A count is not a positive integer, or is above 1e15.
        ShapeError: `kv_heads` does not divide `q_heads`, `q_len` is given outside decoding, or `latent` is no pair.
        DtypeError: The dtype is not supported.
        KernelError: The phase is unknown.
        MaskError: The mask does not fit `length`.

    >>> Workload(32, 8, 128, 131072, phase="decode").kept_bytes
    536870912
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", str(self.dtype).removeprefix("torch."))
        for name in ("q_heads", "kv_heads", "head_dim", "length", "value_dim", "batch", "q_len", "layers"):
            given = getattr(self, name)
            if given is None and name in ("value_dim", "q_len"):
                continue
            object.__setattr__(self, name, _checked_count(name, given))
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

    def _check_latent(self, latent: Any) -> None:
        pair, fix = isinstance(latent, (tuple, list)) and len(latent) == 2, "pass (kv_lora_rank, qk_rope_head_dim)"
        require(pair, ShapeError, "Workload latent", "two numbers of columns", repr(latent), fix)
        rank, rotated = (_checked_count("latent", count) for count in latent)
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
        """Bytes of the keys and values, or latents, of all tokens in all layers."""
        heads, columns = self.travelling
        return self.layers * self.batch * self.length * heads * columns * self.item

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
        return ", ".join((self.phase, f"{self.length:,} tokens", heads, str(self.dtype), mask, *more))


def _checked_count(name: str, given: Any) -> int:
    """Return a count. Raise unless it is a positive integer of at most `MAX_COUNT`."""
    count = check_count(f"Workload {name}", given, "pass a positive integer", error=ClusterError)
    expected = f"no more than {MAX_COUNT:.0e}"
    require(count <= MAX_COUNT, ClusterError, f"Workload {name}", expected, "a larger number", "check the unit")
    return count
