"""The prompts of an engine: which prompt begins, where its cache is forked for others, and whose chunk is next."""

from itertools import count, islice

from attnmesh.hf.serving.cache_memory import CacheMemory
from attnmesh.hf.serving.chunk_pace import ChunkPace
from attnmesh.hf.serving.engine_request import EngineRequest, Origin
from attnmesh.hf.serving.engine_store import EngineStore
from attnmesh.hf.serving.footprint import growth, never_fits
from attnmesh.hf.serving.kept_caches import LEAST_SHARED
from attnmesh.hf.serving.operations import Fill, Fork, Operation, Start
from attnmesh.hf.serving.rank_worker import RankWorker
from attnmesh.hf.serving.step_exchange import value_codes_of
from attnmesh.hf.serving.step_plan import ServedRequests, StepPlan

OLDEST_EVERY = 3
"""Every third chunk is of the oldest prompt, so that none starves. Others are of the prompt with the shortest rest."""

LOOKAHEAD = 8
"""First requests of the queue, any of which may begin while the ones before it wait for a prefix."""


class PromptQueue:
    """Plans prompts in chunks, for at most `max_rows` requests that decode or have begun."""

    def __init__(
        self, worker: RankWorker, requests: ServedRequests, memory: CacheMemory, store: EngineStore, max_rows: int
    ) -> None:
        self.worker = worker
        self.requests = requests
        self.memory = memory
        self.kept_caches = memory.kept_caches
        self.store = store
        self.max_rows = max_rows
        self.is_full = False
        """True if no chunk fits in memory: then no prompt begins."""
        self.new_cache_ids = count()
        self.chunk_turns = count()

    def plan(self, step: StepPlan, pace: ChunkPace) -> list[Operation]:
        """Return the operations of a step on prompts: one prompt may begin, a cache be forked, a chunk be computed.

        A cache is forked before its next chunk is computed, else it would have passed the fork point.
        """
        operations = self._start(step), self._snapshot(step), self._fill(step, pace)
        return [operation for operation in operations if operation is not None]

    def _start(self, step: StepPlan) -> Start | None:
        """Return the operation that begins a prompt, and note the request as begun; None if no prompt can begin."""
        request, origin = self._next_request(step)
        if request is None or origin is None:
            return None
        loaded = self.store.origin_of(request)
        if loaded is not None and loaded.source is not None and loaded.source != origin.source:
            self.memory.drop(loaded.source)
        self.store.note_begun(request)
        self.requests.waiting.remove(request)
        self.requests.prefilling.append(request)
        step.starting = request
        request.cache_id = next(self.new_cache_ids)
        request.computed_tokens = origin.tokens
        request.is_forked = origin.source is not None
        parting = self.kept_caches.find_parting(request, self._lenders())
        request.fork_points = {parting} if parting >= origin.tokens + LEAST_SHARED else set()
        if self.worker.recomputes_by_token and request.images is None:  # answers are computed by another rule
            request.fork_points.add(len(request.prompt) - self.worker.left_to_decode)
        self.kept_caches.note_use(origin)
        if origin.source is not None:
            step.spared.add(origin.source)
        self.kept_caches.note_images(request)
        answer_is_apart = request.images or self.worker.recomputes_by_token
        later = len(request.answer) if answer_is_apart else 0
        images = value_codes_of(request.images)
        return Start(request.cache_id, request.ids, origin.source, origin.moves, later, images)

    def _next_request(self, step: StepPlan) -> tuple[EngineRequest | None, Origin | None]:
        """Return the request whose prompt begins, and the cache from which it goes on; None twice if no prompt can."""
        waiting = self.requests.waiting
        is_full = self.is_full and bool(self.requests.prefilling)
        if not waiting or len(self.requests.running) >= self.max_rows or self.memory.drops or is_full:
            return None, None
        ready = (request for request in islice(waiting, LOOKAHEAD) if not self.store.holds_up(request))
        request = next((candidate for candidate in ready if not self._let_wait(candidate)), None)
        loaded = (candidate for candidate in waiting if self.store.origin_of(candidate) is not None)
        request = next(loaded, request)  # a request whose cache is loaded goes first: the cache takes memory meanwhile
        if request is None or self._begin_loading(step, request):
            return None, None
        return request, self._choose_origin(step, request)

    def _begin_loading(self, step: StepPlan, request: EngineRequest) -> bool:
        """Begin to load the stored prefix of a prompt, if it is longer than that of any cache. Return whether it is."""
        common_tokens = self.kept_caches.find(request, self._sources(request)).tokens
        return self.store.begin_loading(
            request, common_tokens, self.new_cache_ids, lambda: self._reserve_room(step, request, Origin())
        )

    def _choose_origin(self, step: StepPlan, request: EngineRequest) -> Origin | None:
        """Return the cache from which a prompt goes on; None if there is no room for the prompt.

        A request whose prompt can never fit is ended with an error. Nothing is begun then either.
        """
        if len(request.answer) >= request.max_new_tokens:
            self.requests.waiting.remove(request)
            request.end("length")
            return None
        origin = self.kept_caches.find(request, self._sources(request))
        if (loaded := self.store.origin_of(request)) is not None and loaded.tokens > origin.tokens:
            origin = loaded
        if self._reserve_room(step, request, origin):
            return origin
        if self.requests.running or (self.store.holds_memory and self.store.origin_of(request) is None):
            return None
        if self._reserve_room(step, request, Origin()):  # the cache from which it would go on may be evicted
            return Origin()
        self.requests.waiting.remove(request)
        request.end(never_fits(self.memory.bytes_of(len(request.ids)), self.memory.limit))
        return None

    def _lenders(self) -> list[EngineRequest]:
        """Return the running requests whose cached tokens were computed as those of a prompt are."""
        if self.worker.recomputes_by_token:
            return [request for request in self.requests.prefilling if not request.answer]
        return self.requests.running

    def _sources(self, request: EngineRequest) -> list[EngineRequest]:
        """Return the running requests from whose caches a prompt may go on.

        Rows decode before a prompt begins, and a state cannot go back: a row with a state lends its cache only to a
        prompt that has the row's next token too.
        """
        lenders = self._lenders()
        if not self.worker.template.irreversible_layers:
            return lenders
        decoding = {row for row in self.requests.rows if row.held_logits is None}
        ids = request.ids[: len(request.ids) - self.worker.left_to_decode]
        return [other for other in lenders if other not in decoding or ids[: len(other.ids)] == other.ids]

    def _let_wait(self, request: EngineRequest) -> bool:
        """Let a request wait for a running prompt with the same first tokens. Return whether it waits.

        Prompts A and B share 500 tokens. While A computes them, B waits; A gets a fork point at 500, where its cache is
        forked for B. A request that may have failed a step also waits, as long as another one runs.
        """
        if request.suspected and any(other.suspected for other in self.requests.running):
            return True
        prefilling = self.requests.prefilling
        for other in prefilling:
            common_tokens = self.kept_caches.count_shared(request, other)
            if (
                common_tokens < LEAST_SHARED
                or common_tokens in other.passed_fork_points
                or common_tokens < other.computed_tokens
            ):
                continue
            if common_tokens - self.kept_caches.find(request, prefilling).tokens >= LEAST_SHARED:
                other.fork_points.add(common_tokens)
                return True
        return False

    def _reserve_room(self, step: StepPlan, request: EngineRequest, origin: Origin) -> bool:
        """Make room for a prompt, beside the rests of prompts that have begun, and promise it. Return whether it fits.

        Kept caches are dropped for the room, but not the cache from which the prompt goes on.
        """
        tokens = len(request.ids)
        bytes_of = self.memory.bytes_of
        if origin.moves and origin.source is not None:
            need = growth(self.worker.caches[origin.source], tokens - origin.tokens)
        else:
            need = bytes_of(tokens, origin.tokens)
        rests = (bytes_of(len(other.ids)) - bytes_of(other.computed_tokens) for other in self.requests.prefilling)
        spared = [] if origin.source is None else [origin.source]
        return self.memory.reserve(step, need, beside=sum(rests), spared=spared)

    def _snapshot(self, step: StepPlan) -> Fork | None:
        """Return the operation that forks the cache of a prompt at a fork point; None if no prompt is at one."""
        for request in self.requests.prefilling:
            if request is step.starting or not request.fork_points:
                continue
            fork_point = min(request.fork_points)
            if request.computed_tokens < fork_point:
                continue
            request.fork_points.remove(fork_point)
            request.passed_fork_points.add(fork_point)
            if request.computed_tokens > fork_point or self.worker.caches[request.cache_id].crops_anywhere:
                continue  # the cache has no state of the fork point any more, or needs none to go back to it
            if self.memory.reserve_free(step, self.memory.bytes_of(request.computed_tokens)):
                fork_id = next(self.new_cache_ids)
                self.kept_caches.keep(fork_id, request.salt, is_snapshot=True)
                step.forking = request, fork_id
                step.spared.add(fork_id)
                return Fork(request.cache_id, fork_id)
        return None

    def _fill(self, step: StepPlan, pace: ChunkPace) -> Fill | None:
        """Return the operation that computes the next chunk of a prompt; None if no chunk fits in memory."""
        prefilling = ordered = self.requests.prefilling
        if next(self.chunk_turns) % OLDEST_EVERY != OLDEST_EVERY - 1:
            ordered = sorted(prefilling, key=lambda request: len(request.ids) - request.computed_tokens)
        waiting = len(self.requests.waiting) + len(prefilling)
        most = pace.tokens(len(self.requests.rows), waiting, store_is_busy=self.store.busy)
        for request in ordered:
            stop = min(
                (fork_point for fork_point in request.fork_points if fork_point > request.computed_tokens),
                default=len(request.ids),
            )
            size = min(most, stop - request.computed_tokens)
            while not (fits := self._make_room_for_chunk(step, request, size)) and size > LEAST_SHARED:
                size = max(LEAST_SHARED, size // 2)
            if fits:
                step.computing = request
                self.is_full = False
                return Fill(request.cache_id, size, stop)
        self.is_full = bool(prefilling)
        return None

    def _make_room_for_chunk(self, step: StepPlan, request: EngineRequest, tokens: int) -> bool:
        """Make room for a chunk of a prompt, and promise it. Return whether it fits.

        The prompt that begins in this step has been promised all its room.
        """
        more = 0 if self.memory.footprint is None else self.memory.footprint.chunk_bytes(tokens)
        more += 0 if request is step.starting else self.memory.growth(request, tokens)
        return self.memory.reserve(step, more)
