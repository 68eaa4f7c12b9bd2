"""Frames of videos in prompts and batches to learn, on one to four ranks, beside stock transformers on one device."""

from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

import attnmesh.hf as hf
from attnmesh import errors
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.images.image_answers import alike, answer, generated, submit
from tests.support.images.image_models import build_images, image_case
from tests.support.images.image_prompts import (
    IMAGES,
    OPTIONS,
    SHAPES,
    SIZES,
    Part,
    compute_answer_logits,
    logits,
    max_error,
    pixels,
    stock,
    vision_model,
)
from tests.support.images.image_training import check, labelled
from tests.support.models.families import prompt
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.serving.engines import running
from tests.support.truth.mesh_problems import named_mesh
from tests.support.truth.seeds import some
from tests.support.truth.tolerances import FLOAT64_MODEL, worst

Batch = dict[str, Any]

CLIPS = {"clip": (3, 4, 6), "slow": (2, 4, 4), "late": (3, 4, 6)}
"""Videos by name, as patches along time, height and width."""

SECONDS = {"clip": 0.5, "slow": 1.5, "late": 1.5}
"""Seconds between frames. The last frames of `late` have higher positions than the short text after them."""

FIRST: tuple[Part, ...] = (5, "wide", 4, "clip", 26)
SECOND: tuple[Part, ...] = (*FIRST, 3, "slow", 9, "high", 17)


def clip_pixels(name: str, seed: int = 0) -> Tensor:
    """Random patches of a video."""
    generator = torch.Generator().manual_seed(len(name) + 100 * seed)
    return torch.randn(int(torch.tensor(CLIPS[name]).prod()), 96, dtype=torch.float64, generator=generator)


def media_tokens(kind: str, name: str) -> list[int]:
    """Return the tokens of an image or a video. Qwen3-VL has the time, which is text, before each frame."""
    frames, height, width = (CLIPS | SIZES)[name]
    patches = height * width // 4
    if name in SIZES:
        return [92, *[90] * patches, 93]
    if kind == "qwen2_5_vl":
        return [92, *[91] * (frames * patches), 93]
    return [token for frame in range(frames) for token in (6 + frame, 7, 92, *[91] * patches, 93)]


def inputs(kind: str, *rows: tuple[Part, ...], seed: int = 0, side: str = "left") -> Batch:
    """What a processor of Qwen returns for texts with images and videos, padded on a side."""
    names = [part for row in rows for part in row if isinstance(part, str)]
    images, videos = ([name for name in names if name in known] for known in (SIZES, CLIPS))
    sequences = [
        [
            token
            for place, part in enumerate(row)
            for token in (
                media_tokens(kind, part) if isinstance(part, str) else (prompt(part, seed=place)[0] % 80 + 5).tolist()
            )
        ]
        for row in rows
    ]
    length = max(map(len, sequences))
    fill = {"left": lambda ids: [0] * (length - len(ids)) + ids, "right": lambda ids: ids + [0] * (length - len(ids))}
    ids = torch.tensor([fill[side](row) for row in sequences])
    mask = torch.tensor([fill[side]([1] * len(row)) for row in sequences])
    batch: Batch = {
        "input_ids": ids,
        "attention_mask": mask,
        "mm_token_type_ids": (ids == 90).int() + 2 * (ids == 91).int(),
    }
    if images:
        batch["pixel_values"] = torch.cat([pixels(name, seed) for name in images])
        batch["image_grid_thw"] = torch.tensor([SIZES[name] for name in images])
    if videos:
        batch["pixel_values_videos"] = torch.cat([clip_pixels(name, seed) for name in videos])
        batch["video_grid_thw"] = torch.tensor([CLIPS[name] for name in videos])
        if kind == "qwen2_5_vl":
            batch["second_per_grid_ts"] = torch.tensor([SECONDS[name] for name in videos])
    return batch


PROMPTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "one": ((FIRST,), {}),
    "padded": (((9, "slow", 4), SECOND), {}),
    "chunked": ((SECOND,), {"prefill_chunk_size": 16}),
    "short": (((5, "late", 2), (7, "late", 1)), {}),
}
"""Texts with images and videos, and options. No number of ranks divides the tokens."""

PAIRS = {*zip(PROMPTS, SHAPES[1:] + SHAPES[1:], strict=True), ("padded", SHAPES[0])}
"""Cases of `make test`. The others are marked long."""


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        pytest.param(name, shape, marks=[] if (name, shape) in PAIRS else pytest.mark.long)
        for name in PROMPTS
        for shape in SHAPES
    ],
)
@pytest.mark.parametrize("kind", IMAGES)
def test_a_prompt_with_videos_gives_stock_logits(kind: str, name: str, shape: Shape, pool: Pool) -> None:
    rows, options = PROMPTS[name]
    batch = inputs(kind, *rows)
    expected = stock(kind, batch)
    for found in pool.run(shape.ranks, compute_answer_logits, kind, shape, batch, options):
        assert float((found - expected).abs().max()) < FLOAT64_MODEL


