"""Preparations that each rank would make for itself, made once in the process that ranks are forked from.

PyTorch's compiler imports most of its parts with the first graph. What stands frozen is not searched for garbage again
in any rank, which would also copy the memory that it shares with the others.
"""

import gc

import torch

torch.compile(torch.neg, backend="aot_eager")(torch.ones(2))
torch._dynamo.reset()
gc.collect()
gc.freeze()
