"""Forward passes of one token as a CUDA graph: the GPU runs them without waiting for Python.

A step is captured with its positions read from the cache on the device. Its first replays are compared, bit by bit,
with the model's own passes: a model that counts tokens in Python differs there, and is run as it is from then on.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attnmesh.errors import InputError
from attnmesh.hf.cache.layer import ShardedLayer
from attnmesh.hf.cache.sharded_cache import ShardedCache
from attnmesh.hf.families.family import family_of
from attnmesh.hf.models import has_windows, rope_switches

WARM = 1
"""Steps before one that is watched for waits, and then captured: they compile programs."""

COMPARED = 2
"""Replays that are compared: a number that Python gave to the capture is right in the first, and not in the second."""

TOKENS, CACHE, MASK, POSITIONS = "input_ids", "past_key_values", "attention_mask", "position_ids"


@contextmanager
def steps_as_graphs(model: PreTrainedModel, cache: ShardedCache) -> Iterator[None]:
    """Run steps of one token over the cache as a CUDA graph in this block. No sequence has padding."""
    if not _is_capturable(model, cache):
        yield
        return
    steps, own = StepGraph(model, cache), vars(model).get("forward")
    model.forward = steps
    try:
        yield
    finally:
        steps.drop()
        del model.forward
        if own is not None:
            model.forward = own


def _is_capturable(model: PreTrainedModel, cache: ShardedCache) -> bool:
    """Return whether a step does nothing that its graph would not: on one GPU, of tokens that stay where they are.

    Hooks of modules run in a capture alone.
    """
    config, devices = model.config, {x.device for x in model.parameters()}
    family = family_of(config)
    changes = family.temperature, family.adds_bias, family.near_bias
    return (
        cache.ranks == 1
        and len(devices) == 1
        and devices.pop().type == "cuda"
        and all(type(layer) is ShardedLayer for layer in cache.layers)
        and not any((cache.folder, cache.hot, model.training, has_windows(config), rope_switches(config), *changes))
        and config.get_text_config(decoder=True) is config
        and POSITIONS in signature(model.forward).parameters
        and not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    )


class StepGraph:
    """Stands for a model's `forward`, and runs its steps of one token as a CUDA graph."""

    def __init__(self, model: PreTrainedModel, cache: ShardedCache) -> None:
        self.forward, self.cache = model.forward, cache
        self.__signature__ = signature(model.forward)
        self.passes = self.replays = self.room = 0
        self.is_watched = self.given_up = False
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        """Return what the model returns."""
        given = {name: x for name, x in inputs.items() if x is not None and name not in (MASK, POSITIONS)}
        if self.given_up or args or not self._is_step(given, inputs.get(POSITIONS)):
            self.drop()
            return self.forward(*args, **inputs)
        if self.graph is None or not self.room or self._signature(given) != self.captured:
            self.drop()
            self.passes += 1
            self.room = min((kv.sizes.capacity - kv.length for kv in self.cache.kvs), default=0)
            if self.passes <= WARM or self.room <= COMPARED:  # a pass makes room
                return self.forward(**given)
            if not self.is_watched:
                return self._watched(given)
            if not self._capture(given):
                return self.forward(**given)
        self.room, self.replays = self.room - 1, self.replays + 1
        return self._compared(given) if self.replays <= COMPARED else self._replay(given)

    def drop(self) -> None:
        """Drop the graph. The host counts the cache's tokens again."""
        if self.graph is not None:
            self.graph, self.replays, self.room = None, 0, 0
        for kv in self.cache.kvs:
            kv.shards.leave_graphs()

    def _is_step(self, given: dict[str, Any], positions: Tensor | None) -> bool:
        """Return whether these are inputs of a step over the cache, and no more than logits are asked for."""
        rest = {name: x for name, x in given.items() if name not in (TOKENS, CACHE)}
        ids = given.get(TOKENS)
        return (
            given.get(CACHE) is self.cache
            and isinstance(ids, Tensor)
            and ids.shape[1:] == (1,)
            and (positions is None or positions.ndim == 2)
            and all(isinstance(x, bool | int | str) for x in rest.values())
            and rest.get("return_dict", True)
            and not any(x and name.startswith("output_") for name, x in rest.items())
            and not torch.is_grad_enabled()
            and all(kv.padding is None for kv in self.cache.kvs)
        )

    def _signature(self, given: dict[str, Any]) -> list[Any]:
        """Return what a graph is bound to: the options of the pass, and the memory of the cache."""
        options = [(name, x) for name, x in given.items() if name not in (TOKENS, CACHE)]
        shards = (kv.shard for kv in self.cache.kvs)
        memory = [x.data_ptr() for shard in shards for x in (*shard.stored, shard.token_index, shard.state)]
        return [given[TOKENS].shape, options, memory, [len(kv.shard.shared) for kv in self.cache.kvs]]

    def _watched(self, given: dict[str, Any]) -> Any:
        """Return the model's pass, and give up if the host waits in it: no graph can."""
        self.is_watched = True
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            before = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("warn")
            try:
                output = self.forward(**given)
            finally:
                torch.cuda.set_sync_debug_mode(before)
        for warning in caught:
            if "called a synchronizing CUDA operation" in str(warning.message):
                self.given_up = True
            elif "Synchronization debug mode" not in str(warning.message):
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        return output

    def _capture(self, given: dict[str, Any]) -> bool:
        """Capture a step, and return whether that can be done."""
        graph, self.ids = torch.cuda.CUDAGraph(), given[TOKENS].clone()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                positions = self.cache.kvs[0].lengths[:, None]
                self.output = self.forward(**{**given, TOKENS: self.ids, POSITIONS: positions})
        except (RuntimeError, InputError):
            self.given_up = True
        else:  # other outputs would be written over by later replays
            self.given_up = any(x is not None and name not in ("logits", CACHE) for name, x in self.output.items())
        if self.given_up:
            self.drop()
            return False
        self.graph, self.captured = graph, self._signature(given)
        return True

    def _replay(self, given: dict[str, Any]) -> Any:
        """Return the output of a replay."""
        assert self.graph is not None
        self.ids.copy_(given[TOKENS])
        self.graph.replay()
        return type(self.output)(logits=self.output.logits.clone(), past_key_values=self.cache)

    def _compared(self, given: dict[str, Any]) -> Any:
        """Return the model's own pass, and give up if a replay has other bits."""
        replayed = self._replay(given).logits
        for kv in self.cache.kvs:
            kv.truncate(kv.length - 1)
        output = self.forward(**given)
        self.given_up = not torch.equal(replayed, output.logits)
        return output
