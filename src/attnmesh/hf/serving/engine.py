"""An engine that serves requests on a mesh: rank 0 admits, schedules and samples, and the other ranks follow.

In a step rank 0 sends operations to all ranks, and all ranks run them: each row decodes a token, and one prompt
computes a chunk. The ranks that follow need no tokenizer, no clock and no random numbers.
"""

import queue
from collections.abc import Iterable, Mapping, Sequence
from secrets import randbits
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from attnmesh.errors import (
    ArgumentError,
    Busy,
    GrammarError,
    MeshError,
    ShapeError,
    TooLong,
    check_count,
)
from attnmesh.hf.images.inputs import OWN_PROCESSOR, image_inputs, none_if_all_text, without_absent
from attnmesh.hf.models import (
    check_can_decode_rows,
    check_rope_switch,
    rope_regime,
    rope_switches,
    unwrap,
    vocabulary_size,
)
from attnmesh.hf.options import agreement_with_peers, describe_value
from attnmesh.hf.serving.engine_request import EngineRequest, SamplingParams
from attnmesh.hf.serving.footprint import memory_share, never_fits
from attnmesh.hf.serving.grammar_masks import Grammar, GrammarTokens
from attnmesh.hf.serving.operations import Operation, StepResults
from attnmesh.hf.serving.prefix_store import PrefixStore
from attnmesh.hf.serving.rank_worker import RankWorker
from attnmesh.hf.serving.scheduler import Scheduler
from attnmesh.hf.serving.speculation import Speculation
from attnmesh.hf.serving.step_exchange import END_OF_STEPS, StepExchange, can_be_sent
from attnmesh.mesh.axes import RankMesh
from attnmesh.runtime.counters import count_traffic

IDLE_POLL_SECONDS = 1.0
"""Seconds between exchanges while an engine is idle. An exchange finds that a rank is lost."""

WAITING_POLL_SECONDS, WRITING_POLL_SECONDS = 0.005, 0.05
"""Seconds between exchanges while an engine waits for memory or for files to read, and while it writes files."""

SUBJECT = "hf.Engine"


