"""Preparations that each rank would make for itself, made once in the process that ranks are forked from.

PyTorch's compiler imports most of its parts with the first graph, and others with its first gradient. What stands
frozen is not searched for garbage again in any rank, which would also copy the memory that it shares with the others.
Triton's interpreter compiles a program with its first launch. A family's sources are read with its first model.
"""

import gc
from importlib.util import find_spec

import torch

from attnmesh.hf.pins import check_family
from tests.support.models import families

if find_spec("triton") and not torch.cuda.is_available():
    from triton.runtime.interpreter import InterpretedFunction

    from attnmesh.kernels.programs import attend, decode, peers, tiles

    for program in (x for module in (attend, decode, peers, tiles) for x in vars(module).copy().values()):
        if isinstance(program, InterpretedFunction):
            program.rewrite()

for config in families.CONFIGS.values():
    check_family(config)
torch.compile(torch.neg, backend="aot_eager")(torch.ones(2, requires_grad=True)).sum().backward()
torch._dynamo.reset()
gc.collect()
gc.freeze()
