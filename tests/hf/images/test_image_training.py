"""Training with images on two to four ranks, beside stock transformers on one device."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from inspect import signature
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, GPT2Config, Trainer, TrainingArguments

import attnmesh.hf as hf
from attnmesh import errors
from attnmesh.hf.images.cut import prepare_text_model
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.images import image_prompts, image_spans, processed_images
from tests.support.images.image_models import build_images, image_batch, image_case
from tests.support.images.image_prompts import IMAGES, vision_model
from tests.support.images.image_training import (
    BUILT,
    SPANS,
    Batch,
    check,
    labelled,
    loss_and_gradients_in_place,
    model_of,
)
from tests.support.models import families
from tests.support.models.families import prompt
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.training.trainers import FSDP, LOGGED, fsdp_on_cpus, launched, settings, trainer_class
from tests.support.truth.mesh_problems import named_mesh
from tests.support.truth.tolerances import FLOAT32_SUMS, FLOAT64_LOSS, FLOAT64_MODEL, TRAINED

KINDS = (*IMAGES, *SPANS, *BUILT)
TYPES = {"token_type_ids", "mm_token_type_ids"}
SHAPES = (Shape(1, 2, 1), Shape(1, 1, 3), Shape(1, 2, 2), Shape(2, 1, 1))


def batch_of(kind: str) -> Batch:
    """Return images and texts to learn. No number of ranks divides the tokens; the shorter sequence has padding."""
    if kind in SPANS:
        batch = image_spans.inputs(kind, *((3, 5, 26) if kind == "gemma3" else (7, 18)), rows=2)
    elif kind == "llava":
        batch = processed_images.processed("right")
    elif kind in BUILT:
        batch = image_batch(model_of(kind, "sdpa"), torch.float64)
    else:
        batch = padded_on_the_right(image_prompts.FIRST, (20, "large", 4))
    return labelled(batch)


def padded_on_the_right(*rows: tuple[image_prompts.Part, ...]) -> Batch:
    """Return what a processor of Qwen returns for training."""
    batches = [image_prompts.inputs(row) for row in rows]
    by_token = ("input_ids", "attention_mask", "mm_token_type_ids")
    joined = {name: [batch[name] for batch in batches] for name in batches[0]}
    return {
        name: pad_sequence([x[0] for x in parts], batch_first=True) if name in by_token else torch.cat(parts)
        for name, parts in joined.items()
    }


LONG = pytest.mark.long

PAIRS = {*zip(KINDS, cycle(SHAPES), strict=False), ("qwen3_vl", SHAPES[2])}
"""Cases of `make test`. The others are marked long."""


@pytest.mark.parametrize(
    ("kind", "shape"),
    [pytest.param(kind, shape, marks=[] if (kind, shape) in PAIRS else LONG) for kind in KINDS for shape in SHAPES],
)
def test_loss_and_gradients_are_those_of_one_device(kind: str, shape: Shape, pool: Pool) -> None:
    gradients = check(kind, shape, batch_of(kind), pool)
    assert sum("visual" in name or "vision" in name for name in gradients) > 10


def spans_that_differ() -> Batch:
    """Return three rows for Gemma 3: two images, one elsewhere and padding, and none."""
    rows = [image_spans.inputs("gemma3", *texts, rows=1) for texts in ((3, 5, 26), (11, 14), (66,))]
    kinds = ("input_ids", "attention_mask", "token_type_ids")
    joined = {name: pad_sequence([row[name][0] for row in rows], batch_first=True) for name in kinds}
    return labelled({**joined, "pixel_values": image_spans.inputs("gemma3", 1, 1, 1, 1)["pixel_values"]})


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[1], Shape(1, 1, 1)], ids=str)
def test_images_in_other_places_of_each_row_see_each_other(shape: Shape, pool: Pool) -> None:
    check("gemma3", shape, spans_that_differ(), pool)


def text_of(kind: str, length: int = 29) -> Batch:
    """Return text alone, with the types of tokens that the model's processor returns."""
    ids = prompt(length, batch=2) % 80 + 5
    types = TYPES & {*signature(model_of(kind, "sdpa").forward).parameters}
    return {"input_ids": ids, "labels": ids, **dict.fromkeys(types, torch.zeros_like(ids))}


