"""The option `--workload` of `attnmesh plan`, and recurrent layers: a workload, its source and its record."""

from typing import Any

from attnmesh.planner.plan import Plan
from attnmesh.planner.recurrent_cost import RecurrentCost
from attnmesh.planner.workload_presets import WORKLOADS


def source_of(name: str | None, length: int) -> dict[str, str]:
    """Return the name of a preset, how `length` tokens come about, and its source; nothing without a preset."""
    if name is None:
        return {}
    preset = WORKLOADS[name]
    text = f"and {preset.text} of text" if preset.text else "without text"
    tokens = f"{' x '.join(map(str, preset.grid))} {text}" if length == preset.length else "given by --length"
    return {"preset": name, "tokens": tokens, "source": preset.source}


def enabling_code(plan: Plan) -> str:
    """Return the lines of Python that put a model of diffusers on the mesh of a plan."""
    mesh = f"am.init_mesh({tuple(plan.shape)})"
    return f'  attnmesh.diffusers.enable(pipeline.transformer, {mesh}, exchange="{plan.exchange}")'


def recurrent_record(cost: RecurrentCost) -> dict[str, Any]:
    """Return the figures of all recurrent layers as a JSON object."""
    exchanges = {
        name: {"seconds": price.seconds, "bytes": {"inside": price.inside, "between": price.between}}
        for name, price in (("scan", cost.scan), ("halo", cost.halo))
    }
    return {**exchanges, "memory": cost.memory}
