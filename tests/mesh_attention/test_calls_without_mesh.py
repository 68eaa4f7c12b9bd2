"""Calls without `mesh=` where there are several ranks: each rank is alone, and is told so once."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Shard, distribute_tensor

import attnmesh as am
from attnmesh import errors
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh

CONTIGUOUS = am.Contiguous()


def heads() -> list[Tensor]:
    return [torch.ones(1, n, 6, 4) for n in (4, 2, 2)]


@on_each_rank
def record_warnings_of_call(call: Callable[[], Any]) -> list[tuple[str, bool]]:
    """What a call warned of, as if it were the first of its process, and whether this file is blamed."""
    before = set(errors._warned)
    errors._warned.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    errors._warned.update(before)
    return [(str(w.message), w.filename == __file__) for w in caught if w.category is UserWarning]


def twice() -> None:
    first, second = (am.attention(*heads()) for _ in range(2))
    assert torch.equal(first, second)


def compiled() -> None:
    layer = torch.compile(lambda *x: am.attention(*x) * 2, fullgraph=True, backend="eager")
    torch.testing.assert_close(layer(*heads()), 2 * am.attention(*heads(), mesh=None))


def on_the_mesh() -> None:
    am.attention(*heads(), mesh=named_mesh(Shape(1, 2, 1), AXES), layout=CONTIGUOUS)


def of_dtensors() -> None:
    mesh = named_mesh(Shape(1, 2, 1), AXES)["queries"]
    am.attention(*(distribute_tensor(x, mesh, [Shard(2)]) for x in heads()))


@on_each_rank
def call_alone() -> dict[str, Any]:
    calls = [twice, compiled, on_the_mesh, of_dtensors]
    return {call.__name__: record_warnings_of_call(call) for call in calls} | {
        "said": record_warnings_of_call(lambda: am.attention(*heads(), mesh=None)),
        "attend": record_warnings_of_call(lambda: am.attend(*heads(), mask=am.Causal())),
    }


def test_attention_without_a_mesh_among_several_ranks_warns_once(pool: Pool) -> None:
    for found in pool.run(2, call_alone):
        text = (
            "attention: no mesh= in a process group of 2 ranks, so each rank attends to its own tokens only. "
            "Pass mesh= for attention over the tokens of all ranks, or mesh=None if this is meant."
        )
        assert found.pop("twice") == [(text, True)]
        assert not any(found.values()), found


def test_one_rank_is_not_warned(pool: Pool) -> None:
    assert record_warnings_of_call(twice) == []
    assert pool.run(1, record_warnings_of_call, twice) == [[]]


@on_each_rank
def call_where_warnings_are_errors() -> list[bool]:
    """Whether each call of two raises."""
    raised = []
    before = set(errors._warned)
    errors._warned.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with pytest.raises(UserWarning, match="no mesh="):
                am.attention(*heads())
            raised.append(True)
    errors._warned.update(before)
    return raised


def test_where_warnings_are_errors_each_call_raises(pool: Pool) -> None:
    assert pool.run(2, call_where_warnings_are_errors) == [[True, True]] * 2


@on_each_rank
def generate_without_mesh() -> dict[str, Any]:
    import attnmesh.hf as hf
    from tests.support.models import families

    model = families.model("llama", "attnmesh")
    ids = torch.arange(2, 12)[None]
    mesh = named_mesh(Shape(1, 1, 2), AXES)
    options: dict[str, Any] = {"max_new_tokens": 2, "do_sample": False}
    return {
        "left out": record_warnings_of_call(lambda: hf.generate(model, ids, **options)),
        "said": record_warnings_of_call(lambda: hf.generate(model, ids, mesh=None, **options)),
        "mesh": record_warnings_of_call(lambda: hf.generate(model, ids, mesh=mesh, **options)),
        "cache": record_warnings_of_call(
            lambda: hf.generate(model, ids, cache=hf.ShardedCache(model.config, mesh), **options)
        ),
        "the model alone": record_warnings_of_call(lambda: model(ids, use_cache=False)),
        "ranks": dist.get_world_size(),
    }


def test_generating_without_a_mesh_among_several_ranks_warns_once(pool: Pool) -> None:
    for found in pool.run(2, generate_without_mesh):
        text = (
            "generate: no mesh= in a process group of 2 ranks, so each rank generates alone, with all keys and values. "
            "Pass mesh= or a cache to shard them over the ranks, or mesh=None if this is meant."
        )
        assert found.pop("left out") == [(text, True)]
        assert found.pop("ranks") == 2
        ((alone, _),) = found.pop("the model alone")
        assert alone.startswith("attnmesh.hf: a model ran without a mesh in a process group of 2 ranks")
        assert not any(found.values()), found
