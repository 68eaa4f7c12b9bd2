"""The planner's memory of training, beside the memory that PyTorch's tracker counts in a step of a small model."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import MagicMock, patch

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import LlamaConfig, LlamaForCausalLM

import attnmesh as am
import attnmesh.hf as hf
from attnmesh.hf.model_size import training_size
from attnmesh.planner.training import TrainedModel, training


class Step(NamedTuple):
    """Most bytes that are alive in a step, bytes of the optimizer's moments, and numbers of the trained weights."""

    peak: int
    moments: int
    trained: int


@contextmanager
def tracked(*parts: Any) -> Iterator[MemTracker]:
    """Count the bytes that are alive. The tracker hooks all weights, of which frozen ones take no hooks."""

    def hook(register: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, function: register(x, function) if x.requires_grad else MagicMock()

    names = ("register_hook", "register_post_accumulate_grad_hook")
    tracker = MemTracker()
    with patch.multiple(Tensor, **{name: hook(getattr(Tensor, name)) for name in names}), tracker:
        tracker.track_external(*parts)
        yield tracker


def step(config: LlamaConfig, rank: int, length: int, folder: Path) -> Step:
    """Make a step in bfloat16, with gradient checkpointing and AdamW, of a model or of an adapter, which is saved."""
    model: Any = LlamaForCausalLM(config).train()
    model.activation_checkpointing_enable()
    if rank:
        model.enable_input_require_grads()
        with warnings.catch_warnings():  # peft asks transformers by a former name
            warnings.simplefilter("ignore", FutureWarning)
            model = get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM"))
    trained = [x for x in model.parameters() if x.requires_grad]
    optimizer = torch.optim.AdamW(trained, foreach=False)
    ids = torch.randint(config.vocab_size, (1, length))
    batch = hf.shard_batch({"input_ids": ids, "labels": ids}, None)
    for tracking in (nullcontext(), tracked(model, optimizer)):  # the first step makes the optimizer's state
        with warnings.catch_warnings(), tracking as tracker:
            warnings.simplefilter("ignore")
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    (snapshot,) = tracker.get_tracker_snapshot("peak").values()
    model.save_pretrained(folder)
    moments = [x for state in optimizer.state.values() for x in state.values() if x.ndim]
    return Step(snapshot["Total"], sum(x.nbytes for x in moments), sum(x.numel() for x in trained))


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("vocabulary", "layers", "rank", "length"),
    [(4000, 2, 0, 256), *(pytest.param(*one, 2048, marks=LONG) for one in ((4000, 4, 0), (200, 6, 8)))],
)
def test_memory_is_an_upper_bound_of_what_a_step_takes(
    vocabulary: int, layers: int, rank: int, length: int, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_attention_heads": 8, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=vocabulary, num_hidden_layers=layers, attn_implementation="attnmesh", **sizes)
    model = training_size(config, rank, length=length, phase="training")
    (one,) = training(model, am.Cluster.preset("local", 1, 1))
    measured = step(config, rank, length, tmp_path)
    assert 1 < one.memory / measured.peak < 1.35
    assert model.trained == measured.trained
    (file,) = tmp_path.glob("*.safetensors")
    weights = sum(x.nbytes for x in load_file(file).values())
    assert model.checkpoint_bytes == weights + measured.moments


def test_tokens_that_fit_fill_the_memory() -> None:
    cluster = am.Cluster.preset("dgx-h100", 2)
    work = am.Workload(32, 8, 128, 131_072, layers=32, phase="training")
    ways = training(TrainedModel(work, 32, 4096, 14336, 128_256, 8_030_261_248), cluster)
    assert sorted(one.context for one in ways) == [1, 2, 4, 8, 16]
    for one in ways:
        assert one.data * one.context == 16
        filled = one.states + (one.memory - one.states) * one.tokens / work.length
        assert filled == pytest.approx(cluster.device.memory, rel=1e-4)
