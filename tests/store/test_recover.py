"""Recovery after lost ranks: surviving shards and copies move to another mesh, and nothing is computed again."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import attnmesh as am
from attnmesh import hf
from attnmesh.cli.launch import Processes, leave_with_parent
from attnmesh.errors import MeshError, RankFailure
from attnmesh.mesh.axes import RankMesh
from attnmesh.mesh.shapes import AXES, Shape
from attnmesh.setup.rendezvous import enter, leave
from tests.support.models import families
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh
from tests.support.truth.seeds import pairs
from tests.support.truth.tolerances import FLOAT32_SUMS, worst

SIZES: dict[str, Any] = {"batch": 2, "kv_heads": 4, "head_dim": 6, "value_dim": 5, "capacity": 120}


def new_tokens(length: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(2, 4, length, width, generator=generator) for width in (6, 5))
    return k, v


def filled(mesh: Any, copies: int, padded: bool, seed: int = 0) -> am.KVCache:
    """Return a cache after a sharded prefill, appends, a truncation, a reorder and a larger capacity."""
    cache = am.KVCache(mesh, **SIZES, dtype=torch.float32, block=4, copies=copies)
    axes = RankMesh.of(mesh)
    k, v = new_tokens(37, seed)
    mask = torch.rand(2, 37, generator=torch.Generator().manual_seed(0)) > 0.3
    mine = am.Zigzag().positions(37, axes.shape.ranks, axes.shard_index)
    cache.append_shard(k[:, :, mine], v[:, :, mine], mine, token_mask=mask if padded else None)
    cache.append(*new_tokens(20, seed + 1))
    cache.truncate(50)
    cache.reorder(torch.tensor([1, 0]))
    cache.reserve(200)
    for step in range(11):
        cache.append(*new_tokens(1, seed + 2 + step))
    return cache


def decoded(cache: am.KVCache) -> Tensor:
    """Return the output of fixed queries."""
    q = torch.randn(2, 8, 3, 6, generator=torch.Generator().manual_seed(9))
    return am.decode(q, cache)


def mesh_of(shape: tuple[int, int, int]) -> Any:
    return named_mesh(Shape(*shape), AXES) if Shape(*shape).ranks > 1 else None


@on_each_rank
def measure_error_of_recovery(
    before: tuple[int, int, int], after: tuple[int, int, int], lost: list[int], padded: bool, layers: int
) -> tuple[float, bool]:
    """Recover with `lost` ranks as new ones. Return the worst error, and True if a second recovery is equal."""
    rank = dist.get_rank()
    mesh, other = mesh_of(before), mesh_of(after)
    caches = [filled(mesh, 2, padded, 100 * layer) for layer in range(layers)]
    if rank == 1:  # a step ahead of the others
        for cache in caches[:1]:
            cache.guard.checked = False
            cache.append(*new_tokens(1, 77))
    found = am.recover(None if rank in lost else caches, other, copies=min(2, Shape(*after).ranks // after[0]))
    errors = []
    for layer, cache in enumerate(found):
        alone = filled(None, 1, padded, 100 * layer)
        errors.append(float((decoded(cache) - decoded(alone)).abs().max()))
        for each in (cache, alone):
            each.append(*new_tokens(3, 5))
        errors.append(float((decoded(cache) - decoded(alone)).abs().max()))
    again = am.recover(found, other)  # from caches that were recovered
    same = all(
        torch.allclose(decoded(one), decoded(two), atol=FLOAT32_SUMS) for one, two in zip(again, found, strict=True)
    )
    return worst(errors), same


@pytest.mark.parametrize(
    ("places", "padded"),
    pairs(
        [
            ((1, 1, 4), (1, 1, 4), [2]),
            ((1, 2, 2), (1, 1, 4), [0]),
            ((2, 1, 2), (1, 2, 2), [3]),
            ((1, 1, 4), (2, 2, 1), [1, 3]),
            ((1, 1, 3), (1, 3, 1), [1]),
            ((1, 1, 2), (1, 1, 2), [0]),
        ],
        [False, True],
    ),
)
def test_surviving_shards_and_copies_restore_the_cache(
    pool: Pool, places: tuple[tuple[int, int, int], tuple[int, int, int], list[int]], padded: bool
) -> None:
    before, after, lost = places
    for error, same in pool.run(Shape(*before).ranks, measure_error_of_recovery, before, after, lost, padded, 2):
        assert error < FLOAT32_SUMS, "float32, merged in another order"
        assert same


@on_each_rank
def recover_without_copies(lost: int) -> str:
    mesh = mesh_of((1, 1, 3))
    cache = filled(mesh, 1, False)
    try:
        am.recover(None if dist.get_rank() == lost else [cache], mesh)
    except MeshError as error:
        return str(error)
    return "recovered"


def test_lost_shards_are_named(pool: Pool) -> None:
    messages = pool.run(3, recover_without_copies, 1)
    assert len(set(messages)) == 1
    assert messages[0].startswith("recover: expected a rank or a copy of each shard, given none of [(0, 1)], along")


@on_each_rank
def recover_wrongly(kind: str) -> str:
    mesh = mesh_of((1, 1, 2))
    cache = filled(mesh, 2, False)
    bad = dist.get_rank() == 1
    arguments: dict[str, tuple[Any, dict[str, Any]]] = {
        "no list": (cache if bad else [cache], {}),
        "no cache": ([1] if bad else [cache], {}),
        "unknown option": ([cache], {"block": 3} if bad else {}),
        "copies": ([cache], {"copies": 1 + bad}),
        "capacity": ([cache], {"capacity": 30}),
        "no caches": (None, {}),
        "other layers": ([cache] * (1 + bad), {}),
        "truncation": ([cache], {}),
    }
    if kind == "truncation" and bad:
        cache.rewrites += 1  # as after `truncate` and new tokens
    caches, options = arguments[kind]
    try:
        am.recover(caches, mesh, **options)
    except ValueError as error:
        return str(error)
    return "recovered"


WRONG_CALLS = {
    "no list": "recover: expected a list of caches, one per layer, given KVCache. Fix: pass [cache]",
    "no cache": "recover: expected a list of caches, one per layer, given list. Fix: pass [cache]",
    "unknown option": "recover: expected the arguments of its signature, given block=3. Fix: see help",
    "copies": "recover: expected the same call on every rank, given:\n    ranks  copies\n    0      1\n    1  ",
    "capacity": "recover: expected room for the tokens that are left, given 61 in a capacity of 30. Fix: pass capa",
    "no caches": "recover: expected caches on some rank, given None on all. Fix: pass the caches on",
    "truncation": "recover: expected caches truncated and reordered equally often, given counts [[2], [3]]. Fix: ",
    "other layers": "recover: expected the same caches on every rank, given ranks whose sizes differ. Fix: pass",
}


@pytest.mark.parametrize("kind", WRONG_CALLS)
def test_all_ranks_raise_alike(pool: Pool, kind: str) -> None:
    one, other = pool.run(2, recover_wrongly, kind)
    assert one == other
    assert one.startswith(WRONG_CALLS[kind])


def short_cache(mesh: Any, layer: int, copies: int = 2, block: int = 4, zigzag: bool = False) -> am.KVCache:
    """Return a layer's cache of 37 tokens, block-cyclic or after a sharded prefill."""
    cache = am.KVCache(mesh, **SIZES, dtype=torch.float32, block=block, copies=copies)
    (k, v), axes = new_tokens(37, layer), RankMesh.of(mesh)
    mine = am.Zigzag().positions(37, axes.shape.ranks, axes.shard_index)
    if zigzag:
        cache.append_shard(k[:, :, mine], v[:, :, mine], mine)
    else:
        cache.append(k, v)
    return cache


