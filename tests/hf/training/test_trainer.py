"""Trainers on a mesh have the losses, metrics and weights of one process."""

import warnings
from contextlib import nullcontext
from logging import INFO, NOTSET, getLogger
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import Trainer, TrainingArguments

import attnmesh.hf as hf
from attnmesh import errors
from attnmesh.mesh.shapes import AXES, Shape
from tests.support import families
from tests.support.families import STOCK, prompt
from tests.support.mesh_problems import named_mesh
from tests.support.pool import Pool, on_each_rank
from tests.support.tolerances import FLOAT32_SUMS, TRAINED
from tests.support.trainers import (
    FSDP,
    STEPS,
    collate,
    examples,
    fsdp_on_cpus,
    launched,
    mesh_of,
    on_rank,
    settings,
    train,
    trainer_class,
)


def check(pool: Pool, folder: Path, kind: str, family: str, data: int, shape: Shape, **options: Any) -> None:
    """Assert that a trainer on a mesh is that of one process, which gets the batches of all meshes."""
    tolerance = options.pop("tolerance", FLOAT32_SUMS)
    alone = {name: x for name, x in options.items() if "fsdp" not in name and name != "where"}
    alone["per_device_train_batch_size"] = 2 * data
    if kind == "Trainer":  # it weighs tokens over all processes; the evaluation of TRL weighs batches
        alone["per_device_eval_batch_size"] = 2 * data
    trainer, attention = trainer_class(kind), STOCK[family]
    if family == "gpt-oss" and "packing" in options:
        # The eager attention of transformers 5.23 mixes packed documents, so one device of our own is the reference.
        trainer, attention = hf.on_mesh(trainer, None), "attnmesh"
    logged, tokens, weights = train(kind, trainer, family, attention, str(folder / "1"), alone)
    ranks = data * shape.ranks
    answers = pool.run(ranks, on_rank, kind, family, data, shape, str(folder / "2"), options, deadline=350)
    for given, _, trained in answers:
        for name, values in logged.items():
            if tolerance > 1e-3 and name == "eval_exact":
                continue  # a rounded logit changes a prediction
            rel = 10 * tolerance if name == "grad_norm" else tolerance
            assert given[name] == pytest.approx(values, rel=rel, abs=tolerance), (name, given[name], values)
        assert all(torch.allclose(trained[name], x, atol=50 * tolerance) for name, x in weights.items())
    shares = [count for _, count, _ in answers]
    assert max(shares) < 1.25 * tokens / ranks or not tokens, "evaluation is not sharded"


MESHES = {"1x2x2": (1, Shape(1, 2, 2)), "2x2x1": (1, Shape(2, 2, 1)), "2 of 1x2x1": (2, Shape(1, 2, 1))}

SHORT = {
    ("Trainer", "gemma3", "2 of 1x2x1", False),
    ("SFTTrainer", "gpt-oss", "2x2x1", True),
}
"""Cases of `make test`. The others are marked long."""


def cases() -> list[Any]:
    """Return both trainers of language models, with and without packing, on each mesh."""
    return [
        pytest.param(*case, marks=[] if case in SHORT else pytest.mark.long)
        for kind, packings in (("Trainer", [False]), ("SFTTrainer", [False, True]))
        for family in ("llama", "gpt-oss", "gemma3", "qwen3")
        for mesh in MESHES
        for packing in packings
        for case in [(kind, family, mesh, packing)]
    ]


@pytest.mark.parametrize(("kind", "family", "mesh", "packing"), cases())
def test_training_on_a_mesh_is_that_of_one_process(
    kind: str, family: str, mesh: str, packing: bool, pool: Pool, tmp_path: Path
) -> None:
    data, shape = MESHES[mesh]
    if packing and data == 2:
        pytest.skip("packs differ: those of one process are of twice as many sequences")
    check(pool, tmp_path, kind, family, data, shape, **({"packing": True} if packing else {}))


RECIPE = {"bf16": True, "activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}}
"""Common settings: float32 weights, autocast to bfloat16, and gradient checkpointing."""

PREFERENCES = 1e-4
"""Their losses are differences of sums of about 300, rounded in float32."""

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "preferences": ("DPOTrainer", {"tolerance": PREFERENCES}),
    "rewards": ("RewardTrainer", {"tolerance": PREFERENCES}),
    "recipe": ("Trainer", {**RECIPE, "tolerance": 2e-2}),  # three digits are what bfloat16 has
    "three heads": ("Trainer", {"changes": {"num_attention_heads": 3, "num_key_value_heads": 3}}),
    "counts of each rank": ("Trainer", {"average_tokens_across_devices": False}),
    "smooth labels": ("Trainer", {"label_smoothing_factor": 0.1}),
    "adapters": ("SFTTrainer", {"lora": True}),
}

