"""After ranks are lost: the keys that the others hold, and their copies, on another mesh; nothing is computed again."""

import multiprocessing as mp
import os
import signal
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
from attnmesh.cli.launch import _leave_with_parent
from attnmesh.comm.rendezvous import enter, leave
from attnmesh.errors import MeshError, RankFailure, UnforeseenError
from attnmesh.mesh.axes import Mesh
from attnmesh.mesh.shapes import AXES, Shape
from tests.support import families
from tests.support.mesh_problems import named_mesh
from tests.support.pool import Pool

SIZES: dict[str, Any] = {"batch": 2, "kv_heads": 4, "head_dim": 6, "value_dim": 5, "capacity": 120}


def new_tokens(length: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(2, 4, length, width, generator=generator) for width in (6, 5))
    return k, v


def filled(mesh: Any, copies: int, padded: bool, seed: int = 0) -> am.KVCache:
    """By a prefill in shards, new tokens, a cut, another order, and more room."""
    cache = am.KVCache(mesh, **SIZES, dtype=torch.float32, block=4, copies=copies)
    here = Mesh.of(mesh)
    (k, v), mask = new_tokens(37, seed), torch.rand(2, 37, generator=torch.Generator().manual_seed(0)) > 0.3
    mine = am.Zigzag().positions(37, here.shape.ranks, here.shard)
    cache.append_shard(k[:, :, mine], v[:, :, mine], mine, token_mask=mask if padded else None)
    cache.append(*new_tokens(20, seed + 1))
    cache.truncate(50)
    cache.reorder(torch.tensor([1, 0]))
    cache.reserve(200)
    for step in range(11):
        cache.append(*new_tokens(1, seed + 2 + step))
    return cache


def answer(cache: am.KVCache) -> Tensor:
    q = torch.randn(2, 8, 3, 6, generator=torch.Generator().manual_seed(9))
    return am.decode(q, cache)


def meshed(shape: tuple[int, int, int]) -> Any:
    return named_mesh(Shape(*shape), AXES) if Shape(*shape).ranks > 1 else None


