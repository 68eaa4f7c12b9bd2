"""The prompt, the model's path and the mesh of `attnmesh generate`, checked before any rank is started."""

import os
import warnings
from logging import ERROR, getLogger
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from attnmesh.cli.launch import leaving_tidily
from attnmesh.cli.mesh_option import LayersChoice, MeshChoice, MeshOptions, choose_mesh
from attnmesh.cli.output import Status
from attnmesh.errors import InputError, ModelError, require
from attnmesh.mesh.shapes import Shape
from attnmesh.planner.serving import ModelSizes
from attnmesh_command.messages import under_torchrun
from attnmesh_command.option_texts import read_prompt

TYPICAL = 4096
"""Tokens of a context for which a mesh is chosen before there is a prompt."""


class PromptOptions(NamedTuple):
    """The text of `--prompt` and `--prompt-file`, after images; `raw` leaves out the chat template."""

    text: str = ""
    file: Path | None = None
    raw: bool = False
    images: tuple[Path, ...] = ()

    def read(self) -> str:
        """Return the text of the file, then the given one."""
        return read_prompt(self.text, self.file)

    def ids(self, tokenizer: Any, text: str) -> list[int]:
        """Return the tokens of the text, in the chat template of the tokenizer if it has one."""
        if self.raw or not tokenizer.chat_template:
            ids: list[int] = tokenizer(text)["input_ids"]
            return ids
        messages = [{"role": "user", "content": text}]
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])

    def with_images(self, processor: Any, text: str) -> dict[str, Any]:
        """Return the tokens of images and text, and the inputs for images."""
        from attnmesh.hf.load import as_model_error

        names = ", ".join(map(str, self.images))
        fix = "pass other files, or --raw and a text with the image tokens"
        with as_model_error("--image", "images that the model's processor takes", names, fix):
            pictures = [_open_image(path) for path in self.images]
            if self.raw or not getattr(processor, "chat_template", None):
                return dict(processor(text=text, images=pictures, return_tensors="pt"))
            content = [*({"type": "image", "image": picture} for picture in pictures), {"type": "text", "text": text}]
            template = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
            return dict(processor.apply_chat_template([{"role": "user", "content": content}], **template))


def _open_image(path: Path) -> Any:
    """Return an image. Raise for one of more pixels than Pillow takes for harmless."""
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        return Image.open(path).convert("RGB")


class Prepared(NamedTuple):
    """A model's path and mesh, and a checked prompt for it."""

    path: str
    ids: tuple[int, ...]
    heads: tuple[int, int]
    mesh: MeshChoice
    longest: int | None
    """Tokens of the model's context; None if it has no limit."""
    tokenizer: Any = None
    """Tokenizer of the model; None on ranks, but for stop strings."""
    processor: Any = None
    """The processor of a model of images; None on ranks."""
    images: dict[str, Any] | None = None
    """Inputs for images; None for a model of text."""
    layers: LayersChoice = LayersChoice()

    @property
    def for_ranks(self) -> "Prepared":
        """The same without what ranks do not need."""
        return self._replace(tokenizer=None, processor=None)


def prepare_prompt(
    model: str,
    prompt: PromptOptions,
    new_tokens: int,
    ranks: int,
    mesh: MeshOptions,
    status: Status,
    *,
    revision: str | None = None,
) -> Prepared:
    """Read the prompt, find the model, and choose the mesh."""
    text = prompt.read()
    prepared, config = _read_model(model, status, images=bool(prompt.images), revision=revision)
    if prompt.images:
        inputs = prompt.with_images(prepared.processor, text)
        inputs.pop("attention_mask", None)
        ids = inputs.pop("input_ids")[0].tolist()
        prepared = prepared._replace(images=inputs)
    else:
        ids = prompt.ids(prepared.tokenizer, text)
    _check_length(len(ids), new_tokens, prepared.longest)
    return _on_mesh(prepared, config, mesh, ranks, len(ids) + new_tokens)._replace(ids=tuple(ids))


def find_model(
    model: str,
    ranks: int,
    mesh: MeshOptions,
    status: Status,
    *,
    images: bool | None = False,
    revision: str | None = None,
) -> Prepared:
    """Find the model, and choose the mesh. It is one of images and text if `images`; None looks at the model."""
    prepared, config = _read_model(model, status, images=images, revision=revision)
    return _on_mesh(prepared, config, mesh, ranks, min(prepared.longest or TYPICAL, TYPICAL))


