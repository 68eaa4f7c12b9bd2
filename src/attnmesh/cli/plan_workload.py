"""The options `--workload`, `--length` and `--recurrent` of `attnmesh plan`: a workload from their text."""

import re
from typing import Annotated, Any

import typer

from attnmesh.cli.plan_model import check_alone
from attnmesh.errors import ArgumentError, ShapeError, check_choice
from attnmesh.planner.plan import Plan
from attnmesh.planner.recurrent import TRANSITIONS, Recurrent
from attnmesh.planner.recurrent_cost import RecurrentCost
from attnmesh.planner.workload import Workload
from attnmesh.planner.workload_presets import WORKLOADS, workload_preset

UNITS = {"": 1, "k": 10**3, "m": 10**6, "ki": 2**10, "mi": 2**20}
"""Units of a length: 128k is 128,000 tokens, 128Ki is 131,072."""

WorkloadOption = Annotated[
    str | None,
    typer.Option(help=f"Attention of a diffusion transformer in one denoising step: {', '.join(WORKLOADS)}."),
]
LengthOption = Annotated[
    str | None,
    typer.Option(help="Tokens: 4096, 128k (128,000), 5M or 5e6, 128Ki (131,072), 1Mi. Required without --workload."),
]
RecurrentOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Recurrent layers: heads x rows x columns of a state, then :matrix, :diagonal or :scalar, :layers=N and "
        ":conv=CHANNELSxWIDTH, as 32x128x128:matrix:layers=36:conv=8192x4. Give it once for each kind."
    ),
]

COUNT = "([0-9]{1,15})"


def preset_of(
    name: str, length: str | None, model: str | None, sizes: dict[str, Any], common: dict[str, Any]
) -> Workload:
    """Return the preset of `--workload`, with the tokens of `--length` if it is given."""
    check_choice("--workload", name, WORKLOADS, "name one of these", ArgumentError)
    check_alone({"--model": model, **sizes}, "sizes of the workload alone", beside="--workload")
    if common["phase"] == "decode":
        given, fix = "--decode", "leave it out, or pass --training"
        raise ArgumentError("attnmesh plan --workload", "a forward pass, or training", given, fix)
    changes = {} if length is None else {"length": length_of(length)}
    return workload_preset(name, **{**common, **changes})


def source_of(name: str | None, length: int) -> dict[str, str]:
    """Return the name of a preset, how `length` tokens come about, and its source; nothing without a preset."""
    if name is None:
        return {}
    found = WORKLOADS[name]
    text = f"and {found.text} of text" if found.text else "without text"
    tokens = f"{' x '.join(map(str, found.grid))} {text}" if length == found.length else "given by --length"
    return {"preset": name, "tokens": tokens, "source": found.source}


def enabling_code(plan: Plan) -> str:
    """Return the lines of Python that put a model of diffusers on the mesh of a plan."""
    mesh = f"am.init_mesh({tuple(plan.shape)})"
    return f'  attnmesh.diffusers.enable(pipeline.transformer, {mesh}, exchange="{plan.exchange}")'


def length_of(text: str | None) -> int:
    """Return the tokens of `--length`.

    >>> [length_of(text) for text in ("4096", "128k", "128Ki", "1.5M", "1e6")]
    [4096, 128000, 131072, 1500000, 1000000]
    """
    if text is None:
        raise ArgumentError("attnmesh plan", "--length or --workload", "neither", "write --length 128k")
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,15})?(?:e[0-9]{1,2})?)(|k|m|ki|mi)", text.lower())
    tokens = float(match[1]) * UNITS[match[2]] if match else 0.5
    if tokens != int(tokens):
        fix = "k and M count in thousands, Ki and Mi in 1,024s"
        raise ShapeError("--length", "tokens, as 4096, 128k, 5M, 128Ki or 1Mi", repr(text), fix)
    return int(tokens)


def recurrent_of(text: str) -> Recurrent:
    """Return the recurrent layers of one `--recurrent`.

    >>> recurrent_of("32x128x128:scalar:layers=36")
    Recurrent(heads=32, key_dim=128, value_dim=128, layers=36, transition='scalar', conv_channels=0, conv_width=1)
    """
    sizes, *settings = text.split(":")
    found = re.fullmatch(f"{COUNT}x{COUNT}x{COUNT}", sizes)
    if found is None:
        raise ShapeError("--recurrent", "HEADSxROWSxCOLUMNS of a state", repr(text), "write 32x128x128:matrix")
    options: dict[str, Any] = {}
    for setting in settings:
        if setting in TRANSITIONS:
            one: dict[str, Any] = {"transition": setting}
        elif match := re.fullmatch(f"layers={COUNT}", setting):
            one = {"layers": int(match[1])}
        elif match := re.fullmatch(f"conv={COUNT}x{COUNT}", setting):
            one = {"conv_channels": int(match[1]), "conv_width": int(match[2])}
        else:
            expected = f"{', '.join(TRANSITIONS)}, layers=N or conv=CHANNELSxWIDTH after each colon"
            raise ShapeError("--recurrent", expected, repr(setting), "write 32x128x128:matrix:layers=36:conv=8192x4")
        if options.keys() & one.keys():
            fix = "leave one out, or give another kind a --recurrent of its own"
            raise ShapeError("--recurrent", "each setting once", repr(text), fix)
        options |= one
    return Recurrent(*map(int, found.groups()), **options)


def recurrent_record(cost: RecurrentCost) -> dict[str, Any]:
    """Return the figures of all recurrent layers as a JSON object."""
    exchanges = {
        name: {"seconds": one.seconds, "bytes": {"inside": one.inside, "between": one.between}}
        for name, one in (("scan", cost.scan), ("halo", cost.halo))
    }
    return {**exchanges, "memory": cost.memory}
