"""The shape of the mesh for each batch: the documents of one batch are short, and those of another are long."""

from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from attnmesh.core.layout import Layout
from attnmesh.core.mask import Causal
from attnmesh.errors import ArgumentError, KernelError, MeshError, short
from attnmesh.hf.models import indexed_layer_indices, is_recurrent, key_heads
from attnmesh.hf.training.batch import AgreedBatch
from attnmesh.mesh.axes import RankMesh
from attnmesh.mesh.shapes import Shape, check_heads_axis, mesh_shapes
from attnmesh.mesh_attention.auto_choices import agreed_layout, agreed_price
from attnmesh.setup.init_mesh import split_mesh

Heads = tuple[int, int, int]
"""Query heads, key heads and columns of a head."""

MAX_SHAPES = 4
"""Number of shapes that are set up, those that send least under a full mask: each needs process groups of its own."""


def check_mesh_shape(shape: object, device_mesh: DeviceMesh | None) -> None:
    """Raise unless `shape` is None, or "auto" beside a mesh of one axis."""
    if shape not in (None, "auto"):
        fix = 'pass shape="auto", or a mesh of that shape'
        raise ArgumentError("on_mesh shape", 'None or "auto"', short(shape), fix)
    axes = 1 if shape is None or device_mesh is None else device_mesh.ndim
    if axes != 1:
        fix = 'slice one axis, as mesh["cp"]'
        raise MeshError("on_mesh mesh", 'a mesh of one axis beside shape="auto"', f"{axes} axes", fix)


class MeshShapes:
    """The mesh given, or meshes of several shapes over its ranks, of which each batch takes the cheapest."""

    def __init__(self, device_mesh: DeviceMesh | None, shape: str | None) -> None:
        self.device_mesh, self.shape = device_mesh, shape
        self.by_shape: dict[Shape, DeviceMesh] = {}
        self.device_meshes: dict[Heads, list[DeviceMesh]] = {}
        """Meshes for the heads of each model."""

    def set_up(self, config: Any) -> None:
        """Make the meshes for a model, once, or raise if the mesh does not fit it. All ranks of the world call it."""
        if self.shape is None or self.device_mesh is None:
            kv_heads = None if indexed_layer_indices(config) else key_heads(config)  # selected keys reach all ranks
            if kv_heads is not None:
                check_heads_axis("on_mesh mesh", RankMesh.of(self.device_mesh).shape, kv_heads)
            return
        if is_recurrent(config):
            raise KernelError("on_mesh shape", "a model without recurrent layers", config.model_type, "leave shape out")
        if (heads := _heads(config)) in self.device_meshes:
            return
        shapes = mesh_shapes(self.device_mesh.size(), *heads[:2])[:MAX_SHAPES]
        for shape in shapes:
            if shape not in self.by_shape:
                self.by_shape[shape] = split_mesh(self.device_mesh, shape)
        self.device_meshes[heads] = [self.by_shape[shape] for shape in shapes]

    def choose(self, batch: AgreedBatch, layout: Layout | str, config: Any) -> tuple[DeviceMesh | None, Layout]:
        """Return the mesh and the layout with which the planner predicts the shortest step of a model."""
        mask = Causal() & batch.documents
        length = batch.positions.shape[1]
        if not self.device_meshes:
            return self.device_mesh, agreed_layout(layout, mask, RankMesh.of(self.device_mesh))
        heads = _heads(config)
        device_meshes = self.device_meshes[heads]
        prices = [agreed_price(layout, mask, length, RankMesh.of(device_mesh), heads) for device_mesh in device_meshes]
        best = min(range(len(prices)), key=lambda index: prices[index].seconds)
        return device_meshes[best], prices[best].layout


def _heads(config: Any) -> Heads:
    """Return the query heads, the key heads and the columns of a head of a model."""
    text = config.get_text_config()
    q_heads = text.num_attention_heads
    return q_heads, key_heads(config) or q_heads, getattr(text, "head_dim", None) or text.hidden_size // q_heads
