"""Unpacked models in the user's cache: whole, bounded, and with errors that name the cause."""

import json
import os
from collections.abc import Callable
from errno import ENOSPC
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from huggingface_hub import constants

from attnmesh.cli.generate_prompt import find_model
from attnmesh.cli.mesh_option import MeshOptions
from attnmesh.cli.output import Status
from attnmesh.cli.serve_command import _ready
from attnmesh.errors import ModelError
from attnmesh.hf import load
from attnmesh_command.messages import OptionError
from attnmesh_command.option_texts import check_model
from tests.support.models import families
from tools.generation import tokenizer


@pytest.fixture
def unpack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Unpack a file of that text, as a GGUF file of a tiny model."""
    monkeypatch.setattr(load, "HF_ASSETS_CACHE", str(tmp_path / "assets"))
    monkeypatch.setattr(load, "find_spec", lambda _: True)
    monkeypatch.setattr(load.AutoTokenizer, "from_pretrained", lambda *_, **__: tokenizer())
    monkeypatch.setattr(load.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: families.model("llama", "sdpa"))

    def locate(text: str) -> str:
        (tmp_path / "model.gguf").write_text(text)
        said: list[str] = []
        place = load.locate(str(tmp_path / "model.gguf"), said.append)
        return f"{place} {bool(said)}"

    return locate


def unpacked(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "assets" / "attnmesh" / "gguf").iterdir())


def test_a_model_is_unpacked_once_and_again_when_it_is_damaged(tmp_path: Path, unpack: Callable[[str], str]) -> None:
    place, again = unpack("one").split()
    assert again == "True"
    assert unpack("one") == f"{place} False"
    weights = Path(place) / "model.safetensors"
    size = weights.stat().st_size
    os.truncate(weights, size // 2)
    assert unpack("one") == f"{place} True"
    assert weights.stat().st_size == size
    (Path(place) / "sizes.json").write_text("no json")
    assert unpack("one") == f"{place} True"
    assert unpacked(tmp_path) == [Path(place)]


def test_the_models_used_last_are_kept(tmp_path: Path, unpack: Callable[[str], str]) -> None:
    places = []
    for second, text in enumerate(("one", "two", "three", "four")):
        places.append(Path(unpack(text).split()[0]))
        os.utime(places[-1], (second, second))
    assert unpacked(tmp_path) == sorted(places[1:])
    abandoned = places[0].with_name(f"{load.SCRATCH}xyz")
    abandoned.mkdir()
    os.utime(abandoned, (0, 0))
    unpack("five")
    assert not abandoned.exists()


RAISED: dict[str, tuple[Exception, str]] = {
    "damage": (ValueError("no such tensor"), r"expected a GGUF file of a language model, given .*no such tensor"),
    "memory": (
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
        r"expected memory for its weights, given .*Fix: free some",
    ),
    "a device": (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), r"expected memory for its weights"),
    "a disk": (OSError(ENOSPC, os.strerror(ENOSPC)), r"expected room on the disk, given .*Fix: free some, or set HF"),
}


@pytest.mark.parametrize("name", RAISED)
def test_an_error_names_its_cause_and_leaves_no_folder(
    name: str, tmp_path: Path, unpack: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    error, expected = RAISED[name]

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(load.AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(ModelError, match=expected):
        unpack("one")
    assert unpacked(tmp_path) == []


def test_a_cache_that_cannot_be_made_is_named(
    tmp_path: Path, unpack: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(load, "HF_ASSETS_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"expected a folder to unpack into, given .*Not a directory.*set HF_HOME"):
        unpack("one")


CODE = "from pathlib import Path\nPath({!r}).touch()\n"
OWN: dict[str, tuple[str, dict[str, Any], Callable[[str], Any]]] = {
    "configuration": ("config.json", {"AutoConfig": "own.Own"}, load.open_config),
    "tokenizer": ("tokenizer_config.json", {"AutoTokenizer": ["own.Own", None]}, load.open_tokenizer),
    "processor": ("processor_config.json", {"AutoProcessor": "own.Own"}, load.open_processor),
}


@pytest.mark.parametrize("name", OWN)
def test_code_that_a_folder_brings_is_never_run_nor_asked_for(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, auto_map, opened = OWN[name]
    ask = Mock(return_value="y")
    monkeypatch.setattr("builtins.input", ask)
    if name != "configuration":
        families.model("llama", "sdpa").config.save_pretrained(tmp_path)
    (tmp_path / file).write_text(json.dumps({"model_type": "own", "auto_map": auto_map}))
    (tmp_path / "own.py").write_text(CODE.format(str(tmp_path / "has run")))
    with pytest.raises(ModelError, match=r"that transformers has itself, given .*code of its own. Fix: use another"):
        opened(str(tmp_path))
    ask.assert_not_called()
    assert not (tmp_path / "has run").exists()


def test_a_family_of_transformers_is_loaded_without_the_code_beside_it(tmp_path: Path) -> None:
    families.model("llama", "sdpa").save_pretrained(tmp_path)
    found = json.loads((tmp_path / "config.json").read_text())
    found["auto_map"] = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}
    (tmp_path / "config.json").write_text(json.dumps(found))
    (tmp_path / "own.py").write_text(CODE.format(str(tmp_path / "has run")))
    load.open_model(load.locate(str(tmp_path)), "auto", torch.device("cpu"))
    assert load.open_config(str(tmp_path)).model_type == "llama"
    assert not (tmp_path / "has run").exists()


COMMITS = {"main": "a" * 40, "v1": "b" * 40}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a tiny model that was fetched from the hub at two commits, whose layers differ in number."""
    folder = tmp_path / "models--some--model"
    (folder / "refs").mkdir(parents=True)
    for layers, (branch, commit) in enumerate(COMMITS.items(), 1):
        (folder / "refs" / branch).write_text(commit)
        model = families.model("llama", "sdpa", num_hidden_layers=layers)
        model.save_pretrained(folder / "snapshots" / commit)
        tokenizer().save_pretrained(folder / "snapshots" / commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return "some/model"


@pytest.mark.parametrize(("revision", "branch"), [(None, "main"), ("v1", "v1"), ("b" * 40, "v1")])
def test_a_model_of_the_hub_is_that_of_its_commit(hub: str, revision: str | None, branch: str) -> None:
    place = load.locate(hub, revision=revision)
    assert place == f"{hub}@{COMMITS[branch]}"
    assert load.locate(place) == place
    layers = 1 + (branch == "v1")
    assert load.open_config(place).num_hidden_layers == layers
    assert len(load.open_tokenizer(place)) == len(tokenizer())
    assert load.open_model(place, "auto", torch.device("cpu")).config.num_hidden_layers == layers
    model = find_model(hub, 1, MeshOptions(), Status("test"), images=None, revision=revision)
    app = SimpleNamespace(name=hub, names=[hub], defaults={}, formats="")
    assert f", mesh {model.mesh}, revision {COMMITS[branch]}" in _ready(app, "::1", 80, model, False, {})


def test_a_revision_is_one_of_the_hub(hub: str, tmp_path: Path) -> None:
    check_model(hub, "v9")
    with pytest.raises(ModelError, match=r"given 'some/model@v9'"):
        load.locate(hub, revision="v9")
    with pytest.raises(
        OptionError, match=r"^--revision: expected a model on the hub, given .* on this machine\. Fix: l"
    ):
        check_model(str(tmp_path), "main")