WIDE = {"dtype": torch.float64, "router_aux_loss_coef": 0.9}
"""Rounding in float32 changes the choice of experts."""

VARIANTS["a layout and a shape for each batch"] = (
    "SFTTrainer",
    {"packing": True, "where": {"layout": "auto", "shape": "auto"}},
)
VARIANTS["fsdp"] = "Trainer", FSDP
VARIANTS["fsdp recipe"] = "Trainer", {**FSDP, **RECIPE, "tolerance": 2e-2, "data": 2}
VARIANTS["routers"] = "Trainer", {"family": "gpt-oss", "changes": {**WIDE, "output_router_logits": True}}
VARIANTS["routers of TRL"] = "SFTTrainer", {"family": "gpt-oss", "changes": WIDE, "packing": True}
VARIANTS["evaluation first"] = "Trainer", {"evaluates": True}
VARIANTS["stream"] = "Trainer", {"stream": True, "data": 2}

LONG = (
    "recipe",
    "rewards",
    "three heads",
    "smooth labels",
    "fsdp recipe",
    "routers of TRL",
    "counts of each rank",
    "stream",
    "routers",
    "evaluation first",
    "fsdp",
)
"""FSDP is also compared with stock transformers in test_trainer_checkpoints.py."""


@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.long if x in LONG else []) for x in VARIANTS])
def test_variants_of_training_are_those_of_one_process(name: str, pool: Pool, tmp_path: Path) -> None:
    kind, options = VARIANTS[name]
    check(pool, tmp_path, kind, shape=Shape(1, 1, 2), **{"family": "llama", "data": 1, **options})


@on_each_rank
def packed_logits(family: str) -> dict[str, bool]:
    """Change the first of two packed documents. Return whether the logits of each document are as before."""
    model, mesh = families.model(family, "attnmesh"), named_mesh(Shape(1, 1, 2), AXES)
    ids, positions = prompt(61), torch.cat((torch.arange(40), torch.arange(21)))[None]
    changed = ids.clone()
    changed[:, 3] = 96 - ids[:, 3]
    calls = hf.on_mesh(Trainer, mesh)._make_calls(None)
    calls.install(model)
    with calls.active(), torch.no_grad():
        before, after = (model(input_ids=x, position_ids=positions, use_cache=False).logits for x in (ids, changed))
    documents = {"first": slice(40), "second": slice(40, None)}
    return {name: torch.allclose(before[:, x], after[:, x], atol=FLOAT32_SUMS) for name, x in documents.items()}


@pytest.mark.parametrize("family", ["gpt-oss", "gemma3"])
def test_a_document_does_not_see_another_one_of_its_pack(family: str, pool: Pool) -> None:
    assert pool.run(2, packed_logits, family) == [{"first": False, "second": True}] * 2


@on_each_rank
def two_models() -> tuple[list[tuple[int, ...]], list[str]]:
    """Return the shapes of the meshes of a model with many key heads and of one with a single one, and the log."""
    calls = hf.on_mesh(Trainer, init_device_mesh("cpu", (4,), mesh_dim_names=("cp",)), shape="auto")._make_calls(None)
    models = [families.model("llama", "attnmesh", num_attention_heads=24, num_key_value_heads=n) for n in (24, 1)]
    found, logger, handler = [], getLogger("attnmesh"), BufferingHandler(100)
    logger.addHandler(handler)
    logger.setLevel(INFO)
    with calls.active(True, *models), torch.no_grad():
        for model in (*models, models[0]):
            logits = model(input_ids=prompt(1024), use_cache=False).logits
            found.append(tuple(logits.shards.mesh.mesh.shape))
    logger.removeHandler(handler)
    logger.setLevel(NOTSET)
    return found, [record.getMessage() for record in handler.buffer]


def test_each_model_has_meshes_for_its_heads_and_logs_each_choice_once(pool: Pool) -> None:
    for rank, ((many, one, again), said) in enumerate(pool.run(4, two_models)):
        assert (many[0], one[0], again) == (4, 1, many)
        begin, end = "1,024 tokens in 1 document: Zigzag on", "ranks (heads x queries x keys)"
        assert said == [f"{begin} {'x'.join(map(str, shape))} {end}" for shape in (many, one) if rank == 0]


