"""Costs of candidates: stages, traffic and layers add up."""

import pytest

from attnmesh.cost.candidate_mesh import Cost

pytestmark = pytest.mark.quick


def cost(name: str, seconds: float) -> Cost:
    made = Cost(memory=100.0)
    made.add_stage(name, seconds)
    made.add_traffic(inside=1.0, between=2.0, messages=3.0)
    return made


def test_stages_of_one_name_and_all_costs_add_up() -> None:
    total = cost("attend", 1.0)
    total.add_stage("attend", 0.5)
    total.add(cost("merge", 2.0))
    assert total == Cost(3.5, 2.0, 4.0, 6.0, 200.0, {"attend": 1.5, "merge": 2.0})


def test_layers_take_the_time_of_each_and_the_memory_is_of_all() -> None:
    one = cost("attend", 1.0)
    three = Cost(memory=100.0)
    for _ in range(3):
        three.add(cost("attend", 1.0))
    assert one.of_layers(3) == Cost(three.seconds, three.inside, three.between, three.messages, 100.0, three.parts)
    assert one == cost("attend", 1.0), "the cost of one layer stays as it is"
