"""Work of each rank on an engine's plan: caches by number, chunks of prompts, and steps of rows."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from attnmesh.cache.cache_config import CacheConfig
from attnmesh.hf.cache.sharded_cache import ShardedCache
from attnmesh.hf.chunked_prefill import left_to_decode, prefill_chunks, run_model
from attnmesh.hf.images.inputs import on_model
from attnmesh.hf.models import is_recurrent, one_token_differs
from attnmesh.hf.options import agree_on_call
from attnmesh.hf.prefill import begin_prompt, crop_to_shared_prefix
from attnmesh.hf.serving.plan_operations import OpenStored, Operation, Start, StepResults
from attnmesh.hf.serving.rank_report import RankReport
from attnmesh.hf.serving.rank_store import RankStore, Reading, name_tokens
from attnmesh.hf.serving.row_pass import decode_rows, note_tokens
from attnmesh.mesh.axes import RankMesh
from attnmesh.store.block_rows import CacheFiller

MEASURED = 32
"""Steps of rows after which bytes are measured again: caches that were forked copy what they change."""


class RankWorker:
    """The caches of one rank, and the operations of plans."""

    def __init__(self, model: PreTrainedModel, mesh: DeviceMesh | None, options: dict[str, Any]) -> None:
        self.model = model
        self.mesh = mesh
        self.axes = RankMesh.of(mesh)
        self.left_to_decode = left_to_decode(model.config)
        self.template = ShardedCache(model.config, mesh, **options)  # raises here, not at the first request
        self.options = {**options, "shares": self.template.shares}  # options of caches: shares are measured once
        self.caches: dict[int, ShardedCache] = {}
        self.store: RankStore | None = None
        self.draft_worker: RankWorker | None = None
        """The caches of a draft model, if it guesses tokens."""
        self.prefills: dict[int, Iterator[int]] = {}
        self.prompts: dict[int, Tensor] = {}
        self.is_causal = all(getattr(module, "is_causal", True) for module in model.get_decoder().modules())
        """True if several tokens of an answer may be computed at once."""
        self.is_recurrent = is_recurrent(model.config)
        """True if caches cannot drop tokens: a prompt goes on only from a cache of nothing but its first tokens."""
        self.recomputes_by_token = one_token_differs(model.config)
        """True if one token is computed by another rule than several: answers are computed again token by token."""
        self.prompt_lengths: dict[int, int] = {}
        """Tokens of the prompts that are computed, by number: those of answers come after them."""
        self.size = 0  # tokens of the chunk that is computed
        self.stop = 0  # token before which the chunk ends
        self.nbytes = 0
        self.steps = 0

    @property
    def scale(self) -> float:
        """Bytes of the rank that holds most, over those of rank 0: 1 with even shares."""
        shares = self.options.get("shares") or (1.0,)
        return float(max(shares) / shares[0])

    @property
    def opened_store(self) -> RankStore:
        """The store, where there is one."""
        assert self.store is not None
        return self.store

    def run(self, plan: Sequence[Operation]) -> StepResults:
        """Run operations in order."""
        results = StepResults()
        for operation in plan:
            operation.run(self, results)
        return results

    @property
    def step_report(self) -> RankReport:
        """Return what rank 0 needs to know of this rank in each step."""
        report = RankReport(self.nbytes)
        return report if self.store is None else self.store.add_to(report)

    def do_draft(self, plan: Sequence[Operation]) -> StepResults:
        """Run operations of the draft model, whose caches count with those of the model."""
        assert self.draft_worker is not None
        before = self.draft_worker.nbytes
        results = self.draft_worker.run(plan)
        self.nbytes += self.draft_worker.nbytes - before
        return results

    def do_open(self, opening: OpenStored) -> None:
        """Make a cache, and begin to read stored blocks into it."""
        cache = ShardedCache(self.model.config, self.mesh, **self.options)
        cache.choose_block(opening.tokens)
        cache.history.rope_regime = tuple(opening.rope)
        room = max([opening.tokens, *(block.stop for block, _ in opening.blocks)])
        kvs = cache.make([CacheConfig.from_code(code) for code in opening.layers], room, self.model.device)
        self.caches[opening.number] = cache
        reading = Reading(cache, CacheFiller(kvs), opening.blocks, self.model.device)
        self.opened_store.begin_reading(opening.number, reading)
        self.nbytes = self.measure()

    def do_drop(self, numbers: Sequence[int]) -> None:
        """Forget caches."""
        for number in numbers:
            for held in (self.caches, self.prefills, self.prompts, self.prompt_lengths):
                held.pop(number, None)
        self.nbytes = self.measure()

    def do_start(self, start: Start) -> int:
        """Begin a prompt. Return the tokens that its cache has."""
        if start.source is None:
            cache = ShardedCache(self.model.config, self.mesh, **self.options)
        else:
            cache = self.caches.pop(start.source) if start.moves else self.caches[start.source].fork()
        self.caches[start.number] = cache
        ids = self.prompts[start.number] = torch.tensor([start.ids], device=self.model.device)
        length = self.prompt_lengths[start.number] = len(start.ids) - start.later
        first = ids[:, :length]
        images = on_model(start.images, self.model)
        agree_on_call(self.axes, self.model, first, None, cache, {"chunk_size": None, **images})
        prompt = begin_prompt(self.axes, self.model, first, None, images)
        if cache.tokens is None and cache.get_seq_length():
            name_tokens(cache, prompt)
        shared = crop_to_shared_prefix(self.model, prompt, cache)
        self.prefills[start.number] = prefill_chunks(self.model, prompt, cache, lambda: self.size, lambda: self.stop)
        self.nbytes = self.measure()
        return shared

    def do_fork(self, number: int, other: int) -> None:
        """Keep the cache as it is under another number."""
        self.caches[other] = self.caches[number].fork()
        self.nbytes = self.measure()

    @torch.no_grad()
    def do_fill(self, number: int, size: int, stop: int) -> tuple[int, Tensor | None]:
        """Compute the next chunk of a prompt. Return the cached tokens, and after the last chunk the logits."""
        if number not in self.prefills:  # it did not begin
            return 0, None
        cache = self.caches[number]
        ids = self.prompts[number]
        self.size = size
        self.stop = stop
        logits = None
        if next(self.prefills[number], None) is None:
            length = cache.get_seq_length()
            rest = ids[:, length : length + self._tokens_at_once(size, self.prompt_lengths[number] - length)]
            positions = torch.arange(rest.shape[1], device=ids.device)[None] + cache.next_position
            cache.history.is_consistent = False
            logits = run_model(self.model, rest, positions, cache)
            note_tokens(cache, rest, length)
            if length + rest.shape[1] < ids.shape[1]:
                logits = None
            else:
                del self.prefills[number], self.prompts[number], self.prompt_lengths[number]
        self.nbytes = self.measure()
        return cache.get_seq_length(), logits

    def _tokens_at_once(self, size: int, left: int) -> int:
        """Return the tokens of the next pass, of which `left` are of the prompt."""
        if not self.is_causal or (self.recomputes_by_token and left <= 0):
            return 1
        return min(max(size, 2), left) if self.recomputes_by_token else max(size, 2)

    def do_crop(self, rows: Sequence[tuple[int, int]]) -> None:
        """Take tokens back from the ends of caches."""
        for number, tokens in rows:
            self.caches[number].crop(-tokens)

    def do_rows(self, rows: Sequence[tuple[int, Sequence[int]]], grows: bool) -> Sequence[Tensor]:
        """Add tokens to each cache, of which some grow or none. Return the logits of each row, (tokens, vocabulary)."""
        numbers, tokens = zip(*rows, strict=True)
        logits = decode_rows(self.model, tokens, [self.caches[number] for number in numbers])
        self.steps += 1
        if grows or self.steps % MEASURED == 0:
            self.nbytes = self.measure()
        parts: Sequence[Tensor] = logits.split([*map(len, tokens)])
        return parts

    def close(self, *, at_once: bool = False) -> None:
        """End what goes on beside the plans."""
        if self.store is not None:
            self.store.close(at_once=at_once)

    def measure(self, without: Collection[int] = ()) -> int:
        """Return the bytes of caches in the memory of this rank. Memory that caches share counts once."""
        caches = [cache for number, cache in self.caches.items() if number not in without]
        tensors = [x for cache in caches for kv in cache.kvs for x in kv.own_shard.stored]
        tensors += [
            x for cache in caches for kv in cache.kvs for part in kv.own_shard.earlier_pieces for x in part.stored
        ]
        tensors += [x for cache in caches for x in cache.states.values()]
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
        return sum(storages.values()) + (0 if self.draft_worker is None else self.draft_worker.nbytes)
