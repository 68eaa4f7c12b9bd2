"""Sizes of a workload, held against a cache's memory, what queries see, and the runs of tokens of a layout."""

from typing import Any

import pytest
import torch

import attnmesh as am
from attnmesh.core.layout import Layout
from attnmesh.core.mask import Mask
from attnmesh.errors import ShapeError
from attnmesh.planner.workload import Workload, runs_per_shard

pytestmark = pytest.mark.quick


def test_a_token_of_a_layer_has_a_key_and_a_value_of_each_key_head() -> None:
    work = Workload(32, 8, 128, 1000, value_dim=64, layers=3, batch=2, phase="decode")
    assert work.kept_bytes == 3 * 2 * 1000 * 8 * (128 + 64) * 2
    assert Workload(32, 8, 128, 1000, dtype="float32", phase="decode").kept_bytes == 1000 * 8 * 2 * 128 * 4


CACHES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"storage": "int8"}, {"storage": "int8"}),
    ({"mask": am.Window(9)}, {"mask": am.Window(9)}),
    ({"mask": am.Window(9), "q_len": 3}, {"mask": am.Window(9), "keep": 2}),
    ({"latent": (12, 4)}, {"kv_heads": 1, "value_dim": 12, "values": "prefix"}),
    ({"latent": (12, 4), "storage": "int8"}, {"kv_heads": 1, "value_dim": 12, "values": "prefix", "storage": "int8"}),
]


@pytest.mark.parametrize(("options", "cache_options"), CACHES, ids=str)
def test_a_workload_keeps_the_bytes_of_a_cache(options: dict[str, Any], cache_options: dict[str, Any]) -> None:
    work = Workload(4, 2, 16, 64, batch=3, phase="decode", dtype=torch.float32, **options)
    sizes = {"batch": 3, "kv_heads": 2, "head_dim": 16, "capacity": 64, "dtype": torch.float32, **cache_options}
    assert work.kept_bytes == am.KVCache(None, **sizes).config.nbytes


@pytest.mark.parametrize("mask", [am.Causal(), am.Window(9), am.Causal() & am.Chunks(16), am.Window(9) & am.Chunks(5)])
@pytest.mark.parametrize("q_len", [1, 4])
def test_a_decode_step_keeps_as_many_tokens_as_one_query_sees_and_the_new_ones_before_it(
    mask: Mask, q_len: int
) -> None:
    tokens = torch.arange(64)
    seen = int((mask.visible(tokens, tokens) & (tokens <= tokens[:, None])).sum(1).max())
    assert Workload(4, 2, 16, 64, phase="decode", q_len=q_len, mask=mask).kept == min(64, seen + q_len - 1)
    assert Workload(4, 2, 16, 64, phase="prefill", mask=mask).kept == 64


@pytest.mark.parametrize("layout", [am.Contiguous(), am.Zigzag()], ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_a_scan_passes_through_each_run_of_consecutive_tokens(layout: Layout, ranks: int) -> None:
    middle = layout.positions(120, ranks, 0)
    runs = 1 + int((middle.diff() != 1).sum())
    assert runs_per_shard("test", layout) == runs
    rounds, reach = 0, 1  # each round doubles the ranks that a state has passed
    while reach < ranks:
        rounds, reach = rounds + 1, 2 * reach
    kinds = am.Recurrent(2, 8, 4, layers=3), am.Recurrent(0, 0, 0, layers=2, conv_channels=6, conv_width=3)
    work = Workload(1, 1, 64, 120, batch=5, phase="training", recurrent=kinds)
    numbers = 3 * 2 * (8 * 8 + 8 * 4)  # of each state a matrix and a bias
    assert work.scan_bytes(ranks, layout) == 2 * runs * rounds * 5 * numbers * 4
    assert work.halo_bytes(ranks, layout) == 2 * min(runs, ranks - 1) * 5 * 2 * (2 * 6) * 2
    assert work.state_bytes == 5 * (3 * 2 * 8 * 4 * 4 + 2 * (2 * 6) * 2)


def test_a_scan_of_more_runs_than_two_is_refused() -> None:
    with pytest.raises(ShapeError, match="scan_bytes layout: expected one or two runs of tokens per rank"):
        Workload(1, 1, 64, 120, recurrent=am.Recurrent(2, 8, 4)).scan_bytes(2, am.Striped(4))


def test_keys_are_expanded_from_latents_in_training_alone() -> None:
    sizes: dict[str, Any] = {"value_dim": 8, "latent": (12, 4), "dtype": "float16"}
    heads = {phase: Workload(4, 4, 16, 64, phase=phase, **sizes) for phase in ("training", "prefill", "decode")}
    assert {phase: work.travelling_heads for phase, work in heads.items()} == {"training": 4, "prefill": 1, "decode": 1}
    assert {phase: work.travelling_width for phase, work in heads.items()} == {
        "training": 16 + 8,
        "prefill": 12 + 4,
        "decode": 12 + 4,
    }
    assert heads["decode"].cached_widths == (16, 12)
    assert (heads["decode"].itemsize, heads["decode"].sum_itemsize) == (2, 4)


def test_index_keys_are_those_of_the_layers_with_an_indexer() -> None:
    plain = Workload(4, 2, 16, 64, layers=6, phase="decode")
    assert (plain.selecting, plain.indexers, plain.index_bytes) == (0, 0, 0)
    every = Workload(4, 2, 16, 64, layers=6, phase="decode", selected=am.Selected(8, 2, 10))
    assert (every.selecting, every.indexers, every.index_bytes) == (6, 6, 6 * 64 * 10 * 2)
    some = Workload(4, 2, 16, 64, layers=6, phase="decode", selected=am.Selected(8, 2, 10, layers=4, indexers=3))
    assert (some.selecting, some.indexers, some.index_bytes) == (4, 3, 3 * 64 * 10 * 2)
