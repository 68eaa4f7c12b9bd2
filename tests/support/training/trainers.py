"""Trainers of tiny models, which tests run on meshes and in one process."""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from datasets import Dataset, DatasetDict, load_from_disk
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast, Trainer, TrainingArguments

import attnmesh.hf as hf
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.models import families
from tests.support.models.families import STOCK, prompt
from tests.support.ranks.pool import on_each_rank
from tests.support.truth.mesh_problems import named_mesh

STEPS, LENGTH = 3, 61

FSDP = {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}
"""Settings of a trainer that shards the weights of a Llama."""


@contextmanager
def launched() -> Iterator[None]:
    """Give this rank the variables of torchrun, and forget accelerate's state at the end."""
    rank, size = dist.get_rank(), dist.get_world_size()
    variables = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_ADDR": "localhost", "MASTER_PORT": 29500}
    try:
        with patch.dict(os.environ, {name: str(value) for name, value in variables.items()}):
            yield
    finally:
        forget_accelerate()


def forget_accelerate() -> None:
    """Forget accelerate's state, which all accelerators of a process share, also those of earlier tests."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    AcceleratorState._reset_state()
    PartialState._shared_state.clear()
    GradientState._reset_state()


@contextmanager
def fsdp_on_cpus() -> Iterator[None]:
    """Let accelerate shard weights on CPUs as on GPUs. By itself it ignores FSDP there."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    made = AcceleratorState.__init__

    def make(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        made(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:  # as in its own branch
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    with patch.object(AcceleratorState, "__init__", make):
        yield


def mesh_of(data: int, shape: Shape) -> Any:
    """Return this rank's mesh, of several in a world of `data` times its ranks."""
    if data == 1:
        return named_mesh(shape, AXES)
    return init_device_mesh("cpu", (data, *shape), mesh_dim_names=("data", *AXES))[AXES]


def examples(count: int = 4 * STEPS, first: int = 0) -> list[dict[str, Any]]:
    """Return sequences of several lengths with different numbers of labels."""
    sequences = []
    for number in range(first, first + count):
        ids = prompt(LENGTH - 7 * (number % 4), seed=number)[0]
        labels = ids.clone()
        labels[: 3 * (number % 5)] = -100
        sequences.append({"input_ids": ids, "labels": labels})
    return sequences


def collate(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Pad the sequences of a batch on the right."""
    size = max(len(row["input_ids"]) for row in batch)

    def padded(name: str, value: int) -> Tensor:
        return torch.stack([torch.nn.functional.pad(x[name], (0, size - len(x[name])), value=value) for x in batch])

    mask = torch.stack([torch.arange(size) < len(row["input_ids"]) for row in batch]).long()
    return {"input_ids": padded("input_ids", 0), "labels": padded("labels", -100), "attention_mask": mask}


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of 97 words, which only names the special tokens: the data are token ids."""
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(97)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", bos_token="w1", eos_token="w2")


class Counting:
    """Tokens that a model has embedded on this rank, in evaluation."""

    def __init__(self, model: Any) -> None:
        self.tokens = 0
        model.get_input_embeddings().register_forward_hook(self._count)

    def _count(self, module: torch.nn.Module, args: Any, output: Tensor) -> None:
        self.tokens += 0 if module.training else output.shape[0] * output.shape[1]


LOGGED = (
    *("loss", "grad_norm", "train_loss", "num_input_tokens_seen", "num_tokens", "entropy", "mean_token_accuracy"),
    *("eval_loss", "eval_exact", "rewards/margins", "logps/chosen", "logits/chosen", "accuracy", "margin"),
    *("kl", "logps/rejected", "logits/rejected", "rewards/chosen", "eval_kl", "eval_rewards/rejected"),
)


def settings(kind: Any, folder: str, **options: Any) -> Any:
    """Return arguments of a trainer of a few steps, with two micro-batches each.

    The first steps of Adam are signs of gradients, which rounding turns where they are almost 0: its epsilon smooths
    them.
    """
    return kind(
        **{
            "output_dir": folder, "use_cpu": True, "max_steps": STEPS, "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2, "logging_steps": 1, "report_to": [], "save_strategy": "no",
            "disable_tqdm": True, "learning_rate": 1e-3, "seed": 1, "max_grad_norm": 0.5, "bf16": False,
            "adam_epsilon": 1e-2, **options,
        }
    )  # fmt: skip


Make = Callable[..., Trainer]


def plain(trainer: Any, model: Any, folder: str, **options: Any) -> Trainer:
    """Return a `Trainer` of padded sequences, which also computes a metric from whole logits."""
    evaluation = {"eval_strategy": "steps", "eval_steps": 3, "include_num_input_tokens_seen": "non_padding"}
    evaluation |= {"per_device_eval_batch_size": 2}
    data_of = Stream if options.pop("stream", False) else list
    made: Trainer = trainer(
        model=model, args=settings(TrainingArguments, folder, **evaluation | options),
        train_dataset=data_of(examples()),
        eval_dataset=examples(8, 100), data_collator=collate, compute_metrics=exact,
    )  # fmt: skip
    return made


class Stream(torch.utils.data.IterableDataset[Any]):
    """Sequences without a length."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


def exact(outputs: Any) -> dict[str, float]:
    """Return the share of tokens that the logits predict."""
    several = isinstance(outputs.predictions, tuple)  # beside the logits, those of routers
    logits = next(x for x in outputs.predictions if x.ndim == 3) if several else outputs.predictions
    predicted, labels = logits[:, :-1].argmax(-1), outputs.label_ids[:, 1:]
    return {"exact": float((predicted == labels)[labels != -100].mean()), "logits": float(logits.std())}


def lists(rows: list[dict[str, Any]]) -> Any:
    """Return a dataset of token ids."""
    return Dataset.from_list([{name: x.tolist() for name, x in row.items()} for row in rows])


def sft(trainer: Any, model: Any, folder: str, **options: Any) -> Trainer:
    """Return a `SFTTrainer`."""
    from trl import SFTConfig

    common: dict[str, Any] = {
        "max_length": LENGTH,
        "gradient_checkpointing": False,
        "eval_strategy": "steps",
        "eval_steps": 3,
    }
    options = {**common, "per_device_eval_batch_size": 2, **options}
    rows = {"train_dataset": lists(examples()), "eval_dataset": lists(examples(8, 100))}
    if options.pop("lora", False):
        from peft import LoraConfig

        rows["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    given = settings(SFTConfig, folder, **options)
    made: Trainer = trainer(model=model, args=given, processing_class=tokenizer(), **rows)
    return made


def pairs() -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return prompts with a chosen and a rejected answer."""
    lengths = [(20 + 3 * (number % 5), 17 + number, 29) for number in range(20)]
    return [
        (prompt(first, seed=n)[0], prompt(good, seed=n + 90)[0], prompt(bad, seed=n + 60)[0])
        for n, (first, good, bad) in enumerate(lengths)
    ]


def dpo(trainer: Any, model: Any, folder: str, **options: Any) -> Trainer:
    """Return a `DPOTrainer` with a reference model of its own."""
    from trl import DPOConfig

    rows = [["".join(f" w{token}" for token in part) for part in row] for row in pairs()]
    texts = Dataset.from_list([dict(zip(("prompt", "chosen", "rejected"), row, strict=True)) for row in rows])
    given = settings(DPOConfig, folder, max_length=LENGTH, gradient_checkpointing=False, **options)
    made: Trainer = trainer(
        model=model, ref_model=deepcopy(model), args=given, train_dataset=texts, processing_class=tokenizer()
    )
    return made


def kto(trainer: Any, model: Any, folder: str, **options: Any) -> Trainer:
    """Return a `KTOTrainer`, whose reference is a model of its own or the model without an adapter.

    With `rows`, a folder, its reference is computed before training: ranks share the file that TRL writes beside them.
    """
    from trl import KTOConfig

    more: dict[str, Any] = {"ref_model": deepcopy(model)}
    if options.pop("lora", False):
        from peft import LoraConfig

        more = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")}
    rows = options.pop("rows", None)
    if rows is not None:
        more.pop("ref_model", None)
        options["precompute_ref_log_probs"] = True
    data = dict(judged()) if rows is None else dict(load_from_disk(rows))
    common = {"max_length": LENGTH, "gradient_checkpointing": False, "eval_strategy": "steps", "eval_steps": 2}
    given = settings(KTOConfig, folder, **common | {"per_device_eval_batch_size": 2, **options})
    made: Trainer = trainer(
        model=model, args=given, train_dataset=data["train"], eval_dataset=data["eval"], processing_class=tokenizer(),
        **more,
    )  # fmt: skip
    return made


def judged() -> DatasetDict:
    """Return prompts with a short answer each, which is desirable or not."""
    rows = []
    for number, (first, *answers) in enumerate(pairs()):
        answer = answers[number % 3 % 2][: 4 + number % 4]
        words = ["".join(f" w{token}" for token in part) for part in (first, answer)]
        rows.append({"prompt": words[0], "completion": words[1], "label": number % 3 != 1})
    return DatasetDict({"train": Dataset.from_list(rows[:16]), "eval": Dataset.from_list(rows[16:])})


def reward(trainer: Any, model: Any, folder: str, **options: Any) -> Trainer:
    """Return a `RewardTrainer`, whose model has one class."""
    from trl import RewardConfig

    rows = [{"chosen_ids": torch.cat(row[:2]), "rejected_ids": torch.cat(row[::2])} for row in pairs()]
    given = settings(RewardConfig, folder, max_length=LENGTH, gradient_checkpointing=False, **options)
    made: Trainer = trainer(model=model, args=given, train_dataset=lists(rows), processing_class=tokenizer())
    return made


TRAINERS: dict[str, Make] = {"Trainer": plain, "SFTTrainer": sft, "DPOTrainer": dpo, "RewardTrainer": reward}
TRAINERS["KTOTrainer"] = kto


def trainer_class(kind: str) -> type[Trainer]:
    """Return a trainer of transformers or of TRL."""
    if kind == "Trainer":
        return Trainer
    found: type[Trainer] = getattr(import_module("trl"), kind)
    return found


def train(kind: str, trainer: Any, family: str, attention: str, folder: str, options: dict[str, Any]) -> Any:
    """Train, and return what was logged, the tokens of evaluation on this rank, and the weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TRL's own
        changes = options.pop("changes", {})
        model = made(kind, family, attention, changes).train()
        counting, resume = Counting(model), options.pop("resume", None)
        evaluates, final = options.pop("evaluates", False), options.pop("final", None)
        torch.manual_seed(7)  # of adapters
        made_trainer = TRAINERS[kind](trainer, model, folder, **options)
        if evaluates:
            made_trainer.evaluate()
        made_trainer.train(resume_from_checkpoint=resume)
        if final:
            made_trainer.save_model(final)
    for module in (x for x in model.modules() if isinstance(x, FSDPModule)):
        module.reshard()  # an evaluation leaves the outermost weights gathered
    sharded = [isinstance(x, DTensor) for x in model.parameters()]
    assert all(sharded) if options.get("fsdp") else not any(sharded)
    log = made_trainer.state.log_history
    logged = {name: [entry[name] for entry in log if name in entry] for name in LOGGED}
    weights = {name: getattr(x, "full_tensor", x.clone)().detach() for name, x in model.named_parameters()}
    return logged, counting.tokens, weights


def made(kind: str, family: str, attention: str, changes: dict[str, Any]) -> Any:
    """Return the model that a trainer trains."""
    if kind != "RewardTrainer":
        # Rounding in float32 moves gradient norms of gpt-oss by 3e-5 in one process, ten times as far as Llama's.
        kind = {"dtype": torch.float64 if family == "gpt-oss" else torch.float32}
        return families.model(family, attention, **kind | changes)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        config = type(families.CONFIGS[family])(**{**families.CONFIGS[family].to_dict(), "num_labels": 1})
        return AutoModelForSequenceClassification.from_config(config, attn_implementation=attention)


@on_each_rank
def train_on_rank(kind: str, family: str, data: int, shape: Shape | None, folder: str, options: dict[str, Any]) -> Any:
    """Train on a mesh, of `data` of them; without a shape, on as many ranks by stock transformers."""
    with launched(), fsdp_on_cpus() if options.get("fsdp") else nullcontext():
        if shape is None:
            return train(kind, trainer_class(kind), family, STOCK[family], folder, dict(options))
        options = dict(options)
        where = options.pop("where", {})
        mesh = init_device_mesh("cpu", (shape.ranks,), mesh_dim_names=("cp",)) if where else mesh_of(data, shape)
        return train(kind, hf.on_mesh(trainer_class(kind), mesh, **where), family, "attnmesh", folder, options)
