"""Work of each rank of an engine: caches by their ids, chunks of prompts, and steps of rows."""

from collections.abc import Collection, Iterator, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from attnmesh.cache.cache_config import CacheConfig
from attnmesh.errors import InputError
from attnmesh.hf.cache.sharded_cache import ShardedCache
from attnmesh.hf.chunked_prefill import left_to_decode, prefill_chunks, run_model
from attnmesh.hf.images.inputs import images_for_model
from attnmesh.hf.models import is_recurrent, one_token_differs
from attnmesh.hf.options import agree_on_call
from attnmesh.hf.prefill import begin_prompt, crop_to_shared_prefix
from attnmesh.hf.serving.operations import (
    CloseStored,
    Crop,
    DecodeRows,
    Draft,
    Drop,
    Fill,
    ForgetBlocks,
    Fork,
    LoadBlocks,
    OpenStored,
    Operation,
    SaveBlocks,
    Start,
    StepResults,
)
from attnmesh.hf.serving.rank_report import RankReport
from attnmesh.hf.serving.rank_store import RankStore, Reading, set_prompt_tokens
from attnmesh.hf.serving.row_pass import decode_rows, note_tokens
from attnmesh.mesh.axes import RankMesh
from attnmesh.store.block_rows import CacheFiller

STEPS_BETWEEN_COUNTS = 32
"""Steps of rows after which bytes are counted again: forked caches share memory, and copy what they change."""


