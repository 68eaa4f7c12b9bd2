"""Enter and leave a world of ranks, also again after a rank was lost.

A store may outlive a world, as torchrun's does when it restarts its workers, and keep keys of the old world. So every
rank writes a new random word, and rank 0 publishes all words. The world begins when each rank has found its own word
among the published ones. The prefix of the world's keys is a hash of the words.
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

from attnmesh.comm.failures import is_timeout
from attnmesh.errors import ArgumentError, RankFailure
from attnmesh.runtime.world import WORLD

GROUP_TIMEOUT = timedelta(minutes=30)
"""Timeout of process groups, unless another is given."""

STORE_POLL_SECONDS = 0.02
"""Seconds between two reads of the store."""


def enter(
    backend: str,
    store: Store | None = None,
    rank: int | None = None,
    ranks: int | None = None,
    *,
    seconds: float = 300.0,
    timeout: timedelta = GROUP_TIMEOUT,
) -> None:
    """Make the default process group once all ranks have come. They have `seconds` for that.

    Without a store, torchrun's store, rank and world size are used. The same store serves again, for more or fewer
    ranks.
    """
    if not is_timeout(seconds):
        raise ArgumentError("rendezvous.enter seconds", "more than 0 seconds", repr(seconds), "pass a number")
    if store is None and rank is None and ranks is None:
        store, rank, ranks = next(rendezvous("env://", timeout=timedelta(seconds=seconds)))
    elif store is None or not isinstance(ranks, int) or not isinstance(rank, int) or not 0 <= rank < ranks:
        expected, given = "a store, a rank and how many there are, or none of them", f"{store}, {rank} and {ranks}"
        raise ArgumentError("rendezvous.enter", expected, given, "pass all three, and count ranks from 0")
    name = _name(store, rank, ranks, seconds)
    dist.init_process_group(backend, store=PrefixStore(name, store), rank=rank, world_size=ranks, timeout=timeout)


def leave() -> None:
    """Release all meshes and process groups, also groups that a lost rank has broken."""
    WORLD.close()
    if dist.is_initialized():
        with suppress(RuntimeError):
            dist.destroy_process_group()


def _name(store: Store, rank: int, ranks: int, seconds: float) -> str:
    """Return a name that the ranks of this world share, and no other world has."""
    mine = uuid4().hex
    end = time.monotonic() + seconds
    store.set(_word_key("word", rank), mine)
    while True:
        if rank == 0:
            _publish_words(store, ranks)
        words = _words(store)
        name = blake2b("".join(words).encode(), digest_size=8).hexdigest()
        if len(words) == ranks and words[rank] == mine:
            store.set(_word_key("read", rank), name)
            if rank == 0 and not _behind(store, ranks, name):
                store.set("attnmesh begins", name)
            if _word_at(store, "attnmesh begins") == name:
                return name
        if time.monotonic() > end:
            missing = [other for other in range(ranks) if not _word_at(store, _word_key("word", other))]
            missing = missing or (_behind(store, ranks, name) if mine in words else [0])
            raise RankFailure(missing, "entering", "world", f"not all {ranks} ranks came within {seconds:.0f} s")
        time.sleep(STORE_POLL_SECONDS)


def _publish_words(store: Store, ranks: int) -> None:
    """Publish all words if a rank has written a new one. Rank 0 calls it."""
    words = [_word_at(store, _word_key("word", rank)) for rank in range(ranks)]
    if all(words) and words != _words(store):
        store.set("attnmesh words", json.dumps(words))


def _behind(store: Store, ranks: int, name: str) -> list[int]:
    """Return the ranks that have not read the words of this name: the word that they left is of another world."""
    return [rank for rank in range(ranks) if _word_at(store, _word_key("read", rank)) != name]


def _words(store: Store) -> list[str]:
    words: list[str] = json.loads(_word_at(store, "attnmesh words") or "[]")
    return words


def _word_at(store: Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""


def _word_key(what: str, rank: int) -> str:
    return f"attnmesh {what} {rank}"
