"""Indexers of transformers models on shards: hooks and subclasses that `restore_indexer` undoes."""

from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.utils.hooks import RemovableHandle

from attnmesh.hf.sparse.entries import EntryCompressor, EntryScorer
from attnmesh.hf.sparse.key_blocks import BlockIndexer
from attnmesh.hf.sparse.pooled import PooledIndexer
from attnmesh.hf.sparse.scores import IndexMask
from attnmesh.hf.sparse.select import ShardKeys
from attnmesh.hf.transformers_names import is_indexer, is_known_indexer, subclass

BASES: dict[str, type] = {
    "DeepseekV4CSACompressor": EntryCompressor,
    "DeepseekV4HCACompressor": EntryCompressor,
    "DeepseekV4IndexerScorer": EntryScorer,
    "MiniMaxM3VLIndexer": BlockIndexer,
    "Qwen4ExpTextQSAIndexer": PooledIndexer,
}
"""First bases of the subclasses of indexers and compressors, by name."""

HOOKS: WeakKeyDictionary[nn.Module, RemovableHandle] = WeakKeyDictionary()
"""Hooks of the indexers that can run on shards."""


def prepare_indexers(model: nn.Module) -> None:
    """Make the indexers of a model able to run on a mesh, unless they are."""
    for module in model.modules():
        if is_indexer(module) and module not in HOOKS:
            HOOKS[module] = module.register_forward_pre_hook(_before, with_kwargs=True)
        elif is_known_indexer(module):
            stock: type = type(module)
            module.__class__ = subclass(stock, BASES[stock.__name__], __reduce_ex__=_reduce)


def restore_indexer(module: nn.Module) -> None:
    """Give an indexer back what it had."""
    if module in HOOKS:
        HOOKS.pop(module).remove()
    if isinstance(module, (*BASES.values(),)):
        module.__class__ = type(module).__mro__[2]


def _before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pass an indexer that is called without a cache the keys of its shards, also when it is recomputed."""
    mask = next((x for x in (*args, *kwargs.values()) if isinstance(x, IndexMask)), None)
    if mask is None or mask.spec.shards is None or mask.spec.shards.cached:
        return None
    return args, {**kwargs, "past_key_values": ShardKeys(mask.spec.shards)}


def _reduce(module: nn.Module, _: Any) -> tuple[Any, ...]:
    """Return how to copy or pickle an indexer: as one of the class that it had, which any process can import."""
    reduced: Any = nn.Module.__reduce_ex__(module, 1)  # later protocols compare the class with the module's
    make, (_, *arguments), state = reduced
    return make, (type(module).__mro__[2], *arguments), state