@on_each_rank
def drawn_by_a_worker(folder: str) -> float:
    """Return a number that a worker of the loader draws, as a collator that masks tokens does."""
    with launched(), torch.random.fork_rng():
        given = settings(TrainingArguments, folder, dataloader_num_workers=1)
        made = hf.on_mesh(Trainer, mesh_of(2, Shape(1, 1, 2)))
        trainer = made(model=families.model("llama", "attnmesh"), args=given, train_dataset=examples())
        trainer.get_train_dataloader().worker_init_fn(0)
        return torch.rand(1).item()


def test_workers_of_the_ranks_of_a_mesh_draw_the_same_numbers(pool: Pool, tmp_path: Path) -> None:
    first, *others = pool.run(4, drawn_by_a_worker, str(tmp_path))
    assert others[0] == first
    assert others[1] == others[2] != first


# --- accelerate ---


def loop(mesh: Any, attention: str) -> list[float]:
    """Return the losses and learning rates of a plain loop."""
    from accelerate import Accelerator

    accelerator, model = Accelerator(cpu=True), families.model("qwen3", attention).train()
    if mesh is not None:
        model = hf.prepare(accelerator, model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=STEPS)
    loader = torch.utils.data.DataLoader(examples(8), batch_size=2, collate_fn=collate, shuffle=True)  # type: ignore[arg-type]
    torch.manual_seed(3)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    logged = []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        tokens = accelerator.gather_for_metrics(batch["attention_mask"].sum()).sum()
        logged += [loss.item(), norm.item(), scheduler.get_last_lr()[0], tokens.item()]
    return logged


@on_each_rank
def loop_losses(shape: Shape) -> list[float]:
    with launched():
        return loop(named_mesh(shape, AXES), "attnmesh")


def test_a_loop_with_accelerate_is_that_of_one_process(pool: Pool) -> None:
    expected = loop(None, "sdpa")
    for given in pool.run(3, loop_losses, Shape(1, 1, 3)):
        assert given == pytest.approx(expected, rel=TRAINED)


@on_each_rank
def reduced(data: int, shape: Shape) -> list[Any]:
    """Return sums and means over meshes of numbers that ranks of a mesh have alike."""
    with launched():
        from accelerate import Accelerator

        accelerator, mesh = Accelerator(cpu=True), mesh_of(data, shape)
        hf.prepare(accelerator, families.model("qwen3", "attnmesh"), mesh)
        own = 3 + dist.get_rank() // shape.ranks
        sums = accelerator.reduce({"x": torch.tensor(own / 4), "n": [torch.tensor(own)]}, "sum")
        mean = accelerator.reduce(torch.tensor(own / 4), "mean")
        return [sums["x"], sums["n"][0], mean]


@pytest.mark.parametrize(("data", "x", "n", "mean"), [(1, 0.75, 3, 0.75), (2, 1.75, 7, 0.875)])
def test_an_accelerator_reduces_over_meshes(data: int, x: float, n: int, mean: float, pool: Pool) -> None:
    for given in pool.run(2 * data, reduced, data, Shape(1, 1, 2)):
        assert [value.item() for value in given] == [x, n, mean]
        assert given[1].dtype == torch.int64


@on_each_rank
def losses_of_two_models(shape: Shape) -> list[float]:
    """Return losses of two models that one accelerator prepares, one of them twice."""
    with launched():
        from accelerate import Accelerator

        accelerator, mesh, ids = Accelerator(cpu=True), named_mesh(shape, AXES), prompt(33)
        models = [families.model(family, "attnmesh") for family in ("qwen3", "llama", "qwen3")]
        models[2] = models[0]
        prepared = [hf.prepare(accelerator, model, mesh) for model in models]
        return [model(input_ids=ids, labels=ids).loss.item() for model in prepared]


def test_an_accelerator_prepares_several_models_and_one_twice(pool: Pool) -> None:
    ids = prompt(33)
    first, second = (
        families.model(family, "sdpa")(input_ids=ids, labels=ids).loss.item() for family in ("qwen3", "llama")
    )
    for given in pool.run(2, losses_of_two_models, Shape(1, 1, 2)):
        assert given == pytest.approx([first, second, first], rel=FLOAT32_SUMS)


