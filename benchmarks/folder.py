"""`python -m benchmarks folder`: steps over a cache in a folder that exceeds memory, beside reading its files; appends.

The folder is filled, and a cache of the same tokens in memory gives the outputs to compare with. Then a process that
may use less memory than the keys, pages of files included, opens the folder. Reading the files and a step take turns.
"""

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

import attnmesh as am
from attnmesh.cache.tiered_shard import LEAVING_PARTS
from attnmesh.cli.launch import Send, run_on_ranks
from attnmesh.store.layer_files import PIECE_TOKENS
from benchmarks.netns import send_rows
from benchmarks.timing import Timing

HEADS, KV_HEADS, DIM = 32, 8, 128
TOKEN_BYTES = 2 * KV_HEADS * DIM * 2
GOAL, APPEND_GOAL = 1.2, 2.0
"""Most time of a step over that of reading its bytes, and of an append over that of writing its rows."""

GROUPS = {"memory.limit_in_bytes": Path("/sys/fs/cgroup/memory"), "memory.max": Path("/sys/fs/cgroup")}
"""Folders of control groups of versions 1 and 2, by the name of their limit."""

CHUNK = 1 << 24
"""Bytes of one read."""


@dataclass(frozen=True)
class Request:
    """Sizes of the cache and of the memory, in bytes, the folder, and how often each is timed."""

    size: int
    memory: int
    folder: Path
    rounds: int


@dataclass(frozen=True)
class Row:
    """A call beside reading, or writing, the same bytes."""

    case: str
    bytes: int
    plain: Timing
    ours: Timing
    ratio: float
    """Median of the ratios of each round."""
    goal: float
    memory: int | None = None
    """Bytes that the process may use; None if it is not bounded."""
    different: int | None = None
    """Numbers of the output that are not those of a cache in memory."""
    in_memory: Timing | None = None
    """Time of the same append to a cache in memory."""


def cache_of(folder: Path | None, tokens: int, hot: int | None = None) -> am.KVCache:
    """Return an empty cache."""
    sizes: dict[str, Any] = {"batch": 1, "kv_heads": KV_HEADS, "head_dim": DIM, "dtype": torch.bfloat16}
    return am.KVCache(None, capacity=tokens + 32 * PIECE_TOKENS, folder=folder, hot=hot, **sizes)


def queries() -> Tensor:
    """Return the query of each step."""
    return torch.randn(1, HEADS, 1, DIM, generator=torch.Generator().manual_seed(1)).bfloat16()


def rows(sizes: tuple[int, int], parent: Path | None, rounds: int, add: Send) -> None:
    """Measure in a folder that goes afterwards, and add each row."""
    with tempfile.TemporaryDirectory(dir=parent) as made:
        _measure(Request(*sizes, Path(made) / "cache", rounds), add)


