"""Steps with a bias by distance: caches on ranks, with padding, forks and windows, beside dense attention."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import attnmesh as am
from attnmesh.errors import DtypeError, InputError, KernelError, MeshError, ShapeError
from attnmesh.mesh.shapes import Shape
from tests.support.caches.make import along_keys, empty_cache, mesh_or_none
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.problems import float64_numbers

HEADS, WIDTH, TOKENS, NEAR = (4, 2), 8, 45, 7


Q, K, V = (float64_numbers(2, HEADS[n > 0], TOKENS, WIDTH, seed=n) for n in range(3))
BIAS, SINKS = float64_numbers(2, HEADS[0], TOKENS, NEAR, seed=3), float64_numbers(HEADS[0], seed=4)
REAL = torch.cat((torch.zeros(2, 6), torch.ones(2, TOKENS - 6)), 1).bool() | torch.tensor([[True], [False]])
LAST = slice(TOKENS - 3, TOKENS)
SIZES: dict[str, Any] = {"batch": 2, "dtype": Q.dtype}


def attend(cache: am.KVCache, mask: am.Mask | None = None, **options: Any) -> Tensor:
    mask = am.Causal() if mask is None else mask
    return am.decode(Q[:, :, LAST], cache, mask=mask, distance_bias=BIAS[:, :, LAST], **options)


@on_each_rank
def decode_with_a_bias(shape: Shape) -> list[Tensor]:
    """Return what steps give of a plain cache, a padded one, a fork, and one that forgets, one token at a time."""
    mesh, few = mesh_or_none(shape), torch.tensor([TOKENS, TOKENS - 2])
    plain, padded = empty_cache(mesh, **SIZES), empty_cache(mesh, **SIZES)
    plain.append(K, V)
    padded.append(K, V, token_mask=REAL)
    fork = plain.fork()
    found = [attend(plain), attend(plain, am.Window(9), sinks=SINKS), attend(padded), attend(fork)]
    found.append(attend(plain, key_lengths=few, merge="tree"))
    window = empty_cache(mesh, mask=am.Window(9), **SIZES)
    steps = []
    for token in range(TOKENS):
        one = slice(token, token + 1)
        new = {"k": K[:, :, one], "v": V[:, :, one], "mask": am.Window(9), "distance_bias": BIAS[:, :, one]}
        steps.append(am.decode(Q[:, :, one], window, sinks=SINKS, **new))
    return [*found, torch.cat(steps[-3:], 2)]


def right() -> list[Tensor]:
    """Return the same by `attend`, of each sequence without its padding."""
    few = torch.tensor([TOKENS, TOKENS - 2])
    whole = am.attend(Q, K, V, mask=am.Causal(), distance_bias=BIAS).out
    near = am.attention(Q, K, V, mask=am.Window(9), sinks=SINKS, distance_bias=BIAS)
    rows = []
    for row, real in enumerate(REAL):
        x = (y[row : row + 1, :, real] for y in (Q, K, V))
        rows.append(am.attend(*x, mask=am.Causal(), distance_bias=BIAS[row : row + 1, :, real]).out[:, :, -3:])
    cut = am.attend(Q, K, V, mask=am.Causal(), distance_bias=BIAS, key_lengths=few).out
    return [*(x[:, :, LAST] for x in (whole, near)), torch.cat(rows), *(x[:, :, LAST] for x in (whole, cut, near))]


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 1, 2), (1, 1, 3), (2, 1, 2)])
def test_steps_agree_with_attend(pool: Pool, shape: tuple[int, ...]) -> None:
    for found in pool.run(Shape(*shape).ranks, decode_with_a_bias, Shape(*shape)):
        for given, expected in zip(found, right(), strict=True):
            torch.testing.assert_close(given, expected, rtol=1e-9, atol=1e-9)  # float64


@on_each_rank
def catch_errors_of_wrong_biases() -> list[str]:
    """Return the errors of calls whose bias is wrong on the last rank."""
    cache = empty_cache(along_keys(2), **SIZES)
    found = list[str]()
    last = dist.get_rank() == 1
    cache.append(K, V)
    other = torch.full_like(BIAS, 2.0)
    for bias, options, kind in (
        (BIAS[:, :, LAST].int(), {}, DtypeError),
        (BIAS, {}, ShapeError),
        (BIAS[:, :, LAST], {"kernel": "native"}, KernelError),
        (BIAS[:, :, LAST], {"softcap": 2.0}, KernelError),
        (BIAS[:, :, LAST], {"reproducible": True}, KernelError),
        (other[:, :, LAST], {}, MeshError),
        (BIAS[:, :, LAST, :2], {}, MeshError),
        (None, {}, MeshError),
    ):
        given = {"distance_bias": bias, **options} if last else {"distance_bias": BIAS[:, :, LAST]}
        with pytest.raises(InputError) as raised:
            am.decode(Q[:, :, LAST], cache, **given)
        assert isinstance(raised.value, kind), raised.value
        found.append(str(raised.value))
    return found


def test_a_wrong_bias_of_one_rank_raises_the_same_on_all(pool: Pool) -> None:
    first, second = pool.run(2, catch_errors_of_wrong_biases)
    assert first == second
    differing = [text.splitlines()[1].split()[1:] for text in first[-3:]]
    assert differing == [["distance_bias"], ["distance_bias"], ["kernel", "distance_bias"]]


def test_rows_in_8_bits_are_refused() -> None:
    cache = empty_cache(batch=2, storage="int8")
    cache.append(K.float(), V.float())
    with pytest.raises(KernelError, match=r"decode distance_bias: expected a cache of plain numbers, given .*int8"):
        am.decode(Q[:, :, LAST].float(), cache, distance_bias=BIAS[:, :, LAST].float())
