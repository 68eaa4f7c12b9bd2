"""Logits of attention: the scale of the products q.k, and the soft cap, which bounds them."""

import math
from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.errors import DtypeError


class Scaling(NamedTuple):
    """Logits `x = q.k * scale`; under a finite soft cap `softcap * tanh(x / softcap)`."""

    scale: float
    softcap: float = math.inf

    @staticmethod
    def of(subject: str, scale: float | None, softcap: float | None, dim: int) -> "Scaling":
        """Return the checked scale and soft cap of queries of this width, or raise."""
        return Scaling(checked_scale(subject, scale, dim), checked_softcap(subject, softcap))

    @property
    def capped(self) -> bool:
        """True if the logits have a soft cap."""
        return self.softcap < math.inf

    def positive(self) -> tuple[int, "Scaling"]:
        """Return a sign to multiply q by, and this scaling with a positive scale. The sign is 0 for a scale of 0."""
        if self.scale == 0:
            return 0, self._replace(scale=1.0)
        return (1 if self.scale > 0 else -1), self._replace(scale=abs(self.scale))

    def cap(self, products: Tensor) -> Tensor:
        """Return the logits of scaled products."""
        return self.softcap * torch.tanh(products / self.softcap) if self.capped else products


class Scores(NamedTuple):
    """Scale, soft cap and bias that a caller asks for the products q.k; None for the default ones."""

    scale: float | None = None
    softcap: float | None = None
    distance_bias: Tensor | None = None
    """Numbers to add to the logits of near keys, of each query."""

    def scaling(self, subject: str, dim: int) -> Scaling:
        """Return the checked scale and soft cap of queries of this width, or raise."""
        return Scaling.of(subject, self.scale, self.softcap, dim)

    def widened(self, q: Tensor) -> Tensor:
        """Return queries that end with their bias."""
        return with_distance_bias(q, self.distance_bias)

    def select_sequences(self, sequences: slice) -> "Scores":
        """Return the scores of some sequences of a batch."""
        return self._replace(distance_bias=None if self.distance_bias is None else self.distance_bias[sequences])


def with_distance_bias(q: Tensor, bias: Tensor | None) -> Tensor:
    """Append the bias as extra columns of q, cast to q's dtype. It then travels, and gets gradients, with q.

    Column d is added to the logit of the key d positions before.
    """
    return q if bias is None else torch.cat((q, bias.to(q.dtype)), -1)


def bias_columns(q: Tensor, dim: int) -> int:
    """Return the columns of the bias that ends queries of keys of this width; 0 without one."""
    return q.shape[-1] - dim


def checked_softcap(subject: str, softcap: float | None) -> float:
    """Return the soft cap; inf for None. Its size must fit in float32, which kernels use."""
    if softcap is None:
        return math.inf
    if isinstance(softcap, bool) or not isinstance(softcap, Real) or not 1e-30 <= softcap <= 1e30:
        given = f"{softcap!r} of type {type(softcap).__name__}"
        fix = "pass a Python float, or leave it out for no cap"
        raise DtypeError(f"{subject} softcap", "None or a number from 1e-30 to 1e30", given, fix)
    return float(softcap)


def checked_scale(subject: str, scale: float | None, dim: int) -> float:
    """Return the scale, 1/sqrt(dim) by default. Its size must fit in float32, which kernels use."""
    if scale is None:
        return float(dim**-0.5)
    if isinstance(scale, bool) or not isinstance(scale, Real) or not (scale == 0 or 1e-30 <= abs(scale) <= 1e30):
        given = f"{scale!r} of type {type(scale).__name__}"
        raise DtypeError(f"{subject} scale", "None, 0 or a number of size 1e-30 to 1e30", given, "pass a Python float")
    return float(scale)
