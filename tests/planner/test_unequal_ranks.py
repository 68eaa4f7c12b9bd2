"""Plans of decoding on unequal ranks: priced with even shares and with those of their rates, within their memory."""

import json
from dataclasses import replace
from typing import Any

import pytest

import attnmesh as am
from attnmesh.cli.plan_command import code_to_run
from attnmesh.cli.probe_command import described
from attnmesh.errors import ClusterError
from attnmesh.hf.model_size import model_size
from attnmesh.mesh.shapes import Shape
from attnmesh.planner.serving import serving_plans
from tests.support.models import families

EQUAL = am.Cluster.preset("local", ranks=2)
UNEQUAL = replace(EQUAL, rates=(4e9, 1e9), memories=(8e9, 8e9))
WORK = am.Workload(8, 8, 128, 1 << 18, phase="decode", dtype="float32")


def kernel_seconds(plan: am.Plan) -> float:
    """Return the seconds of attention, without the time of a call."""
    return dict(plan.parts)["kernel"] - plan.cluster.device.call


def test_shares_by_rates_take_the_work_over_the_sum_of_the_rates() -> None:
    found = [one for one in am.plan(WORK, UNEQUAL) if one.shape == Shape(1, 1, 2) and one.exchange == "direct"]
    best, even = found
    assert (best.shares, even.shares) == ((4, 1), None)
    ratio = kernel_seconds(even) / kernel_seconds(best)
    assert ratio == pytest.approx(2.5, rel=0.001)  # 2**18 tokens do not part as 4 : 1
    assert kernel_seconds(even) == kernel_seconds(next(one for one in am.plan(WORK, EQUAL) if one.shape == even.shape))
    assert best.memory == pytest.approx(0.8 * WORK.kept_bytes)
    assert "  cache = am.KVCache(mesh, ..., shares=(4, 1))\n" in code_to_run(best)


def test_what_a_rank_has_no_memory_for_goes_to_the_others() -> None:
    small = replace(UNEQUAL, memories=(WORK.kept_bytes / 3, 8e9))
    fitting = {one.shares for one in am.plan(WORK, small) if one.shape == Shape(1, 1, 2)}
    assert fitting == {(1, 3)}
    with pytest.raises(ClusterError, match="plan for decode: expected at most"):
        am.plan(WORK, replace(UNEQUAL, device=replace(EQUAL.device, memory=1e6), memories=(1e6, 1e6)))


def test_unequal_ranks_are_kept_in_a_file_and_other_counts_drop_them() -> None:
    assert am.Cluster.of_record(json.loads(json.dumps(UNEQUAL.record()))) == UNEQUAL
    assert UNEQUAL.sized(1, 2) == UNEQUAL
    assert UNEQUAL.sized(1, 3).shares() == (1, 1, 1)
    assert described(UNEQUAL)["each rank reads"] == "4.00, 1.00 GB/s"
    assert described(UNEQUAL)["unequal ranks"] == "generate and serve --shares 4,1"
    assert "unequal ranks" not in described(EQUAL)


def test_ways_to_run_a_model_are_priced_on_unequal_ranks() -> None:
    model = model_size(families.CONFIGS["llama"], length=1 << 16, phase="decode")
    assert {
        one.attention_plan.shares for one in serving_plans(model, UNEQUAL) if one.attention_plan.shape == Shape(1, 1, 2)
    } == {(4, 1)}
    assert len(serving_plans(model, replace(UNEQUAL, hosts=2, rates=(4e9,) * 4, memories=()))) > 0


@pytest.mark.parametrize("rates", [(1e9,), (1e9, -1.0), (1e9, "fast"), 3])
def test_rates_that_are_none_are_refused(rates: Any) -> None:
    with pytest.raises(ClusterError, match="Cluster rates: expected a positive number of each of 2 ranks, or none"):
        replace(EQUAL, rates=rates)
