"""The scheduler of an engine: which requests decode, whose prompts are computed, and which caches are kept."""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from time import perf_counter
from typing import Any

from torch import Tensor

from attnmesh.errors import InputError
from attnmesh.hf.serving.engine_request import EngineRequest, Origin
from attnmesh.hf.serving.footprint import Footprint, growth, never_fits
from attnmesh.hf.serving.grammar_masks import wait_for_any
from attnmesh.hf.serving.guesses import Guesser, NoGuesses, StepTimes
from attnmesh.hf.serving.kept_caches import LEAST_SHARED, KeptCaches
from attnmesh.hf.serving.plan_exchange import specs_of
from attnmesh.hf.serving.plan_operations import Crop, DecodeRows, Drop, Fill, Fork, Operation, Start
from attnmesh.hf.serving.prefix_store import PrefixStore
from attnmesh.hf.serving.rank_report import RankReport
from attnmesh.hf.serving.rank_worker import RankWorker
from attnmesh.hf.serving.store_scheduler import begin_store
from attnmesh.runtime.world import WORLD

LONGEST_CHUNK = 2048
"""Tokens of a chunk at most."""

FIRST_CHUNK = 256
"""Tokens of a chunk without rows beside it, while its speed is not known."""

FIRST_CHUNK_BESIDE_ROWS = 64
"""Tokens of a chunk beside rows that decode, while the speed of either is not known."""

CHUNK_SECONDS = 10.0
"""Seconds of a chunk, or a quarter of the deadline: requests join, and are cancelled, between chunks."""

OLDEST_EVERY = 3
"""Chunks of which one is of the oldest prompt. The others are of the one with the shortest rest."""

LOOKAHEAD = 8
"""Requests of the queue that may begin before those that wait for a prefix."""

MASK_SHARE = 0.05
"""Share of a step that rows wait for masks of grammars."""

LEAST_MASK_WAIT = 0.001
"""Seconds that rows wait for masks of grammars at least."""

IDLE_MASK_WAIT = 0.01
"""Seconds of that wait if all rows wait for masks."""

EMA_WEIGHT = 0.3
"""Weight of the last measurement in an exponential moving average."""