def _measure(request: Request, add: Send) -> None:
    tokens = request.size // TOKEN_BYTES
    plain, cache = cache_of(None, tokens), cache_of(request.folder, tokens)
    random_rows = torch.randn(2, 1, KV_HEADS, PIECE_TOKENS, DIM, generator=torch.Generator().manual_seed(0)).bfloat16()
    while plain.length < tokens:
        k, v = random_rows.roll(plain.length // PIECE_TOKENS, 3)[:, :, :, : tokens - plain.length]
        plain.append(k, v)
        cache.append(k, v)
    expected = am.decode(queries(), plain).float().flatten().tolist()
    os.sync()
    for file in request.folder.rglob("*.*"):
        _drop(file)
    del plain, cache
    run_on_ranks(1, send_rows, _rows, request, expected, on_message=add)


def _rows(request: Request, expected: list[float]) -> Iterator[Row]:
    with _bounded(request.memory) as memory:
        cache = cache_of(request.folder, request.size // TOKEN_BYTES)
        yield _step(cache, request, expected, memory)
        for tokens in (1, 64, PIECE_TOKENS):
            yield _append(cache, tokens, request, memory)
        del cache
        yield _append(cache_of(request.folder, request.size // TOKEN_BYTES, PIECE_TOKENS), 1, request, memory)


@contextmanager
def _bounded(size: int) -> Iterator[int | None]:
    """Let this process use so much memory, pages of files included, where a control group can be made."""
    for name, root in GROUPS.items():
        group = root / f"attnmesh-bench-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        with suppress(OSError):
            (group / name).write_text(str(size))
            (group / "cgroup.procs").write_text(str(os.getpid()))
            try:
                yield size
            finally:
                (root / "cgroup.procs").write_text(str(os.getpid()))
                with suppress(OSError):  # pages are still charged to it
                    group.rmdir()
            return
    yield None


def _step(cache: am.KVCache, request: Request, expected: list[float], memory: int | None) -> Row:
    """Return a step beside reading the files of whole pieces."""
    files = [blocks.file.path for blocks in cache.own_shard.earlier_pieces if blocks.file is not None]
    reads, steps, out = list[float](), list[float](), None
    for _ in range(request.rounds):
        begun = time.perf_counter()
        file_bytes = sum(map(_read, files))
        reads.append((time.perf_counter() - begun) * cache.nbytes / file_bytes)
        begun = time.perf_counter()
        out = am.decode(queries(), cache)
        steps.append(time.perf_counter() - begun)
    assert out is not None
    different = sum(one != other for one, other in zip(out.float().flatten().tolist(), expected, strict=True))
    ratio = median(step / read for step, read in zip(steps, reads, strict=True))
    figures = Timing.of(reads), Timing.of(steps), round(ratio, 3)
    return Row(f"a step over {cache.nbytes / 1e9:.1f} GB", cache.nbytes, *figures, GOAL, memory, different)


def _append(cache: am.KVCache, tokens: int, request: Request, memory: int | None) -> Row:
    """Return an append beside writing its rows to their places, in time of the processor: none waits for the disk."""
    k, v = torch.randn(2, 1, KV_HEADS, tokens, DIM).bfloat16()
    hot = cache.config.hot
    # Tokens leave the hot ones some hundreds at a time, so a round has that many appends.
    times = 1 if hot is None else hot // LEAVING_PARTS
    writes, appends, path = list[float](), list[float](), request.folder / "plain"
    content = [memoryview(x.view(torch.uint8).numpy().tobytes()) for x in (*k[0], *v[0])]
    places = Places(path, cache.own_shard.used_slots)
    plain, plain_appends = cache_of(None, 0), list[float]()
    rounds = max(request.rounds, min(1000, PIECE_TOKENS // tokens)) if times == 1 else request.rounds
    for _ in range(min(rounds, 16 * PIECE_TOKENS // tokens)):
        begun = time.process_time()
        for _ in range(times):
            places.write(content, tokens)
        writes.append((time.process_time() - begun) / times)
        begun = time.process_time()
        for _ in range(times):
            cache.append(k, v)
        appends.append((time.process_time() - begun) / times)
        begun = time.process_time()
        for _ in range(times):
            plain.append(k, v)
        plain_appends.append((time.process_time() - begun) / times)
    places.close()
    for file in path.parent.glob(f"{path.name} *"):
        file.unlink()
    figures = Timing.of(writes), Timing.of(appends), round(median(appends) / median(writes), 3)
    case = f"an append of {tokens:,} token{'s' * (tokens > 1)}" + (f", hot={hot:,}" if hot else "")
    return Row(case, tokens * TOKEN_BYTES, *figures, APPEND_GOAL, memory, in_memory=Timing.of(plain_appends))


class Places:
    """Files of one piece each, in which the rows of each head of keys and of values have a place of their own."""

    def __init__(self, path: Path, filled: int) -> None:
        self.path = path
        self.filled = filled  # rows of the last file, as of the cache's
        self.number = 0
        self.handle = self._next()

    def _next(self) -> int:
        """Return a new file."""
        self.number += 1
        handle = os.open(f"{self.path} {self.number}", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        os.ftruncate(handle, PIECE_TOKENS * TOKEN_BYTES)
        return handle

    def write(self, rows: Sequence[memoryview], tokens: int) -> None:
        """Write new rows, those of each head after its earlier ones; those that do not fit in a new file."""
        fit = min(tokens, PIECE_TOKENS - self.filled)
        if fit < tokens:
            split = fit * DIM * 2
            self.write([row[:split] for row in rows], fit)
            self.close()
            self.handle, self.filled = self._next(), 0
            self.write([row[split:] for row in rows], tokens - fit)
            return
        for place, content in enumerate(rows):
            os.pwrite(self.handle, content, (place * PIECE_TOKENS + self.filled) * DIM * 2)
        self.filled += tokens

    def close(self) -> None:
        """Close the file."""
        os.close(self.handle)


def _read(file: Path) -> int:
    """Return the bytes of a file, read from the disk."""
    memory, size = bytearray(CHUNK), 0
    handle = os.open(file, os.O_RDONLY)
    try:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while count := os.readv(handle, [memory]):
            size += count
    finally:
        os.close(handle)
    _drop(file)
    return size


def _drop(file: Path) -> None:
    """Let the pages of a file leave memory."""
    handle = os.open(file, os.O_RDONLY)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)
