"""PyTorch without work that no test looks at. Imported before the compiler is, by each process that tests much.

The compiler measures how long its guards take, for which it empties the caches of the processor, and searches for
garbage after each graph. A seed is kept for each kind of device that is missing, with the stack of its call as text.
"""

import os
from typing import Any

import torch

os.environ["TORCH_DYNAMO_RUN_GC_AFTER_COMPILE"] = "0"
torch._C._dynamo.guards.profile_guard_manager = lambda *_: 0.0


def _forget(*_: Any, **__: Any) -> None:
    """Do nothing when a device is first used, which is not there."""


if not torch.cuda.is_available():
    for place in (torch.cuda.random, torch.xpu.random, torch.mtia):
        place._lazy_call = _forget
