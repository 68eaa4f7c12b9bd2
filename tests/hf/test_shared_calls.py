"""Shared layers where ranks differ: another thread, inference mode, or no memory on one of them."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import attnmesh as am
import attnmesh.hf as hf
from attnmesh import errors
from attnmesh.comm.host_linear import HostLinear
from attnmesh.kernels.native.abi import NO_MEMORY_CODE
from tests.support.models.families import prompt
from tests.support.models.shared_weights import counted_calls, load, mesh_of, saved_stock
from tests.support.process.needs import needs_library
from tests.support.ranks.pool import Pool, on_each_rank

pytestmark = needs_library
SECONDS_TO_NAME = 2.0
"""Seconds of a call in which another rank fails: ranks that wait look twice, half a second apart."""


@on_each_rank
def generate_with_one_in_inference_mode(folder: str) -> tuple[list[list[int]], list[int]]:
    mesh = am.init_mesh((1, 2, 2))
    with counted_calls() as calls, torch.inference_mode(dist.get_rank() == 0):
        model = hf.share_weights(load(folder), mesh)
        tokens = hf.generate(model, prompt(30), mesh=mesh, max_new_tokens=4, do_sample=False)
    return tokens.tolist(), calls


def test_inference_mode_of_one_rank_changes_nothing(pool: Pool, tmp_path: Path) -> None:
    expected = saved_stock(tmp_path, 30, 4)
    (tokens, calls), *others = pool.run(4, generate_with_one_in_inference_mode, str(tmp_path))
    assert tokens == expected
    assert calls
    assert others == [(tokens, calls)] * 3


def run_in_thread(call: Callable[[], None]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def call_within_each_step(model: Any, call: Callable[[], None]) -> None:
    """Call in another thread while this one is within a step of the model."""
    main = threading.get_ident()

    def hook(_: Any, args: Any) -> None:
        if main == threading.get_ident() and args[0].shape[1] == 1:
            run_in_thread(call)

    model.model.layers[0].mlp.register_forward_pre_hook(hook)


@on_each_rank
def generate_beside_a_thread(folder: str) -> list[list[int]]:
    """Tokens of ranks of which one calls the model in another thread, without a cache, within each step."""
    mesh, alike = mesh_of(2), list[bool]()
    with counted_calls():
        model = hf.share_weights(load(folder), mesh)

        def call() -> None:
            with torch.no_grad():
                alike.append(torch.equal(model(prompt(2)).logits, load(folder)(prompt(2)).logits))

        call()
        if dist.get_rank():
            call_within_each_step(model, call)
        tokens = hf.generate(model, prompt(30), mesh=mesh, max_new_tokens=3, do_sample=False)
    assert all(alike)
    assert len(alike) > dist.get_rank()
    return tokens.tolist()


def test_another_thread_computes_alone(pool: Pool, tmp_path: Path) -> None:
    expected = saved_stock(tmp_path, 30, 3)
    assert pool.run(2, generate_beside_a_thread, str(tmp_path)) == [expected] * 2


@on_each_rank
def generate_beside_a_thread_with_a_cache(folder: str) -> tuple[list[list[int]], set[str]]:
    """Tokens of a rank, and what a thread is told that calls the model with a cache on the mesh within each step."""
    mesh, told = mesh_of(2), set[str]()
    with counted_calls():
        model = hf.share_weights(load(folder), mesh)
        cache = hf.ShardedCache(model.config, mesh)

        def call() -> None:
            try:
                with torch.no_grad():
                    model(prompt(1), past_key_values=cache)
            except errors.InputError as error:
                told.add(f"{type(error).__name__}: {error}")

        call_within_each_step(model, call)
        tokens = hf.generate(model, prompt(30), mesh=mesh, max_new_tokens=3, do_sample=False)
        run_in_thread(call)  # which shares the next step
    assert cache.get_seq_length() == 1
    return tokens.tolist(), told


def test_a_second_thread_with_a_cache_is_refused(pool: Pool, tmp_path: Path) -> None:
    expected = saved_stock(tmp_path, 30, 3)
    for tokens, told in pool.run(2, generate_beside_a_thread_with_a_cache, str(tmp_path)):
        assert tokens == expected
        assert len(told) == 1
        assert told.pop().startswith("MeshError: share_weights: expected steps of one thread at a time")


class Told(NamedTuple):
    """What a rank is told when the last one gets no memory in a shared layer, the seconds to it, and later tokens."""

    said: str
    seconds: float
    tokens: list[list[int]]


@on_each_rank
def generate_without_memory(folder: str, where: str) -> Told:
    mesh, run, left = mesh_of(dist.get_world_size()), HostLinear.run, [5]

    def fail(call: HostLinear, x: Tensor) -> Any:
        left[0] -= 1
        if left[0] == 0 and where == "native":
            call.function = lambda *_: NO_MEMORY_CODE
        if left[0] == 0 and where == "PyTorch":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return run(call, x)

    said, began = "nothing", 0.0
    with counted_calls():
        model = hf.share_weights(load(folder), mesh)
        hf.generate(model, prompt(30), mesh=mesh, max_new_tokens=2, do_sample=False)
        if dist.get_rank() == dist.get_world_size() - 1:
            HostLinear.run = fail  # type: ignore[method-assign]
        began = time.monotonic()
        try:
            hf.generate(model, prompt(30), mesh=mesh, max_new_tokens=3, do_sample=False)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        seconds = time.monotonic() - began
        HostLinear.run = run  # type: ignore[method-assign]
        tokens = hf.generate(model, prompt(30), mesh=mesh, max_new_tokens=3, do_sample=False)
    return Told(said, seconds, tokens.tolist())


@pytest.mark.parametrize(("ranks", "where"), [(2, "native"), (3, "PyTorch")])
def test_a_rank_without_memory_is_named_by_all(ranks: int, where: str, pool: Pool, tmp_path: Path) -> None:
    expected = saved_stock(tmp_path, 30, 3)
    own = {"native": "MemoryError: ", "PyTorch": "RuntimeError: DefaultCPUAllocator"}[where]
    found = pool.run(ranks, generate_without_memory, str(tmp_path), where)
    *others, last = (told.said for told in found)
    assert last.startswith(own)
    (text,) = set(others)
    assert text.startswith("UnforeseenError: a layer of shared weights: expected what each rank can do, given")
    assert own.partition(":")[0] in text
    for told in found:
        assert told.seconds < SECONDS_TO_NAME
        assert told.tokens == expected
