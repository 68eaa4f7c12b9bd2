"""The scheduler of an engine: which requests decode, whose prompts are computed, and which caches are kept."""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from time import perf_counter
from typing import Any

from torch import Tensor

from attnmesh.errors import InputError
from attnmesh.hf.serving.footprint import Footprint, growth, never_fits
from attnmesh.hf.serving.grammar_masks import wait_for_any
from attnmesh.hf.serving.guesses import NoGuesses, StepTimes
from attnmesh.hf.serving.plan_exchange import specs_of
from attnmesh.hf.serving.prefix_store import PrefixStore
from attnmesh.hf.serving.prefixes import LEAST_SHARED, Prefixes
from attnmesh.hf.serving.rank_worker import RankWorker
from attnmesh.hf.serving.store_schedule import begin_store
from attnmesh.hf.serving.stream import Stream
from attnmesh.runtime.world import WORLD

LONGEST_CHUNK = 2048
"""Tokens of a chunk at most."""

FIRST_CHUNK, FIRST_CHUNK_BESIDE_ROWS = 256, 64
"""Tokens of the first chunk, whose speed is not known yet: while no rows decode, and beside rows."""

CHUNK_SECONDS = 10.0
"""Seconds of a chunk, or a quarter of the deadline: requests join, and are cancelled, between chunks."""

OLDEST_EVERY = 3
"""Chunks of which one is of the oldest prompt. The others are of the one with the shortest rest."""

LOOKAHEAD = 8
"""Requests of the queue that may begin before those that wait for a prefix."""

MASK_SHARE, LEAST_MASK_WAIT, IDLE_MASK_WAIT = 0.05, 0.001, 0.01
"""Wait of all rows for masks of grammars: a share of a step, at least some seconds, and seconds if all rows wait."""

EMA_WEIGHT = 0.3
"""Weight of the last measurement in an exponential moving average."""


@dataclass
class StepPlan:
    """A step: the operations of all ranks, and the requests that take their results."""

    operations: list[Any] = field(default_factory=list)
    rows: list[Stream] = field(default_factory=list)  # rows that decode; the others wait for masks of grammars
    begun: Stream | None = None  # request whose prompt begins
    filled: Stream | None = None  # request whose prompt has a chunk
    forked: tuple[Stream, int] | None = None  # request whose cache is forked, and the fork's number
    spared: set[int] = field(default_factory=set)  # kept caches that are forked, or made
    promised: int = 0  # bytes by which caches grow


