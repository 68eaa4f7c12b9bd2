"""Steps over a cache and further keys of each rank: one softmax, as over all keys in one place."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import attnmesh as am
from attnmesh import errors
from attnmesh.runtime.counters import count_traffic
from tests.support.caches.make import along_keys, random_cache
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.tolerances import FLOAT64, worst

HEADS, WIDTH, TOKENS, MORE = (4, 2), 8, 45, 11
SIZES: dict[str, Any] = {"batch": 2, "dtype": torch.float64}


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def part_of(q: Tensor, rank: int, ranks: int, **options: Any) -> am.Partial:
    """Return attention over a rank's share of the further keys: none for the last of several ranks."""
    share = slice(rank, MORE, max(1, ranks - 1)) if rank < max(1, ranks - 1) else slice(0, 0)
    k, v = numbers(2, 2, HEADS[1], MORE, WIDTH, seed=5, dtype=q.dtype)[:, :, :, share]
    return am.attend(q, k, v, **options)


@on_each_rank
def compare_with_keys_in_one_place(ranks: int) -> list[float]:
    """Return how far steps are from attention over all keys in one place."""
    rank = dist.get_rank() if ranks > 1 else 0
    found = []
    for mask, rows, output in (
        (am.Causal(), 1, "replicated"),
        (am.Window(6), 3, "replicated"),
        (am.Causal(), 2, "heads"),
    ):
        q, sinks = numbers(2, HEADS[0], rows, WIDTH, seed=2), numbers(HEADS[0], seed=3)
        cache = random_cache(TOKENS, along_keys(ranks), mask=mask if mask != am.Causal() else None, **SIZES)
        options: dict[str, Any] = {"mask": mask, "sinks": sinks, "scale": 0.5, "output": output}
        out = am.decode(q, cache, partial=part_of(q, rank, ranks, scale=0.5), **options)
        k, v = numbers(2, 2, HEADS[1], TOKENS, WIDTH)
        more = numbers(2, 2, HEADS[1], MORE, WIDTH, seed=5)
        keys, values = (torch.cat(x, 2).repeat_interleave(2, 1) for x in zip((k, v), more, strict=True))
        scaling = 0.5 * q @ keys.mT
        seen = mask.visible(torch.arange(TOKENS - rows, TOKENS), torch.arange(TOKENS))
        scaling[..., :TOKENS].masked_fill_(~seen, -torch.inf)
        sink = sinks[:, None, None].expand(2, -1, rows, 1)
        expected = torch.cat((scaling, sink), -1).softmax(-1)[..., :-1] @ values
        own = torch.arange(HEADS[0]).tensor_split(ranks)[rank] if output == "heads" else slice(None)
        found.append(float((out - expected[:, own]).abs().max()))
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_one_softmax_covers_the_cache_further_keys_and_sinks(pool: Pool, ranks: int) -> None:
    for found in pool.run(ranks, compare_with_keys_in_one_place, ranks):
        assert worst(found) < FLOAT64, found


@on_each_rank
def count_received_bytes(other_keys: bool) -> int:
    cache = random_cache(TOKENS, along_keys(4), batch=2)
    q = numbers(2, HEADS[0], 1, WIDTH, seed=2, dtype=torch.float32)
    partial = part_of(q, dist.get_rank(), 4) if other_keys else None
    with count_traffic() as traffic:
        am.decode(q, cache, partial=partial, merge="tree")
    return traffic.bytes


def test_further_keys_send_nothing_more(pool: Pool) -> None:
    assert pool.run(4, count_received_bytes, True) == pool.run(4, count_received_bytes, False)


def shorter(partial: am.Partial) -> am.Partial:
    return am.Partial(*(x[:, :, :1] for x in partial))


def rounded(partial: am.Partial) -> am.Partial:
    return am.Partial(*(x.float() for x in partial))


def on_one_rank(partial: am.Partial) -> am.Partial | None:
    return partial if dist.get_rank() else None


def as_list(partial: am.Partial) -> list[Tensor]:
    return list(partial)


REFUSED = {
    shorter: "decode partial: expected shapes",
    rounded: "decode partial: expected out in torch.float64",
    as_list: "decode partial: expected a partial",
    on_one_rank: "decode: expected the same call on every rank",
}


@on_each_rank
def catch_refusal(name: str, **options: Any) -> str:
    """Return the error of a step whose partial a function of this name has changed."""
    cache, q = random_cache(TOKENS, along_keys(2), **SIZES), numbers(2, HEADS[0], 2, WIDTH, seed=2)
    change = next((change for change in REFUSED if change.__name__ == name), lambda partial: partial)
    try:
        am.decode(q, cache, partial=change(part_of(q, dist.get_rank(), 2)), **options)  # type: ignore[arg-type]
    except errors.InputError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("change", REFUSED, ids=lambda change: change.__name__)
def test_what_does_not_fit_is_refused_on_all_ranks(pool: Pool, change: Any) -> None:
    found = pool.run(2, catch_refusal, change.__name__)
    assert len(set(found)) == 1
    assert found[0].startswith(REFUSED[change]), found[0]


@on_each_rank
def catch_refusal_of_reproducible() -> str:
    return catch_refusal("", reproducible=True)


def test_reproducible_steps_are_refused(pool: Pool) -> None:
    for error in pool.run(2, catch_refusal_of_reproducible):
        assert error.startswith("decode reproducible: expected no partial="), error


@on_each_rank
def decode_unchecked() -> Tensor:
    cache, q = random_cache(TOKENS, along_keys(2), **SIZES), numbers(2, HEADS[0], 2, WIDTH, seed=2)
    partial = part_of(q, 0, 2) if dist.get_rank() else None
    return am.decode(q, cache, partial=partial, checked=False)


def test_partials_on_some_ranks_are_nan_where_nothing_is_compared(pool: Pool) -> None:
    for out in pool.run(2, decode_unchecked):
        assert out.isnan().all(), out
