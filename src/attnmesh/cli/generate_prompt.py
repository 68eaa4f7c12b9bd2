"""The prompt, the model's place and the mesh of `attnmesh generate`, checked before any rank is started."""

import os
import sys
from logging import ERROR, getLogger
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from attnmesh.cli.launch import leaving_tidily, under_torchrun
from attnmesh.cli.mesh_option import MeshChoice, choose
from attnmesh.cli.output import Status
from attnmesh.errors import ModelError, require


class Prompt(NamedTuple):
    """The text of `--prompt` and `--prompt-file`; `raw` leaves out the chat template."""

    text: str = ""
    file: Path | None = None
    raw: bool = False

    def read(self) -> str:
        """Return the text of the file, then the given one."""
        try:
            begin = "" if self.file is None else sys.stdin.read() if str(self.file) == "-" else self.file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError("--prompt-file", "a file of text", f"{self.file}: {error}", "name another") from None
        text = "\n\n".join(part for part in (begin, self.text) if part.strip())
        require(bool(text), ModelError, "prompt", "some text", "an empty prompt", "pass --prompt or --prompt-file")
        try:
            text.encode()
        except UnicodeEncodeError as error:  # invalid bytes of a command line arrive as lone surrogates
            raise ModelError("prompt", "text in UTF-8", str(error), "look to the terminal's encoding") from None
        return text

    def ids(self, tokenizer: Any, text: str) -> list[int]:
        """Return the tokens of the text, in the chat template of the tokenizer if it has one."""
        if self.raw or not tokenizer.chat_template:
            ids: list[int] = tokenizer(text)["input_ids"]
            return ids
        messages = [{"role": "user", "content": text}]
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])


class Prepared(NamedTuple):
    """A checked prompt for a model, and the mesh."""

    place: str
    ids: tuple[int, ...]
    heads: tuple[int, int]
    mesh: MeshChoice
    tokenizer: Any = None
    """None on ranks, which need none."""


def prepare(model: str, prompt: Prompt, new: int, ranks: int, mesh: str, status: Status) -> Prepared:
    """Find the model, read the prompt, and choose the mesh."""
    from transformers.utils import logging

    from attnmesh.hf.latent import latent_widths
    from attnmesh.hf.load import locate, open_config, open_tokenizer

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    getLogger("huggingface_hub").setLevel(ERROR)  # it logs each attempt to reach the hub
    text = prompt.read()
    if under_torchrun() and os.environ.get("LOCAL_RANK") != "0":
        dist.barrier()  # one rank of each host fetches and unpacks
    with leaving_tidily():  # it may write a folder
        place = locate(model, status.update)
    if under_torchrun() and os.environ.get("LOCAL_RANK") == "0":
        dist.barrier()
    given, fix = f"{model!r}, a configuration alone", "name the folder or the hub's model that it belongs to"
    require(not place.endswith(".json"), ModelError, "--model", "weights and a tokenizer", given, fix)
    config = open_config(place).get_text_config(decoder=True)
    tokenizer = open_tokenizer(place)
    ids = prompt.ids(tokenizer, text)
    _check_length(len(ids), new, config)
    heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if latent_widths(config) is not None:
        heads = config.num_attention_heads, 1  # latents have one head
    return Prepared(place, tuple(ids), heads, choose(mesh, ranks, *heads), tokenizer)


def _check_length(tokens: int, new: int, config: Any) -> None:
    """Raise if there are no tokens, or more than fit the model's context."""
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and tokens + new > longest:
        fix = f"shorten the prompt by {tokens + new - longest} tokens, or use a model with a longer context"
        fix = f"pass --max-new-tokens {longest - tokens} or less" if tokens < longest // 2 else fix
        given = f"{tokens} and {new} new ones"
        raise ModelError("prompt", f"at most {longest} tokens, the model's context", given, fix)
    fix = "check the tokenizer's files"
    require(tokens > 0, ModelError, "prompt", "at least one token", "none by this tokenizer", fix)
