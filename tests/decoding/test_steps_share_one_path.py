"""Every kind of step runs the same functions of `attnmesh.decoding` in the same order: no kind has a way of its own.

A kind with a way of its own may send the same messages and give the same numbers, so that neither tells. The functions
that run do. The tests compare those of each kind with those of a plain step, and name none: renamed, split or joined
functions change both alike. How ranks merge is no kind: subclasses of `PreparedStep` have functions of the same names.
"""

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import attnmesh as am
from attnmesh import decoding
from tests.support.ranks.pool import Pool, on_each_rank
from tools.walk import call_watched

ROOM = str(Path(decoding.__file__).parent)

CALLS = tuple({inspect.unwrap(call).__code__.co_filename for call in (am.decode, am.decode_rows)})
"""Files of the functions that users call: each begins in its own way, and what it calls is compared."""

CHECKS = ("step_checks.py", "step_agreement.py")
"""Files of what is done at the first step of a signature, and of what ranks say to each other if it fails."""

SIZES: dict[str, Any] = {"batch": 2, "kv_heads": 2, "head_dim": 16, "capacity": 100, "block": 4, "dtype": torch.float32}


def _cache(mesh: Any, **options: Any) -> am.KVCache:
    return am.KVCache(mesh, **{**SIZES, **options})


def _tokens(count: int, batch: int = 2, heads: int = 2) -> tuple[Tensor, Tensor]:
    k, v = torch.randn(2, batch, heads, count, 16, generator=torch.Generator().manual_seed(count))
    return k, v


def steps(mesh: Any) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yield a step of each kind on a cache of forty tokens."""
    q = torch.randn(2, 4, 1, 16, generator=torch.Generator().manual_seed(1))

    def filled(real: Tensor | None = None, **options: Any) -> am.KVCache:
        cache = _cache(mesh, **options)
        cache.append(*_tokens(40, cache.config.batch), token_mask=real)
        return cache

    plain, window = filled(), am.Window(9)
    yield "plain", lambda: am.decode(q, plain)
    padded = filled(torch.arange(40)[None].expand(2, -1) > torch.tensor([[3], [0]]))
    yield "padded", lambda: am.decode(q, padded)
    forgets = filled(mask=window)
    yield "a window that forgets", lambda: am.decode(q, forgets, mask=window)
    forked = filled().fork()
    yield "forked", lambda: am.decode(q, forked)
    rows = [filled(batch=1) for _ in range(2)]
    yield "rows", lambda: am.decode_rows(q, rows)
    selection = am.Selection(torch.arange(8, dtype=torch.int32).expand(2, 1, 1, 8).contiguous())
    yield "selected", lambda: am.decode(q, plain, selected=selection)
    latents = _cache(mesh, kv_heads=1, value_dim=12, values="prefix")
    latents.append(_tokens(40, 2, 1)[0])
    yield "latents", lambda: am.decode(q, latents)
    stored = filled(storage="int8")
    yield "int8", lambda: am.decode(q, stored)
    yield "reproducible", lambda: am.decode(q, plain, reproducible=True)
    several = torch.randn(2, 4, 3, 16, generator=torch.Generator().manual_seed(2))
    yield "several queries", lambda: am.decode(several, plain)
    yield "several queries, padded", lambda: am.decode(several, padded)
    sinks = torch.ones(4)
    yield "sinks", lambda: am.decode(q, plain, sinks=sinks)
    yield "another kernel", lambda: am.decode(q, plain, kernel="reference")


def traced(call: Callable[[], object]) -> list[str]:
    """Return the functions of the room that a call runs through, but for checks and the call itself."""
    found = list[str]()

    def on_frame(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        is_of_room = code.co_filename.startswith(ROOM) and not code.co_filename.endswith((*CHECKS, *CALLS))
        is_of_record = code.co_qualname.startswith(("StepInputs.", "StepOptions."))
        if event == "call" and is_of_room and not is_of_record:
            found.append(f"{Path(code.co_filename).name} {code.co_name}")

    call_watched(call, on_frame)
    return found


@on_each_rank
def trace_steps() -> dict[str, tuple[list[str], list[str]]]:
    """On a rank: the functions of the first step of each kind, and of a later one."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("keys",)) if ranks > 1 else None
    return {name: (traced(step), traced(step)) for name, step in steps(mesh)}


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_kind_of_step_runs_the_same_functions(ranks: int, pool: Pool) -> None:
    for ways in pool.run(ranks, trace_steps):
        first, later = ways["plain"]
        assert later, "a step runs functions of the room"
        for name, (begun, known) in ways.items():
            assert begun == first, name
            assert known == (first if name == "selected" else later), (
                name
            )  # a selection's indices are checked each time
