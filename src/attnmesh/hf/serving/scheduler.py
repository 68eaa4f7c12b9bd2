"""The scheduler of an engine: it plans steps, and applies their results."""

from collections.abc import Sequence
from functools import partial as partial_of
from time import perf_counter

from torch import Tensor

from attnmesh.errors import InputError
from attnmesh.hf.serving.cache_memory import CacheMemory
from attnmesh.hf.serving.chunk_pace import ChunkPace
from attnmesh.hf.serving.engine_request import EngineRequest
from attnmesh.hf.serving.engine_store import begin_store
from attnmesh.hf.serving.footprint import never_fits
from attnmesh.hf.serving.grammar_masks import wait_for_any
from attnmesh.hf.serving.guesses import Guesser, StepTimes
from attnmesh.hf.serving.operations import Crop, DecodeRows, Drop, Fill, Operation, Start, StepResults
from attnmesh.hf.serving.prefix_store import PrefixStore
from attnmesh.hf.serving.prompt_queue import PromptQueue
from attnmesh.hf.serving.rank_report import RankReport
from attnmesh.hf.serving.rank_worker import RankWorker
from attnmesh.hf.serving.step_plan import ServedRequests, StepPlan

MASK_SHARE = 0.05
"""Share of a step's time that rows wait for masks of grammars, so that a late mask holds up other rows little."""

LEAST_MASK_WAIT = 0.001
"""Seconds that rows wait for masks of grammars, if this is more than `MASK_SHARE`."""

IDLE_MASK_WAIT = 0.01
"""Seconds of a wait for masks while no row can decode and no prompt is computed or waits."""

KEPT_PER_ROW = 2
"""Kept caches for each row that may decode, at most: each prompt is compared with the tokens of all of them."""


