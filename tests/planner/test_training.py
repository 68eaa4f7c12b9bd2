"""The planner's memory of training, beside the memory that PyTorch's tracker counts in a step of a small model."""

import json
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import AutoConfig, Trainer
from trl import SFTTrainer

import attnmesh as am
from attnmesh.hf.model_size import training_size
from attnmesh.planner.training import LOSSES, TrainerOptions, TrainingSizes, training_plans
from tests.support.process.scripts import run_script
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.training.trainers import fsdp_on_cpus, launched
from tests.support.truth.seeds import some

SCRIPT = Path(__file__).parents[2] / "examples" / "finetune.py"


@contextmanager
def memory_tracker(*parts: Any) -> Iterator[MemTracker]:
    """Count the bytes that are alive. The tracker hooks all weights, of which frozen ones take no hooks."""

    def for_trained(register: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, function: register(x, function) if x.requires_grad else MagicMock()

    names = ("register_hook", "register_post_accumulate_grad_hook")
    tracker = MemTracker()
    with patch.multiple(Tensor, **{name: for_trained(getattr(Tensor, name)) for name in names}), tracker:
        tracker.track_external(*parts)
        yield tracker


@on_each_rank
def measure_peak_bytes(words: list[str], sizes: dict[str, Any], loss: str) -> int:
    """On a rank: run the script with a model of these sizes, and return the most bytes alive in its second step.

    The first step makes the moments of AdamW. The script writes nothing.
    """
    config = AutoConfig.from_pretrained
    training_step = Trainer.training_step
    trackers = []

    def config_with_sizes(*args: Any, **more: Any) -> Any:
        return config(*args, **more | sizes)

    def loss_of_step(self: Trainer, model: Any, *args: Any) -> Tensor:
        if self.state.global_step == 1:
            trackers.append(second.enter_context(memory_tracker(model, self.optimizer.optimizer)))
        return training_step(self, model, *args)

    def made_up_loss(self: Trainer, **_: Any) -> dict[str, float]:
        second.close()
        return {"eval_loss": 0.0}

    saving = patch.multiple(Trainer, _save_checkpoint=MagicMock(), save_model=MagicMock())
    full = {"compute_loss": Trainer.compute_loss} if loss == "full" else {}
    started = launched() if dist.get_world_size() > 1 else nullcontext()  # torchrun's one rank has DDP's buckets
    with started, fsdp_on_cpus(), saving, ExitStack() as second, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with (
            patch.object(AutoConfig, "from_pretrained", config_with_sizes),
            patch.object(Trainer, "training_step", loss_of_step),
            patch.multiple(SFTTrainer, evaluate=made_up_loss, **full),
            patch.object(dist, "destroy_process_group"),
            patch.object(sys, "argv", [str(SCRIPT), *words]),
        ):
            runpy.run_path(str(SCRIPT), run_name="__main__")
    return int(trackers[0].get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


WIDE = {"hidden_size": 256, "intermediate_size": 688, "num_attention_heads": 8, "head_dim": 32}
"""Sizes of layers that are wider than the script's."""

MODELS = [{"vocab_size": 128_000}, WIDE | {"vocab_size": 4000}, WIDE | {"vocab_size": 300, "num_hidden_layers": 6}]

SHORT = [
    (1, 1, {"vocab_size": 32_000}, "fused", "", 128),
    (2, 2, MODELS[1], "fused", "--fsdp", 128),
    (2, 2, MODELS[1], "full", "", 512),
    (2, 1, MODELS[2], "full", "--fsdp", 128),
]

OPTIONS = ("", "--fsdp", "--lora 8")

LONG = [
    (ranks, ranks, sizes, loss, more, length)
    for length, ranks, sizes, loss, more in product((128, 512, 2048), (1, 2, 3, 4), MODELS, LOSSES, OPTIONS)
    if ranks > 1 or more != "--fsdp"
]


@pytest.mark.parametrize(
    ("ranks", "context", "sizes", "loss", "more", "length"),
    [*SHORT, *(pytest.param(*cell, marks=pytest.mark.long) for cell in LONG)],
)
def test_memory_is_an_upper_bound_of_what_a_step_takes(
    ranks: int, context: int, sizes: dict[str, Any], loss: str, more: str, length: int, pool: Pool, tmp_path: Path
) -> None:
    data = tmp_path / "documents.jsonl"
    data.write_text("".join(json.dumps({"text": chr(97 + number) * 3000}) + "\n" for number in range(20)))
    words = f"--data {data} --folder {tmp_path} --context {context} --packs {ranks // context} --length {length} {more}"
    measured = pool.run(ranks, measure_peak_bytes, f"{words} --bf16 --steps 2 --save-every 9".split(), sizes, loss)
    model = training_size(script_config(**sizes), 8 if "--lora" in more else 0, length=length, phase="training")
    ways = training_plans(model, am.Cluster.preset("local", 1, ranks), TrainerOptions(loss, ddp="--fsdp" not in more))
    (one,) = (way for way in ways if way.context == context)
    assert 1 <= one.memory / max(measured) <= 1.15


def script_config(**sizes: Any) -> Any:
    """Return the configuration of the script's model, with other sizes."""
    script = runpy.run_path(str(SCRIPT))
    return AutoConfig.from_pretrained(script["CONFIGURATION"], **script["SMALL"] | sizes)


@pytest.mark.parametrize("rank", [0, 8])
def test_a_checkpoint_has_the_weights_that_are_trained(rank: int, tmp_path: Path) -> None:
    run = run_script(SCRIPT, "--steps", 1, "--packs", 1, "--length", 128, "--folder", tmp_path, "--lora", rank)
    assert run.returncode == 0, run.stderr[-2000:]
    model = training_size(script_config(vocab_size=258), rank, length=128, phase="training")
    (file,) = (tmp_path / "final").glob("*.safetensors")
    moments = torch.load(tmp_path / "checkpoint-1" / "optimizer.pt")["state"].values()
    weights = load_file(file).values()
    assert model.trained_parameters == sum(x.numel() for x in weights)
    saved = [*weights, *(x for state in moments for x in state.values() if x.ndim)]
    assert model.checkpoint_bytes == sum(x.nbytes for x in saved)


TRAINERS = [
    *(TrainerOptions(loss, offload) for loss in LOSSES for offload in (False, True)),
    TrainerOptions("fused", rollout=64),
]


@pytest.mark.parametrize("trainer", some(TRAINERS, TRAINERS[1], TRAINERS[4]))
def test_tokens_that_fit_fill_the_memory(trainer: TrainerOptions) -> None:
    cluster = am.Cluster.preset("dgx-h100", 2)
    work = am.Workload(32, 8, 128, 131_072, layers=32, phase="training")
    model = TrainingSizes(work, 32, 4096, 14336, 128_256, 8_030_261_248)
    ways = training_plans(model, cluster, trainer)
    assert sorted(one.context for one in ways) == [1, 2, 4, 8, 16]
    for one in ways:
        assert one.data * one.context == 16
        longest = replace(model, workload=replace(work, length=one.tokens))
        (filled,) = (x for x in training_plans(longest, cluster, trainer) if x.context == one.context)
        assert 0.97 < filled.memory / cluster.device.memory < 1.001  # a layer takes more or less as its shape changes
        assert (filled.offloaded_bytes > 0) == trainer.offload


def llama_8b(adapter: int = 0, **options: Any) -> TrainingSizes:
    """Return the sizes of Llama 3 8B, in training with sequences of 4,096 tokens."""
    work = am.Workload(32, 8, 128, 4096, layers=32, phase="training", **options)
    return TrainingSizes(work, 32, 4096, 14336, 128_256, 8_030_261_248, adapter)


def test_a_batch_takes_the_activations_of_all_its_sequences() -> None:
    one, three = (training_plans(llama_8b(batch=batch), am.Cluster.preset("dgx-h100", 1)) for batch in (1, 3))
    growing = [{way.context: [moment.growing_bytes for moment in way.moments] for way in ways} for ways in (one, three)]
    for context, sizes in growing[0].items():
        assert growing[1][context] == pytest.approx([3 * size for size in sizes], rel=0.01)


def test_an_adapter_alone_has_gradients_moments_and_float32() -> None:
    """Each of 8 ranks has an eighth of all weights: 4 bytes of a frozen one, 12 of a trained one without gradient."""
    cluster, adapter, whole = am.Cluster.preset("dgx-h100", 1), 10**7, 8_030_261_248
    (plain,) = (way for way in training_plans(llama_8b(), cluster) if way.context == 8)
    (adapted,) = (way for way in training_plans(llama_8b(adapter), cluster) if way.context == 8)
    assert plain.weight_and_optimizer_bytes == 12 * whole / 8
    assert adapted.weight_and_optimizer_bytes == (4 * whole + 12 * adapter) / 8
    assert (plain.gradient_bytes, adapted.gradient_bytes) == (4 * whole / 8, 4 * adapter / 8)
    assert (plain.input_bytes, adapted.input_bytes) == (512 * 32 * 4096 * 2, 512 * 32 * 4096 * 4)
    read = 512 * 14336 * 4  # by the adapter of the feed-forward network
    assert adapted.layer_bytes - plain.layer_bytes == pytest.approx(512 * 4 * 2 * 4096 + read, rel=0.2)
    assert llama_8b(adapter).trained_head_and_layer == (0, adapter / 32)
    assert llama_8b(adapter).checkpoint_bytes == 12 * adapter


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_head_is_counted_once(tied: bool) -> None:
    head, layer = 1000 * 64, 5000
    model = replace(llama_8b(), layers=3, hidden_size=64, vocab_size=1000, tied=tied)
    model = replace(model, model_parameters=3 * layer + head * (1 if tied else 2))
    assert model.layer_parameters == layer
    assert model.trained_head_and_layer == (head, layer)


def test_offloaded_inputs_leave_that_of_one_layer() -> None:
    (way,) = (way for way in training_plans(llama_8b(), SMALL_HOST, TrainerOptions(offload=True)) if way.context == 4)
    assert (way.input_bytes, way.offloaded_bytes) == (1024 * 4096 * 2, 1024 * 32 * 4096 * 2)


SMALL_HOST = am.Cluster.preset("dgx-h100", 1, 4)


def test_ranks_of_a_sequence_are_a_part_of_a_host_or_whole_hosts() -> None:
    ways = training_plans(llama_8b(), am.Cluster.preset("dgx-h100", 2, 6))
    found = {way.context: (way.attention_plan.cluster.hosts, way.attention_plan.cluster.ranks) for way in ways}
    assert found == {1: (1, 1), 2: (1, 2), 3: (1, 3), 6: (1, 6), 12: (2, 6)}


def test_ways_that_fit_come_first_and_of_these_that_of_the_least_time_of_ranks() -> None:
    ways = training_plans(llama_8b(), am.Cluster.preset("dgx-h100", 2))
    assert ways == sorted(ways, key=lambda way: way.tokens < 4096)
    times = [way.attention_plan.seconds * way.context for way in ways if way.tokens >= 4096]
    assert len(times) > 1
    assert times == sorted(times)


def test_weights_that_do_not_fit_leave_no_token() -> None:
    small = am.Cluster.preset("dgx-h100", 1)
    small = replace(small, device=replace(small.device, memory=1e9))
    assert {way.tokens for way in training_plans(llama_8b(), small)} == {0}


def test_a_fused_loss_takes_fewer_ranks() -> None:
    """Logits of 128,256 tokens are most of what a rank takes, and are never there in TRL's trainers."""
    cluster, work = am.Cluster.preset("dgx-h100", 1), am.Workload(32, 8, 128, 131_072, layers=32, phase="training")
    model = TrainingSizes(work, 32, 4096, 14336, 128_256, 8_030_261_248)
    full, fused = (training_plans(model, cluster, TrainerOptions(loss))[0] for loss in LOSSES)
    assert (full.context, fused.context) == (4, 2)
    assert fused.logit_bytes * fused.context < full.logit_bytes * full.context / 8


def test_completions_have_their_keys_beside_weights_that_each_rank_holds() -> None:
    cluster, work = am.Cluster.preset("dgx-h100", 1), am.Workload(14, 2, 64, 32_768, layers=24, phase="training")
    model = TrainingSizes(work, 24, 896, 4864, 151_936, 494_032_768)
    shared, whole, drawing = (
        training_plans(model, cluster, trainer)
        for trainer in (
            TrainerOptions("fused"),
            TrainerOptions("fused", ddp=True),
            TrainerOptions("fused", ddp=True, rollout=64),
        )
    )
    by_context = [{one.context: one for one in ways} for ways in (shared, whole, drawing)]
    for context, one in by_context[2].items():
        assert one.completion_bytes == 64 * 24 * 32_768 * 2 * (64 + 64) * 2 / context
        assert (
            one.weight_and_optimizer_bytes
            == by_context[1][context].weight_and_optimizer_bytes
            > by_context[0][context].weight_and_optimizer_bytes
        )
        assert one.memory >= one.weight_and_optimizer_bytes + one.completion_bytes