class Scheduler:
    """Plans steps of an engine on rank 0, and takes their results. Caches take at most `memory` bytes on each rank."""

    def __init__(
        self,
        worker: RankWorker,
        max_rows: int,
        memory: int,
        max_gap: float | None,
        store: PrefixStore | None = None,
        guesser: NoGuesses | None = None,
    ) -> None:
        self.worker = worker
        self.max_rows = int(max_rows)
        self.memory = memory
        self.max_gap = max_gap
        self.guesser = guesser or NoGuesses()
        self.store = begin_store(store, worker)
        self.waiting: deque[Stream] = deque()
        self.filling: list[Stream] = []  # requests whose prompts are computed, the oldest first
        self.rows: list[Stream] = []
        self.step = StepPlan()  # step that is planned
        self.prefixes = Prefixes(worker)
        self.footprint: Footprint | None = None
        self.is_full = False  # true if no chunk fits: then no other prompt begins
        self.numbers, self.chunks = count(), count()
        self.drops: list[int] = []  # caches that the next step drops
        self.rejected: dict[int, int] = {}  # last tokens of caches that the next step takes back, by number
        self.nbytes: list[int] = [0]
        """Bytes of caches by rank, as of the last exchange."""
        self.step_times = StepTimes()
        self.row_seconds = 0.0  # seconds of a step of rows
        self.token_seconds = 0.0  # seconds of a token of a prompt
        self.guess_seconds = 0.0  # seconds of the last guesses
        self.counts = dict.fromkeys(("tokens", "prompt_tokens", "cached_tokens", "preempted", "evicted", "steps"), 0)
        self.counts |= {"drafted_tokens": 0, "accepted_tokens": 0}

    @property
    def running(self) -> list[Stream]:
        """The requests that have a cache of their own."""
        return [*self.rows, *self.filling]

    @property
    def busy(self) -> bool:
        """True if a step has something to do."""
        return bool(self.rows or self.filling or self.waiting or self.drops or self.store.busy)

    def metrics(self) -> dict[str, float | list[float]]:
        """Return counts, and the bytes of caches by rank."""
        sizes: dict[str, float] = {"running": len(self.rows), "filling": len(self.filling)}
        sizes |= {"kept": len(self.prefixes.kept), "cache_limit_bytes": self.memory}
        sizes |= {**self.store.metrics(), **self.guesser.metrics()}
        return {**self.counts, **sizes, "step_seconds": self.row_seconds, "cache_bytes": [*map(float, self.nbytes)]}

    def plan(self) -> StepPlan:
        """Return the next step."""
        step = self.step = StepPlan()
        self._end_cancelled()
        self._draw_held()
        while len(self.prefixes.kept) > 2 * self.max_rows:
            self._evict(next(iter(self.prefixes.kept)))
        self._guess()
        grows = self._fit_rows()
        prompts = [operation for operation in (self._start(), self._snapshot(), self._fill()) if operation is not None]
        if self.filling and not self.rows and not prompts:  # none can go on beside the others
            self._preempt(self._bytes_of(len(self.filling[-1].ids)))
        step.operations = [["crop", [*self.rejected.items()]]] if self.rejected else []
        self.rejected = {}
        step.operations += self.store.before(self.drops, self._spare_seconds() / 2 if self.rows else None)
        if self.drops:
            step.operations.append(["drop", self.drops])
            self.prefixes.forget(self.drops)
            self.drops = []
        step.rows = [stream for stream in self.rows if stream.held is None]
        if step.rows:
            rows = [[row.number, [row.answer[-1], *row.guesses.checked]] for row in step.rows]
            step.operations.append(["rows", rows, grows])
        step.operations += [*prompts, *self.store.after()]
        return step

    def hear(self, numbers: list[list[int]]) -> None:
        """Take the numbers of all ranks, as of the last step: bytes of caches, and what the store needs."""
        self.nbytes = [nbytes for nbytes, *_ in numbers]
        self.drops += self.store.hear([others for _, *others in numbers])

    def take(self, step: StepPlan, results: dict[str, Any]) -> None:
        """Take the results of a step: new tokens, and prompts that are done."""
        if isinstance(error := results.get("crop"), InputError):
            raise error  # caches differ from what is known of them
        if (rows := results.get("rows")) is not None:
            self.counts["steps"] += 1
            self._measure("row_seconds", self.worker.seconds["rows"])
            drafted = sum(len(stream.guesses.checked) for stream in step.rows)
            self.counts["drafted_tokens"] += drafted
            seconds = self.worker.seconds["rows"] + self.worker.seconds.get("crop", 0.0)
            before = self.counts["accepted_tokens"]
            self._take_rows(step.rows, rows)
            accepted = self.counts["accepted_tokens"] - before
            self.step_times.add(len(step.rows), drafted, seconds, accepted, self.guess_seconds)
        if step.begun is not None:
            self._take_start(step.begun, results["start"])
        if step.filled is not None and step.filled in self.filling:
            self._take_chunk(step.filled, results["fill"])
        if step.forked is not None:
            self.store.keep(*step.forked)
        self.store.take(results, self.worker.seconds)

    def end_all(self, reason: str | BaseException) -> None:
        """End all streams."""
        for stream in [*self.running, *self.waiting]:
            stream.end(reason)
        self.rows, self.filling = [], []
        self.waiting.clear()

    # --- results ---

    def _take_rows(self, streams: list[Stream], rows: Sequence[Tensor] | InputError) -> None:
        if isinstance(rows, InputError):
            self.rows = [stream for stream in self.rows if stream.held is not None]
            self._find_cause(streams, rows)
            return
        logits = dict(zip(streams, rows, strict=True))
        running = self.rows
        self.rows = []
        until = perf_counter() + max(LEAST_MASK_WAIT, MASK_SHARE * self.row_seconds)
        for stream in running:
            if stream in logits:
                stream.suspected = False
                stream.guesses.begin()
            if stream not in logits or not self._add(stream, logits[stream], until - perf_counter()):
                self.rows.append(stream)

    def _draw_held(self) -> None:
        """Draw the next token of rows whose masks have come late, and wait for one if there is nothing else to do."""
        held = [(stream, stream.held) for stream in self.rows if stream.held is not None]
        alone = len(held) == len(self.rows) and not self.filling and not self.waiting
        if held and alone:
            wait_for_any([stream.grammar for stream, _ in held if stream.grammar is not None], IDLE_MASK_WAIT)
        for stream, logits in held:
            if self._add(stream, logits):
                self.rows.remove(stream)

    def _find_cause(self, rows: list[Stream], error: InputError) -> None:
        """End the row that cannot go on. The others are computed again.

        If it is not known which row that is, each suspect joins the other rows alone, until a step fails again.
        """
        suspects = [stream for stream in rows if stream.suspected] or rows
        for stream in rows[::-1]:
            stream.suspected = stream in suspects
            if suspects == [stream]:
                self._end(stream, error, keep=False)
            else:
                self._put_back(stream)

    def _take_start(self, stream: Stream, shared: int | InputError) -> None:
        if isinstance(shared, InputError):
            self.filling.remove(stream)
            self._end(stream, shared, keep=False)
            return
        stream.filled = shared
        self.counts["cached_tokens"] += shared
        stream.cached_tokens = min(shared, len(stream.prompt))

    def _take_chunk(self, stream: Stream, chunk: tuple[int, Tensor | None] | InputError) -> None:
        if isinstance(chunk, InputError):
            self.filling.remove(stream)
            self._end(stream, chunk, keep=False)
            return
        before = stream.filled
        stream.filled, logits = chunk
        self.counts["prompt_tokens"] += stream.filled - before
        if self.footprint is None:
            self.footprint = Footprint.of(self.worker.caches[stream.number])
        if stream.filled > before + 2:  # a last token or two say little of a chunk
            self._measure("token_seconds", self.worker.seconds["fill"] / (stream.filled - before))
        if logits is not None:
            self.filling.remove(stream)
            if not self._add(stream, logits):
                self.rows.append(stream)

    def _add(self, stream: Stream, logits: Tensor, seconds: float = 0.0) -> bool:
        """Draw the next token of a stream, and one more after each accepted guess. Return if the stream has ended.

        Logits, (tokens, vocabulary), are held if the mask of the grammar is not made within `seconds`: other rows go on
        meanwhile.
        """
        until = perf_counter() + seconds
        for place, scores in enumerate(logits):
            late = stream.grammar is not None and not stream.grammar.is_ready(max(0.0, until - perf_counter()))
            stream.held = logits[place:] if late else None
            if late:
                return False
            try:
                ended = stream.add(scores)
            except Exception as error:  # it is of one request, which ends alone
                self._end(stream, error, keep=False)
                return True
            self.counts["tokens"] += stream.finish_reason != "stop"
            if ended:
                self._end(stream, stream.finish_reason or "stop", keep=not self.worker.by_steps)
                return True
            if not stream.guesses.accepts(stream.answer[-1]):
                break
            self.counts["accepted_tokens"] += 1
        self._reject(stream)
        return False

    def _reject(self, stream: Stream) -> None:
        """Take guesses that were not accepted from the end of a cache, with the next step."""
        if stream.guesses.pending:
            self.rejected[stream.number] = len(stream.guesses.pending)
            stream.guesses.pending = []

    # --- ends ---

    def _end(self, stream: Stream, reason: str | BaseException, *, keep: bool) -> None:
        """End a stream, and keep its cache or drop it."""
        stream.end(reason)
        if stream.number < 0:
            return
        self._reject(stream)
        if keep:
            self.prefixes.keep(stream)
            self.store.keep(stream, stream.number, self.rejected.get(stream.number, 0))
        else:
            self.drops.append(stream.number)

    def _end_cancelled(self) -> None:
        for streams, keep in ((self.waiting, False), (self.filling, False), (self.rows, not self.worker.by_steps)):
            for stream in [stream for stream in streams if stream.cancelled]:
                streams.remove(stream)
                self._end(stream, "cancelled", keep=keep)

    def _put_back(self, stream: Stream) -> None:
        """Put a request back into the queue: its prompt and tokens are computed again."""
        self._reject(stream)
        if not (self.worker.by_steps and stream.answer):
            self.store.keep(stream, stream.number, self.rejected.get(stream.number, 0))
        self.drops.append(stream.number)
        stream.number, stream.filled, stream.held = -1, 0, None
        stream.passed_fork_points.clear()
        self.waiting.appendleft(stream)

    # --- memory ---

    def _bytes_of(self, tokens: int, shared: int = 0) -> int:
        """Return the bytes of a cache of so many tokens; 0 before the first cache."""
        return 0 if self.footprint is None else self.footprint(tokens, shared=shared)

    def _free(self) -> int:
        """Return the bytes that are left on the fullest rank, after drops and growth of this step."""
        held = self.worker.measure(self.drops) if self.drops else self.worker.nbytes
        most = max(self.nbytes)
        scale = self.worker.scale
        return int(self.memory - scale * held - max(0.0, most - scale * self.nbytes[0]) - self.step.promised)

    def _make_room(self, more: int, spared: Collection[int] = ()) -> bool:
        """Drop kept caches, least recently used first, until `more` bytes fit. Return whether they do.

        Caches of guesses go last.
        """
        while self._free() < more:
            oldest = next((number for number in self.prefixes.kept if number not in {*spared, *self.step.spared}), None)
            if oldest is not None:
                self._evict(oldest)
            elif not self.guesser.release():
                return False
        return True

    def _evict(self, number: int) -> None:
        self.prefixes.remove(number)
        self.drops.append(number)
        self.counts["evicted"] += 1

    def _guess(self) -> None:
        """Guess tokens of the rows of this step, where guesses are worth their time."""
        rows = [stream for stream in self.rows if stream.held is None]
        for stream in rows:
            stream.guesses.compare(stream.answer)
        start = perf_counter()
        self.guesser.guess(rows, self.step_times, self._free)
        self.guess_seconds = perf_counter() - start

    def _fit_rows(self) -> bool:
        """Put the youngest requests back into the queue until the others can grow. Return whether they grow.

        Four rows, the oldest first, each with the blocks that it needs; 3 blocks are free:

            2 1 1 1     5 blocks: all guesses go, with which the first row took a block more
            1 1 1 1     4 blocks: the last row goes back, and its blocks are free
            1 1 1       3 blocks: these rows grow
        """
        more = self._growth_of_rows()
        if not self._make_room(more):
            for stream in self.rows:  # guesses go before a row does
                stream.guesses.checked = []
            more = self._growth_of_rows()
        while not self._make_room(more) and self.running:
            self._preempt(more)
            more = self._growth_of_rows()
        self.step.promised = more
        return more > 0

    def _growth_of_rows(self) -> int:
        return sum(self._growth(stream, 1 + len(stream.guesses.checked)) for stream in self.rows)

    def _growth(self, stream: Stream, tokens: int) -> int:
        cache = self.worker.caches[stream.number]
        return growth(cache, tokens) if cache.get_seq_length() else self._bytes_of(tokens)

    def _preempt(self, more: int) -> None:
        """Put the youngest request back.

        A request that is alone holds the memory of a cache that it was forked from, or can never fit.
        """
        stream = (self.filling or self.rows).pop()
        if self.running or stream.forked:
            self._put_back(stream)
            self.counts["preempted"] += 1
        else:
            needed = max(self._bytes_of(len(stream.ids)), self.worker.nbytes + more)
            self._end(stream, never_fits(needed, self.memory), keep=False)

    # --- prompts ---

    def _start(self) -> list[Any] | None:
        """Begin the prompt of a request, if there is room for it. Return the operation."""
        if not self.waiting or len(self.running) >= self.max_rows or self.drops or (self.is_full and self.filling):
            return None
        ready = (stream for stream in islice(self.waiting, LOOKAHEAD) if not self.store.holds_up(stream))
        stream = next((candidate for candidate in ready if not self._let_wait(candidate)), None)
        stream = next((candidate for candidate in self.waiting if self.store.found(candidate) is not None), stream)
        origin = None if stream is None or self._begin_loading(stream) else self._source(stream)
        if stream is None or origin is None:
            return None
        source, same, moves = origin
        if (loaded := self.store.found(stream)) is not None and loaded[0] != source:
            self.drops.append(loaded[0])
        self.store.begun(stream)
        self.waiting.remove(stream)
        self.filling.append(stream)
        self.step.begun, stream.number, stream.filled, stream.forked = stream, next(self.numbers), same, source >= 0
        parting = self.prefixes.parting(stream, self._lenders())
        stream.fork_points = {parting} if parting >= same + LEAST_SHARED else set()
        if self.worker.by_steps and stream.images is None:  # the answer is computed otherwise than a prompt
            stream.fork_points.add(len(stream.prompt) - self.prefixes.left)
        self.prefixes.use(source, moves=moves)
        self.step.spared.add(source)
        if stream.images_digest is not None:
            self.prefixes.images_digests[stream.number] = stream.images_digest
        later = len(stream.answer) if stream.images or self.worker.by_steps else 0
        begun = None if source < 0 else source
        return ["start", stream.number, stream.ids, begun, moves, later, specs_of(stream.images)]

    def _begin_loading(self, stream: Stream) -> bool:
        """Begin to load the prefix of a prompt, if one is stored that is longer than others. Return whether it is."""
        same = self.prefixes.find(stream, self._lenders())[1]
        return self.store.begin_loading(
            stream, same, self.numbers, lambda: self._reserve_room(stream, -1, 0, moves=False)
        )

    def _source(self, stream: Stream) -> tuple[int, int, bool] | None:
        """Return the cache that a prompt goes on from, its tokens, and if the prompt takes it; None if no room is left.

        A prompt that can never fit is refused.
        """
        if len(stream.answer) >= stream.max_new_tokens:
            self.waiting.remove(stream)
            stream.end("length")
            return None
        origin = self.prefixes.find(stream, self._lenders())
        none = (-1, 0, False)
        if (loaded := self.store.found(stream)) is not None and loaded[1] > origin[1]:
            origin = (*loaded, True)
        if self._reserve_room(stream, *origin):
            return origin
        if self.running or (self.store.holds_memory and self.store.found(stream) is None):
            return None
        if self._reserve_room(stream, *none):  # without the cache that it would go on from
            return none
        self.waiting.remove(stream)
        stream.end(never_fits(self._bytes_of(len(stream.ids)), self.memory))
        return None

    def _lenders(self) -> list[Stream]:
        """Return the running requests whose caches hold tokens as prompts have them."""
        return [stream for stream in self.filling if not stream.answer] if self.worker.by_steps else self.running

    def _let_wait(self, stream: Stream) -> bool:
        """Let a request wait for a prompt that computes what both begin with, and forks there. Return if it waits."""
        if stream.suspected and any(other.suspected for other in self.running):
            return True
        for other in self.filling:
            same = self.prefixes.shared(stream, other)
            if same < LEAST_SHARED or same in other.passed_fork_points or same < other.filled:
                continue
            if same - self.prefixes.find(stream, self.filling)[1] >= LEAST_SHARED:
                other.fork_points.add(same)
                return True
        return False

    def _reserve_room(self, stream: Stream, source: int, same: int, moves: bool) -> bool:
        """Make room for a prompt beside what others will need, and promise it. Return whether it fits.

        Kept caches are dropped for it, but not its source.
        """
        tokens = len(stream.ids)
        need = growth(self.worker.caches[source], tokens - same) if moves else self._bytes_of(tokens, same)
        rests = (self._bytes_of(len(other.ids)) - self._bytes_of(other.filled) for other in self.filling)
        fits = self._make_room(need + sum(rests), [source])
        self.step.promised += need if fits else 0
        return fits

    def _snapshot(self) -> list[Any] | None:
        """Fork the cache of a prompt that has come to where others part from it. Return the operation."""
        for stream in (stream for stream in self.filling if stream is not self.step.begun and stream.fork_points):
            place = min(stream.fork_points)
            if stream.filled < place:
                continue
            stream.fork_points.remove(place)
            stream.passed_fork_points.add(place)
            more = self._bytes_of(stream.filled)
            goes_back = self.worker.caches[stream.number].crops_anywhere
            if stream.filled == place and not goes_back and self._free() >= more:
                self.step.promised += more
                number = next(self.numbers)
                self.prefixes.keep(stream, snapshot=number)
                self.step.forked = stream, number
                self.step.spared.add(number)
                return ["fork", stream.number, number]
        return None

    def _fill(self) -> list[Any] | None:
        """Return the operation that computes the next chunk of a prompt, in most turns that with the shortest rest."""
        turn = next(self.chunks) % OLDEST_EVERY == OLDEST_EVERY - 1
        ordered = self.filling if turn else sorted(self.filling, key=lambda stream: len(stream.ids) - stream.filled)
        for stream in ordered:
            stop = min((place for place in stream.fork_points if place > stream.filled), default=len(stream.ids))
            size = min(self._chunk(), stop - stream.filled)
            while not (fits := self._make_room(more := self._growth_of_chunk(stream, size))) and size > LEAST_SHARED:
                size = max(LEAST_SHARED, size // 2)
            if fits:
                self.step.filled, self.step.promised, self.is_full = stream, self.step.promised + more, False
                return ["fill", stream.number, size, stop]
        self.is_full = bool(self.filling)
        return None

    def _growth_of_chunk(self, stream: Stream, tokens: int) -> int:
        """Return the bytes that a chunk of a prompt takes. Those of the prompt that begins are promised."""
        passing = 0 if self.footprint is None else self.footprint.of_chunk(tokens)
        return passing + (0 if stream is self.step.begun else self._growth(stream, tokens))

    def _chunk(self) -> int:
        """Return the tokens of the next chunk, so that rows wait no longer than they may."""
        longest = min(CHUNK_SECONDS, WORLD.deadline / 4 if WORLD.deadline else CHUNK_SECONDS)
        if not self.rows:
            return min(LONGEST_CHUNK, max(1, int(longest / self.token_seconds))) if self.token_seconds else FIRST_CHUNK
        if not self.token_seconds or not self.row_seconds:
            return FIRST_CHUNK_BESIDE_ROWS
        if self.max_gap is None:
            waiting = len(self.waiting) + len(self.filling)  # requests that wait for a first token count like rows
            spare = 2 * self.row_seconds * waiting
        else:
            spare = self._spare_seconds() / (1 + self.store.busy)
        return max(1, min(LONGEST_CHUNK, int(min(spare, longest) / self.token_seconds)))

    def _spare_seconds(self) -> float:
        """Return the seconds that a step of rows may take longer."""
        return self.row_seconds if self.max_gap is None else max(self.max_gap - self.row_seconds, 0.0)

    def _measure(self, name: str, seconds: float) -> None:
        before = getattr(self, name)
        setattr(self, name, seconds if not before else (1 - EMA_WEIGHT) * before + EMA_WEIGHT * seconds)