class Scheduler:
    """Plans steps of an engine on rank 0, and applies results. Caches take at most `memory_limit` bytes of a rank."""

    def __init__(
        self,
        worker: RankWorker,
        max_rows: int,
        memory_limit: int,
        max_gap: float | None,
        store: PrefixStore | None = None,
        guesser: Guesser | None = None,
    ) -> None:
        self.worker = worker
        self.max_rows = int(max_rows)
        self.guesser = guesser or Guesser()
        self.store = begin_store(store, worker)
        self.requests = ServedRequests()
        self.memory = CacheMemory(worker, memory_limit, self.guesser)
        self.prompts = PromptQueue(worker, self.requests, self.memory, self.store, self.max_rows)
        self.pace = ChunkPace(max_gap)
        self.rejected: dict[int, int] = {}
        """Tokens that the next step takes back from the end of each cache."""
        self.step_times = StepTimes()
        self.guess_seconds = 0.0
        """Seconds for which the guesses of this step were made."""
        self.counts = dict.fromkeys(("tokens", "prompt_tokens", "cached_tokens", "preempted", "steps"), 0)
        self.counts |= {"drafted_tokens": 0, "accepted_tokens": 0}

    @property
    def busy(self) -> bool:
        """True if a step has something to do."""
        return bool(self.requests.running or self.requests.waiting or self.memory.drops or self.store.busy)

    def metrics(self) -> dict[str, float | list[float]]:
        """Return counts, and the bytes of caches by rank."""
        sizes: dict[str, float] = {"running": len(self.requests.rows), "filling": len(self.requests.prefilling)}
        sizes |= {"kept": len(self.memory.kept_caches.kept), "cache_limit_bytes": self.memory.limit}
        sizes |= {**self.store.metrics(), **self.guesser.metrics()}
        sizes |= {"step_seconds": self.pace.row_seconds}
        nbytes = [*map(float, self.memory.nbytes)]
        return {**self.counts, "evicted": self.memory.evicted, **sizes, "cache_bytes": nbytes}

    def add(self, request: EngineRequest) -> None:
        """Add a request to those that wait."""
        self.requests.waiting.append(request)

    def update_requests(self) -> None:
        """End cancelled requests, draw from held logits, and guess tokens.

        Called before `plan`, to which it leaves the memory of rows and prompts. May end requests, add tokens to
        answers, change guesses, evict kept caches, and run operations of the draft model on all ranks.
        """
        self._end_cancelled()
        self._draw_held()
        self.memory.keep_at_most(KEPT_PER_ROW * self.max_rows)
        self._guess()

    def plan(self) -> StepPlan:
        """Return the next step.

        Draws no token, and runs no operation. May begin requests, give up guesses, put requests back, evict kept
        caches, and end requests that can never fit or that a replay has ended.

        Rows are promised memory first, and prompts what rows leave. Both may drop caches, so operations are listed at
        last. Ranks run them in this order:

            crop                 before a state is saved, else wrong guesses are in it, and before its cache is dropped
            forget, save         before a cache is dropped, else its blocks are lost
            close, load          before a prompt begins with a loaded cache, else the cache is not cut to its tokens
            drop                 before a cache grows, else both take memory at once
            rows                 before prompts: if memory ends, one prompt ends, and no row is computed again
            start, fork, fill    of prompts, as `PromptQueue.plan` has them
            open                 after all: if there is no memory for the cache, its prompt begins without it
        """
        step = StepPlan()
        requests = self.requests
        grows = self._fit_rows(step)
        prompts = self.prompts.plan(step, self.pace)
        if requests.prefilling and not requests.rows and not prompts:  # no prompt can go on beside the others
            self._preempt(self.memory.bytes_of(len(requests.prefilling[-1].ids)))
        step.rows = self._decoding_rows()
        store_seconds = self.pace.store_seconds if requests.rows else None
        step.operations = [
            *self._crop_rejected(),
            *self.store.operations_before(self.memory.drops, store_seconds),
            *self._drop(),
            *self._decode(step.rows, grows),
            *prompts,
            *self.store.operations_after(),
        ]
        return step

    def receive_reports(self, reports: Sequence[RankReport]) -> None:
        """Note what all ranks report of the last step: the bytes of their caches, and the state of the store."""
        self.memory.note_bytes([report.nbytes for report in reports])
        self.memory.drop(*self.store.receive_reports(reports))

    def apply_results(self, step: StepPlan, results: StepResults) -> None:
        """Apply the results of a step: new tokens, and prompts that are done."""
        if (error := results.error_of(Crop)) is not None:
            raise error  # caches are not as rank 0 knows them
        if step.rows:
            self._apply_rows(step.rows, results)
        if step.starting is not None:
            self._apply_start(step.starting, results)
        if step.computing is not None and step.computing in self.requests.prefilling:
            self._apply_chunk(step.computing, results)
        if step.forking is not None:
            self.store.keep(*step.forking)
        self.store.apply_results(results)

    def end_all(self, reason: str | BaseException) -> None:
        """End all requests."""
        for request in [*self.requests.running, *self.requests.waiting]:
            request.end(reason)
        for requests in (self.requests.rows, self.requests.prefilling, self.requests.waiting):
            requests.clear()

    # --- operations ---

    def _crop_rejected(self) -> list[Operation]:
        rejected = self.rejected
        self.rejected = {}
        return [Crop([*rejected.items()])] if rejected else []

    def _drop(self) -> list[Operation]:
        return [Drop(self.memory.pop_drops())] if self.memory.drops else []

    def _decode(self, rows: list[EngineRequest], grows: bool) -> list[Operation]:
        ids_by_cache = [(row.cache_id, [row.answer[-1], *row.guesses.checked]) for row in rows]
        return [DecodeRows(ids_by_cache, grows)] if rows else []

    # --- results ---

    def _apply_rows(self, rows: list[EngineRequest], results: StepResults) -> None:
        """Draw the next tokens of rows, or find the row whose step failed. The time of either counts as a step's."""
        seconds = results.seconds[DecodeRows]
        self.counts["steps"] += 1
        self.pace.add_rows(seconds)
        guesses = sum(len(request.guesses.checked) for request in rows)
        self.counts["drafted_tokens"] += guesses
        before = self.counts["accepted_tokens"]
        if (error := results.error_of(DecodeRows)) is not None:
            self._end_failed_row(rows, error)
        else:
            self._draw_rows(dict(zip(rows, results.rows, strict=True)))
        accepted = self.counts["accepted_tokens"] - before
        seconds += results.seconds.get(Crop, 0.0)
        self.step_times.add(len(rows), guesses, seconds, accepted, self.guess_seconds)

    def _draw_rows(self, logits: dict[EngineRequest, Tensor]) -> None:
        """Draw the next tokens of each row, of which none is suspected any more, as the step was good.

        All rows together wait `MASK_SHARE` of a step for masks of grammars. A row whose mask comes later holds its
        logits, and `_draw_held` draws its tokens.
        """
        until = perf_counter() + max(LEAST_MASK_WAIT, MASK_SHARE * self.pace.row_seconds)
        for request, scores in logits.items():
            request.suspected = False
            request.guesses.note_cached()
            if self._draw_tokens(request, scores, until - perf_counter()):
                self.requests.rows.remove(request)

    def _draw_held(self) -> None:
        """Draw the next token of rows whose masks came late. If there is nothing else to do, wait for a mask first."""
        requests = self.requests
        held_logits = [(request, request.held_logits) for request in requests.rows if request.held_logits is not None]
        alone = len(held_logits) == len(requests.rows) and not requests.prefilling and not requests.waiting
        if held_logits and alone:
            wait_for_any([request.grammar for request, _ in held_logits if request.grammar is not None], IDLE_MASK_WAIT)
        for request, logits in held_logits:
            if self._draw_tokens(request, logits):
                requests.rows.remove(request)

    def _end_failed_row(self, rows: list[EngineRequest], error: InputError) -> None:
        """End the row whose step failed, if there is one suspect. All other rows are computed again.

        Rows A, B and C fail in one step: all three become suspects, and are put back. A suspect begins only while no
        other suspect runs. A's first good step clears A, and B begins. If a step with B fails, B alone is suspected in
        it, and ends.
        """
        suspects = [request for request in rows if request.suspected] or rows
        for request in rows[::-1]:
            self.requests.rows.remove(request)
            request.suspected = request in suspects
            if suspects == [request]:
                self._end(request, error, keep=False)
            else:
                self._put_back(request)

    def _apply_start(self, request: EngineRequest, results: StepResults) -> None:
        """Note how many tokens the cache of a new prompt has, or end the request if its prompt could not begin.

        After a replay the cache may also have tokens of the answer. The request reports those of the prompt alone.
        """
        if (error := results.error_of(Start)) is not None:
            self.requests.prefilling.remove(request)
            self._end(request, error, keep=False)
            return
        shared = results.cached_tokens or 0
        request.computed_tokens = shared
        self.counts["cached_tokens"] += shared
        request.cached_tokens = min(shared, len(request.prompt))

    def _apply_chunk(self, request: EngineRequest, results: StepResults) -> None:
        """Count the tokens of a chunk, or end the request if the chunk failed.

        Logits come with the last chunk alone: the request then becomes a row, unless its first token ends the answer.
        """
        if (error := results.error_of(Fill)) is not None:
            self.requests.prefilling.remove(request)
            self._end(request, error, keep=False)
            return
        tokens = results.computed_tokens - request.computed_tokens
        request.computed_tokens = results.computed_tokens
        self.counts["prompt_tokens"] += tokens
        self.memory.learn_footprint(request.cache_id)
        self.pace.add_chunk(tokens, results.seconds[Fill])
        if results.logits is not None:
            self.requests.prefilling.remove(request)
            if not self._draw_tokens(request, results.logits):
                self.requests.rows.append(request)

    def _draw_tokens(self, request: EngineRequest, logits: Tensor, seconds: float = 0.0) -> bool:
        """Draw the next token of a request, and one more after each accepted guess. Return whether it has ended.

        `logits`, (tokens, vocabulary), are those after its last token and after each guess. If the mask of the grammar
        is not made within `seconds`, the request holds them for a later step, and other rows go on meanwhile.
        """
        until = perf_counter() + seconds
        for index, scores in enumerate(logits):
            late = request.grammar is not None and not request.grammar.is_ready(max(0.0, until - perf_counter()))
            request.held_logits = logits[index:] if late else None
            if late:
                return False
            try:
                ended = request.add(scores)
            except Exception as error:  # the error of this request, which alone ends
                self._end(request, error, keep=False)
                return True
            self.counts["tokens"] += request.finish_reason != "stop"
            if ended:
                self._end(request, request.finish_reason or "stop", keep=not self.worker.recomputes_by_token)
                return True
            if not request.guesses.accept(request.answer[-1]):
                break
            self.counts["accepted_tokens"] += 1
        self._reject(request)
        return False

    def _reject(self, request: EngineRequest) -> None:
        """Let the next step take guesses that were not accepted from the end of the cache."""
        if rejected := request.guesses.pop_rejected():
            self.rejected[request.cache_id] = rejected

    # --- ends ---

    def _end(self, request: EngineRequest, reason: str | BaseException, *, keep: bool) -> None:
        """End a request. Keep its cache for later prompts, or let the next step drop it."""
        request.end(reason)
        if request.cache_id < 0:
            return
        self._reject(request)
        if keep:
            self.memory.kept_caches.keep(request.cache_id, request.salt)
            self.store.keep(request, request.cache_id, self.rejected.get(request.cache_id, 0))
        else:
            self.memory.drop(request.cache_id)

    def _end_cancelled(self) -> None:
        for requests, keep in (
            (self.requests.waiting, False),
            (self.requests.prefilling, False),
            (self.requests.rows, not self.worker.recomputes_by_token),
        ):
            for request in [request for request in requests if request.cancelled]:
                requests.remove(request)
                self._end(request, "cancelled", keep=keep)

    def _put_back(self, request: EngineRequest) -> None:
        """Put a request back to the head of the queue. Its prompt and answer are computed again later."""
        self._reject(request)
        if not (self.worker.recomputes_by_token and request.answer):
            self.store.keep(request, request.cache_id, self.rejected.get(request.cache_id, 0))
        self.memory.drop(request.cache_id)
        request.cache_id = -1
        request.computed_tokens = 0
        request.held_logits = None
        request.passed_fork_points.clear()
        self.requests.waiting.appendleft(request)

    # --- rows in memory ---

    def _decoding_rows(self) -> list[EngineRequest]:
        """Return the rows that decode. Other rows hold logits, and wait for masks of grammars."""
        return [request for request in self.requests.rows if request.held_logits is None]

    def _guess(self) -> None:
        """Guess tokens of the rows of the next step. May run operations of the draft model on all ranks."""
        rows = self._decoding_rows()
        for request in rows:
            request.guesses.compare(request.answer)
        start = perf_counter()
        self.guesser.guess(rows, self.step_times, partial_of(self.memory.free, StepPlan()))
        self.guess_seconds = perf_counter() - start

    def _fit_rows(self, step: StepPlan) -> bool:
        """Put the youngest requests back into the queue until the others can grow. Return whether they grow.

        Four rows, the oldest first, each with the blocks that it needs; 3 blocks are free:

            2 1 1 1     5 blocks: all guesses go, with which the first row took a block more
            1 1 1 1     4 blocks: the last row goes back, and its blocks are free
            1 1 1       3 blocks: these rows grow
        """
        more = self._growth_of_rows()
        if self.memory.reserve(step, more):
            return more > 0
        for request in self.requests.rows:  # guesses are given up before a row is
            request.guesses.give_up()
        more = self._growth_of_rows()
        while not self.memory.reserve(step, more) and self.requests.running:
            self._preempt(more)
            more = self._growth_of_rows()
        return more > 0

    def _growth_of_rows(self) -> int:
        return sum(self.memory.growth(one, 1 + len(one.guesses.checked)) for one in self.requests.rows)

    def _preempt(self, more: int) -> None:
        """Put the youngest request back into the queue, for rows that need `more` bytes.

        A forked request that is alone is put back too: its cache may hold memory of the cache it was forked from. Any
        other request that is alone can never fit, and ends.
        """
        request = (self.requests.prefilling or self.requests.rows).pop()
        if self.requests.running or request.is_forked:
            self._put_back(request)
            self.counts["preempted"] += 1
        else:
            needed = max(self.memory.bytes_of(len(request.ids)), self.worker.nbytes + more)
            self._end(request, never_fits(needed, self.memory.limit), keep=False)
