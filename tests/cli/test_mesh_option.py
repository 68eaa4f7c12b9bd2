"""The mesh of `--mesh`, and who computes the layers: as they are named, or the planner's first way."""

from dataclasses import replace

import pytest

from attnmesh.cli.mesh_option import MeshChoice, MeshOptions, choose_mesh
from attnmesh.errors import ModelError
from attnmesh.planner.serving import ModelSizes, serving_plans
from attnmesh.planner.units import seconds_text
from attnmesh_command.messages import OptionError
from tests.support.planning.planned import cpus, model_of_cpus


def test_the_shape_that_sends_least_is_chosen() -> None:
    def chosen(text: str, ranks: int) -> MeshChoice:
        return choose_mesh(MeshOptions(text), ranks, 9, 3)[0]

    assert chosen("auto", 4).shape == (1, 4, 1)
    assert chosen("auto", 3).shape == (1, 3, 1)
    assert chosen("tp=3", 12)[:3] == ((1, 4, 1), 3, False)
    assert chosen("keys=4", 4) == ((1, 1, 4), 1, False, "as --mesh says")
    assert chosen("tp=9,keys=2", 18)[:3] == ((1, 1, 2), 9, False)
    assert chosen("keys=tp=9", 9)[:3] == ((1, 1, 9), 1, True)
    assert chosen("auto", 2).reason == "a prompt sends least so; with keys=2 it sends 3.0 times as much"
    with pytest.raises(OptionError, match="expected 4 ranks, given queries=2,keys=3, which is 6"):
        chosen("queries=2,keys=3", 4)


@pytest.mark.parametrize(("ranks", "short", "shared"), [(2, 1e-4, True), (2, 1e-3, False), (4, 1e-4, True)])
def test_the_mesh_and_who_computes_are_those_of_the_plan(
    ranks: int, short: float, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, machine = model_of_cpus(), replace(cpus(ranks=ranks), inside=replace(cpus().inside, short=short))
    monkeypatch.setattr("attnmesh.cli.mesh_option.this_machine", lambda *_: machine)
    ways = (one for one in serving_plans(model, machine) if one.ranks == ranks)
    plans = [one for one in ways if one.sharding.tp == 1 and not one.sharding.is_joint]
    mesh, layers = choose_mesh(MeshOptions(), ranks, 9, 3, lambda: model)
    assert (mesh.shape, mesh.tp, layers.layers_shared) == (plans[0].shape, 1, plans[0].sharding.layers_shared)
    assert layers.layers_shared == shared
    times = [seconds_text(way.seconds) for way in plans[:2]]
    assert layers.reason == f"{times[0]} a token by the planner, {'whole' if shared else 'shared'} {times[1]}"


def test_a_named_mesh_and_named_layers_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnmesh.cli.mesh_option.this_machine", lambda *_: cpus(ranks=4))
    mesh, layers = choose_mesh(MeshOptions("queries=2,keys=2", "whole"), 4, 9, 3, model_of_cpus)
    assert (mesh.shape, mesh.reason, layers.layers_shared) == ((1, 2, 2), "as --mesh says", False)


def test_ranks_that_split_weights_by_tp_do_not_share_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnmesh.cli.mesh_option.this_machine", lambda *_: cpus(ranks=6))
    assert not choose_mesh(MeshOptions("tp=3,keys=2"), 6, 9, 3, model_of_cpus)[1].layers_shared


def test_one_rank_is_a_mesh_of_its_own() -> None:
    assert choose_mesh(MeshOptions(), 1, 9, 3, model_of_cpus)[0].shape == (1, 1, 1)


def test_a_model_without_a_price_shares_layers_if_it_can() -> None:
    def refuse() -> ModelSizes:
        raise ModelError("plan model", "layers of attention", "none", "use another")

    mesh, layers = choose_mesh(MeshOptions(), 4, 9, 3, refuse)
    assert (mesh.shape, layers.layers_shared, layers.reason) == ((1, 4, 1), True, "")
