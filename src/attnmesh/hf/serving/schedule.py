"""Schedule of an engine: which requests decode, whose prompt is computed, and which caches are kept."""

from collections import OrderedDict, deque
from itertools import count
from typing import Any

import torch
from torch import Tensor

from attnmesh.errors import InputError, TooLong
from attnmesh.hf.images.inputs import IMAGE_MARK
from attnmesh.hf.models import is_recurrent
from attnmesh.hf.serving.link import specs_of
from attnmesh.hf.serving.stream import Stream
from attnmesh.hf.serving.worker import Worker

LEAST = 16
"""Tokens that a kept cache has to share with a prompt."""

WHOLE = 2048
"""Tokens of a chunk while no rows decode."""

SMALL = 64
"""Tokens of the first chunk beside rows, whose speed is not known yet."""

MOVING = 0.3
"""Weight of the last measurement in a mean."""


class Schedule:
    """The requests of an engine on rank 0, by what they wait for."""

    def __init__(self, worker: Worker, max_rows: int, cache_memory: int | None, max_gap: float | None) -> None:
        self.worker, self.max_rows, self.memory, self.max_gap = worker, int(max_rows), cache_memory, max_gap
        self.waiting: deque[Stream] = deque()
        self.filling: Stream | None = None
        self.filled = 0  # tokens of its prompt that are cached
        self.rows: list[Stream] = []
        self.kept: OrderedDict[int, str] = OrderedDict()
        """Salts of the caches of requests that ended, least recently used first."""
        self.numbers = count()
        self.drops: list[int] = []
        self.dropped = False  # the last plan dropped caches, so the bytes of its exchange are older than they are
        self.nbytes: list[int] = [0]
        """Bytes of caches by rank, as of the last exchange."""
        self.row_seconds, self.token_seconds = 0.0, 0.0
        """Seconds of a step of rows, and of a token of a prompt."""
        self.counts = dict.fromkeys(("tokens", "prompt_tokens", "cached_tokens", "preempted", "evicted", "steps"), 0)

    @property
    def busy(self) -> bool:
        """True if a step has something to do."""
        return bool(self.rows or self.filling or self.waiting or self.drops)

    def metrics(self) -> dict[str, float | list[float]]:
        """Return counts, and the bytes of caches by rank."""
        sizes = {"running": len(self.rows), "filling": int(self.filling is not None), "kept": len(self.kept)}
        return {**self.counts, **sizes, "step_seconds": self.row_seconds, "cache_bytes": [*map(float, self.nbytes)]}

    def plan(self) -> list[Any]:
        """Return the operations of the next step."""
        self._end_cancelled()
        self._free_memory()
        plan: list[Any] = []
        start = self._start()
        self.dropped = bool(self.drops)
        if self.drops:
            plan.append(["drop", self.drops])
            self.drops = []
        if self.rows:
            plan.append(["rows", [[stream.number, stream.answer[-1]] for stream in self.rows]])
        if start is not None:
            plan.append(start)
        if self.filling is not None:
            plan.append(["fill", self.filling.number, self._chunk()])
        return plan

    def take(self, results: dict[str, Any]) -> None:
        """Take the results of a step: new tokens, and prompts that are done."""
        rows, fill = results.get("rows"), results.get("fill")
        error = next((x for x in (results.get("start"), fill) if isinstance(x, InputError)), None)
        if rows is not None:
            self.counts["steps"] += 1
            self._measure("row_seconds", self.worker.seconds["rows"])
            self._take_rows(rows)
        if (stream := self.filling) is None:
            return
        if error is not None or fill is None:
            self._end(stream, error or "cancelled", keep=False)
            self.filling = None
            return
        if "start" in results:
            self.filled = results["start"]
            self.counts["cached_tokens"] += self.filled
            stream.cached_tokens = min(self.filled, len(stream.prompt))
        self._take_chunk(stream, *fill)

    def end_all(self, reason: str | BaseException) -> None:
        """End all streams."""
        for stream in [*self.rows, *([self.filling] if self.filling else []), *self.waiting]:
            stream.end(reason)
        self.rows, self.filling = [], None
        self.waiting.clear()

    def _take_rows(self, rows: Tensor | InputError) -> None:
        running, self.rows = self.rows, []
        for number, stream in enumerate(running):
            if isinstance(rows, InputError):
                self._end(stream, rows, keep=False)
            elif not self._add(stream, rows[number]):
                self.rows.append(stream)

    def _take_chunk(self, stream: Stream, cached: int, logits: Tensor | None) -> None:
        before, self.filled = self.filled, cached
        self.counts["prompt_tokens"] += cached - before
        if cached > before + 2:  # else it is the last token, or two
            self._measure("token_seconds", self.worker.seconds["fill"] / (cached - before))
        if logits is not None:
            self.filling = None
            if not self._add(stream, logits):
                self.rows.append(stream)

    def _add(self, stream: Stream, logits: Tensor) -> bool:
        """Draw the next token of a stream. Return whether it has ended."""
        try:
            ended = stream.add(logits)
        except Exception as error:  # that of one request, which ends it alone
            self._end(stream, error, keep=False)
            return True
        self.counts["tokens"] += stream.finish_reason != "stop"
        if ended:
            self._end(stream, stream.finish_reason or "stop", keep=True)
        return ended

    def _end(self, stream: Stream, reason: str | BaseException, *, keep: bool) -> None:
        """End a stream, and keep its cache or drop it."""
        stream.end(reason)
        if stream.number < 0:
            return
        if keep:
            self.kept[stream.number] = stream.salt
        else:
            self.drops.append(stream.number)

    def _end_cancelled(self) -> None:
        for streams, keep in ((self.waiting, False), (self.rows, True)):
            for stream in [stream for stream in streams if stream.cancelled]:
                streams.remove(stream)
                self._end(stream, "cancelled", keep=keep)
        if self.filling is not None and self.filling.cancelled:
            self._end(self.filling, "cancelled", keep=False)
            self.filling = None

    def _free_memory(self) -> None:
        """Drop kept caches, then put the youngest request back, while caches take more than their memory."""
        if self.memory is None:
            while len(self.kept) > 2 * self.max_rows:
                self._drop_oldest()
        elif max(self.nbytes) > self.memory and not self.dropped:  # else the bytes are not those after a drop
            if self.kept:
                self._drop_oldest()
            elif not self.drops:
                self._preempt()

    def _drop_oldest(self) -> None:
        """Drop the kept cache that was used least recently."""
        self.drops.append(self.kept.popitem(last=False)[0])
        self.counts["evicted"] += 1

    def _preempt(self) -> None:
        """Put the youngest request back into the queue: its prompt and tokens are computed again.

        A request that is alone holds the memory of a cache that it was forked from, or can never fit.
        """
        if self.filling is not None:
            stream, self.filling = self.filling, None
        elif self.rows:
            stream = self.rows.pop()
        else:
            return
        if self.rows or stream.forked:
            self.drops.append(stream.number)
            self.waiting.appendleft(stream)
            self.counts["preempted"] += 1
            return
        given, fix = f"{max(self.nbytes):,} bytes for one request", "shorten the prompt, or raise cache_memory"
        error = TooLong("submit ids", f"caches of at most {self.memory:,} bytes a rank", given, fix)
        self._end(stream, error, keep=False)

    def _start(self) -> list[Any] | None:
        """Begin the prompt of the next request, if there is room for it. Return the operation."""
        if self.filling is not None or not self.waiting or len(self.rows) >= self.max_rows or not self._has_room():
            return None
        stream = self.waiting.popleft()
        if len(stream.answer) >= stream.max_new_tokens:
            stream.end("length")
            return None
        self.filling, stream.number, self.filled = stream, next(self.numbers), 0
        source, moves = self._source(torch.tensor(stream.ids), stream.images is not None, stream.salt)
        stream.forked = source >= 0
        if moves:
            self.kept.pop(source, None)
        elif source in self.kept:
            self.kept.move_to_end(source)
        later = len(stream.answer) if stream.images else 0  # what images are merged with is the prompt alone
        begun = None if source < 0 else source
        return ["start", stream.number, stream.ids, begun, moves, later, specs_of(stream.images)]

    def _has_room(self) -> bool:
        """Return whether the prompt that waits fits, by the bytes that tokens take now. Drop kept caches for it."""
        tokens = sum(cache.get_seq_length() for cache in self.worker.caches.values())
        if self.memory is None or not tokens:
            return True
        need = max(self.nbytes) / tokens * len(self.waiting[0].ids)
        if max(self.nbytes) + need <= self.memory or not (self.rows or self.kept):
            return True
        if self.kept and not self.drops:
            self._drop_oldest()
        return False

    def _source(self, ids: Tensor, pictured: bool, salt: str) -> tuple[int, bool]:
        """Return the cache with the longest prefix of a prompt, -1 for none, and whether nothing else needs it.

        Images that differ are found when the prompt begins.
        """
        best, source, moves, recurrent = LEAST - 1, -1, False, is_recurrent(self.worker.model.config)
        salts = self.kept | {stream.number: stream.salt for stream in self.rows}
        for number in (number for number, other in salts.items() if other == salt):
            cache = self.worker.caches[number]
            held = torch.empty(0) if cache.tokens is None else cache.tokens[0].cpu()
            most = min(len(held), len(ids) - 1)
            differs = ((held[:most] != ids[:most]) & ~(pictured & (held[:most] <= IMAGE_MARK))).nonzero()
            same = int(differs[0]) if len(differs) else most
            if same > best and (same == len(held) if recurrent else cache.prefix(same)):
                best, source, moves = same, number, number in self.kept and same >= len(held) - 1
        return source, moves

    def _chunk(self) -> int:
        """Return the tokens of the next chunk, so that rows wait no longer than they may."""
        if not self.rows:
            return WHOLE
        if not self.token_seconds or not self.row_seconds:
            return SMALL
        if self.max_gap is None:
            spare = 2 * self.row_seconds * (1 + len(self.waiting))  # who waits for a first token counts as who has one
        else:
            spare = max(self.max_gap - self.row_seconds, 0.0)
        return max(1, min(WHOLE, int(spare / self.token_seconds)))

    def _measure(self, name: str, seconds: float) -> None:
        before = getattr(self, name)
        setattr(self, name, seconds if not before else (1 - MOVING) * before + MOVING * seconds)
