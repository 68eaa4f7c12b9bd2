"""Steps of a model as a CUDA graph: the tokens of the model's own passes, and no graph where Python takes part."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MambaConfig, MistralConfig

from attnmesh import hf
from attnmesh.errors import ShapeError
from attnmesh.hf.step_graph import PACKAGES, StepGraph, steps_as_graphs
from tests.support.emulation.emulated_gpu import EmulatedGPU, EmulatedGraph, emulated_gpu
from tests.support.emulation.emulated_waits import on_gpu
from tests.support.emulation.noted_graphs import noted_graphs

SIZES = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 97}
LLAMA = LlamaConfig(**SIZES, num_key_value_heads=2)
PROMPTS = torch.tensor([[5, 6, 7], [4, 3, 2]])
TOKENS = 5


@pytest.fixture
def gpu() -> Iterator[EmulatedGPU]:
    with emulated_gpu() as gpu, torch.no_grad():
        yield gpu


@pytest.fixture
def graphs() -> Iterator[list[EmulatedGraph]]:
    """The graphs that are captured."""
    made: list[EmulatedGraph] = []

    def graph() -> EmulatedGraph:
        made.append(EmulatedGraph())
        return made[-1]

    with patch("torch.cuda.CUDAGraph", graph):
        yield made


def model_of(config: Any, kind: Any = None) -> Any:
    """Return a model with random weights on the emulated GPU."""
    torch.manual_seed(0)
    make = AutoModelForCausalLM.from_config if kind is None else kind._from_config
    return on_gpu(make(config, attn_implementation="attnmesh").eval())


def tokens_of(model: Any, cache: hf.ShardedCache, *, tokens: int, as_graphs: bool = True, **options: Any) -> Tensor:
    """Return the most likely tokens after the prompts."""
    logits = model(PROMPTS.cuda(), past_key_values=cache).logits
    found = []
    with steps_as_graphs(model, cache) if as_graphs else nullcontext():
        for _ in range(tokens):
            found.append(logits[:, -1].argmax(-1, keepdim=True))
            logits = model(input_ids=found[-1], past_key_values=cache, return_dict=True, **options).logits
    return torch.cat(found, 1).cpu()


def both(model: Any, tokens: int = TOKENS, **options: Any) -> tuple[hf.ShardedCache, bool]:
    """Return the cache after steps as graphs, and whether these gave the tokens of the model's own passes."""
    own, cache = (hf.ShardedCache(model.config, None, **options) for _ in range(2))
    found = tokens_of(model, cache, tokens=tokens)
    return cache, torch.equal(found, tokens_of(model, own, tokens=tokens, as_graphs=False))


@pytest.mark.parametrize(
    "options", [{"capacity": 40}, {"storage": "int8"}, pytest.param({"reproducible": True}, marks=pytest.mark.long)]
)
def test_a_graph_gives_the_tokens_of_the_model(gpu, graphs, options):
    model = model_of(LLAMA)
    cache, equal = both(model, **options)
    assert equal
    assert [graph.replays for graph in graphs] == [TOKENS - 2]
    assert cache.get_seq_length() == PROMPTS.shape[1] + TOKENS
    assert "forward" not in vars(model)


@pytest.mark.parametrize("do_sample", [pytest.param(False, marks=pytest.mark.long), True])
def test_generate_gives_the_same_tokens_with_and_without_a_graph(gpu, graphs, do_sample):
    model = model_of(LlamaConfig(**SIZES, num_key_value_heads=2, eos_token_id=None))

    def tokens() -> Tensor:
        torch.manual_seed(1)
        options = {"max_new_tokens": TOKENS, "do_sample": do_sample}
        return hf.generate(model, PROMPTS.cuda(), mesh=None, **options).cpu()

    found = tokens()
    assert [graph.replays for graph in graphs] == [TOKENS - 2]
    with patch("attnmesh.hf.step_graph._is_capturable", lambda *_: False):
        assert torch.equal(found, tokens())


