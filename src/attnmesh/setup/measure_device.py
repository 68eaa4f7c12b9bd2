"""Rates of one rank while all ranks work."""

import os
from collections.abc import Callable
from functools import partial as partial_of

import torch
from torch import Tensor

from attnmesh.core.mask import FULL, Documents, Mask
from attnmesh.core.scaling import Scaling
from attnmesh.core.selection import Visible
from attnmesh.cost.rates import Device
from attnmesh.kernels.local_op import attend_locally
from attnmesh.kernels.prepared_local import PreparedLocal
from attnmesh.setup.measured_ranks import MeasuredRanks

KEYS = {"cpu": 2**15, "cuda": 2**20}
"""Keys of 8 heads that are read and copied: more than a CPU caches."""

RUNS = 8
"""Runs of tokens that are timed together, and beside one call of as many pairs of query and key."""


def measure_device(world: MeasuredRanks, dtype: torch.dtype) -> Device:
    """Return the rates of a rank while all ranks work, and its memory."""
    gpu = world.device.type == "cuda"
    tokens, width = (8192, 128) if gpu else (512, 64)
    q, k, v = torch.randn(3, 1, 8, tokens, width, device=world.device, dtype=dtype).unbind()
    flops = 4 * 8 * tokens * tokens * width
    learned = [x.clone().requires_grad_() for x in (q, k, v)]
    scaling = Scaling(width**-0.5)

    def attending(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask = FULL) -> Callable[[], object]:
        return partial_of(PreparedLocal.of(q, k, v, mask, scaling, "auto").attend, q, k, v, None)

    def both() -> None:
        out, _ = attend_locally(learned[0], learned[1], learned[2], Visible(FULL), scaling, "auto")
        torch.autograd.grad(out.sum(), learned)

    with torch.no_grad():
        attend_all = attending(q, k, v)
        forward = world.median(attend_all, until_all=True)
        alone_seconds = world.median(lambda: attend_all() if world.axis.index == 0 else None, until_all=True)
        few = [x[:, :, :8].contiguous() for x in (q, k, v)]
        call = world.short(attending(*few))
        head = [x[:, :1] for x in (q, k, v)]
        block = tokens // RUNS
        at_once = attending(head[0], *(x[:, :, :block] for x in head[1:]))
        in_runs = attending(*head, mask=FULL & Documents([block] * RUNS))
        run_seconds = max(0.0, world.short(in_runs) - world.short(at_once)) / (RUNS - 1)
        keys = torch.randn(2, 1, 8, KEYS[world.device.type], width, device=world.device, dtype=dtype)
        read_seconds = world.median(attending(few[0][:, :, :1], *keys.unbind()))
        copy = world.median(keys.clone)
    backward = max(world.median(both, until_all=True) - forward, forward)
    bytes_read = keys.numel() * keys.element_size()
    rates = flops / forward, 2.5 * flops / backward, bytes_read / max(read_seconds - call, 1e-9)
    speed_up = max(1.0, forward / alone_seconds)  # of a rank that works alone
    # A run counts as two calls: of its own keys, and of the keys before them.
    return Device(
        *rates, _memory(world), copy_rate=2 * bytes_read / copy, call=call, run=2 * run_seconds, alone=speed_up
    )


def _memory(world: MeasuredRanks) -> float:
    """Return the bytes of memory per rank: the GPU's, or a share of the host's."""
    if world.device.type == "cuda":
        return float(torch.cuda.get_device_properties(world.device).total_memory)
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return float(pages) / max(map(len, world.hosts))
