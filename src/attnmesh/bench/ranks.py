"""Start ranks on this machine, run one function on all, and hand back what each says."""

import multiprocessing as mp
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def run_on_ranks(
    ranks: int, function: Callable[..., Any], *arguments: Any, seconds: float = 1800.0, exact_memory: bool = False
) -> list[Any]:
    """Each rank's result, from gloo ranks of one thread each; the first error ends all and is raised here.

    With `exact_memory`, memory goes back to the system when it is freed, so that the resident size tells what is held;
    that is slow, and not for timing.
    """
    context = mp.get_context("spawn")
    if exact_memory:
        os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    answers: Any = context.Queue()
    with tempfile.TemporaryDirectory(prefix="attnmesh-") as folder:
        store = Path(folder) / "store"
        arguments = (answers, store, ranks, function, arguments)
        processes = [context.Process(target=_rank, args=(rank, *arguments), daemon=True) for rank in range(ranks)]
        for process in processes:
            process.start()
        try:
            said = [answers.get(timeout=seconds) for _ in range(ranks)]
            for _, error in said:
                if isinstance(error, str):
                    raise RuntimeError(error)
        finally:
            os.environ.pop("MALLOC_MMAP_THRESHOLD_", None)
            for process in processes:
                process.join(timeout=5)
                process.kill()
    return [result for _, (result,) in sorted(said)]


def _rank(rank: int, answers: Any, store: Path, ranks: int, function: Callable[..., Any], arguments: Any) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # nothing listens but on this machine
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(minutes=5))
        answers.put((rank, (function(*arguments),)))
        dist.destroy_process_group()
    except Exception:
        answers.put((rank, f"on rank {rank}:\n{traceback.format_exc()}"))
