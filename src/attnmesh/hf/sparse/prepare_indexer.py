"""Indexers of transformers models on shards: hooks and subclasses that `restore_indexer` undoes."""

from inspect import signature, unwrap
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.utils.hooks import RemovableHandle

from attnmesh.hf.family import SubclassedModule, known_subclassed
from attnmesh.hf.sparse.scores import IndexMask
from attnmesh.hf.sparse.select import ShardKeys
from attnmesh.hf.transformers_names import stock_of, subclass

INDEXER_HOOKS: WeakKeyDictionary[nn.Module, RemovableHandle] = WeakKeyDictionary()
"""Hooks of the indexers that can run on shards."""


def prepare_indexers(model: nn.Module) -> None:
    """Make the indexers of a model able to run on a mesh, unless they already are."""
    for module in model.modules():
        if is_indexer(module) and module not in INDEXER_HOOKS:
            INDEXER_HOOKS[module] = module.register_forward_pre_hook(_before, with_kwargs=True)
        elif (record := known_subclass_of(module)) is not None:
            stock: type = type(module)
            module.__class__ = subclass(stock, record.base, __reduce_ex__=_reduce)


def restore_indexer(module: nn.Module) -> None:
    """Remove the hook of an indexer, and give it its own class back, if `prepare_indexers` changed it."""
    if module in INDEXER_HOOKS:
        INDEXER_HOOKS.pop(module).remove()
    if isinstance(module, tuple(record.base for record in known_subclassed().values())):
        module.__class__ = stock_of(module)


def _before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pass `ShardKeys` as the cache to an indexer in training, also when checkpointing recomputes it."""
    mask = next((x for x in (*args, *kwargs.values()) if isinstance(x, IndexMask)), None)
    if mask is None or mask.recognised.sequence is None or mask.recognised.sequence.cached:
        return None
    return args, {**kwargs, "past_key_values": ShardKeys(mask.recognised.sequence)}


def _reduce(module: nn.Module, _: Any) -> tuple[Any, ...]:
    """Return how to copy or pickle an indexer: as an object of its own class, which any process can import."""
    reduced: Any = nn.Module.__reduce_ex__(module, 1)  # later protocols compare the class with the module's
    make, (_, *arguments), state = reduced
    return make, (stock_of(module), *arguments), state


def is_indexer(module: Any) -> bool:
    """Return whether a module scores keys that its cache returns: its `forward` calls `update_indexer`."""
    if type(module).__name__ in known_subclassed():
        return False
    code = getattr(unwrap(type(module).forward), "__code__", None)
    return code is not None and "update_indexer" in code.co_names


def known_subclass_of(module: Any) -> SubclassedModule | None:
    """Return the record of a module that can run as a subclass; None for others. An incomplete one is refused later."""
    kind = type(module)
    record = known_subclassed().get(type(module).__name__)
    if record is None or not kind.__module__.startswith("transformers"):
        return None
    reads = {*record.reads} <= {*kind.forward.__code__.co_names}
    return record if reads and (*signature(kind.forward).parameters,) == record.arguments else None
