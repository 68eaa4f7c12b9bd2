"""Guesses of a draft model: a small model of the same vocabulary reads each row, and draws its next tokens.

The ranks share the draft's keys, as they share the model's. Rank 0 alone plans the draft's passes and draws guesses, so
ranks need not agree on a guess. A row's guesses are drawn with the random numbers with which its tokens will be drawn.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import inf
from time import perf_counter

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnmesh.errors import InputError
from attnmesh.hf.serving.engine_request import EngineRequest, Origin
from attnmesh.hf.serving.footprint import Footprint, growth
from attnmesh.hf.serving.guesses import LEAST_RATE, Guesser, RowTimes, StepTimes
from attnmesh.hf.serving.kept_caches import KeptCaches
from attnmesh.hf.serving.operations import Crop, DecodeRows, Drop, Fill, Operation, Start, StepResults
from attnmesh.hf.serving.rank_worker import RankWorker

FIRST_RATE = 0.6
"""Acceptance rate that is assumed before any guess is checked, and after `STEPS_BEFORE_RETRY` steps without guesses."""

FIRST_PROPOSED = 3.0
"""Guesses that a row is credited with at its start, so that a few wrong ones do not turn it off."""

STEPS_BEFORE_RETRY = 64
"""Steps without guesses after which the draft guesses for a row again. A lower number wastes more steps."""

SHARE_EMA_WEIGHT = 0.2
"""Weight of a row's last step in the share of guesses that a new row begins with."""

TRIAL_DRAFT = 2
"""Most guesses of a row while guesses are not worth their time, or their time is not known."""

LAG = 96
"""Tokens that the draft's cache may lack of a row. If it lacks more, they are read in chunks, as a prompt is."""

SHORTEST_CHUNK, LONGEST_CHUNK = 64, 2048
"""Fewest and most tokens of a chunk that the draft reads beside a step."""

MAX_ENDED_CACHES = 16
"""Most caches of ended rows that are kept, for later rows that begin alike."""


@dataclass
class DraftRow:
    """The draft's cache of a row."""

    request: EngineRequest
    read: int = 0
    """Tokens of the row that are in the cache, or are being read into it; 0 without a cache."""
    computed_tokens: int = 0
    """Tokens in the cache so far, while the text is read."""
    guessed: list[int] = field(default_factory=list)
    """Guesses that are in the cache after the row's tokens."""
    is_reading: bool = False
    """True while the text is read in chunks."""
    idle: int = 0
    """Steps since a guess was made."""
    was_tried: bool = False
    """True once the draft has guessed for the row."""
    fails: bool = False
    """True if the draft cannot read the row."""

    @property
    def length(self) -> int:
        """Tokens of the row."""
        return len(self.request.prompt) + len(self.request.answer)

    @property
    def unread(self) -> int:
        """Tokens of the row that are not in the cache."""
        return self.length - (self.computed_tokens if self.is_reading else self.read)

    @property
    def is_late(self) -> bool:
        """True if the cache lacks more than `LAG` tokens, or has none."""
        return not self.read or self.unread > LAG

    @property
    def is_worth(self) -> bool:
        """True if enough guesses are accepted for them to be worth their time."""
        return self.request.guesses.acceptance_rate >= LEAST_RATE

    def catch_up(self) -> tuple[int, list[int]]:
        """Return how many guesses to take back from the cache, and the tokens to add: at least one."""
        new = self.request.answer[self.read - len(self.request.prompt) :]
        pairs = [*zip(self.guessed, new[:-1], strict=False)]
        right = next((index for index, (guess, token) in enumerate(pairs) if guess != token), len(pairs))
        wrong = len(self.guessed) - right
        self.read = self.length
        self.guessed = []
        return wrong, new[right:]


