"""Forward passes of one token as a CUDA graph: the GPU runs them without waiting for Python.

A step is captured with its positions read from the cache on the device. The first replays are compared, bit by bit,
with the model's own passes, and if one differs the model is run as it is. Only modules of known packages are captured:
a module that branches on a count of tokens may differ only after these replays.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnmesh.hf.cache.layer import ShardedLayer
from attnmesh.hf.cache.sharded_cache import ShardedCache
from attnmesh.hf.family import family_of
from attnmesh.hf.models import has_windows, rope_switches
from attnmesh.hf.tensor_parallel import tp_mesh
from attnmesh.mesh.axes import RankMesh

WARM_PASSES = 1
"""The model's own passes before the pass that is watched for waits of the CPU: they compile programs."""

COMPARED_REPLAYS = 2
"""Replays that are compared. A number that Python gave to the capture is right in the first, stale in the second."""

MAX_CAPTURES = 3
"""Captures in a row with no more than `COMPARED_REPLAYS` replays, before the model is run without a graph.

Such captures cost time, and save none.
"""

PACKAGES = ("torch", "transformers", "peft")
"""Packages of the modules that are captured: they compute on the device alone."""

TOKENS, CACHE, MASK, POSITIONS = "input_ids", "past_key_values", "attention_mask", "position_ids"


@contextmanager
def steps_as_graphs(model: PreTrainedModel, cache: ShardedCache) -> Iterator[None]:
    """Run steps of one token over the cache as a CUDA graph in this block. No sequence has padding."""
    if not _is_capturable(model, cache):
        yield
        return
    steps = StepGraph(model, cache)
    model.forward = steps
    try:
        yield
    finally:
        if vars(model).get("forward") is steps:
            del model.forward
        steps.drop()


def _is_capturable(model: PreTrainedModel, cache: ShardedCache) -> bool:
    """Return whether a graph holds all of a step: on this GPU alone, and without a part of Python or of a mask."""
    config = model.config
    family = family_of(config)
    rules = family.temperature, family.adds_bias, family.near_bias
    return (
        torch.cuda.is_available()
        and {x.device for x in model.parameters()} == {torch.device("cuda", torch.cuda.current_device())}
        and cache.ranks == RankMesh.of(tp_mesh(model)).ranks == 1
        and all(type(layer) is ShardedLayer for layer in cache.layers)
        and not any((cache.folder, cache.hot, model.training, has_windows(config), rope_switches(config), *rules))
        and config.get_text_config(decoder=True) is config
        and POSITIONS in signature(model.forward).parameters
        and all(map(_is_stock, model.modules()))
        and not (nn.modules.module._global_forward_hooks or nn.modules.module._global_forward_pre_hooks)
    )


def _is_stock(module: nn.Module) -> bool:
    """Return whether a module is of a known package, without hooks or another `forward`: a replay would run neither."""
    is_known = type(module).__module__.split(".")[0] in PACKAGES
    return is_known and not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