def test_a_cache_that_grows_is_captured_again(gpu, graphs):
    with patch("attnmesh.hf.cache.layer.growth_capacity", lambda tokens: tokens + 6), noted_graphs() as noted:
        _, equal = both(model_of(LLAMA), tokens=10)
    assert equal
    assert [steps.all_captures for steps in noted] == [len(graphs)] == [2]


def test_a_cache_goes_on_after_its_graph(gpu, graphs):
    """The CPU counts again, and a truncation or a second generation is no graph's."""
    model = model_of(LLAMA)
    cache, _ = both(model)
    cache.crop(-TOKENS)
    assert cache.get_seq_length() == PROMPTS.shape[1]
    assert not any(kv_cache.local_shards.counter.in_graphs for kv_cache in cache.kv_caches)
    first = model(PROMPTS[:, :1].cuda(), past_key_values=cache).logits
    fresh = hf.ShardedCache(LLAMA, None)
    model(PROMPTS.cuda(), past_key_values=fresh)
    assert torch.equal(first.cpu(), model(PROMPTS[:, :1].cuda(), past_key_values=fresh).logits.cpu())


def test_the_first_token_of_all_is_the_models_own_pass(gpu, graphs):
    model, cache = model_of(LLAMA), hf.ShardedCache(LLAMA, None)
    with steps_as_graphs(model, cache):
        model(input_ids=PROMPTS[:, :1].cuda(), past_key_values=cache)
    assert cache.get_seq_length() == 1
    assert not graphs


class Counting(LlamaForCausalLM):
    """A model that takes positions from the cache in Python."""

    def forward(self, *args: Any, position_ids: Tensor | None = None, **inputs: Any) -> Any:
        """Ignore the positions that are given."""
        return super().forward(*args, **inputs)


class Reading(LlamaForCausalLM):
    """A model in which the CPU reads a number."""

    def forward(self, *args: Any, position_ids: Tensor | None = None, **inputs: Any) -> Any:
        """Read the first token."""
        ids = args[0] if args else inputs["input_ids"]
        assert int(ids[0, 0]) >= 0
        return super().forward(*args, position_ids=position_ids, **inputs)


@pytest.fixture
def known(monkeypatch):
    """Take the modules of this file for those of a known package."""
    monkeypatch.setattr("attnmesh.hf.step_graph.PACKAGES", (*PACKAGES, "tests"))


@pytest.mark.usefixtures("known")
def test_a_model_that_counts_in_python_is_run_as_it_is(gpu, graphs):
    _, equal = both(model_of(LLAMA, Counting))
    assert equal
    assert [graph.replays for graph in graphs] == [2]  # the second has other bits


@pytest.mark.usefixtures("known")
def test_a_model_that_waits_is_not_captured(gpu, graphs):
    _, equal = both(model_of(LLAMA, Reading))
    assert equal
    assert not graphs


class Failing(LlamaForCausalLM):
    """A model that raises in a capture alone."""

    def forward(self, *args: Any, position_ids: Tensor | None = None, **inputs: Any) -> Any:
        """Raise where a graph is captured."""
        if torch.cuda.is_current_stream_capturing():
            raise ValueError("in a capture")
        return super().forward(*args, position_ids=position_ids, **inputs)


@pytest.mark.usefixtures("known")
def test_a_capture_that_fails_is_not_tried_again(gpu, graphs):
    cache, equal = both(model_of(LLAMA, Failing))
    assert equal
    assert len(graphs) == 1
    assert not any(kv_cache.local_shards.counter.in_graphs for kv_cache in cache.kv_caches)


