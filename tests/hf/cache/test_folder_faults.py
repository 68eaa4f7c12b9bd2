"""Folders that a cache cannot go on with: named, and left as they are."""

import gc
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import attnmesh as am
import attnmesh.hf as hf
from attnmesh.errors import KernelError, StoreError
from attnmesh.mesh.shapes import AXES, Shape
from attnmesh.store.save_layers import save_layers
from attnmesh.store.token_ids import TokenIds
from tests.support.models import families
from tests.support.models.families import prompt
from tests.support.models.recurrent import model_of
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh

SIZES: dict[str, Any] = {"batch": 1, "kv_heads": 2, "head_dim": 8, "capacity": 9000, "dtype": torch.float32}


def test_keys_without_ids_stay_and_are_refused_as_a_folder(tmp_path: Path) -> None:
    model = families.model("llama", "attnmesh")
    cache = hf.ShardedCache(model.config, folder=tmp_path)
    with torch.no_grad():
        model(prompt(50), past_key_values=cache)
    held = cache.kv_caches[0].fork().keys[:, :, :50].clone()
    del cache
    with pytest.raises(StoreError, match="expected a folder with the ids of its tokens, given none in"):
        hf.ShardedCache(model.config, folder=tmp_path)
    restored = hf.ShardedCache(model.config)
    restored.restore(tmp_path)
    assert restored.kv_caches[0].keys[:, :, :50].equal(held)


def test_a_folder_of_fewer_layers_stays(tmp_path: Path) -> None:
    model, deeper = (families.model("llama", "attnmesh", num_hidden_layers=layers) for layers in (1, 2))
    hf.generate(model, prompt(40), cache=hf.ShardedCache(model.config, folder=tmp_path), max_new_tokens=2)
    with pytest.raises(StoreError, match="expected a folder of 2 layers, given 1 in"):
        hf.ShardedCache(deeper.config, folder=tmp_path)
    assert hf.ShardedCache(model.config, folder=tmp_path).get_seq_length() == 41


def test_a_save_of_fewer_layers_needs_its_configuration(tmp_path: Path) -> None:
    model, deeper = (families.model("llama", "attnmesh", num_hidden_layers=layers) for layers in (1, 2))
    saved = hf.ShardedCache(model.config)
    hf.generate(model, prompt(20), cache=saved, max_new_tokens=2)
    saved.save(tmp_path)
    message = r"a cache of 2 layers, given 1 in .*\. Fix: pass the configuration of the model that was saved\."
    with pytest.raises(StoreError, match=message):
        hf.ShardedCache(deeper.config).restore(tmp_path)


@pytest.mark.parametrize(
    ("family", "states"),
    [
        ("qwen3_next", {}),
        ("qwen3_next", {"recurrent.0.rows": torch.ones(1)}),
        ("llama", {"recurrent.0.conv.0": torch.ones(1)}),
    ],
)
def test_a_save_of_another_family_leaves_the_cache_as_it_was(
    tmp_path: Path, family: str, states: dict[str, torch.Tensor]
) -> None:
    saved = am.KVCache(None, **SIZES)
    saved.append(*torch.randn(2, 1, 2, 5, 8))
    save_layers([saved] * (3 if family == "llama" else 1), tmp_path, extra_tensors=states)
    cache = hf.ShardedCache(model_of(family).config)
    with pytest.raises(StoreError, match="load: expected the states of this model, given"):
        cache.restore(tmp_path)
    assert not cache.kv_caches


def test_another_prompt_has_its_own_ids(tmp_path: Path) -> None:
    model = families.model("llama", "attnmesh")
    cache = hf.ShardedCache(model.config, folder=tmp_path / "a")
    hf.generate(model, prompt(40), cache=cache, max_new_tokens=2)
    cache.reset()
    with torch.no_grad():
        model(prompt(30, seed=5), past_key_values=cache)
    saved = hf.ShardedCache(model.config)
    hf.generate(model, prompt(20, seed=3), cache=saved, max_new_tokens=2)
    saved.save(tmp_path / "b")
    with pytest.raises(KernelError, match="restore: expected a cache in memory, given one in a folder"):
        cache.restore(tmp_path / "b")
    del cache
    with pytest.raises(StoreError, match="expected ids of its tokens, given no ids of 30 tokens"):
        hf.ShardedCache(model.config, folder=tmp_path / "a")


