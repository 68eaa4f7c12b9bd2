"""Tensors that travel or are kept together."""

from torch import Tensor

Tensors = tuple[Tensor, ...]