def test_other_calls_of_the_model_leave_the_graph_as_it_is(gpu, graphs):
    """So do blocks inside of the block, which another thread may run."""
    model, cache = model_of(LLAMA), hf.ShardedCache(LLAMA, None)
    expected = tokens_of(model, hf.ShardedCache(LLAMA, None), tokens=TOKENS, as_graphs=False)
    logits = model(PROMPTS.cuda(), past_key_values=cache).logits
    found = []
    with steps_as_graphs(model, cache):
        for _ in range(TOKENS):
            found.append(logits[:, -1].argmax(-1, keepdim=True))
            logits = model(input_ids=found[-1], past_key_values=cache, return_dict=True).logits
            with steps_as_graphs(model, hf.ShardedCache(LLAMA, None)):
                model(PROMPTS.cuda())
    assert torch.equal(torch.cat(found, 1).cpu(), expected)
    assert [graph.replays for graph in graphs] == [TOKENS - 2]
    assert "forward" not in vars(model)


def test_shared_blocks_that_move_are_captured_again(gpu, graphs):
    model, orders = model_of(LLAMA), {3: [1, 0, 1], 5: [2, 1, 0]}
    outs = []
    for as_graphs in (False, True):
        cache = hf.ShardedCache(LLAMA, None, block=1)
        logits = model(PROMPTS[:1].cuda(), past_key_values=cache).logits[:, -1:]
        found = []
        cache.batch_repeat_interleave(3)
        logits = logits.expand(3, -1, -1) + torch.eye(3, LLAMA.vocab_size)[:, None].cuda()
        with steps_as_graphs(model, cache) if as_graphs else nullcontext():
            for step in range(8):
                if step in orders:
                    cache.reorder_cache(torch.tensor(orders[step]).cuda())
                token = (logits[:, -1].argmax(-1, keepdim=True) + step) % LLAMA.vocab_size
                logits = model(input_ids=token, past_key_values=cache, return_dict=True).logits
                found.append(logits.cpu())
        outs.append(found)
    assert all(map(torch.equal, *outs))
    assert len(graphs) > 1


def test_a_copy_of_a_cache_in_the_block_counts_its_tokens(gpu, graphs):
    model, cache = model_of(LLAMA), hf.ShardedCache(LLAMA, None, capacity=10)
    model(PROMPTS.cuda(), past_key_values=cache)
    with steps_as_graphs(model, cache):
        for _ in range(6):
            model(input_ids=PROMPTS[:, :1].cuda(), past_key_values=cache, return_dict=True)
        other = deepcopy(cache)
    assert other.get_seq_length() == 9
    with pytest.raises(ShapeError, match="room for the new tokens, given 9 tokens and 3 more"):
        model(PROMPTS.cuda(), past_key_values=other)


def hooked(model: Any) -> None:
    model.model.layers[0].register_forward_hook(lambda *_: None)


def patched(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    mlp.forward = mlp.forward


def foreign(model: Any) -> None:
    model.model.layers[0].mlp.__class__ = type("Mine", (type(model.model.layers[0].mlp),), {"__module__": "mine"})


CONFIGS: dict[str, tuple[Any, Callable[[Any], object]]] = {
    "a window": (MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=4), lambda _: None),
    "a recurrence": (MambaConfig(hidden_size=32, state_size=4, num_hidden_layers=2, vocab_size=97), lambda _: None),
    "a rope that grows": (
        LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
        lambda _: None,
    ),
    "a hook": (LLAMA, hooked),
    "a forward of one's own": (LLAMA, patched),
    "a module of one's own": (LLAMA, foreign),
    "training": (LLAMA, lambda model: model.train()),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_that_is_more_than_its_kernels_has_no_graph(gpu, graphs, name):
    config, change = CONFIGS[name]
    model = model_of(config)
    change(model)
    with steps_as_graphs(model, hf.ShardedCache(model.config, None)):
        assert not isinstance(model.forward, StepGraph)


def test_hidden_states_are_of_the_models_own_pass(gpu, graphs):
    model = model_of(LLAMA)
    tokens_of(model, hf.ShardedCache(LLAMA, None), tokens=4, output_hidden_states=True)
    assert not graphs