class StepGraph:
    """Stands for a model's `forward`, and runs its steps of one token over a cache as a CUDA graph."""

    def __init__(self, model: PreTrainedModel, cache: ShardedCache) -> None:
        self.forward, self.cache = model.forward, cache
        self.__signature__ = signature(model.forward)
        self.passes = self.replays = self.captures = 0
        self.room = 0
        """Tokens until the cache grows, which moves it in memory."""
        self.is_watched = self.given_up = False
        self.graph: torch.cuda.CUDAGraph | None = None
        self.output: Any = None
        self.bound_to: tuple[Any, list[Any]] | None = None

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        """Return what the model returns: by a replay in a step over the cache, and otherwise by its own pass."""
        if inputs.get(CACHE) is not self.cache:  # a call for something else
            return self.forward(*args, **inputs)
        step_inputs = {name: x for name, x in inputs.items() if x is not None and name != MASK}
        if self.given_up or args or not self._is_step(step_inputs):
            self.drop()
            return self.forward(*args, **inputs)
        if self.graph is None or not self.room or not self._is_bound_to(step_inputs):
            self.drop()
            self.passes += 1
            self.room = min(
                (kv_cache.config.capacity - kv_cache.length for kv_cache in self.cache.kv_caches), default=0
            )
            if self.passes <= WARM_PASSES or self.room <= COMPARED_REPLAYS:  # a pass makes room
                return self.forward(**step_inputs)
            if not self.is_watched:
                return self._watch(step_inputs)
            if not self._capture(step_inputs):
                return self.forward(**step_inputs)
        self.room, self.replays = self.room - 1, self.replays + 1
        return self._compare(step_inputs) if self.replays <= COMPARED_REPLAYS else self._replay(step_inputs)

    def drop(self) -> None:
        """Drop the graph. The CPU counts the cache's tokens again."""
        self.graph = self.output = self.bound_to = None
        self.replays = self.room = 0
        for kv_cache in self.cache.kv_caches:
            kv_cache.local_shards.leave_graphs()

    def _is_step(self, inputs: dict[str, Any]) -> bool:
        """Return whether these are inputs of a step over the cache, of which the caller asks for logits alone."""
        ids = inputs.get(TOKENS)
        positions = inputs.get(POSITIONS)
        options = self._options(inputs)
        return (
            isinstance(ids, Tensor)
            and ids.shape[1:] == (1,)
            and (positions is None or positions.ndim == 2)
            and all(isinstance(x, bool | int | str) for x in options.values())
            and options.get("return_dict", True)
            and not any(x and name.startswith("output_") for name, x in options.items())
            and not torch.is_grad_enabled()
            and all(kv_cache.padding is None for kv_cache in self.cache.kv_caches)
        )

    @staticmethod
    def _options(inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the inputs of a pass besides tokens, positions and the cache."""
        return {name: x for name, x in inputs.items() if name not in (TOKENS, POSITIONS, CACHE)}

    def _binding(self, inputs: dict[str, Any]) -> tuple[Any, list[Any]]:
        """Return what a graph is bound to: the sizes and options of a pass, and the memory of the cache."""
        shards = [kv_cache.own_shard for kv_cache in self.cache.kv_caches]
        memory = [
            x
            for shard in shards
            for x in (*shard.kv_tensors, shard.earlier_pieces, shard.token_index, shard.device_counts)
        ]
        return (inputs[TOKENS].shape, self._options(inputs)), memory

    def _is_bound_to(self, inputs: dict[str, Any]) -> bool:
        """Return whether the graph is that of a pass with these inputs."""
        assert self.bound_to is not None
        options, memory = self._binding(inputs)
        bound_options, bound_memory = self.bound_to
        return options == bound_options and len(memory) == len(bound_memory) and all(map(is_, memory, bound_memory))

    def _watch(self, inputs: dict[str, Any]) -> Any:
        """Return the output of the model's own pass. Give up if the CPU waits for the GPU in it: a graph cannot."""
        self.is_watched = True
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            mode = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("warn")
            try:
                output = self.forward(**inputs)
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        for warning in caught:
            if "called a synchronizing CUDA operation" in str(warning.message):
                self.given_up = True
            elif "Synchronization debug mode" not in str(warning.message):
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        return output

    def _capture(self, inputs: dict[str, Any]) -> bool:
        """Capture a step, and return whether that can be done."""
        self.captures += 1
        graph = torch.cuda.CUDAGraph()
        self.ids = inputs[TOKENS].clone()
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        state = generator.clone_state()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                positions = self.cache.kv_caches[0].lengths[:, None]
                self.output = self.forward(**{**inputs, TOKENS: self.ids, POSITIONS: positions})
        except Exception:  # of any kind: the model's own pass raises it again, unless the capture was its cause
            generator.graphsafe_set_state(state)  # PyTorch would go on as if it captured
            self.given_up = True
        else:  # other outputs would be written over by later replays
            is_known = isinstance(self.output, dict) and {*self.output.keys()} <= {"logits", CACHE}
            self.given_up = not is_known or self.captures > MAX_CAPTURES
        if self.given_up:
            self.drop()
            return False
        self.graph, self.bound_to = graph, self._binding(inputs)
        return True

    def _replay(self, inputs: dict[str, Any]) -> Any:
        """Return the output of a replay, as a copy: the next replay writes over it."""
        assert self.graph is not None
        self.captures = 0 if self.replays > COMPARED_REPLAYS else self.captures
        self.ids.copy_(inputs[TOKENS])
        self.graph.replay()
        return type(self.output)(logits=self.output.logits.clone(), past_key_values=self.cache)

    def _compare(self, inputs: dict[str, Any]) -> Any:
        """Return the model's own pass, and give up if a replay has other bits."""
        replayed = self._replay(inputs).logits
        for kv_cache in self.cache.kv_caches:
            kv_cache.truncate(kv_cache.length - 1)
        output = self.forward(**inputs)
        self.given_up = not torch.equal(replayed, output.logits)
        return output