def find_draft(draft: str, tokenizer: Any, status: Status) -> str:
    """Return the place of a draft model, or raise unless it has the tokens of the model, and can go back."""
    from attnmesh.hf.models import is_recurrent

    try:
        prepared, config = _read_model(draft, status, images=False, revision=None)
    except InputError as error:
        raise type(error)("--draft", *error.args[1:]) from None
    vocabulary, draft_vocabulary = tokenizer.get_vocab(), prepared.tokenizer.get_vocab()
    differ = sorted(
        token for token in {*vocabulary, *draft_vocabulary} if vocabulary.get(token) != draft_vocabulary.get(token)
    )
    given, fix = (
        f"one in which {len(differ)} differ, such as {differ[:1]!r:.40}",
        "name a smaller model of its kind",
    )
    require(not differ, ModelError, "--draft", "a model with the same tokens", given, fix)
    expected, given = "a model whose caches take tokens back", f"a {config.model_type}, whose states do not"
    require(not is_recurrent(config), ModelError, "--draft", expected, given, "name another, or leave it out")
    return prepared.path


def _read_model(model: str, status: Status, *, images: bool | None, revision: str | None) -> tuple[Prepared, Any]:
    """Return what is known of a model before its mesh is chosen, on one rank so far, and its configuration."""
    from transformers.utils import logging

    from attnmesh.hf.latent_states import latent_widths
    from attnmesh.hf.load import locate, open_config, open_processor, open_tokenizer, reads_images

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    getLogger("huggingface_hub").setLevel(ERROR)  # it logs each attempt to reach the hub
    if under_torchrun() and os.environ.get("LOCAL_RANK") != "0":
        dist.barrier()  # one rank of each host fetches and unpacks
    with leaving_tidily():  # it may write a folder
        path = locate(model, status.update, revision)
    if under_torchrun() and os.environ.get("LOCAL_RANK") == "0":
        dist.barrier()
    given, fix = f"{model!r}, a configuration alone", "name the folder or the hub's model that it belongs to"
    require(not path.endswith(".json"), ModelError, "--model", "weights and a tokenizer", given, fix)
    images = reads_images(path) if images is None else images
    config = open_config(path, images=images).get_text_config(decoder=True)
    processor = open_processor(path) if images else None
    tokenizer = open_tokenizer(path) if processor is None else processor.tokenizer
    heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if latent_widths(config) is not None:
        heads = config.num_attention_heads, 1  # latents have one head
    longest = getattr(config, "max_position_embeddings", None)
    alone = MeshChoice(Shape(1, 1, 1), 1, False, "")
    return Prepared(path, (), heads, alone, longest, tokenizer, processor, {} if images else None), config


def _on_mesh(prepared: Prepared, config: Any, options: MeshOptions, ranks: int, length: int) -> Prepared:
    """Choose the mesh, and who computes the layers, for contexts of this length."""

    def sized() -> ModelSizes:
        from attnmesh.hf.model_size import model_size

        dtype = str(getattr(config, "dtype", None) or "float32") if options.dtype == "auto" else options.dtype
        return model_size(config, dtype.removeprefix("torch."), length=length, phase="decode")

    mesh, layers = choose_mesh(options, ranks, *prepared.heads, sized)
    return prepared._replace(mesh=mesh, layers=layers)


def _check_length(tokens: int, new_tokens: int, longest: int | None) -> None:
    """Raise if there are no tokens, or more than fit the model's context."""
    if longest is not None and tokens + new_tokens > longest:
        fix = f"shorten the prompt by {tokens + new_tokens - longest} tokens, or use a model with a longer context"
        fix = f"pass --max-new-tokens {longest - tokens} or less" if tokens < longest // 2 else fix
        given = f"{tokens} and {new_tokens} new ones"
        raise ModelError("prompt", f"at most {longest} tokens, the model's context", given, fix)
    fix = "check the tokenizer's files"
    require(tokens > 0, ModelError, "prompt", "at least one token", "none by this tokenizer", fix)