@on_each_rank
def after_an_error(shape: Shape) -> tuple[str, Any, float]:
    """Return the error of a batch, and the shards and the loss of the next one, in a loop that goes on."""
    with launched():
        from accelerate import Accelerator

        model = hf.prepare(Accelerator(cpu=True), families.model("qwen3", "attnmesh"), named_mesh(shape, AXES))
        ids = prompt(33)
        try:
            model(input_ids=ids, labels=ids + 1000)
            raised = "none"
        except errors.ArgumentError as error:
            raised = type(error).__name__
        output = model(input_ids=ids, labels=ids)
        return raised, type(output.logits).__name__, output.loss.item()


def test_a_loop_goes_on_after_a_batch_whose_call_raised(pool: Pool) -> None:
    ids = prompt(33)
    expected = families.model("qwen3", "sdpa")(input_ids=ids, labels=ids).loss.item()
    for given in pool.run(2, after_an_error, Shape(1, 1, 2)):
        assert given == ("ArgumentError", "ShardedOutput", pytest.approx(expected, rel=TRAINED))


@on_each_rank
def after_an_error_of_another_model(shape: Shape) -> tuple[str, float]:
    """Return the logits and the loss of a model after a call of another one that raised in a layer."""
    with launched():
        from accelerate import Accelerator

        accelerator, mesh, ids = Accelerator(cpu=True), named_mesh(shape, AXES), prompt(33)
        first, second = (
            hf.prepare(accelerator, families.model(family, "attnmesh"), mesh) for family in ("llama", "qwen3")
        )
        first.model.layers[1].register_forward_pre_hook(without_memory)
        with pytest.raises(MemoryError):
            first(input_ids=ids)
        assert accelerator.calls.shards is None
        output = second(input_ids=ids, labels=ids)
        return type(output.logits).__name__, output.loss.item()


def without_memory(*_: Any) -> None:
    raise MemoryError


def test_a_call_that_raised_leaves_no_shards_to_another_model(pool: Pool) -> None:
    ids = prompt(33)
    expected = families.model("qwen3", "sdpa")(input_ids=ids, labels=ids).loss.item()
    for given in pool.run(2, after_an_error_of_another_model, Shape(1, 1, 2)):
        assert given == ("ShardedOutput", pytest.approx(expected, rel=TRAINED))


# --- bad input ---


