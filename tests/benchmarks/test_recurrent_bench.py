"""The recurrent bench: its contenders compute the same layer, and its table and JSON have all rows."""

import json

import torch
import torch.distributed as dist

import attnmesh as am
from attnmesh.setup.init_mesh import init_mesh
from benchmarks import recurrent
from benchmarks.commands import app
from tests.support.process.command import run
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.tolerances import worst

SMALL = recurrent.Request(tokens=70, key_heads=2, head_dim=8, rounds=2)


@on_each_rank
def measure_largest_errors() -> list[float]:
    """The largest error of each way's output, and of the sum of its gradients of weights."""
    mesh = init_mesh("cpu", (1, 1, dist.get_world_size()))
    layer = recurrent.layer_of(SMALL)
    whole = torch.randn(1, SMALL.tokens, layer.hidden_size, generator=torch.Generator().manual_seed(1))
    expected = recurrent.layer_call(layer, whole, None, False)()
    gradients = recurrent.layer_call(layer, whole, None, True)()[1:]
    forward, backward = (recurrent.calls_of(SMALL, mesh, backward=both) for both in (False, True))
    found = []
    for name in (name for name in forward if name.startswith("2 ranks")):
        layout = am.Zigzag() if "zigzag" in name else am.Contiguous()
        found.append(float((forward[name]() - am.shard(expected, mesh, layout=layout, dim=1)).abs().max()))
        for x, y in zip(backward[name]()[1:], gradients, strict=True):
            dist.all_reduce(x)
            found.append(float((x - y).abs().max() / y.abs().max()))
    return found


def test_all_ways_compute_the_same_layer(pool: Pool) -> None:
    for errors in pool.run(2, measure_largest_errors):
        assert len(errors) == 3 * 8
        assert worst(errors) < 1e-4  # float32, whose roundings the rule carries from token to token


def test_the_bench_measures_and_is_shown() -> None:
    small = ("recurrent", "--ranks", "2", "--length", "64", "--key-heads", "2", "--head-dim", "8", "--rounds", "2")
    code, text = run(*small, "--json", command=app)
    assert code == 0
    rows = json.loads(text)["rows"]
    assert [row["case"] for row in rows] == ["forward"] * 7 + ["forward + backward"] * 7
    assert all(row["timing"]["median"] > 0 for row in rows)
    assert [row["received"] > 0 for row in rows] == ([False] * 4 + [True] * 3) * 2
    assert run("recurrent", "--ranks", "2", "--key-heads", "3", command=app)[0] == 1