TEXTS = [
    *((kind, SHAPES[1], 29) for kind in ("qwen2_5_vl", "gemma3", "paligemma", "gemma4")),
    ("gemma3", SHAPES[0], 8),  # no longer than the window
]


@pytest.mark.parametrize(("kind", "shape", "length"), TEXTS)
def test_a_batch_may_have_text_alone(kind: str, shape: Shape, length: int, pool: Pool) -> None:
    check(kind, shape, text_of(kind, length), pool)


@pytest.mark.parametrize("kind", ["gemma3", "gemma4", "gemma4_unified", "molmo2", "paligemma", "shieldgemma2"])
def test_text_has_the_masks_that_its_types_give(kind: str) -> None:
    """These models make masks of types. In training Molmo 2 wants types of text, too."""
    batch = {**text_of(kind), "attention_mask": torch.ones(2, 29, dtype=torch.long)}
    batch["attention_mask"][1, 20:] = 0
    batch["labels"] = batch["labels"].where(batch["attention_mask"] == 1, -100)
    batch = text_of(kind) if kind == "paligemma" else batch  # whose padding would be in a span
    expected, gradients = loss_and_gradients_in_place(model_of(kind, "sdpa"), {**batch, "use_cache": False})
    loss, found = loss_and_gradients_in_place(model_of(kind, "attnmesh"), hf.shard_batch(batch, None))
    assert loss == pytest.approx(expected, rel=FLOAT64_LOSS)
    for name, x in gradients.items():
        assert (found[name] - x).abs().max() <= FLOAT64_MODEL * max(1, float(x.abs().max())), name


@on_each_rank
def losses_of_a_data_set(kind: str, batches: list[Batch]) -> list[float]:
    """Return the losses of whole batches, of a model that accelerate has prepared."""
    from accelerate import Accelerator

    with launched():
        model = hf.prepare(Accelerator(cpu=True), deepcopy(model_of(kind, "attnmesh")), named_mesh(SHAPES[0], AXES))
        return [float(model(**batch).loss.detach()) for batch in batches]


@pytest.mark.parametrize("kind", KINDS)
def test_some_batches_of_a_data_set_have_no_images(kind: str, pool: Pool) -> None:
    batches = [batch_of(kind), text_of(kind), batch_of(kind)]
    expected = [float(model_of(kind, "sdpa")(**batch, use_cache=False).loss.detach()) for batch in batches]
    assert pool.run(2, losses_of_a_data_set, kind, batches) == [pytest.approx(expected, rel=FLOAT64_LOSS)] * 2


@pytest.mark.parametrize("kind", ["qwen3_vl", "paligemma"])
def test_one_device_is_a_mesh_too(kind: str) -> None:
    expected, gradients = loss_and_gradients_in_place(model_of(kind, "sdpa"), {**batch_of(kind), "use_cache": False})
    whole = {**batch_of(kind), "use_cache": False}
    for batch in (hf.shard_batch(batch_of(kind), None), whole):
        loss, found = loss_and_gradients_in_place(model_of(kind, "attnmesh"), batch)
        assert loss == pytest.approx(expected, rel=FLOAT64_LOSS)
        assert all(torch.allclose(found[name], x, atol=FLOAT64_LOSS) for name, x in gradients.items())


@on_each_rank
def error_of_types_for_gpt2() -> str:
    from accelerate import Accelerator

    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 96, "attn_pdrop": 0}
    ids = prompt(29, batch=2) % 80 + 5
    with launched():
        model: Any = AutoModelForCausalLM.from_config(GPT2Config(**sizes), attn_implementation="attnmesh")
        model = hf.prepare(Accelerator(cpu=True), model, named_mesh(SHAPES[0], AXES))
        with pytest.raises(errors.KernelError) as raised:
            model(input_ids=ids, labels=ids, token_type_ids=torch.zeros_like(ids))
    return str(raised.value)


def test_types_of_a_text_model_are_not_left_out(pool: Pool) -> None:
    """To GPT-2 a type is a token, of which it adds the embedding: 0 is not the same as none."""
    first, second = pool.run(2, error_of_types_for_gpt2)
    assert first == second
    assert "given GPT2LMHeadModel. Fix: leave token_type_ids and images out" in first


# --- trainers ---


def examples(count: int) -> list[Batch]:
    """Return sequences with one image or two."""
    rows: list[tuple[image_prompts.Part, ...]] = [
        (5 + number, "wide", 9, *(("high", 4) if number % 3 else ()), 17) for number in range(count)
    ]
    return [labelled(image_prompts.inputs(row)) for row in rows]


