"""A store of prefixes: texts and tokens are those without it, on any ranks, whatever its files hold."""

from collections import OrderedDict
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import attnmesh.hf as hf
from attnmesh.errors import InputError
from attnmesh.hf.serving.engine import Engine
from attnmesh.hf.serving.operations import DecodeRows, LoadBlocks, SaveBlocks
from attnmesh.hf.serving.step_plan import StepPlan
from attnmesh.mesh.shapes import AXES, Shape
from attnmesh.store.block_names import StoredBlock
from tests.support.models import families
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.serving.engines import (
    NEW,
    PLACE,
    TEXT,
    asked,
    assert_greedy,
    greedy,
    ids,
    model_of,
    running,
    schedule_of,
    storing,
    tokens,
    until,
    until_stored,
)
from tests.support.truth.mesh_problems import named_mesh
from tests.support.truth.seeds import some

# --- on any ranks ---


@on_each_rank
def take_a_turn(name: str, shape: Shape, folder: Path, cached: tuple[int, int]) -> None:
    """Ask a question and go on after the answer. `cached` are the tokens of each that are not computed, at least."""
    model, mesh = model_of(name), named_mesh(shape, AXES)
    first = ids(TEXT)
    answer = greedy(model, first, NEW, mesh=mesh)
    turn = first + answer + ids(13, seed=1)
    wanted = answer, greedy(model, turn, NEW, mesh=mesh)
    with storing(model, mesh, folder) as engine:
        if engine is not None:
            for text, right, least in zip((first, turn), wanted, cached, strict=True):
                given, held = asked(engine, text)
                assert given == right
                assert held >= least, (held, least)


@on_each_rank
def catch_error_of_a_store_on_one_rank(folder: Path) -> str:
    model, mesh = model_of("llama"), named_mesh(Shape(1, 1, 2), AXES)
    store = None if torch.distributed.get_rank() else hf.PrefixStore(folder)
    with pytest.raises(InputError) as raised:
        Engine(model, mesh, store=store)
    return str(raised.value)


def test_a_store_on_some_ranks_alone_is_refused_on_all(pool: Pool, tmp_path: Path) -> None:
    for text in pool.run(2, catch_error_of_a_store_on_one_rank, tmp_path):
        assert text.startswith("hf.Engine: expected the same call on every rank")
        assert "store" in text


STATES = ["gemma3_text", "qwen3_next", "mamba2", "falcon_h1", "mistral"]
"""Models with windows or recurrent states, whose prefixes end where a cache did. The first three are not long.

Windows, states, and states of which one token is computed by another rule than several.
"""


@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.long), "deepseek_v3"])
def test_prefixes_are_there_for_later_engines_on_other_ranks(name: str, pool: Pool, tmp_path: Path) -> None:
    pool.run(2, take_a_turn, name, Shape(1, 1, 2), tmp_path, (0, 0))
    pool.run(3, take_a_turn, name, Shape(1, 1, 3), tmp_path, (144, 144))
    pool.run(1, take_a_turn, name, Shape(1, 1, 1), tmp_path, (144, 144))


@pytest.mark.parametrize("ranks", [(1, 2), pytest.param((3, 1), marks=pytest.mark.long)], ids=str)
@pytest.mark.parametrize("name", some(STATES, *STATES[:3]))
def test_states_are_there_where_a_cache_ended(name: str, ranks: tuple[int, int], pool: Pool, tmp_path: Path) -> None:
    before, after = ranks
    pool.run(before, take_a_turn, name, Shape(1, 1, before), tmp_path, (0, 0))
    pool.run(after, take_a_later_turn, name, Shape(1, 1, after), tmp_path)


@on_each_rank
def take_a_later_turn(name: str, shape: Shape, folder: Path) -> None:
    """Go on after an answer of an earlier engine."""
    model, mesh = model_of(name), named_mesh(shape, AXES)
    first = ids(TEXT)
    turn = first + greedy(model, first, NEW, mesh=mesh) + ids(21, seed=2)
    wanted = greedy(model, turn, NEW, mesh=mesh)
    with storing(model, mesh, folder) as engine:
        if engine is not None:
            given, held = asked(engine, turn)
            assert given == wanted
            assert held >= (TEXT - 2 if engine.worker.recomputes_by_token else TEXT + NEW - 1)


@on_each_rank
def store_heads_of_ranks(shape: Shape, folder: Path, least: int) -> None:
    take_a_turn("llama", shape, folder, (least, least))


