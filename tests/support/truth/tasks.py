"""A small task of this rank, as calls of attention on a mesh have one: its tensors, and its memory."""

import torch
from torch import Tensor

import attnmesh as am
from attnmesh.core.scaling import Scaling
from attnmesh.mesh.axes import RankMesh
from attnmesh.mesh.schedule import Problem
from attnmesh.mesh.shapes import AXES, Shape
from attnmesh.mesh_attention.attention_spec import AttentionSpec
from attnmesh.mesh_attention.head_swap import HeadTensors, empty_tokens
from attnmesh.mesh_attention.task import task_of
from tests.support.truth.mesh_problems import named_mesh

HEADS, KV_HEADS, DIM, VALUE_DIM, LENGTH = 4, 2, 8, 6, 23
MASK = am.Window(9)
SCALING = Scaling(DIM**-0.5)
ALONE = Shape(1, 1, 1)


def whole_tensors() -> tuple[list[Tensor], Tensor]:
    """Return q, k, v and sinks of the whole sequence, and the gradient of out."""
    generator = torch.Generator().manual_seed(0)
    shapes = (HEADS, LENGTH, DIM), (KV_HEADS, LENGTH, DIM), (KV_HEADS, LENGTH, VALUE_DIM), (HEADS, LENGTH, VALUE_DIM)
    q, k, v, dout = (torch.randn(1, *shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [q, k, v, torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)], dout


class Rank:
    """A task of this rank, and where its tokens and heads are."""

    def __init__(self, shape: Shape, exchange: str, mask: am.Mask = MASK) -> None:
        self.axes = RankMesh.of(None if shape == ALONE else named_mesh(shape, AXES))
        problem = Problem(mask, shape, am.Zigzag(), am.Zigzag(), LENGTH, LENGTH)
        self.positions = am.Zigzag().positions(LENGTH, shape.ranks, self.axes.shard_index)
        tensors, dout = whole_tensors()
        self.q, self.k, self.v = (x[:, :, self.positions] for x in tensors[:3])
        self.sinks, self.dout = tensors[3], dout[:, :, self.positions]
        call = AttentionSpec(self.axes, problem, exchange, "reference", SCALING)
        self.task = task_of(call, HEADS, (self.q, self.k, self.v))

    def own(self, x: Tensor) -> Tensor:
        """Return this rank's tokens."""
        return x[:, :, self.positions]

    def memory(self) -> HeadTensors:
        """Return memory for this rank's heads of q, k and v, of all tokens of its chunk."""
        size, tensors = self.task.schedule.chunk, (self.q, self.k, self.v)
        heads = [len(range(x.shape[1])[self.axes.heads.slice_of(x.shape[1])]) for x in tensors]
        tokens = size.queries, size.keys, size.keys
        q, *kv = map(empty_tokens, tensors, heads, tokens)
        return HeadTensors((q,), tuple(kv))
