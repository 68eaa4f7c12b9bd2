"""A world of ranks, entered and left: also once more, by processes that outlived a rank which was lost.

The store by which ranks meet may outlive a world, as torchrun's does when it restarts its workers; and what a gone
world has left in it would be taken for the new one's. So every rank writes a word of its own into it, the first tells
them all back, and a world begins when each has found its word among them: its name is made of these words.
"""

import json
import time
from contextlib import suppress
from datetime import timedelta
from hashlib import blake2b
from uuid import uuid4

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from attnmesh.comm.failures import LONGEST, part
from attnmesh.errors import ArgumentError, RankFailure
from attnmesh.mesh.axes import clear_caches

TIMEOUT = timedelta(minutes=30)
"""What a rank waits for others, unless it is told otherwise."""

POLL_INTERVAL = 0.02
"""Seconds from one look into the store to the next."""


def enter(
    backend: str,
    store: Store | None = None,
    rank: int | None = None,
    ranks: int | None = None,
    *,
    seconds: float = 300.0,
    timeout: timedelta = TIMEOUT,
) -> None:
    """Make the default process group, once all ranks have come, for which they have so many seconds.

    Without a store it is torchrun's, and so are the numbers. The same store serves again, for as many ranks or others.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < LONGEST:
        raise ArgumentError("world.enter seconds", "more than 0 seconds", repr(seconds), "pass a number")
    if store is None and rank is None and ranks is None:
        store, rank, ranks = next(rendezvous("env://", timeout=timedelta(seconds=seconds)))
    elif store is None or rank is None or ranks is None:
        given, fix = f"{store}, {rank} and {ranks}", "pass all three"
        raise ArgumentError("world.enter", "a store, a rank and how many there are, or none of them", given, fix)
    if not isinstance(ranks, int) or not isinstance(rank, int) or not 0 <= rank < ranks:
        raise ArgumentError("world.enter", "a rank below how many there are", f"{rank} of {ranks}", "count from 0")
    name = _name(store, rank, ranks, seconds)
    dist.init_process_group(backend, store=PrefixStore(name, store), rank=rank, world_size=ranks, timeout=timeout)


def leave() -> None:
    """Let go of all meshes and process groups, also of those that a lost rank has broken."""
    clear_caches()
    part()
    if dist.is_initialized():
        with suppress(RuntimeError):
            dist.destroy_process_group()


def _name(store: Store, rank: int, ranks: int, seconds: float) -> str:
    """A name that the ranks of this world have in common, and no others."""
    mine, end = uuid4().hex, time.monotonic() + seconds
    store.set(_key("word", rank), mine)
    while True:
        if rank == 0:
            _tell(store, ranks)
        words = _words(store)
        name = blake2b("".join(words).encode(), digest_size=8).hexdigest()
        if len(words) == ranks and words[rank] == mine:
            store.set(_key("heard", rank), name)
            if rank == 0 and not _deaf(store, ranks, name):
                store.set("attnmesh begins", name)
            if _read(store, "attnmesh begins") == name:
                return name
        if time.monotonic() > end:
            missing = [other for other in range(ranks) if not _read(store, _key("word", other))]
            missing = missing or (_deaf(store, ranks, name) if mine in words else [0])
            raise RankFailure(missing, "entering", "world", f"not all {ranks} ranks came within {seconds:.0f} s")
        time.sleep(POLL_INTERVAL)


def _tell(store: Store, ranks: int) -> None:
    """On the first rank: tell all words back, whenever there is a new one."""
    words = [_read(store, _key("word", rank)) for rank in range(ranks)]
    if all(words) and words != _words(store):
        store.set("attnmesh words", json.dumps(words))


def _deaf(store: Store, ranks: int, name: str) -> list[int]:
    """The ranks that have not heard all words: theirs was of another world."""
    return [rank for rank in range(ranks) if _read(store, _key("heard", rank)) != name]


def _words(store: Store) -> list[str]:
    words: list[str] = json.loads(_read(store, "attnmesh words") or "[]")
    return words


def _read(store: Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""


def _key(what: str, rank: int) -> str:
    return f"attnmesh {what} {rank}"