@on_each_rank
def measure_errors_of_turns(kind: str) -> list[tuple[float, int]]:
    """Return on a rank how far the logits of several turns are off, and the tokens that each took from the cache."""
    model = vision_model(kind, "attnmesh")
    taken = []
    cache = hf.ShardedCache(model.config, named_mesh(Shape(1, 1, 2), AXES), block=4)
    choose_block = cache.choose_block
    cache.choose_block = lambda tokens: (taken.append(cache.get_seq_length()), choose_block(tokens))  # type: ignore[assignment]
    slower = inputs(kind, FIRST)
    if kind == "qwen2_5_vl":
        slower["second_per_grid_ts"] = 3 * slower["second_per_grid_ts"]
    batches = inputs(kind, FIRST), inputs(kind, SECOND), inputs(kind, FIRST), slower, inputs(kind, FIRST, seed=1)
    errors = [max_error(hf.generate(model, **batch, cache=cache, **OPTIONS), stock(kind, batch)) for batch in batches]
    return [*zip(errors, taken, strict=True)]


@pytest.mark.parametrize("kind", some([*IMAGES], "qwen2_5_vl"))
def test_turns_keep_the_videos_that_are_the_same(kind: str, pool: Pool) -> None:
    first = inputs(kind, FIRST)["input_ids"].shape[1]
    for found in pool.run(2, measure_errors_of_turns, kind):
        errors, taken = zip(*found, strict=True)
        assert worst(errors) < FLOAT64_MODEL
        # A turn adds a video and an image; they are taken back; frames farther apart; other pixels.
        assert taken == (0, first, first - 1, 6 if kind == "qwen2_5_vl" else first - 1, 6)


@pytest.mark.parametrize(("kind", "shape"), [("qwen2_5_vl", Shape(1, 1, 3)), ("qwen3_vl", Shape(1, 2, 1))])
def test_loss_and_gradients_with_videos_are_those_of_one_device(kind: str, shape: Shape, pool: Pool) -> None:
    batch = labelled(inputs(kind, FIRST, (20, "slow", 4), side="right"))
    batch["labels"] = batch["labels"].masked_fill(batch["input_ids"] == 91, -100)
    gradients = check(kind, shape, batch, pool)
    assert sum(bool(x.any()) for name, x in gradients.items() if "visual" in name) > 10


@on_each_rank
def stream_videos(kind: str) -> None:
    """Submit two prompts whose videos alone differ, and compare the answers with those of `generate`."""
    model, mesh = vision_model(kind, "attnmesh"), named_mesh(Shape(1, 1, 2), AXES)
    batches = [inputs(kind, FIRST), inputs(kind, FIRST, seed=1)]
    wanted = [generated(model, batch, mesh) for batch in batches]
    assert wanted[0] != wanted[1]
    with running(model, mesh, max_gap=0.01, block=4) as engine:
        if engine is not None:
            assert alike([answer(stream) for stream in [submit(engine, batch) for batch in batches]], wanted)


def test_an_engine_takes_videos(pool: Pool) -> None:
    pool.run(2, stream_videos, "qwen2_5_vl")


# --- real processors ---

