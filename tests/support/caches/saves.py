"""Saves: caches and their outputs, what is in a folder, and saves that stop on the way."""

import os
from pathlib import Path
from threading import Event, Thread, current_thread
from typing import Any

import pytest
import torch

import attnmesh as am
from attnmesh.store import tensor_file
from tests.support.caches.make import along_keys, random_cache

SIZES: dict[str, Any] = {"batch": 1, "kv_heads": 2, "head_dim": 8, "capacity": 20, "dtype": torch.float32}


def cache_of(tokens: int, ranks: int = 1) -> am.KVCache:
    return random_cache(tokens, along_keys(ranks), capacity=tokens + 40, block=16)


def decoded(cache: am.KVCache) -> torch.Tensor:
    """Return the output of a fixed query."""
    return am.decode(torch.randn(1, 4, 1, 8, generator=torch.Generator().manual_seed(1)), cache)


def is_save_of(path: Path, cache: am.KVCache) -> bool:
    """Return whether a folder's save decodes as a cache does."""
    return torch.equal(decoded(am.KVCache.load(path, None)), decoded(cache))


def only_save_in(path: Path) -> Path:
    """Return the folder of the only save."""
    (folder,) = (each for each in path.iterdir() if each.is_dir())
    return folder


def save_until_killed(cache: am.KVCache, path: Path, files: int) -> None:
    """Save in a child that ends once it has written `files` files, and has begun another."""
    child = os.fork()
    if not child:
        write, names = tensor_file.write_tensors, list[str]()

        def write_some(file: Path, *arguments: Any) -> None:
            names.append(file.name)
            if len(names) > files:
                file.with_name(f"{file.name}.part").write_bytes(b"half of it")
                os._exit(0)
            write(file, *arguments)

        tensor_file.write_tensors = write_some
        cache.save(path)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def hold_first_save(monkeypatch: pytest.MonkeyPatch) -> tuple[Event, Event]:
    """Let the next save write one file. Return an event that it sets then, and one that it waits for."""
    begun, go, first, original = Event(), Event(), list[Thread](), tensor_file.write_tensors

    def write(*arguments: Any) -> None:
        original(*arguments)
        first.append(current_thread())
        if first[0] is current_thread():
            begun.set()
            go.wait()

    monkeypatch.setattr(tensor_file, "write_tensors", write)
    return begun, go