class Engine:
    """Serves requests of unequal lengths on one mesh, with tokens that do not depend on what else runs.

    All ranks make an engine with the same arguments. Rank 0 calls `run`, and the others `follow`.

    Args:
        model: A causal language model with `attn_implementation="attnmesh"`. Ranks may share its weights, as
            `tensor_parallel` has it: rank 0 is then the first of these and of the mesh.
        mesh: The mesh that shares keys and values; None for one device.
        max_rows: Requests that decode at the same time.
        max_queue: Requests that wait, beyond which `submit` raises `Busy`.
        cache_memory: Bytes for caches on each rank; with unequal shares, on the rank that holds most. None takes three
            quarters of the free memory, or of what the control group leaves, which the ranks of a host share. Growth
            counts before it is allocated. Where memory ends, kept prefixes go, the least recently used first. Then the
            youngest request waits, and is computed again.
        max_gap: Seconds that a prompt's chunk may add to a step of rows. By default two steps of rows, and two more for
            each request that waits. A chunk has at least a block of the cache on each rank, 128 tokens in long prompts.
        max_model_len: Tokens of a prompt and its answer; the model's context by default.
        tokens_end: Tokens that end an answer; the model's by default. They are not among its tokens.
        store: Where prefixes are kept when their caches go, also for engines that come later; None for nowhere.
        speculate: "ngram" to guess the next tokens of an answer, by what followed its last tokens where they stood
            before, and to check at most 8 guesses of each request in a step; "ngram:N" for at most N. Answers stay the
            same. None for one token of each request in a step.
        draft: A small model with the same tokens and `attn_implementation="attnmesh"`, which guesses the next tokens in
            place of a look-up. All ranks have it, and share its keys. It may be the model itself.
        draft_tokens: Guesses of a draft model for each request in a step at most; 8 by default.
        grammars: The model's tokens, by which rank 0 follows grammars; None if no request has one, and on other ranks.
        cache_options: Options of each request's `ShardedCache`, but for `folder=`. With `storage=`, tokens may depend
            on what else runs: the first chunk of a prompt attends its keys before they are rounded, and chunks are
            shorter beside others. With `shares="auto"` ranks are measured once, here. With `hot=` older tokens in CPU
            memory count as `cache_memory`, too.

    Raises:
        InputError: An argument is not supported, or ranks differ in one.

    >>> from threading import Thread
    >>> from transformers import AutoModelForCausalLM, LlamaConfig
    >>> sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    >>> config = LlamaConfig(vocab_size=97, eos_token_id=None, **sizes)
    >>> model = AutoModelForCausalLM.from_config(config, attn_implementation="attnmesh").eval()
    >>> engine = Engine(model, None)
    >>> thread = Thread(target=engine.run)
    >>> thread.start()
    >>> len([token.id for token in engine.submit([5, 6, 7], max_new_tokens=4)])
    4
    >>> engine.close()
    >>> thread.join()
    """

    def __init__(
        self,
        model: PreTrainedModel,
        mesh: DeviceMesh | None,
        *,
        max_rows: int = 16,
        max_queue: int = 64,
        cache_memory: int | None = None,
        max_gap: float | None = None,
        max_model_len: int | None = None,
        tokens_end: Iterable[int] | None = None,
        store: PrefixStore | None = None,
        speculate: str | None = None,
        draft: PreTrainedModel | None = None,
        draft_tokens: int | None = None,
        grammars: GrammarTokens | None = None,
        **cache_options: Any,
    ) -> None:
        self.model = unwrap(model)
        rank_mesh = RankMesh.of(mesh)
        limits: dict[str, Any] = {"max_rows": max_rows, "max_queue": max_queue}
        limits |= {"cache_memory": cache_memory, "max_model_len": max_model_len}
        context = getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        guessing = {"speculate": speculate, "draft": describe_value(draft), "draft_tokens": draft_tokens}
        others = {"max_gap": max_gap, "store": describe_value(store), **guessing}
        with agreement_with_peers(rank_mesh, self.model, SUBJECT, {**limits, **others}):
            check_can_decode_rows(SUBJECT, self.model)
            for name, limit in limits.items():
                if limit is not None or name in ("max_rows", "max_queue"):
                    check_count(f"{SUBJECT} {name}", limit, "pass a positive int")
            _check_options(max_gap, store, cache_options.get("folder"))
            if max_model_len is not None and context is not None and max_model_len > context:
                expected = f"at most {context}"
                raise ArgumentError(f"{SUBJECT} max_model_len", expected, str(max_model_len), "leave it out")
            speculation = Speculation.of(self.model, speculate, draft, draft_tokens)
        context_limits = max_model_len, context, cache_options.get("capacity")
        self.max_context = min((limit for limit in context_limits if limit is not None), default=None)
        ends = self.model.generation_config.eos_token_id if tokens_end is None else tokens_end
        self.eos_ids = frozenset(() if ends is None else (ends,) if isinstance(ends, int) else ends)
        self.grammars = grammars
        self.step_exchange = StepExchange(self.model, rank_mesh, cache_options.get("output"))
        self.worker = RankWorker(self.model, mesh, cache_options)
        self.shares = self.worker.template.shares
        """Ratios of the tokens of each rank, measured once for all requests; None for even shares."""
        guesser = None if speculation is None else speculation.begin(self.worker, self._run_between_steps)
        memory = int(cache_memory or memory_share(self.step_exchange.meshes, self.model.device, self.shares))
        self.scheduler = Scheduler(self.worker, max_rows, memory, max_gap, store, guesser)
        self.max_queue = int(max_queue)
        self.inbox: queue.SimpleQueue[EngineRequest | None] = queue.SimpleQueue()
        """Requests that `submit` has accepted and no step has taken in; None from `close`."""
        self.error: BaseException | None = None
        """The error that ended `run`; None without one."""
        self.closing = False
        """True once `close` was called, or `run` has ended."""
        self.exchanges = 0
        """Exchanges with all ranks so far. A server that sees their number grow knows that ranks go on."""
        self.step_seconds = 0.0
        """Seconds of all operations of steps so far."""
        self.merge_seconds = 0.0
        """Seconds of these that merges between ranks took."""
        self.pause_seconds = 0.0
        """Seconds that a busy engine waits for a request before a step: 0, unless its last step had no operations."""

    def submit(
        self,
        ids: Sequence[int],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        logit_bias: Mapping[int, float] | Iterable[tuple[int, float]] = (),
        seed: int | None = None,
        stop_ids: Iterable[int] = (),
        logprobs: int = 0,
        replay: Sequence[int] | None = None,
        images: Mapping[str, Any] | None = None,
        salt: str = "",
        grammar: Grammar | None = None,
    ) -> EngineRequest:
        """Queue a request on rank 0, from any thread. Iterate over the request for its tokens.

        Args:
            ids: The prompt.
            max_new_tokens: Tokens of the answer at most.
            temperature: 0 takes the most likely token. Above 0 tokens are drawn.
            top_p: Share of the probability that is drawn from.
            top_k: Tokens that are drawn from; 0 for all.
            min_p: Share of the likeliest token's probability that a token needs to be drawn.
            repetition_penalty: Number above 1 to make tokens of the prompt and the answer less likely; 1 for none.
            frequency_penalty: Number that each time that a token is in the answer takes off its logit.
            presence_penalty: Number that is taken off the logit of each token of the answer.
            logit_bias: Numbers from -100 to 100 that are added to the logits of some tokens, before all penalties.
            seed: Seed of the draws: the same seed draws the same tokens, whatever else runs. None for a random one.
            stop_ids: More tokens that end the answer.
            logprobs: Most likely tokens to return with each token.
            replay: The first tokens of the answer, which were drawn before: the request continues after them. A replay
                has been accepted once, so it may exceed the queue.
            images: Images of the prompt, as the model's processor returns them: `pixel_values` and what comes with it.
            salt: Name of those who share prefixes: a cache of another salt is never used again.
            grammar: What the answer has to be. Tokens that do not follow it are never drawn, whatever their biases.

        Returns:
            The request.

        Raises:
            Busy: The queue is full.
            TooLong: The prompt and its answer can never fit.
            InputError: An argument is not supported.
        """
        if self.error is not None or self.closing:
            raise self.error or Busy("submit", "an engine that runs", "one that is closing", "submit to another")
        seed = randbits(62) if seed is None else seed
        shaping = top_p, top_k, min_p, repetition_penalty, frequency_penalty, presence_penalty
        biases = tuple(logit_bias.items() if isinstance(logit_bias, Mapping) else map(tuple, logit_bias))
        sampling = SamplingParams(temperature, *shaping, biases, seed, logprobs)
        sampling.check()
        stops = [*stop_ids]
        if not all(type(token) is int for token in stops):
            fix = "pass tokens.tolist()"
            raise ArgumentError("submit stop_ids", "a list of ints", f"{stops!r:.40}", fix)
        inputs = none_if_all_text(without_absent(images or {}), self.model) or None
        request = EngineRequest(
            [*ids], sampling, max_new_tokens, self.eos_ids | {*stops}, inputs, [*(replay or ())], salt
        )
        self._check_request(request)
        if grammar is not None:
            if self.grammars is None:
                fix = "pass Engine(grammars=hf.GrammarTokens(tokenizer)) on rank 0"
                raise GrammarError(grammar.field, "an engine with grammars", "none", fix)
            request.grammar = self.grammars.begin(grammar, request.all_stop_ids, request.answer)
        if replay is None and self._queued >= self.max_queue:
            given = f"one of {self.max_queue} requests that wait"
            fix = "submit again later, or raise max_queue"
            raise Busy("submit", "a queue with room", given, fix)
        self.scheduler.store.name_blocks(request)
        self.inbox.put(request)
        if self.closing:  # the request may have come too late to be found
            request.end(self.error or "cancelled")
        return request

    def _check_request(self, request: EngineRequest) -> None:
        """Raise unless the model knows the tokens of a request, and its context and the memory hold all of them."""
        config = self.model.config.get_text_config(decoder=True)
        vocab_size = vocabulary_size(self.model)
        check_count("submit max_new_tokens", request.max_new_tokens, "count the tokens of the answer")
        expected = f"tokens from 0 to {vocab_size - 1}, as ints"
        fix = "use this model's tokenizer, and tokens.tolist()"
        known = all(type(token) is int and 0 <= token < vocab_size for token in request.ids)
        if not known or not request.prompt:
            raise ArgumentError("submit ids", expected, "others, or none", fix)
        biased = [token for token, _ in request.sampling.logit_bias]
        known = all(type(token) is int and 0 <= token < vocab_size for token in biased)
        if not known or len({*biased}) < len(biased):
            raise ArgumentError("submit logit_bias", f"{expected}, each once", "others, or one twice", fix)
        prompt = len(request.prompt)
        total = prompt + request.max_new_tokens
        given = f"{prompt} and {request.max_new_tokens} new ones"
        if self.max_context is not None and total > self.max_context:
            fix = "shorten the prompt, or pass a smaller max_new_tokens"
            raise TooLong("submit ids", f"at most {self.max_context} tokens", given, fix)
        footprint, memory = self.scheduler.memory.footprint, self.scheduler.memory.limit
        if footprint is not None and footprint(prompt) > memory:
            raise never_fits(footprint(prompt), memory)
        self._check_images(request.images or {})
        check_rope_switch(config, prompt - 1, total)
        if rope_regime(config, prompt) != rope_regime(config, total):
            fix = f"stay within {min(rope_switches(config), default=0)} tokens, or call hf.generate"
            raise ShapeError("submit ids", "a rope that stays the same", given, fix)

    def _check_images(self, images: Mapping[str, Any]) -> None:
        """Raise unless the model takes inputs for images, and ranks can send them."""
        unknown = sorted(images.keys() - image_inputs(self.model))
        if unknown:
            expected = "inputs for images that the model takes"
            raise ArgumentError("submit images", expected, ", ".join(unknown), OWN_PROCESSOR)
        others = ", ".join(name for name, value in images.items() if not can_be_sent(value))
        if others:
            fix = 'make them with return_tensors="pt"'
            raise ArgumentError("submit images", "tensors, numbers and text", f"others: {others}", fix)

    def run(self) -> None:
        """Serve on rank 0 until `close`. A lost rank ends the engine, and its requests, with `RankFailure`."""
        if not self.step_exchange.is_leader:
            raise MeshError(f"{SUBJECT} run", "rank 0", "another rank", "call follow")
        try:
            while not self.closing:
                self._step()
            self.scheduler.end_all("cancelled")
            self._run_on_all(END_OF_STEPS)
        except BaseException as error:
            self.error = error
            raise
        finally:
            self.closing = True
            self._receive(0.0)
            self.scheduler.end_all(self.error or "cancelled")
            self.worker.close(at_once=self.error is not None)

    def follow(self) -> None:
        """Run the operations of rank 0 on this rank, until rank 0 closes."""
        if self.step_exchange.is_leader:
            raise MeshError(f"{SUBJECT} follow", "a rank other than 0", "rank 0", "call run")
        ended = False
        try:
            while not ended:
                operations, _ = self.step_exchange.exchange([], self.worker.step_report)
                ended = operations == END_OF_STEPS
                if not ended:
                    self._run(operations, None)
        finally:
            self.worker.close(at_once=not ended)

    def close(self) -> None:
        """End `run`, and cancel open requests."""
        self.closing = True
        self.inbox.put(None)

    def metrics(self) -> dict[str, float | list[float]]:
        """Return counts and sizes: numbers, and lists with a number for each rank."""
        share = self.merge_seconds / self.step_seconds if self.step_seconds else 0.0
        waits = {"queue": self._queued, "exchanges": self.exchanges}
        return {**self.scheduler.metrics(), **waits, "merge_share": share}

    @property
    def _queued(self) -> int:
        """Requests that wait, with those that no step has taken in."""
        return self.inbox.qsize() + len(self.scheduler.requests.waiting)

    def _step(self) -> None:
        """Plan and run a step, once there is a request or something else to do, or it is time for an exchange."""
        idle = WRITING_POLL_SECONDS if self.scheduler.store.is_writing else IDLE_POLL_SECONDS
        self._receive(self.pause_seconds if self.scheduler.busy else idle)
        self.scheduler.update_requests()
        step = self.scheduler.plan()
        self.pause_seconds = 0.0 if step.operations else WAITING_POLL_SECONDS
        with count_traffic() as traffic:
            results = self._run_on_all(step.operations, None if step.starting is None else step.starting.images)
        self.step_seconds += sum(results.seconds.values())
        self.merge_seconds += sum(traffic.merges)
        self.scheduler.apply_results(step, results)

    def _receive(self, seconds: float) -> None:
        """Move new requests to the scheduler. Wait at most `seconds` for a first one."""
        while True:
            try:
                request = self.inbox.get(timeout=seconds) if seconds else self.inbox.get_nowait()
            except queue.Empty:
                return
            seconds = 0.0
            if request is not None:  # None is from `close`, which wakes the engine
                self.scheduler.add(request)

    def _run_on_all(self, operations: list[Operation], images: dict[str, Any] | None = None) -> StepResults:
        """Run operations on all ranks, and give the ranks' reports to the scheduler. A prompt may begin with images."""
        operations, reports = self.step_exchange.exchange(operations, self.worker.step_report)
        self.scheduler.receive_reports(reports)
        self.exchanges += 1
        return StepResults() if operations == END_OF_STEPS else self._run(operations, images)

    def _run_between_steps(self, operations: list[Operation]) -> StepResults:
        """Run operations of the draft model on all ranks, before rank 0 plans a step. Reports wait for the step."""
        operations, _ = self.step_exchange.exchange(operations, self.worker.step_report)
        self.exchanges += 1
        return self.worker.run(operations)

    def _run(self, operations: list[Operation], images: dict[str, Any] | None) -> StepResults:
        """Run operations on this rank. Rank 0 sends the images of the prompt that begins."""
        return self.worker.run(self.step_exchange.share_images(operations, images, self.model.device))


def _check_options(max_gap: object, store: object, folder: object) -> None:
    """Raise unless options are possible. `folder=` is not: a folder holds one cache, and each request has its own."""
    if max_gap is not None and not (isinstance(max_gap, (int, float)) and max_gap > 0):
        fix = "pass seconds, or leave it out"
        raise ArgumentError(f"{SUBJECT} max_gap", "seconds above 0", repr(max_gap), fix)
    if store is not None and not isinstance(store, PrefixStore):
        fix = "pass one, or leave it out"
        raise ArgumentError(f"{SUBJECT} store", "a PrefixStore", type(store).__name__, fix)
    if folder is not None:
        expected = "no folder, which one cache takes"
        raise ArgumentError(f"{SUBJECT} folder", expected, repr(folder), "pass store=hf.PrefixStore(folder)")