class RankWorker:
    """The caches of one rank, and the operations of steps."""

    def __init__(self, model: PreTrainedModel, device_mesh: DeviceMesh | None, options: dict[str, Any]) -> None:
        self.model = model
        self.device_mesh = device_mesh
        self.mesh = RankMesh.of(device_mesh)
        self.left_to_decode = left_to_decode(model.config)
        self.template = ShardedCache(model.config, device_mesh, **options)  # raises here, not at the first request
        self.options = {**options, "shares": self.template.shares}
        """Options of caches. Shares are measured once."""
        self.caches: dict[int, ShardedCache] = {}
        self.store: RankStore | None = None
        self.draft_worker: RankWorker | None = None
        """The caches of a draft model, if it guesses tokens."""
        self.prefills: dict[int, Iterator[int]] = {}
        """Chunks of the prompts that are being computed, as `prefill_chunks` yields them, by cache."""
        self.prompts: dict[int, Tensor] = {}
        """These prompts, with tokens of answers after them, by cache."""
        self.is_causal = all(getattr(module, "is_causal", True) for module in model.get_decoder().modules())
        """True if several tokens of an answer may be computed at once."""
        self.is_recurrent = is_recurrent(model.config)
        """True if caches cannot drop tokens: a prompt goes on only from a cache whose tokens are all its own."""
        self.recomputes_by_token = one_token_differs(model.config)
        """True if one token is computed by another rule than several: answers are computed again token by token."""
        self.prompt_lengths: dict[int, int] = {}
        """Tokens of these prompts, without those of answers, by cache."""
        self.chunk_size = 0
        """Tokens of the chunk that is being computed."""
        self.chunk_stop = 0
        """Token before which the chunk ends."""
        self.nbytes = 0
        """Bytes of the caches, as they were counted last."""
        self.row_steps = 0
        """Steps of rows so far."""

    @property
    def fullest_ratio(self) -> float:
        """Ratio of the cache bytes of the rank that holds most to those of rank 0: 1 with even shares."""
        shares = self.options.get("shares") or (1.0,)
        return float(max(shares) / shares[0])

    @property
    def opened_store(self) -> RankStore:
        """The store of an engine that has one."""
        assert self.store is not None
        return self.store

    def run(self, operations: Sequence[Operation]) -> StepResults:
        """Run operations in order, and note their results and seconds.

        An `InputError` is noted as a result: all ranks raise it alike. Of several of one kind the first one stays.
        """
        results = StepResults()
        for operation in operations:
            kind = type(operation)
            start = perf_counter()
            try:
                _run_operation(self, operation, results)
            except InputError as error:
                results.errors.setdefault(kind, error)
            results.seconds[kind] = results.seconds.get(kind, 0.0) + perf_counter() - start
        return results

    @property
    def step_report(self) -> RankReport:
        """The report that this rank sends to rank 0 in each step."""
        report = RankReport(self.nbytes)
        return report if self.store is None else self.store.add_to(report)

    def do_draft(self, operations: Sequence[Operation]) -> StepResults:
        """Run operations of the draft model, whose caches count with those of the model."""
        assert self.draft_worker is not None
        before = self.draft_worker.nbytes
        results = self.draft_worker.run(operations)
        self.nbytes += self.draft_worker.nbytes - before
        return results

    def do_open(self, opening: OpenStored) -> None:
        """Make a cache, and begin to read stored blocks into it."""
        cache = ShardedCache(self.model.config, self.device_mesh, **self.options)
        cache.choose_block(opening.tokens)
        cache.history.rope_regime = tuple(opening.rope)
        room = max([opening.tokens, *(block.stop for block, _ in opening.blocks)])
        configs = [CacheConfig.from_code(code) for code in opening.layers]
        kv_caches = cache.make_kv_caches(configs, room, self.model.device)
        self.caches[opening.cache_id] = cache
        reading = Reading(cache, CacheFiller(kv_caches), opening.blocks, self.model.device)
        self.opened_store.begin_reading(opening.cache_id, reading)
        self.nbytes = self.count_bytes()

    def do_drop(self, cache_ids: Sequence[int]) -> None:
        """Forget caches."""
        for cache_id in cache_ids:
            for by_cache in (self.caches, self.prefills, self.prompts, self.prompt_lengths):
                by_cache.pop(cache_id, None)
        self.nbytes = self.count_bytes()

    def do_start(self, start: Start) -> int:
        """Begin a prompt. Return the tokens that its cache has."""
        if start.source is None:
            cache = ShardedCache(self.model.config, self.device_mesh, **self.options)
        else:
            cache = self.caches.pop(start.source) if start.moves else self.caches[start.source].fork()
        self.caches[start.cache_id] = cache
        ids = self.prompts[start.cache_id] = torch.tensor([start.ids], device=self.model.device)
        length = self.prompt_lengths[start.cache_id] = len(start.ids) - start.later
        without_answer = ids[:, :length]
        images = images_for_model(start.images, self.model)
        agree_on_call(self.mesh, self.model, without_answer, None, cache, {"chunk_size": None, **images})
        prompt = begin_prompt(self.mesh, self.model, without_answer, None, images)
        if cache.tokens is None and cache.get_seq_length():
            set_prompt_tokens(cache, prompt)
        shared = crop_to_shared_prefix(self.model, prompt, cache)
        self.prefills[start.cache_id] = prefill_chunks(
            self.model, prompt, cache, lambda: self.chunk_size, lambda: self.chunk_stop
        )
        self.nbytes = self.count_bytes()
        return shared

    def do_fork(self, cache_id: int, fork_id: int) -> None:
        """Keep the cache as it is under another id."""
        self.caches[fork_id] = self.caches[cache_id].fork()
        self.nbytes = self.count_bytes()

    @torch.no_grad()
    def do_fill(self, cache_id: int, size: int, stop: int) -> tuple[int, Tensor | None]:
        """Compute the next chunk of a prompt. Return the cached tokens, and after the last chunk the logits."""
        if cache_id not in self.prefills:  # its `Start` has raised
            return 0, None
        cache = self.caches[cache_id]
        ids = self.prompts[cache_id]
        self.chunk_size = size
        self.chunk_stop = stop
        logits = None
        if next(self.prefills[cache_id], None) is None:  # only the last tokens of the prompt are left, and its answer
            length = cache.get_seq_length()
            rest = ids[:, length : length + self._tokens_at_once(size, self.prompt_lengths[cache_id] - length)]
            positions = torch.arange(rest.shape[1], device=ids.device)[None] + cache.next_position
            cache.history.is_consistent = False
            logits = run_model(self.model, rest, positions, cache)
            note_tokens(cache, rest, length)
            if length + rest.shape[1] < ids.shape[1]:
                logits = None
            else:
                del self.prefills[cache_id], self.prompts[cache_id], self.prompt_lengths[cache_id]
        self.nbytes = self.count_bytes()
        return cache.get_seq_length(), logits

    def _tokens_at_once(self, size: int, left: int) -> int:
        """Return how many tokens the next pass has, where `left` tokens of the prompt are left.

        If one token is computed by another rule than several, a pass of the prompt has two or more, and one of its
        answer has one.
        """
        if not self.is_causal or (self.recomputes_by_token and left <= 0):
            return 1
        return min(max(size, 2), left) if self.recomputes_by_token else max(size, 2)

    def do_crop(self, rows: Sequence[tuple[int, int]]) -> None:
        """Take tokens back from the ends of caches."""
        for cache_id, count in rows:
            self.caches[cache_id].crop(-count)

    def do_rows(self, rows: Sequence[tuple[int, Sequence[int]]], grows: bool) -> Sequence[Tensor]:
        """Add tokens to caches. Return the logits of each row, (tokens, vocabulary). Bytes are counted if `grows`."""
        cache_ids, new_ids = zip(*rows, strict=True)
        logits = decode_rows(self.model, new_ids, [self.caches[cache_id] for cache_id in cache_ids])
        self.row_steps += 1
        if grows or self.row_steps % STEPS_BETWEEN_COUNTS == 0:
            self.nbytes = self.count_bytes()
        parts: Sequence[Tensor] = logits.split([*map(len, new_ids)])
        return parts

    def close(self, *, at_once: bool = False) -> None:
        """End the thread of the store."""
        if self.store is not None:
            self.store.close(at_once=at_once)

    def count_bytes(self, without: Collection[int] = ()) -> int:
        """Return the bytes of caches in the memory of this rank. Memory that caches share counts once."""
        caches = [cache for cache_id, cache in self.caches.items() if cache_id not in without]
        shards = [kv_cache.own_shard for cache in caches for kv_cache in cache.kv_caches]
        tensors = [x for shard in shards for x in shard.kv_tensors]
        tensors += [x for shard in shards for piece in shard.earlier_pieces for x in piece.kv_tensors]
        tensors += [x for cache in caches for x in cache.states.values()]
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
        return sum(storages.values()) + (0 if self.draft_worker is None else self.draft_worker.nbytes)


