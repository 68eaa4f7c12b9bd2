"""A model's cache in a folder: the tokens of stock transformers, also after it is opened again."""

import gc
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from transformers import Mamba2Config

import attnmesh.hf as hf
from attnmesh.errors import InputError, StoreError
from attnmesh.hf.generation_checkpoint import identify_model
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.models import families
from tests.support.models.families import STOCK, prompt
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh


class Turn(NamedTuple):
    """The tokens after a turn, and how many its cache began with."""

    begun: int
    ids: list[list[int]]


@on_each_rank
def talk_over_a_folder(family: str, folder: Path, shape: Shape, hot: int | None) -> list[Turn]:
    """Return turns, each on a cache that opens the folder."""
    model, mesh = families.model(family, "attnmesh"), named_mesh(shape, AXES) if shape.ranks > 1 else None
    ids = prompt(150)
    turns = []
    for step in range(4):
        cache = hf.ShardedCache(model.config, mesh, folder=folder, hot=hot)
        begun = cache.get_seq_length()
        ids = torch.cat((ids[:, : 60 if step == 2 else None], prompt(30, seed=step)), 1)
        real = torch.ones_like(ids)  # an answer may have the id of padding
        ids = hf.generate(model, ids, attention_mask=real, cache=cache, max_new_tokens=12, do_sample=False)
        turns.append(Turn(begun, ids.tolist()))
        del cache
        gc.collect()  # before the others open it
        if shape.ranks > 1:
            dist.barrier()
    return turns


def stock_turns(family: str) -> list[Turn]:
    model = families.model(family, STOCK[family])
    ids = prompt(150)
    turns = []
    begun = 0
    for step in range(4):
        ids = torch.cat((ids[:, : 60 if step == 2 else None], prompt(30, seed=step)), 1)
        ids = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        turns.append(Turn(begun, ids.tolist()))
        begun = ids.shape[1] - 1
    return turns


@pytest.mark.parametrize(
    ("family", "shape", "hot"),
    [
        ("llama", Shape(1, 1, 1), None),
        ("gemma3", Shape(1, 1, 2), None),
        ("llama", Shape(1, 1, 2), 20),
        pytest.param("gemma3", Shape(1, 1, 2), 1, marks=pytest.mark.long),
        pytest.param("mistral", Shape(2, 1, 1), None, marks=pytest.mark.long),
    ],
)
def test_turns_go_on_where_the_folder_ends(
    family: str, shape: Shape, hot: int | None, pool: Pool, tmp_path: Path
) -> None:
    for turns in pool.run(shape.ranks, talk_over_a_folder, family, tmp_path, shape, hot):
        assert turns == stock_turns(family)


def test_layers_that_keep_all_tokens_have_two_memories(tmp_path: Path) -> None:
    model, stock = families.model("gemma3", "attnmesh"), families.model("gemma3", STOCK["gemma3"])
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
    cache = hf.ShardedCache(model.config, hot=9)
    ids = hf.generate(model, prompt(150), cache=cache, **options)
    assert ids.equal(stock.generate(prompt(150), **options))
    assert {kv_cache.config.hot is None for kv_cache in cache.kv_caches if kv_cache.config.mask is not None} == {True}
    assert {kv_cache.config.hot for kv_cache in cache.kv_caches if kv_cache.config.mask is None} == {9}
    cache.save(tmp_path)
    restored = hf.ShardedCache(model.config, hot=9)
    restored.restore(tmp_path)
    assert {
        kv_cache.own_shard.earlier_tokens > 0 for kv_cache in restored.kv_caches if kv_cache.config.mask is None
    } == {True}
    longer, options["attention_mask"] = torch.cat((ids, prompt(9)), 1), torch.ones(1, ids.shape[1] + 9).long()
    assert hf.generate(model, longer, cache=restored, **options).equal(stock.generate(longer, **options))


