"""The shard of a cache where memory is short: it is as it was before, and copies no more than it has to."""

import sys
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

import attnmesh as am
from attnmesh.cache import frozen_piece, memory_shard
from attnmesh.cache.frozen_piece import join_slots
from attnmesh.cache.memory_shard import MemoryShard
from tests.support.caches.make import random_cache
from tests.support.truth.problems import numbers
from tests.support.truth.tolerances import FLOAT32


@pytest.mark.parametrize("slots", [20, 100])
def test_a_resize_without_memory_for_the_values_leaves_the_shard_as_it_was(
    slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = am.KVCache(None, batch=1, kv_heads=2, head_dim=8, capacity=60, dtype=torch.float32, block=4)
    k, v = numbers(2, 1, 2, 60, 8, seed=1)
    cache.append(k[:, :, :12], v[:, :, :12])
    made, shard = list[int](), cache.own_shard
    assert isinstance(shard, MemoryShard)

    def once(parts: Any, dim: int, rows: int) -> Any:
        made.extend([rows] * (parts[0].ndim == 4))
        if len(made) == 2:
            raise torch.OutOfMemoryError
        return join_slots(parts, dim, rows)

    with monkeypatch.context() as patch:
        patch.setattr(memory_shard, "join_slots", once)
        with pytest.raises(torch.OutOfMemoryError):
            shard.resize(cache.config, slots)
    cache.append(k[:, :, 12:], v[:, :, 12:])
    assert cache.keys[:, :, :60].equal(k)
    assert cache.values[:, :, :60].equal(v)


def test_a_padded_fork_that_finds_no_memory_to_truncate_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, other = (random_cache(61, batch=2, padding=33) for _ in range(2))
    forked = cache.fork()

    def no_memory(*_: object) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(memory_shard, "join_slots", no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            forked.truncate(30)
    assert forked.lengths.tolist() == other.lengths.tolist()
    for each in (forked, other):
        each.truncate(30)
        each.append(*numbers(2, 2, 2, 5, 8, seed=2))
    one, two = (am.decode(numbers(2, 4, 2, 8, seed=3), each) for each in (forked, other))
    assert float((one - two).abs().max()) < FLOAT32


def test_a_fork_that_finds_no_memory_for_another_batch_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = random_cache(61, batch=2)
    forked = cache.fork()

    def no_memory(*_: object) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(frozen_piece, "join_slots", no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            forked.reorder(torch.tensor([1, 0, 1]))
    q = numbers(2, 4, 2, 8, seed=3)
    assert am.decode(q, forked).equal(am.decode(q, cache))


def test_a_save_after_a_reorder_that_failed_is_of_the_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = random_cache(61, batch=2)
    cache.save(tmp_path)

    def no_memory(*_: object) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(memory_shard, "_write", no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            cache.reorder(torch.tensor([1, 0]))
    cache.save(tmp_path)
    loaded = am.KVCache.load(tmp_path, None)
    assert loaded.keys[:, :, :61].equal(cache.keys[:, :, :61])


def test_truncation_copies_one_block_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["attnmesh.cache.memory_shard"]
    copied = []
    join = module.join_slots  # type: ignore[attr-defined]

    def counted(parts: list[Tensor], dim: int, rows: int) -> Tensor:
        copied.append(sum(part.shape[dim] for part in parts))
        return join(parts, dim, rows)  # type: ignore[no-any-return]

    cache = random_cache(150)
    turn = cache.fork()
    other = turn.fork()
    turn.append(*numbers(2, 1, 2, 20, 8, seed=1))
    third = turn.fork()
    fourth = turn.fork()
    monkeypatch.setattr(module, "join_slots", counted)
    for each, length in ((other, 30), (third, 161), (fourth, 9)):
        copied.clear()
        each.truncate(length)
        assert copied == [length % 4] * 3
        assert torch.equal(each.keys[:, :, :9], random_cache(150).keys[:, :, :9])


def interrupted(function: Callable[[], object], name: str, line: int) -> bool:
    """Call a function, with Ctrl-C before one line of the shard's method `name`. Return False if there is no line."""
    lines = count()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if (frame.f_code.co_name, frame.f_code.co_filename) != (name, memory_shard.__file__):
            return None
        if event == "line" and next(lines) == line:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("change", ["_resized", "_share"])
def test_ctrl_c_while_tokens_move_to_other_memory_loses_none(change: str) -> None:
    """Ctrl-C between two fields of a shard would leave them unlike: later tokens then lie beyond its memory."""
    k, v = numbers(2, 1, 2, 110, 8, seed=1)
    q = numbers(1, 1, 4, 1, 8, seed=2)[0]
    mask = am.Window(20) if change == "_resized" else None
    outputs = list[Tensor]()
    for line in count():
        cache = am.KVCache(None, batch=1, kv_heads=2, head_dim=8, capacity=300, dtype=torch.float32, block=8, mask=mask)
        cache.append(k[:, :, :37], v[:, :, :37])
        call = cache.fork if mask is None else partial(cache.append, k[:, :, 37:100], v[:, :, 37:100])
        goes_on = interrupted(call, change, line)
        shard = cache.own_shard
        slots = {len(shard.token_index), *(x.shape[2] for x in shard.kv_tensors)}
        assert len(slots) == 1, f"line {line}"
        start = cache.length
        cache.append(k[:, :, start:], v[:, :, start:])
        outputs.append(am.decode(q, cache, mask=mask or am.Causal()))
        if not goes_on:
            break
    assert len(outputs) > 8  # lines of the method
    for line, output in enumerate(outputs):
        assert float((output - outputs[-1]).abs().max()) < FLOAT32, f"line {line}"