@on_each_rank
def loss_or_error(name: str) -> str:
    """Return the error of a training that is refused, or the loss of its step."""
    rank = dist.get_rank()
    whole = {"mesh": named_mesh(Shape(1, 1, 2), AXES)} if dist.get_world_size() == 2 else {}
    case, options = BAD.get(name, ({}, ""))[0], {}
    model, data, collator = (
        families.model(case.get("family", "llama"), case.get("attention", "attnmesh")),
        examples(20),
        collate,
    )
    mesh = whole.get("mesh")
    match name:
        case "uneven meshes":
            part = named_mesh(Shape(1, 1, 2), AXES)  # all ranks take part in making it
            mesh = part if rank < 2 else None
        case "other batches":
            data = examples(first=rank)
        case "unknown token":
            collator = with_unknown_token
        case "unknown label":
            collator = with_unknown_label
        case "left padding":
            collator = left
        case "images":
            collator = with_images
        case "device map":
            model.hf_device_map = {"model": 0, "lm_head": 1}
        case "context parallelism" | "tensor parallelism":
            from accelerate import ParallelismConfig

            size = {"cp_size" if name == "context parallelism" else "tp_size": 2}
            options["parallelism_config"] = ParallelismConfig(**size)
        case "half compiled":
            model.model = torch.compile(model.model, backend="eager")
        case "compiled" | "objects" | "dispatch" | "FSDP1" | "evaluation first" | "rebalanced":
            options = case["options"]
    try:
        with launched(), fsdp_on_cpus() if options.get("fsdp") else nullcontext(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            given = settings(TrainingArguments, "/nonexistent", max_steps=1, **options)
            rows: dict[str, Any] = {"train_dataset": data, "data_collator": collator}
            made: Any = hf.on_mesh(Trainer, mesh)
            trainer = made(model=model, args=given, **rows)
            if name == "evaluation first":
                trainer.evaluate(data[:2])
            loss = trainer.train().training_loss
    except errors.InputError as error:
        return f"{type(error).__name__}: {error}"
    return f"trained to a loss of {loss:.6f}"


def with_unknown_token(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Collate a batch whose last token, which one rank alone holds, is not in the vocabulary."""
    collated = collate(batch)
    collated["input_ids"][0, -1] = 999
    return collated


def with_unknown_label(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Collate a batch whose last label, which one rank alone holds, is not in the vocabulary."""
    collated = collate(batch)
    collated["labels"][0, -1] = 999
    return collated


def left(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Pad the sequences of a batch on the left."""
    size = max(len(row["input_ids"]) for row in batch)
    ids = torch.stack([torch.nn.functional.pad(x["input_ids"], (size - len(x["input_ids"]), 0)) for x in batch])
    mask = (ids != 0).long()
    return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}


def with_images(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
    return {**collate(batch), "pixel_values": torch.zeros(2, 3, 8, 8)}


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "uneven meshes": (
        {"ranks": 4},
        "MeshError: on_mesh mesh: expected meshes of one size that cover the 4 ranks, given",
    ),
    "other batches": ({}, "MeshError: shard_batch: expected the same call on every rank, given:"),
    "unknown token": (
        {},
        "ArgumentError: attnmesh.hf on_mesh input_ids: expected tokens from 0 to 96, the model's voc",
    ),
    "unknown label": ({}, "ArgumentError: attnmesh.hf labels: expected tokens from 0 to 96, or -100, given 999. Fix"),
    "left padding": ({}, "MaskError: shard_batch attention_mask: expected padding on the right, if any, given"),
    "images": (
        {},
        "KernelError: train images: expected a model that merges images into the embeddings of its text model, given "
        "LlamaForCausalLM. Fix: leave token_type_ids and images out",
    ),
    "device map": (
        {},
        "KernelError: on_mesh: expected a model on one device per rank, given a device_map of 2 devices",
    ),
    "context parallelism": ({}, "KernelError: on_mesh: expected no ParallelismConfig(cp_size=) beside a mesh, given 2"),
    "tensor parallelism": ({}, "KernelError: on_mesh: expected no ParallelismConfig(tp_size=) beside a mesh, given 2"),
    "compiled": (
        {"options": {"torch_compile": True}},
        "KernelError: on_mesh torch_compile: expected a model that is not",
    ),
    "objects": (
        {"options": {"eval_use_gather_object": True}},
        "KernelError: on_mesh: expected evaluation that gathers",
    ),
    "rebalanced": (
        {"options": {"train_sampling_strategy": "batch_rebalance"}},
        "KernelError: on_mesh train_sampling_strategy: expected batches that all ranks of a mesh get, given",
    ),
    "dispatch": (
        {"options": {"accelerator_config": {"dispatch_batches": True}}},
        "KernelError: on_mesh: expected data that each rank reads, given dispatch_batches or split_batches. Fix",
    ),
    "FSDP1": (
        {"options": {"fsdp": True, "fsdp_config": {"version": 1, "sync_module_states": False}}},
        "KernelError: on_mesh: expected DDP, FSDP2 or one process, given FSDP1. Fix: use DDP or FSDP2",
    ),
    "evaluation first": (
        {"options": FSDP},
        "KernelError: evaluate: expected a model whose weights train() has sharded, given one before train(). Fix: ",
    ),
    "stock attention": ({"attention": "sdpa"}, "KernelError: on_mesh: expected a model with attn_implementation 'attn"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_not_supported_raises_alike(name: str, pool: Pool) -> None:
    answers = pool.run(BAD[name][0].get("ranks", 2), loss_or_error, name)
    for answer in answers:
        assert answer.startswith(BAD[name][1]), answer
    assert len(set(answers)) == 1


@pytest.mark.long
def test_a_half_compiled_model_trains_like_a_plain_one(pool: Pool) -> None:
    answers = [pool.run(2, loss_or_error, name) for name in ("half compiled", "plain")]
    compiled, plain = ({float(text.removeprefix("trained to a loss of ")) for text in texts} for texts in answers)
    assert [*compiled] == pytest.approx([*plain], abs=2e-6)  # two roundings to six digits, beside those of sums


def test_only_trainers_are_put_on_a_mesh() -> None:
    for kind in (torch.nn.Linear, hf.on_mesh(Trainer, None), "Trainer"):
        with pytest.raises(errors.ArgumentError, match="on_mesh trainer_class: expected a "):
            hf.on_mesh(kind, None)  # type: ignore[arg-type]
    with pytest.raises(errors.ArgumentError, match=r"on_mesh shape: expected None or .auto., given .1x2x2."):
        hf.on_mesh(Trainer, None, shape="1x2x2")
    with pytest.raises(errors.MeshError):
        hf.on_mesh(Trainer, "cp", shape="auto")  # type: ignore[arg-type]
    with pytest.raises(errors.LayoutError, match='on_mesh layout: expected "auto", Contiguous'):
        hf.on_mesh(Trainer, None, "best")
    assert "create_accelerator_and_postprocess" in vars(Trainer)  # its own attributes are as they were
