"""The model that a batch of shards was passed to, found while it embeds the batch's tokens.

`shard_batch` is given no model, but recurrent layers and indexers have to be prepared for shards. A model embeds its
tokens before its layers run, and Python's stack has the modules that are being called. So other models meet no hook.
"""

import sys
from types import FrameType

from torch import nn

from attnmesh.hf.images.cut import prepare_text_model
from attnmesh.hf.models import COMPRESSED_MODELS, INDEXED_MODELS, RECURRENT_MODELS
from attnmesh.hf.recurrent.prepare import prepare_layers
from attnmesh.hf.shards import Shards
from attnmesh.hf.sparse.prepare import prepare_indexers
from attnmesh.hf.upstream import code_of

CODE = {code_of(kind) for kind in (*RECURRENT_MODELS, *INDEXED_MODELS, *COMPRESSED_MODELS)}
"""Modules of transformers with the code of models whose layers or indexers have to be prepared."""

CALL = nn.Module._call_impl.__name__
"""Function of PyTorch that calls a module."""


def prepare_caller(shards: Shards) -> None:
    """Prepare the recurrent layers and indexers of the modules that are being called. Other models cost no time."""
    if not any(name in sys.modules for name in CODE):
        return
    known: set[nn.Module] = set()
    for module in _running_modules():
        if module not in known:
            prepare_indexers(module)
            for call in prepare_layers(module):  # the model's own hooks run from its next call on
                call.shards = shards
            known.update(module.modules())


def prepare_caller_with_images(shards: Shards) -> None:
    """Prepare the modules that are being called, and let the text model cut the merged sequence to its shards."""
    prepare_caller(shards)
    prepare_text_model(_running_modules())


def _running_modules() -> list[nn.Module]:
    """Return the modules that are being called, from the outermost to the innermost."""
    modules: list[nn.Module] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == CALL:  # no other: Python before 3.13 keeps the locals of each frame that was read
            modules.append(frame.f_locals["self"])
        frame = frame.f_back
    return modules[::-1]