def test_ranks_that_share_heads_read_what_others_stored(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, store_heads_of_ranks, Shape(2, 1, 1), tmp_path, 0)
    pool.run(3, store_heads_of_ranks, Shape(1, 3, 1), tmp_path, 144)
    pool.run(2, store_heads_of_ranks, Shape(2, 1, 1), tmp_path, 144)


@on_each_rank
def store_in_8_bits(storage: str, folder: Path) -> None:
    """Store keys in 8 bits, and read them as they were."""
    model = model_of("llama")
    text = ids(TEXT)
    answers = []
    for least in (0, 144):
        with storing(model, None, folder, storage=storage, window_storage=storage) as engine:
            assert engine is not None
            answers.append(asked(engine, text))
            assert answers[-1][1] >= least
    assert answers[0][0] == answers[1][0]


@pytest.mark.parametrize("storage", ["int8", pytest.param("fp8_e4m3", marks=pytest.mark.long)])
def test_keys_in_8_bits_are_read_as_they_were(storage: str, pool: Pool, tmp_path: Path) -> None:
    pool.run(1, store_in_8_bits, storage, tmp_path)


# --- whose they are ---


@on_each_rank
def check_salts(folder: Path) -> None:
    model, text = model_of("llama"), ids(TEXT)
    with storing(model, None, folder) as engine:
        assert engine is not None
        asked(engine, text, salt="a")
    for salt, cached in (("b", 0), ("", 0), ("a", 144)):
        with storing(model, None, folder) as engine:
            assert engine is not None
            assert asked(engine, text, salt=salt)[1] == cached


def test_another_salt_finds_nothing(pool: Pool, tmp_path: Path) -> None:
    pool.run(1, check_salts, tmp_path)


@on_each_rank
def ask_other_models(folder: Path) -> None:
    """Ask models that differ in one thing: weights, a field of the configuration, the dtype, the tokenizer."""
    text = ids(TEXT)
    changed, typed, configured = (
        model_of("llama"),
        model_of("llama").to(torch.bfloat16),
        model_of("llama"),
    )
    with torch.no_grad():
        changed.model.layers[-1].mlp.down_proj.weight[-1, -1] += 1e-3
    configured.config.rms_norm_eps *= 2
    alike = [
        (model_of("llama"), ""),
        (changed, ""),
        (typed, ""),
        (configured, ""),
        (model_of("llama"), "another tokenizer"),
    ]
    for model, source in alike:
        with storing(model, None, folder, source=source) as engine:
            assert engine is not None
            assert asked(engine, text)[1] == 0
    for model, source in alike:
        with storing(model, None, folder, source=source) as engine:
            assert engine is not None
            assert asked(engine, text)[1] == 144


def test_nothing_of_another_model_is_taken(pool: Pool, tmp_path: Path) -> None:
    pool.run(1, ask_other_models, tmp_path)


# --- pauses, and models that are refused ---


@on_each_rank
def store_without_a_pause(folder: Path) -> None:
    """Store while a row decodes that may pause as long as it takes."""
    model, text = model_of("llama"), ids(TEXT)
    with storing(model, None, folder, max_gap=float("inf")) as engine:
        assert engine is not None
        beside = engine.submit(text, max_new_tokens=100)
        assert asked(engine, ids(TEXT, seed=1))[0]
        assert len(tokens(beside)) == 100


def test_a_pause_may_have_no_limit(pool: Pool, tmp_path: Path) -> None:
    pool.run(1, store_without_a_pause, tmp_path)


@on_each_rank
def store_compressed(folder: Path) -> None:
    with pytest.raises(InputError, match="store: expected a model that keeps keys of tokens"):
        Engine(model_of("deepseek_v4"), None, store=hf.PrefixStore(folder))


def test_models_that_compress_tokens_are_refused_by_name(pool: Pool, tmp_path: Path) -> None:
    pool.run(1, store_compressed, tmp_path)


# --- tiers ---