def collate(batch: list[Batch]) -> Batch:
    """Pad the sequences of a batch on the right."""
    fills = {"input_ids": 0, "attention_mask": 0, "mm_token_type_ids": 0, "labels": -100}
    parts = {name: [row[name] for row in batch] for name in batch[0]}
    return {
        name: torch.cat(x)
        if name not in fills
        else pad_sequence([row[0] for row in x], batch_first=True, padding_value=fills[name])
        for name, x in parts.items()
    }


WRAPPED, BLOCKS = "transformer_layer_cls_to_wrap", ["Qwen2_5_VLDecoderLayer", "Qwen2_5_VLVisionBlock"]
RECIPES: dict[str, dict[str, Any]] = {
    "LoRA": {"max_steps": 3, "lora": True},
    "LoRA, 20 steps": {"max_steps": 20, "lora": True},
    "all weights": {"max_steps": 3},
    "FSDP": {**FSDP, "max_steps": 3, "activation_checkpointing": True, "fsdp_config": {WRAPPED: BLOCKS}},
}


def training_losses(trainer: Any, attention: str, folder: str, options: dict[str, Any]) -> list[float]:
    """Return the losses of each step and of an evaluation."""
    options = dict(options)
    model: Any = deepcopy(vision_model("qwen2_5_vl", attention)).train()
    if options.pop("lora", False):
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(7)
        targets = ["q_proj", "v_proj", "qkv"]  # of the text model and of the tower
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft's own
            model = get_peft_model(model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False)).double()
    given = settings(TrainingArguments, folder, remove_unused_columns=False, **options)
    rows = {"train_dataset": examples(8), "eval_dataset": examples(3), "data_collator": collate}
    made = trainer(model=model, args=given, **rows)
    made.train()
    losses = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    return [*losses, made.evaluate()["eval_loss"]]


@on_each_rank
def train_by_trainer(shape: Shape, folder: str, options: dict[str, Any]) -> list[float]:
    with launched(), fsdp_on_cpus() if "fsdp" in options else nullcontext():
        return training_losses(hf.on_mesh(Trainer, named_mesh(shape, AXES)), "attnmesh", folder, options)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.long
def test_a_trainer_has_the_losses_of_one_device(recipe: str, pool: Pool, tmp_path: Path) -> None:
    options = RECIPES[recipe]
    alone = {name: x for name, x in options.items() if "fsdp" not in name}
    expected = training_losses(Trainer, "sdpa", str(tmp_path / "0"), alone)
    assert expected[-2] < expected[0]
    for shape in (Shape(1, 2, 2), *([] if recipe == "LoRA" else [Shape(1, 1, 1), Shape(1, 2, 1)])):
        for found in pool.run(shape.ranks, train_by_trainer, shape, str(tmp_path / str(shape.ranks)), options):
            assert found == pytest.approx(expected, abs=FLOAT64_MODEL)