class DraftGuesser(Guesser):
    """Guesses of a draft model, at most `most` of a row in a step.

    `run` runs operations on the caches of the draft model, on all ranks.
    """

    def __init__(
        self, worker: RankWorker, most: int, vocab_size: int, run: Callable[[Sequence[Operation]], StepResults]
    ) -> None:
        self.worker = worker
        self.most = most
        self.vocab_size = vocab_size
        self.run = run
        self.longest = getattr(worker.template.config, "max_position_embeddings", None) or 2**62
        self.rows: dict[int, DraftRow] = {}
        self.kept_caches = KeptCaches(worker)
        self.footprint: Footprint | None = None
        self.passes = RowTimes()
        """Seconds of passes over rows."""
        self.token_seconds = 0.0
        """Seconds for which the draft reads one token of a chunk."""
        self.usual_rate = FIRST_RATE
        """Acceptance rate that a new row begins with."""
        self.rest = 0
        """Further steps in which the draft reads nothing."""
        self.counts = {"draft_passes": 0, "draft_prompt_tokens": 0}

    def metrics(self) -> dict[str, float]:
        """Return counts, and the bytes of caches on rank 0."""
        return {**self.counts, "draft_cache_bytes": self.worker.nbytes}

    def release(self) -> bool:
        """Drop the caches of ended rows. Without any, drop all, and read nothing for `STEPS_BEFORE_RETRY` steps."""
        cache_ids = [*self.kept_caches.kept] or [*self.worker.caches]
        self.rest = self.rest if self.kept_caches.kept else STEPS_BEFORE_RETRY
        self._drop(cache_ids)
        return bool(cache_ids)

    def guess(self, rows: Sequence[EngineRequest], times: StepTimes, free: Callable[[], int]) -> None:
        """Guess tokens of rows whose guesses are worth their time, and read a chunk of a row that the draft lacks."""
        self._drop_gone()
        own = [self._updated_row(request, times) for request in rows]
        counts = self._choose(own, [self._count_offered(row, times) for row in own], times)
        chosen = {row.request.cache_id: count for row, count in zip(own, counts, strict=True) if count}
        for row in own:
            row.idle = 0 if row.request.cache_id in chosen else row.idle + 1
            row.was_tried = row.was_tried or not row.idle
        self.rest = max(0, self.rest - 1)
        reading = None if self.rest else self._next_to_read(own, times, free, tries=not chosen)
        size = 0 if reading is None else self._chunk_tokens(times, len(rows))
        more = sum(
            self._growth(row := self.rows[cache_id], row.length - row.read + count)
            for cache_id, count in chosen.items()
        )
        if reading is not None:
            more += self._growth(reading, size)
        if more > free():
            self.release()
        elif chosen or reading is not None:
            self._guess([] if reading is None else self._begin_reading(reading, size), chosen, grows=more > 0)

    def _choose(
        self, rows: Sequence[DraftRow], offered: Sequence[int], times: StepTimes, *, tries: bool = True
    ) -> list[int]:
        """Return how many guesses each row gets, at most its number in `offered`."""
        passes = [*accumulate(map(self.passes, range(1, len(rows) + 1)), max, initial=0.0)]
        return times.choose([row.request.guesses.acceptance_rate for row in rows], offered, passes, tries=tries)

    # --- rows ---

    def _updated_row(self, request: EngineRequest, times: StepTimes) -> DraftRow:
        """Return the row of a request, with new counts of guesses. A row long without guesses is tried again."""
        row = self.rows.get(request.cache_id)
        guesses = request.guesses
        if row is None:
            row = self.rows[request.cache_id] = DraftRow(request, fails=request.images is not None)
        elif not row.idle:
            self.usual_rate += SHARE_EMA_WEIGHT * (guesses.acceptance_rate - self.usual_rate)
        if not row.was_tried:
            guesses.assume_rate(self.usual_rate, FIRST_PROPOSED)
        if row.idle >= STEPS_BEFORE_RETRY and not row.is_worth and not times.debt:
            row.idle = 0
            guesses.assume_rate(FIRST_RATE, FIRST_PROPOSED)
        return row

    def _count_offered(self, row: DraftRow, times: StepTimes) -> int:
        """Return how many tokens may be guessed of a row now: none while the draft has to read its text."""
        is_ready = not (row.is_reading or row.is_late) and row.length > row.read
        return self._most_guesses(row, times) if is_ready else 0

    def _most_guesses(self, row: DraftRow, times: StepTimes) -> int:
        """Return how many tokens may be guessed of a row once the draft has read its text."""
        most = self.most if times.pays else min(self.most, TRIAL_DRAFT)
        return 0 if row.fails else max(0, min(most, row.request.room, self.longest - row.length))

    def _growth(self, row: DraftRow, tokens: int) -> int:
        """Return the bytes by which the cache of a row grows at most with `tokens` more tokens."""
        cache = self.worker.caches.get(row.request.cache_id)
        if cache is not None and cache.get_seq_length():
            return growth(cache, tokens)
        return 0 if self.footprint is None else self.footprint(tokens)

    def _drop_gone(self) -> None:
        """Keep the caches of the last `MAX_ENDED_CACHES` rows that have ended, and drop those of earlier ones."""
        gone = {
            cache_id: row
            for cache_id, row in self.rows.items()
            if row.request.cache_id != cache_id or row.request.finish_reason
        }
        for cache_id, row in gone.items():
            del self.rows[cache_id]
            if row.read and not row.is_reading:
                self.kept_caches.keep(cache_id, row.request.salt)
        unread = [cache_id for cache_id, row in gone.items() if row.is_reading]
        self._drop(unread + [*self.kept_caches.kept][: max(0, len(self.kept_caches.kept) - MAX_ENDED_CACHES)])

    def _drop(self, cache_ids: Sequence[int], *, fails: bool = False) -> None:
        """Drop caches. The texts of their rows are read again later, unless `fails`."""
        for cache_id in cache_ids:
            self.kept_caches.stop_keeping(cache_id)
            if (row := self.rows.get(cache_id)) is not None:
                self.rows[cache_id] = DraftRow(row.request, fails=row.fails or fails, idle=row.idle)
        if cache_ids:
            self.run([Drop([*cache_ids])])

    # --- what the draft reads ---

    def _chunk_tokens(self, times: StepTimes, rows: int) -> int:
        """Return the tokens of a chunk that the draft reads in about the time of a step."""
        size = int(times.without_guesses(rows) / self.token_seconds) if self.token_seconds else SHORTEST_CHUNK
        return max(SHORTEST_CHUNK, min(LONGEST_CHUNK, size))

    def _next_to_read(
        self, rows: Sequence[DraftRow], times: StepTimes, free: Callable[[], int], *, tries: bool
    ) -> DraftRow | None:
        """Return the row that lacks fewest tokens.

        Return None if its whole cache would take over half of the free memory, or its guesses are not worth their time.
        """
        unread = {index: row.unread for index, row in enumerate(rows) if row.is_reading or row.is_late}
        worth = [index for index in unread if rows[index].is_worth and self._most_guesses(rows[index], times)]
        if not worth:
            return None
        row = rows[index := min(worth, key=unread.__getitem__)]
        whole = 0 if row.read or self.footprint is None else self.footprint(row.length + row.request.room)
        as_read = [self._most_guesses(other, times) for other in rows]
        return row if 2 * whole <= free() and self._choose(rows, as_read, times, tries=tries)[index] else None

    def _begin_reading(self, row: DraftRow, size: int) -> list[Operation]:
        """Return the operations that read the next chunk of a row's text. For a first chunk they make its cache."""
        cache_id = row.request.cache_id
        operations = list[Operation]()
        if not row.is_reading:
            origin = Origin(cache_id, row.read, moves=True)
            if not row.read:  # the row may begin as another row does, whose cache is then forked
                others = [other.request for other in self.rows.values() if other.read]
                origin = self.kept_caches.find(row.request, others)
                self.kept_caches.note_use(origin)
            row.read = row.length
            row.guessed = []
            row.is_reading = True
            operations = [Start(cache_id, row.request.ids, origin.source, origin.moves, 0, {})]
        return [*operations, Fill(cache_id, size, row.read)]

    def _apply_chunk(self, row: DraftRow, results: StepResults) -> None:
        if results.error_of(Start, Fill) is not None:
            self._drop([row.request.cache_id], fails=True)
            return
        begun = row.computed_tokens if results.cached_tokens is None else results.cached_tokens
        if self.footprint is None:
            self.footprint = Footprint.of(self.worker.caches[row.request.cache_id])
        row.computed_tokens = results.computed_tokens
        tokens = results.computed_tokens - begun
        self.counts["draft_prompt_tokens"] += tokens
        if tokens > SHORTEST_CHUNK // 2:
            self.token_seconds = results.seconds[Fill] / tokens
        if row.computed_tokens >= row.read - 1:  # the first pass that guesses reads the last token
            row.read = row.computed_tokens
            row.is_reading = False

    # --- guesses ---

    def _guess(self, operations: list[Operation], chosen: Mapping[int, int], *, grows: bool) -> None:
        """Run operations, and passes that guess tokens: `chosen` has the number of each row, by its cache.

        The first pass also reads the tokens that the cache of a row lacks.
        """
        behind = {cache_id: self.rows[cache_id].catch_up() for cache_id in chosen}
        new_ids = {cache_id: new for cache_id, (_, new) in behind.items()}
        crops = [(cache_id, wrong) for cache_id, (wrong, _) in behind.items() if wrong]
        operations = [*([Crop(crops)] if crops else []), *operations]
        draws = {cache_id: self._make_draw(self.rows[cache_id].request) for cache_id in chosen}
        while operations or new_ids:
            start = perf_counter()
            reading = next((operation.cache_id for operation in operations if isinstance(operation, Fill)), None)
            results = self.run([*operations, *([DecodeRows([*new_ids.items()], grows)] if new_ids else [])])
            others = sum(results.seconds.get(kind, 0.0) for kind in (Start, Fill))
            if reading is not None:
                self._apply_chunk(self.rows[reading], results)
            if new_ids:
                try:
                    drawn = _draw_tokens(draws, new_ids, results)
                except InputError:
                    self._drop([*new_ids], fails=True)
                    return
                self.counts["draft_passes"] += 1
                self.passes.add(len(new_ids), perf_counter() - start - others)
                for cache_id, token in drawn.items():
                    self.rows[cache_id].request.guesses.ids.append(token)
                going = [
                    cache_id for cache_id in new_ids if len(self.rows[cache_id].request.guesses.ids) < chosen[cache_id]
                ]
                new_ids = {cache_id: [drawn[cache_id]] for cache_id in going}
                for cache_id in going:
                    self.rows[cache_id].guessed.append(drawn[cache_id])
            operations = []
        for cache_id in chosen:
            guesses = self.rows[cache_id].request.guesses
            guesses.checked = [*guesses.ids]

    def _make_draw(self, request: EngineRequest) -> Callable[[Tensor], int]:
        """Return a function that draws a token after logits, with the random numbers of the row's next tokens."""
        generator = torch.Generator()
        sampling = replace(request.sampling, logprobs=0)
        if request.generator is not None:
            generator.set_state(request.generator.get_state())

        def draw(logits: Tensor) -> int:
            scores = pad(logits[: self.vocab_size], (0, max(0, self.vocab_size - len(logits))), value=-inf)
            return sampling.draw(scores, generator, request.before, request.counts).id

        return draw


def _draw_tokens(
    draws: Mapping[int, Callable[[Tensor], int]], new_ids: Mapping[int, list[int]], results: StepResults
) -> dict[int, int]:
    """Return the next token of each row, or raise the error of a pass."""
    if (error := results.error_of(Crop, DecodeRows)) is not None:
        raise error
    return {cache_id: draws[cache_id](logits[-1]) for cache_id, logits in zip(new_ids, results.rows, strict=True)}
