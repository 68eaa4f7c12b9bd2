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
from attnmesh.errors import InputError, ModelError
from attnmesh.planner.serving import ModelSizes
from attnmesh_command.messages import under_torchrun
from attnmesh_command.option_texts import read_prompt

TYPICAL_CONTEXT = 4096
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


class PromptTokens(NamedTuple):
    """Tokens of a prompt, and the inputs for its images."""

    ids: tuple[int, ...]
    images: dict[str, Any] | None = None
    """Inputs for images; None for a prompt of text."""


class ModelOnMesh(NamedTuple):
    """A model's path, and the mesh that was chosen for it."""

    path: str
    heads: tuple[int, int]
    mesh: MeshChoice
    layers: LayersChoice
    max_context: int | None
    """Tokens of the model's context; None if it has no limit."""
    reads_images: bool
    """True for a model of images and text."""
    tokenizer: Any
    """Tokenizer of the model; None on ranks, but for stop strings."""
    processor: Any
    """The processor of a model of images; None on ranks."""

    @property
    def for_ranks(self) -> "ModelOnMesh":
        """The same without what ranks do not need."""
        return self._replace(tokenizer=None, processor=None)


class FoundModel(NamedTuple):
    """A model before its mesh is chosen."""

    path: str
    config: Any
    tokenizer: Any
    processor: Any
    """None for a model of text."""

    @property
    def max_context(self) -> int | None:
        """Tokens of the model's context; None if it has no limit."""
        limit: int | None = getattr(self.config, "max_position_embeddings", None)
        return limit

    @property
    def heads(self) -> tuple[int, int]:
        """Query heads and key heads."""
        from attnmesh.hf.latent_states import latent_widths

        q_heads = self.config.num_attention_heads
        if latent_widths(self.config) is not None:
            return q_heads, 1  # latents have one head
        return q_heads, getattr(self.config, "num_key_value_heads", None) or q_heads


def prepare_prompt(
    model: str,
    prompt: PromptOptions,
    new_tokens: int,
    ranks: int,
    mesh: MeshOptions,
    status: Status,
    *,
    revision: str | None = None,
) -> tuple[ModelOnMesh, PromptTokens]:
    """Read the prompt, find the model, and choose the mesh."""
    text = prompt.read()
    found = _read_model(model, status, images=bool(prompt.images), revision=revision)
    images: dict[str, Any] | None = None
    if prompt.images:
        images = prompt.with_images(found.processor, text)
        images.pop("attention_mask", None)
        ids = images.pop("input_ids")[0].tolist()
    else:
        ids = prompt.ids(found.tokenizer, text)
    _check_length(len(ids), new_tokens, found.max_context)
    return _on_mesh(found, mesh, ranks, len(ids) + new_tokens), PromptTokens(tuple(ids), images)


def find_model(
    model: str,
    ranks: int,
    mesh: MeshOptions,
    status: Status,
    *,
    images: bool | None = False,
    revision: str | None = None,
) -> ModelOnMesh:
    """Find the model, and choose the mesh. It is one of images and text if `images`; None looks at the model."""
    found = _read_model(model, status, images=images, revision=revision)
    return _on_mesh(found, mesh, ranks, min(found.max_context or TYPICAL_CONTEXT, TYPICAL_CONTEXT))


def find_draft(draft: str, tokenizer: Any, status: Status) -> str:
    """Return the place of a draft model, or raise unless it has the tokens of the model, and can go back."""
    from attnmesh.hf.models import is_recurrent

    try:
        found = _read_model(draft, status, images=False, revision=None)
    except InputError as error:
        raise type(error)("--draft", *error.args[1:]) from None
    vocabulary, draft_vocabulary = tokenizer.get_vocab(), found.tokenizer.get_vocab()
    differ = sorted(
        token for token in {*vocabulary, *draft_vocabulary} if vocabulary.get(token) != draft_vocabulary.get(token)
    )
    if differ:
        given = f"one in which {len(differ)} differ, such as {differ[:1]!r:.40}"
        raise ModelError("--draft", "a model with the same tokens", given, "name a smaller model of its kind")
    if is_recurrent(found.config):
        expected, given = "a model whose caches take tokens back", f"a {found.config.model_type}, whose states do not"
        raise ModelError("--draft", expected, given, "name another, or leave it out")
    return found.path


def _read_model(model: str, status: Status, *, images: bool | None, revision: str | None) -> FoundModel:
    """Return what is known of a model before its mesh is chosen."""
    from transformers.utils import logging

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
    if path.endswith(".json"):
        fix = "name the folder or the hub's model that it belongs to"
        raise ModelError("--model", "weights and a tokenizer", f"{model!r}, a configuration alone", fix)
    images = reads_images(path) if images is None else images
    config = open_config(path, images=images).get_text_config(decoder=True)
    processor = open_processor(path) if images else None
    tokenizer = open_tokenizer(path) if processor is None else processor.tokenizer
    return FoundModel(path, config, tokenizer, processor)


def _on_mesh(found: FoundModel, options: MeshOptions, ranks: int, length: int) -> ModelOnMesh:
    """Choose the mesh, and who computes the layers, for contexts of this length."""
    config = found.config

    def sized() -> ModelSizes:
        from attnmesh.hf.model_size import model_size

        dtype = str(getattr(config, "dtype", None) or "float32") if options.dtype == "auto" else options.dtype
        return model_size(config, dtype.removeprefix("torch."), length=length, phase="decode")

    mesh, layers = choose_mesh(options, ranks, *found.heads, sized)
    return ModelOnMesh(
        path=found.path,
        heads=found.heads,
        mesh=mesh,
        layers=layers,
        max_context=found.max_context,
        reads_images=found.processor is not None,
        tokenizer=found.tokenizer,
        processor=found.processor,
    )


def _check_length(tokens: int, new_tokens: int, max_context: int | None) -> None:
    """Raise if there are no tokens, or more than fit the model's context."""
    if max_context is not None and tokens + new_tokens > max_context:
        fix = f"shorten the prompt by {tokens + new_tokens - max_context} tokens, or use a model with a longer context"
        fix = f"pass --max-new-tokens {max_context - tokens} or less" if tokens < max_context // 2 else fix
        given = f"{tokens} and {new_tokens} new ones"
        raise ModelError("prompt", f"at most {max_context} tokens, the model's context", given, fix)
    if not tokens:
        raise ModelError("prompt", "at least one token", "none by this tokenizer", "check the tokenizer's files")
