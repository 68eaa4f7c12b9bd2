"""Steps of every kind run the same functions in the same order, but for what a kernel does with the runs it gets."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import attnmesh as am
from attnmesh.kernels.native.build import library
from tests.support.pool import Pool

ROOM = str(Path(am.__file__).parent / "decoding")

PATH = [
    *("run_checked", "agreement_on", "StepPlan.of", "kernel_of", "SeenKeys.of", "RunKernel.of", "StepInputs.kind"),
    *("StepInputs.indices", "DecodeStep.options", "StepPlan.is_kept", "RunKernel.hold", "Held.of", "run", "run_step"),
    "RunKernel.attend",
]
"""Functions of a step once it is checked, up to the kernel."""

ATTEND, FIND = PATH[-1], {"runs_by_number", "runs_by_position"}

BY_MESSAGES = {"_run_compared", "_merge", "_finish_reproducible"}
"""Functions of a merge that no native call does."""

KINDS = {
    "plain": 1,
    "window": 1,
    "padded": 1,
    "several queries": 1,
    "latents": 1,
    "int8": 1,
    "heads": 1,
    "padded batch": 2,
    "forked": 2,
    "rows": 3,
    "selected": None,
    "lengths": 1,
    "reproducible": None,
}
"""Kinds of steps, and the native launches of one on a rank, if the native kernel serves it in its own way."""


def step_of(kind: str) -> Callable[[], Tensor]:
    """Return a step of a kind on a cache of its own."""
    ranks, options = (dist.get_world_size() if dist.is_initialized() else 1), dict[str, Any]()
    mesh = am.init_mesh((1, 1, ranks)) if ranks > 1 else None
    batch, tokens = 2 if kind == "padded batch" else 1, 40
    sizes: dict[str, Any] = {"batch": batch, "kv_heads": 2, "head_dim": 24, "capacity": 200, "block": 4}
    if kind == "window":
        sizes["mask"] = options["mask"] = am.Window(9)
    if kind == "latents":
        sizes |= {"kv_heads": 1, "value_dim": 16, "values": "prefix"}
    if kind == "int8":
        sizes["storage"] = "int8"
    caches = [am.KVCache(mesh, **sizes, dtype=torch.float32) for _ in range(3 if kind == "rows" else 1)]
    generator = torch.Generator().manual_seed(0)
    real = torch.arange(tokens) >= torch.arange(2, 2 + batch)[:, None] if "padded" in kind else None
    for cache in caches:
        k, v = torch.randn(2, batch, sizes["kv_heads"], tokens, 24, generator=generator)
        cache.append(k, None if kind == "latents" else v, token_mask=real)
    q = torch.randn(max(batch, len(caches)), 4, 3 if kind == "several queries" else 1, 24, generator=generator)
    if kind == "rows":
        return lambda: am.decode_rows(q, caches)
    cache = caches[0]
    if kind == "forked":
        cache = cache.fork()
        cache.append(*torch.randn(2, batch, 2, 8, 24, generator=generator))
    if kind == "heads":
        options["output"] = "heads"
    if kind == "selected":
        options["selected"] = am.Selection(torch.tensor([[[[3, 17, 30]]]], dtype=torch.int32))
    if kind == "lengths":
        options["key_lengths"] = torch.tensor([29])
    if kind == "reproducible":
        options["reproducible"] = True
    return lambda: am.decode(q, cache, **options)


def ran(step: Callable[[], Tensor]) -> Iterator[str]:
    """Yield the functions of the room that a step enters, and native launches and merges, in order."""
    entered: list[str] = []

    def on_call(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if (
            event == "call"
            and "<" not in code.co_qualname
            and (code.co_filename.startswith(ROOM) or code.co_name in ("launch_at", "merge_in_host"))
        ):
            entered.append(code.co_qualname)

    sys.setprofile(on_call)
    try:
        step()
    finally:
        sys.setprofile(None)
    yield from entered


def _first_steps() -> dict[str, list[str]]:
    return {kind: [*ran(step_of(kind))] for kind in KINDS}


@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_of_every_kind_run_the_same_functions(ranks: int, pool: Pool) -> None:
    for answer in pool.run(ranks, _first_steps):
        for kind, names in answer.items():
            checked = names[names.index("run_checked") :]
            driven = [name for name in dict.fromkeys(checked) if name not in BY_MESSAGES]
            stop = driven.index(ATTEND) + 1
            assert driven[:stop] == PATH, kind
            assert driven[stop] in FIND, kind


@pytest.mark.skipif(library().attend is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_is_one_launch_and_one_merge(ranks: int, pool: Pool) -> None:
    for answer in pool.run(ranks, _first_steps):
        for kind, launches in KINDS.items():
            if launches is not None:
                assert answer[kind].count("NativeKind.launch_at") == launches, kind
                assert answer[kind].count("merge_in_host") == (ranks > 1), kind
