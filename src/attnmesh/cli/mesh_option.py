"""The mesh of `--mesh` for a model, and who computes its layers: as they are named, or as the planner chooses."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from attnmesh.comm.topology import agreed_cluster_and_tile
from attnmesh.cost.cluster import Cluster
from attnmesh.cost.machine_constants import this_machine
from attnmesh.errors import InputError, MeshError
from attnmesh.mesh.axes import device_type_of
from attnmesh.mesh.shapes import AXES, Shape, elements, mesh_shapes, share_evenly
from attnmesh.planner.serving import ModelSizes, ServingPlan, choose_plan, serving_plans, why_not_shared
from attnmesh.planner.units import seconds_text
from attnmesh.setup.init_mesh import world_mesh
from attnmesh_command.messages import under_torchrun
from attnmesh_command.option_texts import TP, axes_of, check_ranks_of_mesh


class MeshChoice(NamedTuple):
    """A mesh of attention, and the ranks that split weights beside it or within it."""

    shape: Shape
    """Ranks along the axes of attention."""
    tp: int
    """Ranks that split weights and heads, beside those of attention."""
    is_joint: bool
    """True if the ranks along the keys axis also split the weights."""
    reason: str

    @property
    def output(self) -> str:
        """Heads that attention returns on a rank: its part where it also has a part of the weights, or all."""
        return "heads" if self.is_joint else "replicated"

    def __str__(self) -> str:
        """Return the text of `--mesh`.

        >>> print(MeshChoice(Shape(1, 1, 4), 2, False, ""), MeshChoice(Shape(1, 1, 8), 1, True, ""))
        tp=2,keys=4 tp=keys=8
        """
        if self.is_joint:
            return f"{TP}=keys={self.shape.keys}"
        sizes = {TP: self.tp, **self.shape._asdict()}
        return ",".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "one rank"


class LayersChoice(NamedTuple):
    """Choice of who computes the layers of a step: the ranks of a host together, or each of them; and the reason."""

    layers_shared: bool = True
    reason: str = ""


class MeshOptions(NamedTuple):
    """The options `--mesh`, `--weights` and `--dtype`."""

    mesh: str = "auto"
    weights: str = "auto"
    dtype: str = "auto"

    @property
    def layers_shared(self) -> bool | None:
        """True if ranks are to share layers; None where the planner chooses."""
        return None if self.weights == "auto" else self.weights == "shared"


def choose_mesh(
    options: MeshOptions, ranks: int, q_heads: int, kv_heads: int, sized: Callable[[], ModelSizes] | None = None
) -> tuple[MeshChoice, LayersChoice]:
    """Return the mesh of `--mesh`, and who computes the layers.

    Axes of attention that are not named, and who computes, are those of the planner's first way that keeps whole
    weights, or the named part of them by tp, on every rank. Without the sizes of the model a prompt sends least.
    """
    sizes = axes_of(options.mesh)
    check_ranks_of_mesh(options.mesh, ranks)
    if joint := sizes.get(f"{TP}=keys"):
        return MeshChoice(Shape(1, 1, joint), 1, joint > 1, "as --mesh says"), LayersChoice()
    tp = sizes.get(TP, 1)
    tp_divides = ranks % tp == 0 and q_heads % tp == 0 and share_evenly(kv_heads, tp)
    if not tp_divides:
        given = f"{options.mesh} on {ranks} ranks, with {q_heads}/{kv_heads} heads"
        fix = "take another number, or give the ranks to the keys axis"
        raise MeshError("--mesh", "a tp that divides the ranks and the heads", given, fix)
    heads = (q_heads // tp, max(1, kv_heads // tp))
    shape = Shape(*(sizes.get(axis, 1) for axis in AXES)) if sizes.keys() - {TP} else None
    if shape is not None and heads[1] % shape.heads:
        expected = f"a heads axis that divides {heads[1]} key heads"
        given = f"{options.mesh}, with {heads[0]}/{heads[1]} heads on a rank"
        raise MeshError("--mesh", expected, given, "give its ranks to another axis")
    plan, layers = None, LayersChoice()
    if ranks > 1 and sized is not None:
        plan, layers = _price(options, ranks, sized, tp, shape)
    if shape is not None:
        return MeshChoice(shape, tp, False, "as --mesh says"), layers
    return _best(ranks // tp, tp, heads, plan), layers


def cluster_here(ranks: int) -> Cluster:
    """Return the cluster of the ranks that torchrun has started, or of `ranks` ranks to be started on this machine."""
    if under_torchrun() and dist.is_initialized():
        return agreed_cluster_and_tile(world_mesh(), torch.device(device_type_of(dist.group.WORLD)))[0]
    return this_machine(ranks, "cuda" if torch.cuda.device_count() >= ranks else "cpu")


def _price(
    options: MeshOptions, ranks: int, sized: Callable[[], ModelSizes], tp: int, shape: Shape | None
) -> tuple[ServingPlan | None, LayersChoice]:
    """Return the planner's way, None for a model without a price, and who computes the layers."""
    cluster = cluster_here(ranks)
    try:
        model = sized()
        ways = serving_plans(model, cluster, shape)
        plan = choose_plan(ways, ranks, tp, options.layers_shared)
    except InputError:
        return None, LayersChoice()
    if tp > 1:
        return plan, LayersChoice(layers_shared=False)
    why = why_not_shared(model, cluster)
    if why is not None:
        return plan, LayersChoice(layers_shared=False, reason=why)
    shared_time, whole_time = (
        seconds_text(choose_plan(ways, ranks, tp, layers_shared).seconds) for layers_shared in (True, False)
    )
    if plan.sharding.layers_shared:
        return plan, LayersChoice(True, f"{shared_time} a token by the planner, whole {whole_time}")
    return plan, LayersChoice(False, f"{whole_time} a token by the planner, shared {shared_time}")


def _best(ranks: int, tp: int, heads: tuple[int, int], plan: ServingPlan | None) -> MeshChoice:
    """Return the mesh of the planner's way, or else the one that sends least in prefill, and the reason."""
    shapes = mesh_shapes(ranks, *heads, training=False)
    shape = shapes[0] if plan is None else plan.shape
    rivals = [rival for rival in shapes if rival != shape]
    if not rivals:
        if ranks > 1:
            return MeshChoice(shape, tp, False, f"no other shape serves {heads[0]}/{heads[1]} heads")
        return MeshChoice(shape, tp, False, "" if tp == 1 else "as --mesh says")
    sent, rival_sent = (sum(elements(mesh, *heads, training=False)) for mesh in (shape, rivals[0]))
    rival_mesh = MeshChoice(rivals[0], tp, False, "")
    if sent > rival_sent:
        return MeshChoice(shape, tp, False, f"a new token takes least time so; a prompt sends least with {rival_mesh}")
    times = f"{rival_sent / sent:.1f} times"
    return MeshChoice(shape, tp, False, f"a prompt sends least so; with {rival_mesh} it sends {times} as much")