def test_beams_and_a_saved_cache_give_stock_tokens(tmp_path: Path) -> None:
    model, stock = families.model("llama", "attnmesh"), families.model("llama", STOCK["llama"])
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
    cache = hf.ShardedCache(model.config, folder=tmp_path / "a")
    beams = hf.generate(model, prompt(40), cache=cache, num_beams=3, **options)
    assert beams.equal(stock.generate(prompt(40), num_beams=3, **options))
    saved = hf.ShardedCache(model.config)
    ids = hf.generate(model, prompt(40), cache=saved, **options)
    saved.save(tmp_path / "b")
    lives = hf.ShardedCache(model.config, folder=tmp_path / "b")
    assert lives.get_seq_length() == ids.shape[1] - 1
    options["attention_mask"] = torch.ones_like(ids)  # a new token may be that of padding
    longer = hf.generate(model, ids, cache=lives, **options)
    assert longer.equal(stock.generate(ids, **options))
    restored = hf.ShardedCache(model.config)
    restored.restore(tmp_path / "b")
    assert restored.tokens is not None
    assert restored.tokens.equal(longer[:, :-1])


def test_a_folder_is_opened_for_more_tokens(tmp_path: Path) -> None:
    """`attnmesh generate --kv-folder` reserves for one prompt and its answer."""
    model, stock = families.model("llama", "attnmesh"), families.model("llama", STOCK["llama"])
    for length in (30, 90, 60):
        options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
        options["attention_mask"] = torch.ones(1, length).long()
        cache = hf.ShardedCache(model.config, folder=tmp_path, capacity=length + 5)
        ids = hf.generate(model, prompt(90)[:, :length], cache=cache, **options)
        assert ids.equal(stock.generate(prompt(90)[:, :length], **options))
        del cache


def test_beams_leave_the_newest_tokens_in_the_folder(tmp_path: Path) -> None:
    model = families.model("llama", "attnmesh")
    cache = hf.ShardedCache(model.config, folder=tmp_path, hot=16)
    hf.generate(model, prompt(40), cache=cache, num_beams=3, max_new_tokens=5, do_sample=False)
    del cache
    again = hf.ShardedCache(model.config, folder=tmp_path, hot=16)
    assert {kv_cache.length for kv_cache in again.kv_caches} == {39}  # those that the beams share


def test_a_folder_has_the_fewer_of_its_ids_and_its_keys(tmp_path: Path) -> None:
    """Keys of other tokens than the ids say would be silently wrong: the shorter of both is what there is."""
    model = families.model("llama", "attnmesh")
    cache = hf.ShardedCache(model.config, folder=tmp_path)
    ids = hf.generate(model, prompt(40), cache=cache, max_new_tokens=5, do_sample=False)
    assert cache.folder is not None
    cache.folder.write_ids(ids[:, :17])
    del cache
    cache = hf.ShardedCache(model.config, folder=tmp_path)
    assert cache.get_seq_length() == 17
    cache.kv_caches[1].truncate(9)  # as an interrupted forward pass leaves it
    del cache
    cache = hf.ShardedCache(model.config, folder=tmp_path)
    assert cache.get_seq_length() == 9
    assert cache.tokens is not None
    assert cache.tokens.equal(ids[:, :9])
    del cache
    (file,) = tmp_path.glob("1-*/tokens.ids")
    content = bytearray(file.read_bytes())
    content[8 * 3] ^= 1
    file.write_bytes(content)
    with pytest.raises(StoreError, match=r"expected the ids of all tokens, given damage in .*tokens.ids"):
        hf.ShardedCache(model.config, folder=tmp_path)


def test_a_folder_of_another_model_is_refused(tmp_path: Path) -> None:
    model, other = families.model("llama", "attnmesh"), families.model("gemma3", "attnmesh")
    hf.generate(model, prompt(20), cache=hf.ShardedCache(model.config, folder=tmp_path), max_new_tokens=2)
    with pytest.raises(InputError, match=r"ShardedCache folder|KVCache"):
        hf.generate(other, prompt(20), cache=hf.ShardedCache(other.config, folder=tmp_path), max_new_tokens=2)
    cache = hf.ShardedCache(model.config, folder=tmp_path)
    assert cache.folder is not None
    assert cache.folder.manifest.note == identify_model(model)
    with pytest.raises(StoreError, match="expected a folder of this model, given one of another model"):
        cache.folder.identify(lambda: "another")


def test_models_with_states_are_refused(tmp_path: Path) -> None:
    config = Mamba2Config(num_hidden_layers=1, attn_implementation="attnmesh")
    with pytest.raises(InputError, match="ShardedCache folder: expected a model that keeps keys and values alone"):
        hf.ShardedCache(config, folder=tmp_path)
    with pytest.raises(InputError, match="ShardedCache hot: expected a model that keeps keys and values alone"):
        hf.ShardedCache(config, hot=9)
