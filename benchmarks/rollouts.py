"""`python -m benchmarks rollouts`: memory of a step of GRPO on one process and on ranks, and the rate of completions.

Both train with the same completions and the same kernels. Completions are drawn as TRL asks for them: a row for each.
"""

import os
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, TrainerCallback
from transformers.utils import logging

from attnmesh import hf
from attnmesh.cli.launch import Send, run_on_ranks
from attnmesh.hf.training.rollouts import generating_on
from benchmarks.netns import send_rows
from benchmarks.timing import CLEAR_REFS, Timing, exact_memory, resident

WIDE = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8}
"""Sizes of the model that is trained: activations and caches of a long completion take most of its memory."""

DEEP = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 9}
DEEP |= {"num_key_value_heads": 3}
"""Sizes of the model that draws: layers of SmolLM2-135M."""

PROMPT, SHORT, GROUP = 16, 16, 2
"""Tokens of a prompt in training and of a completion in the first step; completions of a prompt."""


@dataclass(frozen=True)
class Request:
    """Sizes of a run: tokens of a completion in training; prompts, completions and their tokens in drawing; ranks."""

    tokens: int
    contexts: tuple[int, ...]
    completions: int
    new: int
    ranks: tuple[int, int]
    """Ranks that train, and ranks that draw."""
    rounds: int


@dataclass(frozen=True)
class Memory:
    """Memory of a step of GRPO, of the rank that takes most."""

    ranks: int
    before: float
    """Resident megabytes before the step: weights, gradients, the optimizer and libraries."""
    step: float
    """Megabytes that the step adds at its peak: activations and caches."""
    seconds: float
    goal: ClassVar[float] = 0.35
    """Most of the memory of a step over that on one process."""


@dataclass(frozen=True)
class Speed:
    """Time of drawing completions of one prompt, prompt included."""

    contender: str
    context: int
    tokens: int
    timing: Timing
    goal: ClassVar[float] = 1.5
    """Least tokens in a second over those of transformers."""

    @property
    def rate(self) -> float:
        """Tokens in a second."""
        return self.tokens * 1e3 / self.timing.median


def memory(request: Request, add: Send) -> None:
    """Measure a step on one process and on ranks, which return freed memory at once."""
    for ranks in (1, request.ranks[0]):
        with exact_memory():
            run_on_ranks(ranks, send_rows, _trained, request, spawned=True, on_message=add)


def speed(request: Request, add: Send) -> None:
    """Measure transformers on one process with a thread for each rank, then the ranks."""
    for ranks, threads in ((1, request.ranks[1]), (request.ranks[1], 1)):
        run_on_ranks(ranks, send_rows, _drawn, request, threads=threads, on_message=add)


def model_of(sizes: dict[str, int], attention: str) -> Any:
    """Return a model with random weights whose texts do not end."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=512, max_position_embeddings=1 << 16, eos_token_id=None, pad_token_id=0, **sizes)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def mesh_of_ranks() -> DeviceMesh | None:
    """Return the mesh of all ranks along keys."""
    ranks = dist.get_world_size()
    return init_device_mesh("cpu", (ranks,), mesh_dim_names=("keys",)) if ranks > 1 else None


class Watch(TrainerCallback):  # type: ignore[misc]
    """Memory and time of a step, after a first one with short completions that makes the optimizer's state."""

    trainer: Any

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.before, self.peak, self.begun, self.seconds = 0, 0, 0.0, 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Begin to watch."""
        CLEAR_REFS.write_text("5")
        self.before, self.begun = resident("VmRSS"), time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Keep what the step took. The next one has long completions."""
        self.peak, self.seconds = resident("VmHWM"), time.perf_counter() - self.begun
        self.trainer.generation_config.max_new_tokens = self.tokens


def _trained(request: Request) -> Iterator[Memory]:
    """Return the memory of a step with long completions."""
    trl, dataset = import_module("trl"), import_module("datasets").Dataset
    rank, ranks = dist.get_rank(), dist.get_world_size()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    watch, rows = Watch(request.tokens), [{"prompt": " ".join(f"w{5 + n}" for n in range(PROMPT))}] * 8
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TRL's own
        config = trl.GRPOConfig(
            folder, use_cpu=True, bf16=False, max_steps=2, per_device_train_batch_size=GROUP, num_generations=GROUP,
            gradient_accumulation_steps=1, max_completion_length=SHORT, gradient_checkpointing=False, report_to=[],
            save_strategy="no", disable_tqdm=True, ddp_find_unused_parameters=False,
            generation_kwargs={"suppress_tokens": [1]},  # completions do not end
        )  # fmt: skip
        trainer: Any = hf.on_mesh(trl.GRPOTrainer, mesh_of_ranks())
        watch.trainer = trainer(
            model=model_of(WIDE, "attnmesh"), reward_funcs=_reward, args=config, train_dataset=dataset.from_list(rows),
            processing_class=_words(), callbacks=[watch],
        )  # fmt: skip
        watch.trainer.train()
    figures = torch.tensor([watch.before, watch.peak - watch.before], dtype=torch.float64)
    dist.all_reduce(figures, dist.ReduceOp.MAX)
    before, step = (round(x / 1e6, 1) for x in figures.tolist())
    yield Memory(ranks, before, step, round(watch.seconds, 1))


def _reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Return the share of even tokens."""
    return [sum(token % 2 == 0 for token in row) / len(row) for row in completion_ids]


def _words() -> Any:
    """Return a tokenizer of numbered words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(512)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1")


def _drawn(request: Request) -> Iterator[Speed]:
    """Return the times of transformers on one process, or of the ranks, with and without shared weights."""
    logging.disable_progress_bar()
    ranks, mesh = dist.get_world_size(), mesh_of_ranks()
    contenders = ("transformers",) if mesh is None else ("on_mesh", "on_mesh, share_weights")
    for contender in contenders:
        model = model_of(DEEP, "sdpa" if mesh is None else "attnmesh").eval()
        if "share" in contender:
            hf.share_weights(model, mesh)
        for context in request.contexts:
            ids = torch.arange(context).remainder(500).add(5).expand(request.completions, -1).contiguous()
            seconds = [_seconds(model, ids, request, mesh) for _ in range(request.rounds + 1)][1:]
            where = f"{torch.get_num_threads()} threads" if mesh is None else f"{ranks} ranks"
            yield Speed(f"{contender}, {where}", context, request.completions * request.new, Timing.of(seconds))


@torch.no_grad()
def _seconds(model: Any, ids: Tensor, request: Request, mesh: DeviceMesh | None) -> float:
    """Return the time of one rollout, as TRL asks for it."""
    draws = GenerationConfig(
        do_sample=True, max_new_tokens=request.new, pad_token_id=0, temperature=1.0,
        top_k=0, top_p=1.0, disable_compile=True,
    )  # fmt: skip
    torch.manual_seed(1)
    dist.barrier()
    begun = time.perf_counter()
    options = {"attention_mask": torch.ones_like(ids), "generation_config": draws}
    if mesh is None:
        output = model.generate(ids, **options)
    else:
        with generating_on(mesh, model):
            output = model.generate(ids, **options)
    seconds = time.perf_counter() - begun
    assert output.shape[1] == ids.shape[1] + request.new
    return seconds