@dataclass
class StepPlan:
    """A step: the operations of all ranks, and the requests that take their results."""

    operations: list[Operation] = field(default_factory=list)
    rows: list[EngineRequest] = field(default_factory=list)  # rows that decode; the others wait for masks of grammars
    starting: EngineRequest | None = None  # request whose prompt begins
    computing: EngineRequest | None = None  # request whose prompt has a chunk
    forking: tuple[EngineRequest, int] | None = None  # request whose cache is forked, and the fork's number
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
        guesser: Guesser | None = None,
    ) -> None:
        self.worker = worker
        self.max_rows = int(max_rows)
        self.memory = memory
        self.max_gap = max_gap
        self.guesser = guesser or NoGuesses()
        self.store = begin_store(store, worker)
        self.waiting: deque[EngineRequest] = deque()
        self.prefilling: list[EngineRequest] = []  # requests whose prompts are computed, the oldest first
        self.rows: list[EngineRequest] = []
        self.step = StepPlan()  # step that is planned
        self.kept_caches = KeptCaches(worker)
        self.footprint: Footprint | None = None
        self.is_full = False  # true if no chunk fits: then no other prompt begins
        self.cache_numbers = count()
        self.chunk_turns = count()
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
    def running(self) -> list[EngineRequest]:
        """The requests that have a cache of their own."""
        return [*self.rows, *self.prefilling]

    @property
    def busy(self) -> bool:
        """True if a step has something to do."""
        return bool(self.rows or self.prefilling or self.waiting or self.drops or self.store.busy)

    def metrics(self) -> dict[str, float | list[float]]:
        """Return counts, and the bytes of caches by rank."""
        sizes: dict[str, float] = {"running": len(self.rows), "filling": len(self.prefilling)}
        sizes |= {"kept": len(self.kept_caches.kept), "cache_limit_bytes": self.memory}
        sizes |= {**self.store.metrics(), **self.guesser.metrics()}
        return {**self.counts, **sizes, "step_seconds": self.row_seconds, "cache_bytes": [*map(float, self.nbytes)]}

    def plan(self) -> StepPlan:
        """Return the next step."""
        step = self.step = StepPlan()
        self._end_cancelled()
        self._draw_held()
        while len(self.kept_caches.kept) > 2 * self.max_rows:
            self._evict(next(iter(self.kept_caches.kept)))
        self._guess()
        grows = self._fit_rows()
        prompts = [operation for operation in (self._start(), self._snapshot(), self._fill()) if operation is not None]
        if self.prefilling and not self.rows and not prompts:  # none can go on beside the others
            self._preempt(self._bytes_of(len(self.prefilling[-1].ids)))
        step.operations = [Crop([*self.rejected.items()])] if self.rejected else []
        self.rejected = {}
        step.operations += self.store.before(self.drops, self._spare_seconds() / 2 if self.rows else None)
        if self.drops:
            step.operations.append(Drop(self.drops))
            self.kept_caches.forget(self.drops)
            self.drops = []
        step.rows = [request for request in self.rows if request.held_logits is None]
        if step.rows:
            rows = [(row.number, [row.answer[-1], *row.guesses.checked]) for row in step.rows]
            step.operations.append(DecodeRows(rows, grows))
        step.operations += [*prompts, *self.store.after()]
        return step

    def take_reports(self, reports: Sequence[RankReport]) -> None:
        """Take the reports of all ranks, as of the last step: bytes of caches, and what the store needs."""
        self.nbytes = [report.nbytes for report in reports]
        self.drops += self.store.take_reports(reports)

    def take(self, step: StepPlan, results: dict[type, Any]) -> None:
        """Take the results of a step: new tokens, and prompts that are done."""
        if isinstance(error := results.get(Crop), InputError):
            raise error  # caches differ from what is known of them
        if (rows := results.get(DecodeRows)) is not None:
            self.counts["steps"] += 1
            self._measure("row_seconds", self.worker.seconds[DecodeRows])
            drafted = sum(len(request.guesses.checked) for request in step.rows)
            self.counts["drafted_tokens"] += drafted
            seconds = self.worker.seconds[DecodeRows] + self.worker.seconds.get(Crop, 0.0)
            before = self.counts["accepted_tokens"]
            self._take_rows(step.rows, rows)
            accepted = self.counts["accepted_tokens"] - before
            self.step_times.add(len(step.rows), drafted, seconds, accepted, self.guess_seconds)
        if step.starting is not None:
            self._take_start(step.starting, results[Start])
        if step.computing is not None and step.computing in self.prefilling:
            self._take_chunk(step.computing, results[Fill])
        if step.forking is not None:
            self.store.keep(*step.forking)
        self.store.take(results, self.worker.seconds)

    def end_all(self, reason: str | BaseException) -> None:
        """End all requests."""
        for request in [*self.running, *self.waiting]:
            request.end(reason)
        self.rows = []
        self.prefilling = []
        self.waiting.clear()

    # --- results ---

    def _take_rows(self, requests: list[EngineRequest], rows: Sequence[Tensor] | InputError) -> None:
        if isinstance(rows, InputError):
            self.rows = [request for request in self.rows if request.held_logits is not None]
            self._find_cause(requests, rows)
            return
        logits = dict(zip(requests, rows, strict=True))
        running = self.rows
        self.rows = []
        until = perf_counter() + max(LEAST_MASK_WAIT, MASK_SHARE * self.row_seconds)
        for request in running:
            if request in logits:
                request.suspected = False
                request.guesses.begin()
            if request not in logits or not self._add(request, logits[request], until - perf_counter()):
                self.rows.append(request)

    def _draw_held(self) -> None:
        """Draw the next token of rows whose masks have come late, and wait for one if there is nothing else to do."""
        held_logits = [(request, request.held_logits) for request in self.rows if request.held_logits is not None]
        alone = len(held_logits) == len(self.rows) and not self.prefilling and not self.waiting
        if held_logits and alone:
            wait_for_any([request.grammar for request, _ in held_logits if request.grammar is not None], IDLE_MASK_WAIT)
        for request, logits in held_logits:
            if self._add(request, logits):
                self.rows.remove(request)

    def _find_cause(self, rows: list[EngineRequest], error: InputError) -> None:
        """End the row that cannot go on. The others are computed again.

        If it is not known which row that is, each suspect joins the other rows alone, until a step fails again.
        """
        suspects = [request for request in rows if request.suspected] or rows
        for request in rows[::-1]:
            request.suspected = request in suspects
            if suspects == [request]:
                self._end(request, error, keep=False)
            else:
                self._put_back(request)

    def _take_start(self, request: EngineRequest, shared: int | InputError) -> None:
        if isinstance(shared, InputError):
            self.prefilling.remove(request)
            self._end(request, shared, keep=False)
            return
        request.computed_tokens = shared
        self.counts["cached_tokens"] += shared
        request.cached_tokens = min(shared, len(request.prompt))

    def _take_chunk(self, request: EngineRequest, chunk: tuple[int, Tensor | None] | InputError) -> None:
        if isinstance(chunk, InputError):
            self.prefilling.remove(request)
            self._end(request, chunk, keep=False)
            return
        before = request.computed_tokens
        request.computed_tokens, logits = chunk
        self.counts["prompt_tokens"] += request.computed_tokens - before
        if self.footprint is None:
            self.footprint = Footprint.of(self.worker.caches[request.number])
        if request.computed_tokens > before + 2:  # a last token or two say little of a chunk
            self._measure("token_seconds", self.worker.seconds[Fill] / (request.computed_tokens - before))
        if logits is not None:
            self.prefilling.remove(request)
            if not self._add(request, logits):
                self.rows.append(request)

    def _add(self, request: EngineRequest, logits: Tensor, seconds: float = 0.0) -> bool:
        """Draw the next token of a request, and one more after each accepted guess. Return if the request has ended.

        Logits, (tokens, vocabulary), are held if the mask of the grammar is not made within `seconds`: other rows go on
        meanwhile.
        """
        until = perf_counter() + seconds
        for index, scores in enumerate(logits):
            late = request.grammar is not None and not request.grammar.is_ready(max(0.0, until - perf_counter()))
            request.held_logits = logits[index:] if late else None
            if late:
                return False
            try:
                ended = request.add(scores)
            except Exception as error:  # it is of one request, which ends alone
                self._end(request, error, keep=False)
                return True
            self.counts["tokens"] += request.finish_reason != "stop"
            if ended:
                self._end(request, request.finish_reason or "stop", keep=not self.worker.recomputes_by_token)
                return True
            if not request.guesses.accepts(request.answer[-1]):
                break
            self.counts["accepted_tokens"] += 1
        self._reject(request)
        return False

    def _reject(self, request: EngineRequest) -> None:
        """Take guesses that were not accepted from the end of a cache, with the next step."""
        if request.guesses.pending:
            self.rejected[request.number] = len(request.guesses.pending)
            request.guesses.pending = []

    # --- ends ---

    def _end(self, request: EngineRequest, reason: str | BaseException, *, keep: bool) -> None:
        """End a request, and keep its cache or drop it."""
        request.end(reason)
        if request.number < 0:
            return
        self._reject(request)
        if keep:
            self.kept_caches.keep(request)
            self.store.keep(request, request.number, self.rejected.get(request.number, 0))
        else:
            self.drops.append(request.number)

    def _end_cancelled(self) -> None:
        for requests, keep in (
            (self.waiting, False),
            (self.prefilling, False),
            (self.rows, not self.worker.recomputes_by_token),
        ):
            for request in [request for request in requests if request.cancelled]:
                requests.remove(request)
                self._end(request, "cancelled", keep=keep)

    def _put_back(self, request: EngineRequest) -> None:
        """Put a request back into the queue: its prompt and tokens are computed again."""
        self._reject(request)
        if not (self.worker.recomputes_by_token and request.answer):
            self.store.keep(request, request.number, self.rejected.get(request.number, 0))
        self.drops.append(request.number)
        request.number = -1
        request.computed_tokens = 0
        request.held_logits = None
        request.passed_fork_points.clear()
        self.waiting.appendleft(request)

    # --- memory ---

    def _bytes_of(self, tokens: int, shared: int = 0) -> int:
        """Return the bytes of a cache of so many tokens; 0 before the first cache."""
        return 0 if self.footprint is None else self.footprint(tokens, shared=shared)

    def _free(self) -> int:
        """Return the bytes that are left on the fullest rank, after drops and growth of this step."""
        held_bytes = self.worker.measure(self.drops) if self.drops else self.worker.nbytes
        most = max(self.nbytes)
        scale = self.worker.scale
        return int(self.memory - scale * held_bytes - max(0.0, most - scale * self.nbytes[0]) - self.step.promised)

    def _make_room(self, more: int, spared: Collection[int] = ()) -> bool:
        """Drop kept caches, least recently used first, until `more` bytes fit. Return whether they do.

        Caches of guesses go last.
        """
        while self._free() < more:
            oldest = next(
                (number for number in self.kept_caches.kept if number not in {*spared, *self.step.spared}), None
            )
            if oldest is not None:
                self._evict(oldest)
            elif not self.guesser.release():
                return False
        return True

    def _evict(self, number: int) -> None:
        self.kept_caches.remove(number)
        self.drops.append(number)
        self.counts["evicted"] += 1

    def _guess(self) -> None:
        """Guess tokens of the rows of this step, where guesses are worth their time."""
        rows = [request for request in self.rows if request.held_logits is None]
        for request in rows:
            request.guesses.compare(request.answer)
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
            for request in self.rows:  # guesses go before a row does
                request.guesses.checked = []
            more = self._growth_of_rows()
        while not self._make_room(more) and self.running:
            self._preempt(more)
            more = self._growth_of_rows()
        self.step.promised = more
        return more > 0

    def _growth_of_rows(self) -> int:
        return sum(self._growth(request, 1 + len(request.guesses.checked)) for request in self.rows)

    def _growth(self, request: EngineRequest, tokens: int) -> int:
        cache = self.worker.caches[request.number]
        return growth(cache, tokens) if cache.get_seq_length() else self._bytes_of(tokens)

    def _preempt(self, more: int) -> None:
        """Put the youngest request back.

        A request that is alone holds the memory of a cache that it was forked from, or can never fit.
        """
        request = (self.prefilling or self.rows).pop()
        if self.running or request.is_forked:
            self._put_back(request)
            self.counts["preempted"] += 1
        else:
            needed = max(self._bytes_of(len(request.ids)), self.worker.nbytes + more)
            self._end(request, never_fits(needed, self.memory), keep=False)

    # --- prompts ---

    def _start(self) -> Start | None:
        """Begin the prompt of a request, if there is room for it. Return the operation."""
        if not self.waiting or len(self.running) >= self.max_rows or self.drops or (self.is_full and self.prefilling):
            return None
        ready = (request for request in islice(self.waiting, LOOKAHEAD) if not self.store.holds_up(request))
        request = next((candidate for candidate in ready if not self._let_wait(candidate)), None)
        request = next((candidate for candidate in self.waiting if self.store.found(candidate) is not None), request)
        origin = None if request is None or self._begin_loading(request) else self._choose_origin(request)
        if request is None or origin is None:
            return None
        loaded = self.store.found(request)
        if loaded is not None and loaded.source is not None and loaded.source != origin.source:
            self.drops.append(loaded.source)
        self.store.note_begun(request)
        self.waiting.remove(request)
        self.prefilling.append(request)
        self.step.starting = request
        request.number = next(self.cache_numbers)
        request.computed_tokens = origin.tokens
        request.is_forked = origin.source is not None
        parting = self.kept_caches.parting(request, self._lenders())
        request.fork_points = {parting} if parting >= origin.tokens + LEAST_SHARED else set()
        if self.worker.recomputes_by_token and request.images is None:  # the answer is computed otherwise than a prompt
            request.fork_points.add(len(request.prompt) - self.kept_caches.left_to_decode)
        self.kept_caches.use(origin)
        if origin.source is not None:
            self.step.spared.add(origin.source)
        if request.images_digest is not None:
            self.kept_caches.images_digests[request.number] = request.images_digest
        later = len(request.answer) if request.images or self.worker.recomputes_by_token else 0
        images = specs_of(request.images)
        return Start(request.number, request.ids, origin.source, origin.moves, later, images)

    def _begin_loading(self, request: EngineRequest) -> bool:
        """Begin to load the prefix of a prompt, if one is stored that is longer than others. Return whether it is."""
        common_tokens = self.kept_caches.find(request, self._lenders()).tokens
        return self.store.begin_loading(
            request, common_tokens, self.cache_numbers, lambda: self._reserve_room(request, Origin())
        )

    def _choose_origin(self, request: EngineRequest) -> Origin | None:
        """Return what a prompt goes on from; None if no room is left.

        A prompt that can never fit is refused.
        """
        if len(request.answer) >= request.max_new_tokens:
            self.waiting.remove(request)
            request.end("length")
            return None
        origin = self.kept_caches.find(request, self._lenders())
        if (loaded := self.store.found(request)) is not None and loaded.tokens > origin.tokens:
            origin = loaded
        if self._reserve_room(request, origin):
            return origin
        if self.running or (self.store.holds_memory and self.store.found(request) is None):
            return None
        if self._reserve_room(request, Origin()):  # without the cache that it would go on from
            return Origin()
        self.waiting.remove(request)
        request.end(never_fits(self._bytes_of(len(request.ids)), self.memory))
        return None

    def _lenders(self) -> list[EngineRequest]:
        """Return the running requests whose caches hold tokens as prompts have them."""
        return (
            [request for request in self.prefilling if not request.answer]
            if self.worker.recomputes_by_token
            else self.running
        )

    def _let_wait(self, request: EngineRequest) -> bool:
        """Let a request wait for a prompt that computes what both begin with, and forks there. Return if it waits."""
        if request.suspected and any(other.suspected for other in self.running):
            return True
        for other in self.prefilling:
            common_tokens = self.kept_caches.shared(request, other)
            if (
                common_tokens < LEAST_SHARED
                or common_tokens in other.passed_fork_points
                or common_tokens < other.computed_tokens
            ):
                continue
            if common_tokens - self.kept_caches.find(request, self.prefilling).tokens >= LEAST_SHARED:
                other.fork_points.add(common_tokens)
                return True
        return False

    def _reserve_room(self, request: EngineRequest, origin: Origin) -> bool:
        """Make room for a prompt beside what others will need, and promise it. Return whether it fits.

        Kept caches are dropped for it, but not its source.
        """
        tokens = len(request.ids)
        if origin.moves and origin.source is not None:
            need = growth(self.worker.caches[origin.source], tokens - origin.tokens)
        else:
            need = self._bytes_of(tokens, origin.tokens)
        rests = (self._bytes_of(len(other.ids)) - self._bytes_of(other.computed_tokens) for other in self.prefilling)
        fits = self._make_room(need + sum(rests), [] if origin.source is None else [origin.source])
        self.step.promised += need if fits else 0
        return fits

    def _snapshot(self) -> Fork | None:
        """Fork the cache of a prompt that has come to where others part from it. Return the operation."""
        for request in (
            request for request in self.prefilling if request is not self.step.starting and request.fork_points
        ):
            fork_point = min(request.fork_points)
            if request.computed_tokens < fork_point:
                continue
            request.fork_points.remove(fork_point)
            request.passed_fork_points.add(fork_point)
            more = self._bytes_of(request.computed_tokens)
            goes_back = self.worker.caches[request.number].crops_anywhere
            if request.computed_tokens == fork_point and not goes_back and self._free() >= more:
                self.step.promised += more
                number = next(self.cache_numbers)
                self.kept_caches.keep(request, snapshot=number)
                self.step.forking = request, number
                self.step.spared.add(number)
                return Fork(request.number, number)
        return None

    def _fill(self) -> Fill | None:
        """Return the operation that computes the next chunk of a prompt, in most turns that with the shortest rest."""
        turn = next(self.chunk_turns) % OLDEST_EVERY == OLDEST_EVERY - 1
        ordered = (
            self.prefilling
            if turn
            else sorted(self.prefilling, key=lambda request: len(request.ids) - request.computed_tokens)
        )
        for request in ordered:
            stop = min(
                (fork_point for fork_point in request.fork_points if fork_point > request.computed_tokens),
                default=len(request.ids),
            )
            size = min(self._chunk(), stop - request.computed_tokens)
            while not (fits := self._make_room(more := self._growth_of_chunk(request, size))) and size > LEAST_SHARED:
                size = max(LEAST_SHARED, size // 2)
            if fits:
                self.step.computing = request
                self.step.promised += more
                self.is_full = False
                return Fill(request.number, size, stop)
        self.is_full = bool(self.prefilling)
        return None

    def _growth_of_chunk(self, request: EngineRequest, tokens: int) -> int:
        """Return the bytes that a chunk of a prompt takes. Those of the prompt that begins are promised."""
        passing = 0 if self.footprint is None else self.footprint.of_chunk(tokens)
        return passing + (0 if request is self.step.starting else self._growth(request, tokens))

    def _chunk(self) -> int:
        """Return the tokens of the next chunk, so that rows wait no longer than they may."""
        longest = min(CHUNK_SECONDS, WORLD.deadline / 4 if WORLD.deadline else CHUNK_SECONDS)
        if not self.rows:
            return min(LONGEST_CHUNK, max(1, int(longest / self.token_seconds))) if self.token_seconds else FIRST_CHUNK
        if not self.token_seconds or not self.row_seconds:
            return FIRST_CHUNK_BESIDE_ROWS
        if self.max_gap is None:
            waiting = len(self.waiting) + len(self.prefilling)  # requests that wait for a first token count like rows
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
