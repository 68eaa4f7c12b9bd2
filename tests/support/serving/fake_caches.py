"""Caches of a rank without a model: a token takes a byte, and after each token comes the next number."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from attnmesh.hf.serving.chunk_pace import ChunkPace
from attnmesh.hf.serving.engine_request import EngineRequest, SamplingParams
from attnmesh.hf.serving.operations import Start
from attnmesh.hf.serving.rank_worker import RankWorker

VOCABULARY = 1000


class FakeCache:
    """A cache that holds tokens."""

    attention_layers = ()
    irreversible_layers = ()

    def __init__(self, ids: Sequence[int] = (), *, crops_anywhere: bool = True) -> None:
        self.tokens = torch.tensor([[*ids]], dtype=torch.int64)
        self.crops_anywhere = crops_anywhere

    @property
    def ids(self) -> list[int]:
        return self.tokens[0].tolist()

    def get_seq_length(self) -> int:
        return self.tokens.shape[1]

    def restorable_length(self, length: int) -> int:
        return length if self.crops_anywhere or length == self.get_seq_length() else 0


class FakeWorker:
    """The operations of steps on `FakeCache`s."""

    left_to_decode = 1
    is_recurrent = False
    recomputes_by_token = False
    fullest_ratio = 1.0
    run = RankWorker.run

    def __init__(self, *, crops_anywhere: bool = True) -> None:
        self.caches: dict[int, FakeCache] = {}
        self.prompts: dict[int, list[int]] = {}
        self.crops_anywhere = crops_anywhere
        self.template = FakeCache()

    @property
    def nbytes(self) -> int:
        return self.count_bytes()

    def count_bytes(self, without: Collection[int] = ()) -> int:
        return sum(cache.get_seq_length() for cache_id, cache in self.caches.items() if cache_id not in without)

    def hold(self, cache_id: int, ids: Sequence[int]) -> None:
        self.caches[cache_id] = FakeCache(ids, crops_anywhere=self.crops_anywhere)

    def do_start(self, start: Start) -> int:
        held = [] if start.source is None else self.caches[start.source].ids
        if start.moves and start.source is not None:
            del self.caches[start.source]
        pairs = zip(held, start.ids[: -self.left_to_decode], strict=False)
        shared = next((index for index, (one, other) in enumerate(pairs) if one != other), len(held))
        shared = min(shared, len(start.ids) - self.left_to_decode)
        self.hold(start.cache_id, start.ids[:shared])
        self.prompts[start.cache_id] = [*start.ids]
        return shared

    def do_fill(self, cache_id: int, size: int, stop: int) -> tuple[int, Tensor | None]:
        ids = self.prompts[cache_id]
        length = min(self.caches[cache_id].get_seq_length() + size, stop)
        self.hold(cache_id, ids[:length])
        return length, scores(ids[-1:]) if length == len(ids) else None

    def do_rows(self, rows: Sequence[tuple[int, Sequence[int]]], grows: bool) -> list[Tensor]:
        for cache_id, tokens in rows:
            self.hold(cache_id, [*self.caches[cache_id].ids, *tokens])
        return [scores(tokens) for _, tokens in rows]

    def do_crop(self, rows: Sequence[tuple[int, int]]) -> None:
        for cache_id, count in rows:
            self.hold(cache_id, self.caches[cache_id].ids[:-count])

    def do_fork(self, cache_id: int, fork_id: int) -> None:
        self.hold(fork_id, self.caches[cache_id].ids)

    def do_drop(self, cache_ids: Sequence[int]) -> None:
        for cache_id in cache_ids:
            self.caches.pop(cache_id, None)


class SamePace(ChunkPace):
    """Chunks of one size on a machine of any speed."""

    def tokens(self, rows: int, waiting: int, *, store_is_busy: bool) -> int:
        return 64


class FakeFootprint:
    """Bytes of caches."""

    def __call__(self, tokens: int, *, shared: int = 0) -> int:
        return tokens - shared

    def chunk_bytes(self, tokens: int) -> int:
        return 0


def fake_growth(cache: FakeCache, tokens: int) -> int:
    return tokens


def scores(tokens: Sequence[int]) -> Tensor:
    """Return the logits after tokens, (tokens, vocabulary)."""
    return one_hot((torch.tensor([*tokens]) + 1) % VOCABULARY, VOCABULARY).float()


def request(prompt: Sequence[int], new: int = 4, **fields: Any) -> EngineRequest:
    return EngineRequest([*prompt], SamplingParams(), new, frozenset(), **fields)