@on_each_rank
def ask_from_memory(ranks: int, folder: Path) -> None:
    """Ask again what caches have forgotten, and the folder has no room for."""
    model, mesh = model_of("llama"), named_mesh(Shape(1, 1, ranks), AXES)
    texts = [ids(TEXT, seed=seed) for seed in range(4)]
    wanted = [greedy(model, text, NEW, mesh=mesh) for text in texts]
    with storing(model, mesh, folder, disk=1, max_rows=1) as engine:
        if engine is None:
            return
        for again in (False, True):
            for text, right in zip(texts, wanted, strict=True):
                assert asked(engine, text) == (right, 144 * again)
                until(lambda: not engine.scheduler.busy)
        figures = engine.metrics()
        assert figures["store_memory_tokens"] == 4 * 144
        assert not figures["store_disk_tokens"]
        assert not [*(folder / PLACE).glob("*-*.safetensors")]


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_prefixes_go_from_caches_to_memory(ranks: int, pool: Pool, tmp_path: Path) -> None:
    pool.run(ranks, ask_from_memory, ranks, tmp_path)


@on_each_rank
def store_on_unequal_ranks(folder: Path) -> None:
    """Store blocks that lie on two ranks, and read them for a prompt whose runs are longer."""
    model, mesh = model_of("llama"), named_mesh(Shape(1, 1, 2), AXES)
    text = ids(TEXT)
    longer = text + ids(250, seed=1)
    options: dict[str, Any] = {"shares": (3, 1), "max_rows": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("attnmesh.hf.cache.sharded_cache.PREFILL_ROUNDS", 1)
        wanted = greedy(model, longer, NEW, cache=hf.ShardedCache(model.config, mesh, shares=(3, 1)))
        others = [ids(TEXT, seed=seed) for seed in range(2, 5)]  # for which the cache of the first is dropped
        for before, least in (([text, *others], 144), ([], 384)):  # then from the folder alone
            with storing(model, mesh, folder, **options) as engine:
                if engine is not None:
                    for one in before:
                        asked(engine, one)
                    until_stored(engine)
                    given, held = asked(engine, longer)
                    assert given == wanted
                    assert held >= least, (held, engine.metrics())
                    assert engine.metrics()["store_blocks_damaged"] == 0


def test_blocks_of_unequal_ranks_are_whole_for_other_runs(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, store_on_unequal_ranks, tmp_path)


@on_each_rank
def preempt_into_a_store(folder: Path) -> None:
    """Let requests outgrow the memory of caches: what goes back into the queue goes on from the store."""
    model, texts = families.model("llama", "attnmesh"), [ids(40, seed=seed) for seed in range(4)]
    stock = families.model("llama", "sdpa")
    with storing(model, None, folder, cache_memory=250_000, max_gap=60.0) as engine:
        assert engine is not None
        streams = [engine.submit(text, max_new_tokens=150) for text in texts]
        for text, stream in zip(texts, streams, strict=True):
            new = tokens(stream)
            assert len(new) == 150
            assert_greedy(stock, text, new)
        figures = engine.metrics()
        assert figures["preempted"]
        assert figures["store_memory_tokens"]


def test_a_request_that_is_put_back_goes_on_from_the_store(pool: Pool, tmp_path: Path) -> None:
    pool.run(1, preempt_into_a_store, tmp_path)


BLOCK_GRAIN, PREFIXES, LONG_PREFIX, OWN = 16, 50, 160, 20
"""Tokens of a block; prefixes, their tokens, and those of a question after one."""


def asked_of(number: int, random: Random) -> tuple[int, list[int]]:
    """Return the number of a prefix, of which some are asked for more often, and a prompt with it."""
    prefix = min(int(random.expovariate(0.12)), PREFIXES - 1)
    return prefix, ids(LONG_PREFIX, seed=1000 + prefix) + ids(OWN, seed=2000 + number)


def ideal_hits(requests: int, room: int) -> int:
    """Return the tokens of prompts that are known, if of so many blocks those go that were used least recently.

    The caches of two requests are there beside them.
    """
    random, held, found = Random(0), OrderedDict[tuple[int, ...], None](), 0
    caches = OrderedDict[int, list[tuple[int, ...]]]()
    for number in range(requests):
        _, text = asked_of(number, random)
        blocks = [tuple(text[: BLOCK_GRAIN * (n + 1)]) for n in range(len(text) // BLOCK_GRAIN)]
        hits = next((n for n, block in enumerate(blocks) if block not in held), len(blocks))
        near, cache = max(((len({*blocks} & {*kept}), n) for n, kept in caches.items()), default=(0, 0))
        found += BLOCK_GRAIN * max(hits, near)
        if near >= hits and near:
            caches.move_to_end(cache)
        caches[number] = blocks
        for block in blocks[::-1]:
            held[block] = None
            held.move_to_end(block)
        for full, most in ((held, room), (caches, 2)):
            while len(full) > most:
                full.popitem(last=False)
    return found


@on_each_rank
def ask_in_a_crowded_store(requests: int, folder: Path) -> list[int]:
    """Ask with a tenth of the room that all blocks need, and compare each answer with one without a store."""
    model, random = model_of("llama"), Random(0)
    texts = [asked_of(number, random)[1] for number in range(requests)]
    blocks = len({tuple(text[: BLOCK_GRAIN * (n + 1)]) for text in texts for n in range(len(text) // BLOCK_GRAIN)})
    room = blocks // 10
    with running(model, None, max_rows=16, max_queue=requests) as other:
        assert other is not None
        streams = [other.submit(text, max_new_tokens=4, salt=str(n)) for n, text in enumerate(texts)]
        wanted = [tokens(stream) for stream in streams]
    with storing(model, None, folder) as engine:
        assert engine is not None
        asked(engine, texts[0], new=4)
        until_stored(engine)
        size = max(path.stat().st_size for path in (folder / PLACE).glob("*-*.safetensors"))
    for path in (folder / PLACE).glob("*.safetensors"):
        path.unlink()
    found = 0
    options: dict[str, Any] = {"max_rows": 1, "disk": room * size + size // 2, "memory": max(4, room // 4) * size}
    with storing(model, None, folder, **options) as engine:
        assert engine is not None
        for text, right in zip(texts, wanted, strict=True):
            given, held = asked(engine, text, new=4)
            assert given == right
            found += held
            until_stored(engine)
        store, rank = schedule_of(engine), engine.worker.store
        assert rank is not None
        files = [*(folder / PLACE).glob("*-*.safetensors")]
        assert {StoredBlock.of_file(path.name)[0] for path in files} == {*store.tiers.disk.blocks}  # type: ignore[index]
        assert sum(path.stat().st_size for path in files) <= options["disk"]
        assert {*rank.memory} == {*store.tiers.memory.blocks}
        assert sum(x.nbytes for rows in rank.memory.values() for x in rows.values()) <= options["memory"]
        assert [rank.readings, [*store.loaded], [*store.saving], store.loading] == [{}, [], [], None]
        assert len(engine.worker.caches) == engine.metrics()["kept"]
        assert not engine.metrics()["store_blocks_damaged"]
    return [found, ideal_hits(requests, room)]


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("requests", [60, 1000])
def test_what_was_used_least_recently_goes(requests: int, pool: Pool, tmp_path: Path) -> None:
    ((found, ideal),) = pool.run(1, ask_in_a_crowded_store, requests, tmp_path, deadline=1200)
    assert ideal > 10 * requests
    assert abs(found - ideal) <= 0.05 * ideal


@on_each_rank
def read_plans_beside_streams(ranks: int, folder: Path) -> None:
    """Read the plans while a long prefix is loaded, and later stored, beside a stream."""
    model = families.model("llama", "attnmesh", max_position_embeddings=8192)
    mesh, text, plans = named_mesh(Shape(1, 1, ranks), AXES), ids(2000, seed=7), list[set[type]]()
    with storing(model, mesh, folder) as engine:
        if engine is not None:
            asked(engine, text, new=1)
    with storing(model, mesh, folder, max_gap=0.01) as engine:
        if engine is None:
            return
        store, planned = schedule_of(engine), engine.scheduler.plan
        store.copy_rate = 1e6

        def plan() -> StepPlan:
            step = planned()
            store.copy_rate = 1e6
            plans.append({type(operation) for operation in step.operations})
            return step

        engine.scheduler.plan = plan  # type: ignore[method-assign]
        stream = engine.submit(ids(9), max_new_tokens=4000)
        next(iter(stream))
        assert asked(engine, text + ids(200, seed=8), new=1)[1] == 2000 - 2000 % 16
        until(lambda: not store.saving)
        stream.cancel()
    for operation in (LoadBlocks, SaveBlocks):
        taken = [number for number, one in enumerate(plans) if operation in one]
        assert len(taken) > 2, operation  # in parts
        assert all(DecodeRows in plans[number] for number in taken[:-1])


@pytest.mark.parametrize("ranks", [2])
def test_blocks_come_and_go_between_the_steps_of_others(ranks: int, pool: Pool, tmp_path: Path) -> None:
    pool.run(ranks, read_plans_beside_streams, ranks, tmp_path)