def fine_tuned(trainer: Any, attention: str, folder: str) -> list[float]:
    """Return the losses and accuracies of TRL's trainer, which calls the processor for texts with images."""
    from trl import SFTConfig

    first, second, third = processed_images.pictures()
    rows = [
        {"text": processed_images.TEXTS[0], "images": [first, second]},
        {"text": processed_images.TEXTS[1], "images": [third]},
    ]
    model = build_images(image_case("llava"), attention, torch.float32)
    options: dict[str, Any] = {"max_steps": 2, "max_length": None, "gradient_checkpointing": False}
    options["remove_unused_columns"] = False
    data = {"train_dataset": Dataset.from_list(4 * rows), "processing_class": processed_images.processor("right")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TRL's own
        made = trainer(model=model, args=settings(SFTConfig, folder, **options), **data)
        made.train()
    return [entry[name] for entry in made.state.log_history for name in LOGGED if name in entry]


@on_each_rank
def fine_tune_by_trainer(shape: Shape, folder: str) -> list[float]:
    with launched():
        return fine_tuned(hf.on_mesh(trainer_class("SFTTrainer"), named_mesh(shape, AXES)), "attnmesh", folder)


@pytest.mark.long
def test_a_trainer_of_trl_calls_the_processor(pool: Pool, tmp_path: Path) -> None:
    expected = fine_tuned(trainer_class("SFTTrainer"), "sdpa", str(tmp_path / "1"))
    assert len(expected) > 8
    for found in pool.run(2, fine_tune_by_trainer, Shape(1, 2, 1), str(tmp_path / "2")):
        assert found == pytest.approx(expected, rel=TRAINED, abs=FLOAT32_SUMS)


# --- bad input ---


Example = tuple[Batch, Any]
"""A batch and its model."""


def of_qwen() -> Example:
    return batch_of("qwen2_5_vl"), model_of("qwen2_5_vl", "attnmesh")


def with_other_pixels(rank: int) -> Example:
    batch, model = of_qwen()
    return batch | {"pixel_values": batch["pixel_values"] + rank}, model


def with_images_on_one_rank(rank: int) -> Example:
    batch, model = of_qwen()
    return batch if rank else {name: batch[name] for name in ("input_ids", "labels")}, model


def with_fewer_features(rank: int) -> Example:
    batch, model = of_qwen()
    return batch | {"pixel_values": batch["pixel_values"][:32], "image_grid_thw": batch["image_grid_thw"][:1]}, model


def with_fewer_features_on_one_rank(rank: int) -> Example:
    return with_fewer_features(rank) if rank else of_qwen()


def packed(rank: int) -> Example:
    batch, model = of_qwen()
    positions = torch.cat((torch.arange(30), torch.arange(batch["input_ids"].shape[1] - 30)))
    return batch | {"position_ids": positions[None]}, model


def packed_by_a_collator(rank: int) -> Example:
    batch, model = of_qwen()
    edges = torch.tensor([0, 30, batch["input_ids"].shape[1]], dtype=torch.int32)
    return batch | dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), edges), model


def padded_on_the_left(rank: int) -> Example:
    _, model = of_qwen()
    return labelled(image_prompts.inputs(image_prompts.FIRST, (20, "large", 4))), model


def of_a_text_model(rank: int) -> Example:
    return labelled(processed_images.processed("right")), families.model("llama", "attnmesh")


def with_padding_in_a_span(rank: int) -> Example:
    batch, model = batch_of("paligemma"), model_of("paligemma", "attnmesh")
    batch["attention_mask"][:, -3:], batch["labels"][:, -5:] = 0, -100
    return batch, model


REFUSED: list[tuple[Callable[[int], Example], str]] = [
    (with_other_pixels, "pixel_values"),
    (with_images_on_one_rank, "image_grid_thw"),
    (with_fewer_features_on_one_rank, "image_grid_thw"),
    (with_fewer_features, "Image features and image tokens do not match"),
    (packed, "no positions or packing beside images"),
    (packed_by_a_collator, "Fix: leave it out: the model computes positions; train packed rows without images"),
    (padded_on_the_left, "padding on the right"),
    (of_a_text_model, "merges images into the embeddings of its text model, given LlamaForCausalLM"),
    (with_padding_in_a_span, "padding in a span"),
]


@on_each_rank
def catch_refusal(example: Callable[[int], Example]) -> str:
    """Return the error of a rank for images that are not right."""
    batch, model = example(dist.get_rank())
    try:
        model(**hf.shard_batch(batch, named_mesh(Shape(1, 1, 2), AXES)))
    except (errors.InputError, ValueError) as error:
        total = torch.ones(1)
        dist.all_reduce(total)  # ranks are in step
        assert total == 2
        text = {"input_ids": prompt(20), "attention_mask": torch.ones(1, 20, dtype=torch.long)}
        whole, expected = (model_of("qwen2_5_vl", name)(**text).logits for name in ("attnmesh", "sdpa"))
        torch.testing.assert_close(whole, expected)  # nothing is left of the batch
        return str(error)
    return ""


@pytest.mark.parametrize(("example", "message"), REFUSED)
def test_images_that_do_not_fit_are_refused_on_all_ranks_alike(
    example: Callable[[int], Example], message: str, pool: Pool
) -> None:
    first, second = pool.run(2, catch_refusal, example)
    assert first == second
    assert message in first


def test_a_text_model_that_cuts_runs_alone_as_before() -> None:
    model, ids = model_of("qwen2_5_vl", "sdpa"), prompt(9) % 80 + 5
    before = model.get_decoder()(ids).last_hidden_state
    prepare_text_model([model])
    assert torch.equal(model.get_decoder()(ids).last_hidden_state, before)