def recovered(
    before: tuple[int, int, int], after: tuple[int, int, int], lost: list[int], padded: bool, layers: int
) -> tuple[float, bool]:
    """As if these ranks had come anew, in a world that is as large: how far it is off, and whether it goes on."""
    rank = dist.get_rank()
    mesh, other = meshed(before), meshed(after)
    caches = [filled(mesh, 2, padded, 100 * layer) for layer in range(layers)]
    if rank == 1:  # a step ahead of the others
        for cache in caches[:1]:
            cache.checker.checked = False
            cache.append(*new_tokens(1, 77))
    found = am.recover(None if rank in lost else caches, other, copies=min(2, Shape(*after).ranks // after[0]))
    worst = 0.0
    for layer, cache in enumerate(found):
        alone = filled(None, 1, padded, 100 * layer)
        worst = max(worst, float((answer(cache) - answer(alone)).abs().max()))
        for each in (cache, alone):
            each.append(*new_tokens(3, 5))
        worst = max(worst, float((answer(cache) - answer(alone)).abs().max()))
    again = am.recover(found, other)  # once more, from those that were recovered
    same = all(torch.allclose(answer(one), answer(two), atol=1e-5) for one, two in zip(again, found, strict=True))
    return worst, same


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("before", "after", "lost"),
    [
        ((1, 1, 4), (1, 1, 4), [2]),
        ((1, 2, 2), (1, 1, 4), [0]),
        ((2, 1, 2), (1, 2, 2), [3]),
        ((1, 1, 4), (2, 2, 1), [1, 3]),
        ((1, 1, 3), (1, 3, 1), [1]),
        ((1, 1, 2), (1, 1, 2), [0]),
    ],
)
def test_what_is_left_and_its_copies_are_the_whole(
    pool: Pool, before: tuple[int, int, int], after: tuple[int, int, int], lost: list[int], padded: bool
) -> None:
    for worst, same in pool.run(Shape(*before).ranks, recovered, before, after, lost, padded, 2):
        assert worst < 1e-5, "float32, merged in another order"
        assert same


def without_copies(lost: int) -> str:
    mesh = meshed((1, 1, 3))
    cache = filled(mesh, 1, False)
    try:
        am.recover(None if dist.get_rank() == lost else [cache], mesh)
    except MeshError as error:
        return str(error)
    return "recovered"


def test_what_nobody_has_is_told_by_name(pool: Pool) -> None:
    said = pool.run(3, without_copies, 1)
    assert len(set(said)) == 1
    assert said[0].startswith("recover: expected a rank or a copy of each shard, given none of [(0, 1)], along heads")


def called_wrong(kind: str) -> str:
    mesh = meshed((1, 1, 2))
    cache, one = filled(mesh, 2, False), dist.get_rank() == 1
    given: dict[str, tuple[Any, dict[str, Any]]] = {
        "no list": (cache if one else [cache], {}),
        "no cache": ([1] if one else [cache], {}),
        "an option": ([cache], {"block": 3} if one else {}),
        "copies": ([cache], {"copies": 1 + one}),
        "capacity": ([cache], {"capacity": 30}),
        "nobody": (None, {}),
        "other layers": ([cache] * (1 + one), {}),
        "a cut": ([cache], {}),
    }
    if kind == "a cut" and one:
        cache.changes += 1  # as if it had been truncated, and had grown again
    caches, options = given[kind]
    try:
        am.recover(caches, mesh, **options)
    except ValueError as error:
        return str(error)
    return "recovered"


WRONG = {
    "no list": "recover: expected a list of caches, one a layer, given KVCache. Fix: pass [cache]",
    "no cache": "recover: expected a list of caches, one a layer, given list. Fix: pass [cache]",
    "an option": "recover: expected the arguments of its signature, given block=. Fix: see help",
    "copies": "recover: expected the same call on every rank, given:\n    shards  copies\n    0       1\n    1   ",
    "capacity": "recover: expected room for the tokens that are left, given 61 in a capacity of 30. Fix: pass capa",
    "nobody": "recover: expected caches on some rank, given None on all. Fix: pass what is left",
    "a cut": "recover: expected caches that were truncated and reordered alike, given ranks of which some were trunc",
    "other layers": "recover: expected the same caches on every rank, given ranks whose sizes differ. Fix: pass",
}


@pytest.mark.parametrize("kind", WRONG)
def test_all_ranks_raise_alike(pool: Pool, kind: str) -> None:
    one, other = pool.run(2, called_wrong, kind)
    assert one == other
    assert one.startswith(WRONG[kind])


def dealt(mesh: Any, layer: int, copies: int = 2, block: int = 4, zigzag: bool = False) -> am.KVCache:
    """37 tokens of a layer, as they are dealt or by a prefill in shards."""
    cache = am.KVCache(mesh, **SIZES, dtype=torch.float32, block=block, copies=copies)
    (k, v), here = new_tokens(37, layer), Mesh.of(mesh)
    mine = am.Zigzag().positions(37, here.shape.ranks, here.shard)
    if zigzag:
        cache.append_shard(k[:, :, mine], v[:, :, mine], mine)
    else:
        cache.append(k, v)
    return cache


def unlike_layers(kind: str) -> float | str:
    """How far the recovered layers are off, the second of three ranks lost, or else what is said."""
    mesh, other, rank = meshed((1, 1, 3)), meshed((1, 3, 1)), dist.get_rank()
    caches = [dealt(mesh, 0), dealt(mesh, 1)]
    match kind:
        case "blocks":
            caches[1] = dealt(mesh, 1, block=7)
        case "places":
            caches[0] = dealt(mesh, 0, zigzag=True)
        case "copies":
            caches[1] = dealt(mesh, 1, copies=1)
        case "cuts":
            caches[0].append(*new_tokens(3, 5))
            caches[0].truncate(37)
        case "padding ahead":
            caches[0].checker.checked = False
            if rank == 0:
                caches[0].append(*new_tokens(1, 5), token_mask=torch.zeros(2, 1) > 0)
        case "recovered by some":
            old = [dealt(mesh, 0, zigzag=True), dealt(mesh, 1, zigzag=True)]
            new = am.recover(old, mesh, copies=2)
            caches = new if rank == 0 else old
    try:
        found = am.recover(None if rank == 1 else caches, other, copies=2)
    except MeshError as error:
        return str(error)
    return max(float((answer(one) - answer(dealt(None, n, 1))).abs().max()) for n, one in enumerate(found))


@pytest.mark.parametrize("kind", ["blocks", "places", "cuts", "padding ahead"])
def test_layers_need_not_lie_alike(pool: Pool, kind: str) -> None:
    for off in pool.run(3, unlike_layers, kind):
        assert isinstance(off, float), off
        assert off < 1e-5, "float32, merged in another order"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("copies", "recover: expected a rank or a copy of each shard, given none of [(0, 1)], along heads and tokens"),
        ("recovered by some", "recover: expected each of 37 tokens once, given others in layer 0. Fix: load a checkp"),
    ],
)
def test_what_not_all_layers_have_is_told(pool: Pool, kind: str, message: str) -> None:
    (said,) = set(pool.run(3, unlike_layers, kind))
    assert str(said).startswith(message)


def grown_at_the_second_try() -> list[Any]:
    """There is no memory for more room of the copies, and then there is."""
    mesh = meshed((1, 1, 2))
    cache = am.KVCache(mesh, **SIZES, dtype=torch.float32, block=4, copies=2)
    cache.append(*new_tokens(100, 0))
    (copy,) = cache.shards.copies.values()
    grow, said = copy.grow, []
    copy.grow = lambda _: (_ for _ in ()).throw(MemoryError("none left"))
    if dist.get_rank() == 0:
        copy.grow = grow
    try:
        cache.reserve(300)
    except (MemoryError, UnforeseenError) as error:
        said.append(type(error).__name__)
    copy.grow = grow
    cache.reserve(300)
    cache.append(*new_tokens(100, 1))
    return [*said, [shard.length for shard in cache.shards.all], sum(shard.used for shard in cache.shards.all)]


