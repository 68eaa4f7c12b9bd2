"""PyTorch's compiler without what tests do not look at: how long its guards take, and a search for garbage each time.

Its measurement empties the caches of the processor first, which takes longer than most graphs of a test do.
Imported before the compiler is, by each process that compiles much.
"""

import os

import torch

os.environ["TORCH_DYNAMO_RUN_GC_AFTER_COMPILE"] = "0"
torch._C._dynamo.guards.profile_guard_manager = lambda *_: 0.0