@on_each_rank
def recover_uneven_layers(kind: str) -> float | str:
    """Recover layers of different layouts without rank 1 of 3. Return the worst error, or the message."""
    mesh, other, rank = mesh_of((1, 1, 3)), mesh_of((1, 3, 1)), dist.get_rank()
    caches = [short_cache(mesh, 0), short_cache(mesh, 1)]
    match kind:
        case "blocks":
            caches[1] = short_cache(mesh, 1, block=7)
        case "layouts":
            caches[0] = short_cache(mesh, 0, zigzag=True)
        case "copies":
            caches[1] = short_cache(mesh, 1, copies=1)
        case "truncations":
            caches[0].append(*new_tokens(3, 5))
            caches[0].truncate(37)
        case "padding ahead":
            caches[0].guard.checked = False
            if rank == 0:
                caches[0].append(*new_tokens(1, 5), token_mask=torch.zeros(2, 1) > 0)
        case "recovered by some":
            old = [short_cache(mesh, 0, zigzag=True), short_cache(mesh, 1, zigzag=True)]
            new = am.recover(old, mesh, copies=2)
            caches = new if rank == 0 else old
    try:
        found = am.recover(None if rank == 1 else caches, other, copies=2)
    except MeshError as error:
        return str(error)
    return worst(float((decoded(one) - decoded(short_cache(None, n, 1))).abs().max()) for n, one in enumerate(found))


