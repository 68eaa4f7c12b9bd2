"""The model of `attnmesh generate` and `attnmesh serve` on a rank: its mesh, and who computes its layers."""

from contextlib import suppress
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import PreTrainedModel
from transformers.utils import logging

from attnmesh import hf
from attnmesh.cli.generate_prompt import ModelOnMesh
from attnmesh.errors import InputError
from attnmesh.hf.load import open_model
from attnmesh.hf.shared_weights import SharedLayer
from attnmesh.mesh.axes import device_type_of
from attnmesh.mesh.shapes import AXES
from attnmesh.setup.init_mesh import init_mesh
from attnmesh_command.option_texts import TP

WHOLE_ON_EACH = "whole on each rank"


class LoadedModel(NamedTuple):
    """A model on this rank's device, the mesh that divides the tokens, and who computes the layers."""

    model: PreTrainedModel
    device_mesh: DeviceMesh | None
    weights: str


def load_model(source: ModelOnMesh, dtype: str, weights: str, *, reproducible: bool) -> LoadedModel:
    """Load the model on all ranks. Where `weights` is "auto" ranks share its layers if that was chosen, and they can.

    A reproducible run shares them on any number of ranks: its bits must not depend on their number.
    """
    kind = device_type_of(dist.group.WORLD)
    device = torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")
    device_mesh, tp_mesh = _meshes(device.type, source)
    logging.disable_progress_bar()  # each rank would show one
    logging.set_verbosity_error()
    model = open_model(source.path, dtype, device, tp_mesh, source.mesh.output, images=source.reads_images)
    if tp_mesh is not None:
        return LoadedModel(model, device_mesh, "shared along tp")
    layers_shared, why = source.layers
    alone = device_mesh is None
    if weights == "whole" or (weights == "auto" and not reproducible and (alone or not layers_shared)):
        return LoadedModel(model, device_mesh, _said(WHOLE_ON_EACH, "" if alone else why))
    try:
        hf.share_weights(model, device_mesh)
    except InputError as error:
        if weights == "shared":
            raise
        return LoadedModel(model, device_mesh, _said(WHOLE_ON_EACH, error.args[2]))
    sharing = WHOLE_ON_EACH if device_mesh is None else _said(f"shared by {max(device_mesh.shape)} ranks", why)
    return LoadedModel(model, device_mesh, sharing)


def load_draft(path: str, dtype: str, beside: LoadedModel) -> PreTrainedModel:
    """Load a draft model on all ranks. They share its layers where they share those of the model, and can."""
    draft = open_model(path, dtype, beside.model.device)
    if any(isinstance(module, SharedLayer) for module in beside.model.modules()):
        with suppress(InputError):
            hf.share_weights(draft, beside.device_mesh)
    return draft


def _said(what: str, why: str) -> str:
    return f"{what} ({why})" if why else what


def _meshes(device_type: str, source: ModelOnMesh) -> tuple[DeviceMesh | None, DeviceMesh | None]:
    """Return the mesh that divides the tokens, and the mesh that splits the weights."""
    shape, tp, is_joint, _ = source.mesh
    if tp > 1:  # they exchange most, and lie next to each other
        whole = init_device_mesh(device_type, (*shape, tp), mesh_dim_names=(*AXES, TP))
        return whole[AXES], whole[TP]
    device_mesh = init_mesh(device_type, shape, *source.heads) if shape.ranks > 1 else None
    return device_mesh, device_mesh["keys"] if device_mesh is not None and is_joint else None
