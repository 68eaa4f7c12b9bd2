"""The planner's memory of training, beside the memory that PyTorch's tracker counts in a step of a small model."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
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
from trl.trainer.utils import add_fused_lm_head

import attnmesh as am
import attnmesh.hf as hf
from attnmesh.hf.model_size import training_size
from attnmesh.planner.training import LOSSES, Method, TrainedModel, training
from tests.support.seeds import some


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


def step(config: LlamaConfig, rank: int, length: int, loss: str, folder: Path) -> Step:
    """Make a step in bfloat16, with gradient checkpointing and AdamW, of a model or of an adapter, which is saved."""
    model: Any = LlamaForCausalLM(config).train()
    fused = {"fused_lm_head": True} if loss == "fused" else {}
    if fused:
        add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
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
                of_tokens = model(**batch, **fused).loss
            of_tokens.backward()
            optimizer.step()
            optimizer.zero_grad()
    (snapshot,) = tracker.get_tracker_snapshot("peak").values()
    model.save_pretrained(folder)
    moments = [x for state in optimizer.state.values() for x in state.values() if x.ndim]
    return Step(snapshot["Total"], sum(x.nbytes for x in moments), sum(x.numel() for x in trained))


LONG = pytest.mark.long


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    ("vocabulary", "layers", "rank", "length"),
    [(4000, 2, 0, 256), *(pytest.param(*one, 2048, marks=LONG) for one in ((4000, 4, 0), (32000, 2, 0), (200, 6, 8)))],
)
def test_memory_is_an_upper_bound_of_what_a_step_takes(
    vocabulary: int, layers: int, rank: int, length: int, loss: str, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_attention_heads": 8, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=vocabulary, num_hidden_layers=layers, attn_implementation="attnmesh", **sizes)
    model = training_size(config, rank, length=length, phase="training")
    (one,) = training(model, am.Cluster.preset("local", 1, 1), Method(loss, ddp=True))
    measured = step(config, rank, length, loss, tmp_path)
    assert 1 < one.memory / measured.peak < 1.18
    assert model.trained == measured.trained
    (file,) = tmp_path.glob("*.safetensors")
    weights = sum(x.nbytes for x in load_file(file).values())
    assert model.checkpoint_bytes == weights + measured.moments


METHODS = [
    *(Method(loss, offload) for loss in LOSSES for offload in (False, True)),
    Method("fused", rollout=64),
]


@pytest.mark.parametrize("method", some(METHODS, METHODS[0], METHODS[3], METHODS[4]))
def test_tokens_that_fit_fill_the_memory(method: Method) -> None:
    cluster = am.Cluster.preset("dgx-h100", 2)
    work = am.Workload(32, 8, 128, 131_072, layers=32, phase="training")
    model = TrainedModel(work, 32, 4096, 14336, 128_256, 8_030_261_248)
    ways = training(model, cluster, method)
    assert sorted(one.context for one in ways) == [1, 2, 4, 8, 16]
    for one in ways:
        assert one.data * one.context == 16
        longest = replace(model, workload=replace(work, length=one.tokens))
        (filled,) = (x for x in training(longest, cluster, method) if x.context == one.context)
        assert 0.97 < filled.memory / cluster.device.memory < 1.001  # a layer takes more or less as its shape changes
        assert (filled.host > 0) == method.offload


def test_a_fused_loss_takes_fewer_ranks() -> None:
    """Logits of 128,256 tokens are most of what a rank takes, and are never there in TRL's trainers."""
    cluster, work = am.Cluster.preset("dgx-h100", 1), am.Workload(32, 8, 128, 131_072, layers=32, phase="training")
    model = TrainedModel(work, 32, 4096, 14336, 128_256, 8_030_261_248)
    full, fused = (training(model, cluster, Method(loss))[0] for loss in LOSSES)
    assert (full.context, fused.context) == (8, 2)
    assert fused.logits * fused.context < full.logits * full.context / 8


def test_completions_have_their_keys_beside_weights_that_each_rank_holds() -> None:
    cluster, work = am.Cluster.preset("dgx-h100", 1), am.Workload(14, 2, 64, 32_768, layers=24, phase="training")
    model = TrainedModel(work, 24, 896, 4864, 151_936, 494_032_768)
    shared, whole, drawing = (
        training(model, cluster, method)
        for method in (Method("fused"), Method("fused", ddp=True), Method("fused", ddp=True, rollout=64))
    )
    by_context = [{one.context: one for one in ways} for ways in (shared, whole, drawing)]
    for context, one in by_context[2].items():
        assert one.completions == 64 * 24 * 32_768 * 2 * (64 + 64) * 2 / context
        assert one.states == by_context[1][context].states > by_context[0][context].states
        assert one.memory >= one.states + one.completions