@pytest.mark.parametrize("kind", ["blocks", "layouts", "truncations", "padding ahead"])
def test_layers_may_be_laid_out_differently(pool: Pool, kind: str) -> None:
    for result in pool.run(3, recover_uneven_layers, kind):
        assert isinstance(result, float), result
        assert result < FLOAT32_SUMS, "float32, merged in another order"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("copies", "recover: expected a rank or a copy of each shard, given none of [(0, 1)], along heads and tokens"),
        (
            "recovered by some",
            "recover: expected each of 37 tokens once, given gaps or repeats in layer 0. Fix: load a s",
        ),
    ],
)
def test_tokens_missing_in_a_layer_raise(pool: Pool, kind: str, message: str) -> None:
    (result,) = set(pool.run(3, recover_uneven_layers, kind))
    assert str(result).startswith(message)


# --- a rank is killed during generation ---

NEW_TOKENS, ANNOUNCED = 150, 40


def prompt() -> Tensor:
    return torch.randint(3, 60, (1, 90), generator=torch.Generator().manual_seed(1))


def run_rank(rank: int | None, place: int, ranks: int, folder: Path, pipe: Any) -> None:
    """Generate as `rank` of three, then recover and continue as rank `place` of `ranks`. A new rank has `rank` None."""
    torch.set_num_threads(1)
    threading.Thread(target=leave_with_parent, daemon=True).start()
    store, model = dist.FileStore(str(folder / "store")), families.model("llama", "attnmesh")
    ids, cache = prompt(), None
    if rank is not None:
        enter("gloo", store, rank, 3)
        am.set_deadline(5)
        cache = hf.ShardedCache(model.config, mesh_of((1, 1, 3)), copies=2)
        streamer = TokenCounter(pipe)
        try:
            hf.generate(model, ids, cache=cache, max_new_tokens=NEW_TOKENS, do_sample=False, streamer=streamer)
        except RankFailure as error:
            pipe.send(("lost", error.ranks))
        leave()
    enter("gloo", store, place, ranks)
    start = time.monotonic()
    cache = hf.ShardedCache.recover(cache, model.config, mesh_of((1, 1, ranks)), copies=2)
    seconds = time.monotonic() - start
    reached = cache.tokens
    assert reached is not None
    left = NEW_TOKENS - (reached.shape[1] - ids.shape[1])
    seen: list[int] = []
    model.register_forward_pre_hook(lambda _, __, more: seen.append(more["input_ids"].shape[1]), with_kwargs=True)
    ones = torch.ones_like(reached)  # this model may generate the padding token
    made = hf.generate(model, reached, cache=cache, attention_mask=ones, max_new_tokens=left, do_sample=False)
    pipe.send(("made", made[0].tolist(), sum(seen), left, seconds))
    dist.barrier()
    os._exit(0)


class TokenCounter:
    """Streamer that sends a message at the token number `ANNOUNCED`."""

    def __init__(self, pipe: Any) -> None:
        self.pipe, self.tokens = pipe, 0

    def put(self, _: Tensor) -> None:
        self.tokens += 1
        if self.tokens == ANNOUNCED:
            self.pipe.send(("writing",))

    def end(self) -> None:
        """Do nothing: transformers calls it."""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("replaced", [pytest.param(False, marks=pytest.mark.long), True])
def test_generation_continues_after_a_rank_is_killed(tmp_path: Path, replaced: bool) -> None:
    """The other ranks continue from their shards and copies, without the killed rank or with a new one in its place."""
    processes = Processes()
    processes.preload(["tests.support.emulation.interpreted", "torch._dynamo", "tests.store.test_recover"])
    victim, ranks = 1, 3 if replaced else 2
    places = {0: 0, 1: 1, 2: 2 if replaced else 1}
    pipes = processes.pipes
    try:
        for rank in range(3):
            processes.start(run_rank, rank, places[rank], ranks, tmp_path)
        for pipe in pipes:
            assert pipe.poll(60)
            assert pipe.recv() == ("writing",)
        processes.started[victim].kill()
        for rank in (0, 2):
            assert pipes[rank].poll(20)
            assert pipes[rank].recv() == ("lost", (victim,))
        if replaced:
            processes.start(run_rank, None, victim, ranks, tmp_path)
        model = families.model("llama", "attnmesh")
        whole = hf.generate(model, prompt(), max_new_tokens=NEW_TOKENS, do_sample=False)[0].tolist()
        for pipe in (pipes[0], *pipes[2:]):
            assert pipe.poll(60)
            _, made, seen, left, _ = pipe.recv()
            assert made == whole
            assert seen <= left + 1, "only new tokens are computed"
    finally:
        processes.end()