def test_room_that_could_not_be_made_is_made_when_it_can(pool: Pool) -> None:
    first, second = pool.run(2, grown_at_the_second_try)
    assert first == ["UnforeseenError", [200, 200], 200]
    assert second == ["MemoryError", [200, 200], 200]


@pytest.mark.parametrize("copies", [0, 2, True, "two"])
def test_copies_that_cannot_be_are_refused(copies: Any) -> None:
    with pytest.raises(
        ValueError, match="KVCache copies: expected 1 to 1, the ranks that tokens are sharded over, given"
    ):
        am.KVCache(None, **SIZES, dtype=torch.float32, copies=copies)


def keeps(shape: tuple[int, int, int]) -> list[list[int]]:
    cache = filled(meshed(shape), 2, False)
    return [cache.shards.keepers, [*cache.shards.copies]]


def test_copies_lie_on_the_next_rank(pool: Pool) -> None:
    assert pool.run(3, keeps, (1, 1, 3)) == [[[1], [2]], [[2], [0]], [[0], [1]]]
    assert pool.run(4, keeps, (2, 1, 2)) == [[[1], [1]], [[0], [0]]] * 2


# --- a rank is killed while a model writes ---

NEW, WHEN = 150, 40


def prompt() -> Tensor:
    return torch.randint(3, 60, (1, 90), generator=torch.Generator().manual_seed(1))


def life(rank: int | None, place: int, ranks: int, folder: Path, pipe: Any) -> None:
    """A rank writes, survives, and goes on; or it comes anew, with no number before."""
    torch.set_num_threads(1)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    store, model = dist.FileStore(str(folder / "store")), families.model("llama", "attnmesh")
    ids, cache = prompt(), None
    if rank is not None:
        enter("gloo", store, rank, 3)
        am.set_deadline(5)
        cache = hf.ShardedCache(model.config, meshed((1, 1, 3)), copies=2)
        streamer = _Counting(pipe)
        try:
            hf.generate(model, ids, cache=cache, max_new_tokens=NEW, do_sample=False, streamer=streamer)
        except RankFailure as error:
            pipe.send(("lost", error.ranks))
        leave()
    enter("gloo", store, place, ranks)
    start = time.monotonic()
    cache = hf.ShardedCache.recover(cache, model.config, meshed((1, 1, ranks)), copies=2)
    seconds = time.monotonic() - start
    reached = cache.tokens
    assert reached is not None
    left = NEW - (reached.shape[1] - ids.shape[1])
    seen: list[int] = []
    model.register_forward_pre_hook(lambda _, __, more: seen.append(more["input_ids"].shape[1]), with_kwargs=True)
    ones = torch.ones_like(reached)  # this model may write what is padding elsewhere
    made = hf.generate(model, reached, cache=cache, attention_mask=ones, max_new_tokens=left, do_sample=False)
    pipe.send(("made", made[0].tolist(), sum(seen), left, seconds))
    dist.barrier()
    os._exit(0)


class _Counting:
    """Says when so many tokens are there."""

    def __init__(self, pipe: Any) -> None:
        self.pipe, self.tokens = pipe, 0

    def put(self, _: Tensor) -> None:
        self.tokens += 1
        if self.tokens == WHEN:
            self.pipe.send(("writing",))

    def end(self) -> None:
        """Nothing."""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("replaced", [False, True])
def test_no_token_is_lost_with_a_rank(tmp_path: Path, replaced: bool) -> None:
    """Killed in the midst of writing; the others go on without it, or with one in its place, from what they hold."""
    context: Any = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.interpreted", "torch._dynamo", "tests.decode.test_recover"])
    victim, ranks = 1, 3 if replaced else 2
    places = {0: 0, 1: 1, 2: 2 if replaced else 1}
    processes, pipes = [], []

    def start(rank: int | None, place: int) -> None:
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=life, args=(rank, place, ranks, tmp_path, theirs)))
        processes[-1].start()
        pipes.append(ours)

    try:
        for rank in range(3):
            start(rank, places[rank])
        for pipe in pipes:
            assert pipe.poll(60)
            assert pipe.recv() == ("writing",)
        os.kill(processes[victim].pid, signal.SIGKILL)
        for rank in (0, 2):
            assert pipes[rank].poll(20)
            assert pipes[rank].recv() == ("lost", (victim,))
        if replaced:
            start(None, victim)
        model = families.model("llama", "attnmesh")
        whole = hf.generate(model, prompt(), max_new_tokens=NEW, do_sample=False)[0].tolist()
        for pipe in (pipes[0], *pipes[2:]):
            assert pipe.poll(60)
            _, made, seen, left, _ = pipe.recv()
            assert made == whole
            assert seen <= left + 1, "each token but the new ones was computed once, before"
    finally:
        for process in processes:
            process.kill()
            process.join()