WORDS = ("<image>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
NUMBERS = dict(zip(WORDS, (90, 90, 91, 92, 93), strict=True))


def tokenizer(*special: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of few words and of these special tokens."""
    words = {"<pad>": 0, **{f"w{number}": number for number in range(1, 80)}, "seconds": 80, "<": 81, ">": 82, ".": 83}
    words |= {name: NUMBERS[name] for name in special}
    tokens = Tokenizer(WordLevel(words, unk_token="<pad>"))
    tokens.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokens, pad_token="<pad>", additional_special_tokens=[*special], padding_side="left"
    )


def frames(count: int, height: int, width: int) -> np.ndarray[Any, Any]:
    """Return the frames of a video."""
    return np.random.default_rng(count).integers(0, 255, (count, height, width, 3), dtype=np.uint8)


def of_internvl() -> Batch:
    """Return what InternVL's processor of images makes of two videos: it takes frames as images of four tokens."""
    clips = [frames(3, 36, 40), frames(2, 33, 50)]
    made = GotOcr2ImageProcessorPil(size={"height": 32, "width": 32})([*clips[0], *clips[1]], return_tensors="pt")
    seen = [" ".join(f"w{20 + at} {4 * '<image> '}" for at in range(len(clip))) for clip in clips]
    text = [f"w3 {seen[0]} w4 w5 w6 w7", f"w9 w10 w11 w12 {seen[1]} w12 w13"]
    return {**tokenizer("<image>")(text, padding=True, return_tensors="pt"), "pixel_values": made["pixel_values"]}


def of_qwen(kind: str) -> Batch:
    """Return what the processor of Qwen2.5-VL or Qwen3-VL makes of two texts, two videos and an image."""
    pytest.importorskip("torchvision")  # processors of videos need it
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    sizes: Any = {"size": {"shortest_edge": 64, "longest_edge": 8192}, "patch_size": 4, "merge_size": 2}
    video: Any = Qwen2VLVideoProcessor if kind == "qwen2_5_vl" else Qwen3VLVideoProcessor
    whole: Any = Qwen2_5_VLProcessor if kind == "qwen2_5_vl" else Qwen3VLProcessor
    image = Qwen2VLImageProcessorPil(**{**sizes, "size": {"shortest_edge": 64, "longest_edge": 512}})
    processor = whole(image, tokenizer(*WORDS[1:]), video(**sizes, do_sample_frames=False))
    start, end = "<|vision_start|>", "<|vision_end|>"
    clip = f"{start}<|video_pad|>{end}" if kind == "qwen2_5_vl" else "<|video_pad|>"
    text = [f"w3 {clip} w4 w5 {start}<|image_pad|>{end} w6 w7", f"w9 w10 w11 w12 {clip} w12 w13"]
    clips = [frames(6, 16, 24), frames(4, 24, 16)]
    about = [
        {"fps": fps, "total_num_frames": len(clip), "duration": len(clip) / fps, "frames_indices": [*range(len(clip))]}
        for fps, clip in zip((4, 2), clips, strict=True)
    ]
    made = processor(
        text=text,
        images=[frames(1, 16, 16)[0]],
        videos=clips,
        video_metadata=about,
        padding=True,
        return_tensors="pt",
    )
    return dict(made)


def models_of(kind: str) -> tuple[Any, Any]:
    """Return the model of stock transformers, and that of attnmesh."""
    if kind in IMAGES:
        return vision_model(kind, "sdpa"), vision_model(kind, "attnmesh")
    stock_model, ours = (build_images(image_case(kind), name, torch.float64) for name in ("sdpa", "attnmesh"))
    return stock_model, ours


@on_each_rank
def measure_error_of_processed(kind: str, shape: Shape, batch: Batch) -> float:
    model, ours = models_of(kind)
    found = hf.generate(ours, **batch, mesh=named_mesh(shape, AXES), **OPTIONS)
    return max_error(found, logits(model.generate(**batch, **OPTIONS)))


@pytest.mark.parametrize("kind", ["internvl", *IMAGES])
def test_what_a_processor_returns_is_what_generate_takes(kind: str, pool: Pool) -> None:
    batch = of_qwen(kind) if kind in IMAGES else of_internvl()
    batch = {name: x.double() if "pixel" in name else x for name, x in batch.items()}
    assert ("pixel_values_videos" in batch) == (kind in IMAGES)
    assert not bool(batch["attention_mask"].all())
    assert worst(pool.run(2, measure_error_of_processed, kind, Shape(1, 1, 2), batch)) < FLOAT64_MODEL


# --- bad input ---


@on_each_rank
def catch_refusal(case: str) -> str:
    """Return the error of a rank for videos that are not right."""
    batch, rank = inputs("qwen2_5_vl", FIRST), torch.distributed.get_rank()
    mesh, model = named_mesh(Shape(1, 1, 2), AXES), vision_model("qwen2_5_vl", "attnmesh")
    if case == "fewer frames":
        grid = torch.tensor([[2, 4, 6]])
        batch |= {"pixel_values_videos": batch["pixel_values_videos"][:48], "video_grid_thw": grid}
    elif case == "other seconds":
        batch["second_per_grid_ts"] = batch["second_per_grid_ts"] + rank
    elif case == "sound":
        batch["use_audio_in_video"] = True
    elif case == "a model of images":
        batch = inputs("qwen2_5_vl", (9, "slow", 4))
        model = build_images(image_case("llava"), "attnmesh", torch.float64)
    try:
        hf.generate(model, **batch, mesh=mesh, max_new_tokens=2)
    except errors.InputError as error:
        assert float(hf.generate(model, prompt(9), mesh=mesh, max_new_tokens=1).sum()) > 0  # ranks are in step
        return str(error)
    return ""


REFUSED = {
    "fewer frames": "images that fit the prompt",
    "other seconds": "second_per_grid_ts",
    "sound": "use_audio_in_video=True. Fix: leave it out",
    "a model of images": "Fix: pass what the model's own processor returns",
}


@pytest.mark.parametrize("case", REFUSED)
def test_videos_that_do_not_fit_are_refused_on_all_ranks_alike(case: str, pool: Pool) -> None:
    first, second = pool.run(2, catch_refusal, case)
    assert first == second
    assert REFUSED[case] in first