def _run_operation(worker: RankWorker, operation: Operation, results: StepResults) -> None:
    """Run one operation on a rank, and note the result."""
    match operation:
        case DecodeRows(rows, grows):
            results.rows = worker.do_rows(rows, grows)
        case Start():
            results.cached_tokens = worker.do_start(operation)
        case Fill(cache_id, size, stop):
            results.computed_tokens, results.logits = worker.do_fill(cache_id, size, stop)
        case Fork(cache_id, fork_id):
            worker.do_fork(cache_id, fork_id)
        case Crop(rows):
            worker.do_crop(rows)
        case Drop(cache_ids):
            worker.do_drop(cache_ids)
        case Draft(operations):
            results.draft = worker.do_draft(operations)
        case OpenStored():
            worker.do_open(operation)
        case LoadBlocks(cache_id, nbytes, patience):
            worker.opened_store.do_load(cache_id, nbytes, patience)
        case CloseStored(cache_id, length):
            worker.opened_store.do_close(cache_id, length)
        case SaveBlocks(cache_id, blocks):
            worker.opened_store.do_save(cache_id, blocks)
        case ForgetBlocks(in_memory, on_disk):
            worker.opened_store.do_forget(in_memory, on_disk)
        case _:
            raise NotImplementedError(operation.name)
