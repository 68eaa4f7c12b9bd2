"""`attnmesh generate --image` of a tiny LLaVA: the tokens of stock transformers, errors of one line."""

import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from PIL import Image
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from tests.support.images.image_models import build_images, image_case
from tests.support.images.processed_images import TEMPLATE, pictures, processor
from tests.support.process.command import run_main

TEXT = "w4 w5 w6"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, its processor, images, and files that are none."""
    made = tmp_path_factory.mktemp("model")
    logging.disable_progress_bar()
    build_images(image_case("llava"), "sdpa", torch.float32).save_pretrained(made)
    of_images = processor("left")
    of_images.chat_template = TEMPLATE
    of_images.save_pretrained(made)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=97, **sizes)).save_pretrained(made / "text")
    for number, image in enumerate(pictures()):
        image.save(made / f"{number}.png")
    (made / "text.png").write_text("no image")
    return made


def ask(folder: Path, *images: str, model: str = ".", text: str = TEXT) -> list[str]:
    files = [part for name in images for part in ("--image", str(folder / name))]
    return ["generate", "--model", str(folder / model), *files, "--prompt", text, "--max-new-tokens", "6", "--json"]


@pytest.mark.parametrize("raw", [False, True], ids=["template", "raw"])
def test_several_images_give_the_tokens_of_stock_transformers(raw: bool, folder: Path) -> None:
    written = "w4 <image> <image> w5 w79" if raw else f"<image> <image> {TEXT} w79"
    batch = processor("left")(text=written, images=pictures()[:2], return_tensors="pt")
    stock = build_images(image_case("llava"), "sdpa", torch.float32)
    expected = stock.generate(**batch, max_new_tokens=6, do_sample=False)[0, batch["input_ids"].shape[1] :]
    asked = ask(folder, "0.png", "1.png", text=written if raw else TEXT)
    done = run_main(*asked, *(["--raw"] if raw else []), "--mesh", "keys=2")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["tokens"] == expected.tolist()
    assert report["prompt_tokens"] == batch["input_ids"].shape[1]


WRONG = {
    "no file": (("3.png",), {}, "3.png"),
    "no image": (("text.png",), {}, "cannot identify image file"),
    "a text model": (("0.png",), {"model": "text"}, "expected a model of images and text"),
    "a checkpoint": (("0.png",), {}, "--checkpoint: expected a prompt without images"),
    "a bomb": (("0.png",), {}, "exceeds limit of 600 pixels"),
    "another number": (("0.png",), {"text": "w4 <image> <image> w5"}, "--image: expected images"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_is_said_in_one_line(case: str, folder: Path, tmp_path: Path) -> None:
    images, more, said = WRONG[case]
    options = {"a checkpoint": ["--checkpoint", str(tmp_path)], "another number": ["--raw"]}.get(case, [])
    with mock.patch.object(Image, "MAX_IMAGE_PIXELS", 600 if case == "a bomb" else 10**6):
        done = run_main(*ask(folder, *images, **more), *options)
    assert done.returncode in (1, 2)
    assert said in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