def test_ids_of_a_save_stay_until_others_are_written(tmp_path: Path) -> None:
    model = families.model("llama", "attnmesh")
    saved = hf.ShardedCache(model.config)
    ids = hf.generate(model, prompt(40), cache=saved, max_new_tokens=2)
    saved.save(tmp_path)
    with patch.object(TokenIds, "write", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        hf.ShardedCache(model.config, folder=tmp_path)
    restored = hf.ShardedCache(model.config)
    restored.restore(tmp_path)
    for cache in (restored, hf.ShardedCache(model.config, folder=tmp_path)):
        assert cache.tokens is not None
        assert cache.tokens.equal(ids[:, :-1])


def test_pages_are_those_of_memory(tmp_path: Path) -> None:
    cache, pool = am.KVCache(None, **SIZES, folder=tmp_path), torch.zeros(2, 16, 2, 8)
    with pytest.raises(KernelError, match="append_pages: expected a cache in memory"):
        cache.append_pages(pool, pool, torch.tensor([[0, 1]], dtype=torch.int32))
    with pytest.raises(KernelError, match="pages: expected a cache in memory"):
        cache.pages()
    assert cache.length == 0


@on_each_rank
def fill_by_ranks(folder: Path, ranks: int, fix: str | None) -> None:
    """Fill a folder, or find what is to be done with one of other ranks."""
    model, mesh = families.model("llama", "attnmesh"), named_mesh(Shape(1, 1, ranks), AXES)
    if fix is None:
        hf.generate(model, prompt(40), cache=hf.ShardedCache(model.config, mesh, folder=folder), max_new_tokens=2)
        gc.collect()  # before the others open it
        return
    with pytest.raises(StoreError, match=fix):
        hf.ShardedCache(model.config, mesh, folder=folder)
    restored = hf.ShardedCache(model.config, mesh)
    restored.restore(folder)
    assert restored.get_seq_length() == 41


def test_a_folder_of_other_ranks_says_what_reads_it(pool: Pool, tmp_path: Path) -> None:
    pool.run(1, fill_by_ranks, tmp_path, 1, None)
    pool.run(2, fill_by_ranks, tmp_path, 2, "Fix: take as many ranks, restore it into memory, or append to a new")


@pytest.mark.parametrize("name", ["journal", "ids"])
def test_ids_that_found_a_full_disk_are_written_once_there_is_space(name: str, tmp_path: Path) -> None:
    model = families.model("llama", "attnmesh")
    cache = hf.ShardedCache(model.config, folder=tmp_path)
    opened, written = os.open, os.pwrite
    is_full = True

    def open_one(path: Any, *arguments: Any) -> int:
        if is_full and name == "journal" and str(path).endswith("tokens.journal"):
            raise OSError(28, "No space left on device")
        return opened(path, *arguments)

    def write_half(handle: int, data: Any, offset: int) -> int:
        half = is_full and name == "ids" and os.readlink(f"/proc/self/fd/{handle}").endswith("tokens.ids")
        return written(handle, data[: len(data) // 2] if half else data, offset)

    with patch.object(os, "open", open_one), patch.object(os, "pwrite", write_half):
        with pytest.raises(StoreError, match=r"\(No space left on device\). Fix: free space there"):
            hf.generate(model, prompt(40), cache=cache, max_new_tokens=2)
        is_full = False
        hf.generate(model, prompt(40), cache=cache, max_new_tokens=2)
    del cache
    gc.collect()
    assert hf.ShardedCache(model.config, folder=tmp_path).get_seq_length() == 41
