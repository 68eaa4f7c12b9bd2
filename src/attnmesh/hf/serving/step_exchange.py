"""Operations of steps from rank 0 to all ranks. Every rank sends a report back in the same exchange."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial as partial_of
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from attnmesh.comm.failures import run_collective
from attnmesh.comm.gather import all_gather_ints
from attnmesh.hf.serving.operations import EndOfSteps, Operation, Start, operation_of
from attnmesh.hf.serving.rank_report import RankReport
from attnmesh.hf.tensor_parallel import tp_mesh
from attnmesh.mesh.axes import RankMesh

ValueCode = Sequence[Any]
"""Name, dtype and shape of a tensor; for any other value its name, None and the value."""

END_OF_STEPS: list[Operation] = [EndOfSteps()]
"""Operations that end an engine."""

FIRST_MESSAGE_INTEGERS = 128
"""Integers of the first message. Operations that need more take a second message."""

BYTES_PER_INTEGER = 7
"""Bytes of operations in an integer of 8 bytes, whose sign stays free."""


class StepExchange:
    """The exchange of operations between all ranks. Each of its methods that sends is collective over all of them.

    Operations go in two hops. The leader sends them to its peers, the ranks that share weights with it beside the mesh.
    Then each peer sends them along its own mesh.
    """

    def __init__(self, model: PreTrainedModel, mesh: RankMesh, output: object) -> None:
        peers = RankMesh.of(None if output == "heads" else tp_mesh(model))
        self.meshes = (peers, mesh)
        self.is_leader = mesh.shard_index == peers.shard_index == 0

    def exchange(self, operations: Sequence[Operation], report: RankReport) -> tuple[list[Operation], list[RankReport]]:
        """Return the operations of the leader, and the reports of the ranks of this rank's mesh by shard. Collective.

        `operations` counts on the leader alone. The first message has the number of integers, so all ranks know whether
        a second one follows.
        """
        code = _encode(operations) if self.is_leader else []
        first = (code + [0] * FIRST_MESSAGE_INTEGERS)[:FIRST_MESSAGE_INTEGERS]
        (size, *leader_code), table = self._share_code([len(code), *first], report.to_code())
        if size > FIRST_MESSAGE_INTEGERS:
            leader_code, _ = self._share_code(code if self.is_leader else [0] * size, [])
        return _decode(leader_code[:size]), [*map(RankReport.from_code, table)]

    def _share_code(self, code: list[int], numbers: list[int]) -> tuple[list[int], list[list[int]]]:
        """Return the leader's code, and the `numbers` of each shard of this rank's mesh. Collective.

        `code` has one length on all ranks.
        """
        table = [numbers]
        for mesh in self.meshes:
            table = all_gather_ints([*numbers, *code], mesh)
            code = table[0][len(numbers) :]
        return code, [by_rank[: len(numbers)] for by_rank in table]

    def share_images(
        self, operations: list[Operation], images: Mapping[str, Any] | None, device: torch.device
    ) -> list[Operation]:
        """Return operations with the leader's images of the prompt that begins, on the device. Collective."""
        return [
            replace(one, images=self.share_values(one.images, images, device)) if isinstance(one, Start) else one
            for one in operations
        ]

    def share_values(
        self, codes: Sequence[ValueCode], values: Mapping[str, Any] | None, device: torch.device
    ) -> dict[str, Any]:
        """Return the leader's values that `codes` describe, tensors on the device. Collective.

        `values` counts on the leader alone.
        """
        shared: dict[str, Any] = {}
        for name, dtype, shape_or_value in codes:
            if dtype is None:
                shared[name] = shape_or_value
                continue
            if values is None:
                x = torch.empty(shape_or_value, dtype=getattr(torch, dtype), device=device)
            else:
                x = values[name].to(device).contiguous()
            shared[name] = x
            for axis in (axis for mesh in self.meshes for axis in mesh.axes):  # to peers, then along the mesh
                if axis.size > 1:
                    broadcast = partial_of(dist.broadcast, group_src=0)
                    run_collective(axis, "sharing values of a step", broadcast, x.flatten().view(torch.uint8))
        return shared


def value_codes_of(values: Mapping[str, Any] | None) -> list[ValueCode]:
    """Return the descriptions of values, by which `StepExchange.share_values` receives them.

    >>> value_codes_of({"pixel_values": torch.zeros(2, 3), "num_crops": [1]})
    [['pixel_values', 'float32', [2, 3]], ['num_crops', None, [1]]]
    """
    return [
        [name, str(x.dtype).removeprefix("torch."), [*x.shape]] if isinstance(x, Tensor) else [name, None, x]
        for name, x in (values or {}).items()
    ]


def can_be_sent(value: Any) -> bool:
    """Return whether an operation can describe a value: a tensor, or numbers and text in lists."""
    if isinstance(value, list | tuple):
        return all(map(can_be_sent, value)) and not any(isinstance(x, Tensor) for x in value)
    return value is None or isinstance(value, Tensor | bool | int | float | str)


def _encode(operations: Sequence[Operation]) -> list[int]:
    """Return operations as integers: the number of their bytes, then the bytes, 7 an integer."""
    text = json.dumps([operation.to_code() for operation in operations], separators=(",", ":")).encode()
    parts = (text[start : start + BYTES_PER_INTEGER] for start in range(0, len(text), BYTES_PER_INTEGER))
    return [len(text), *(int.from_bytes(part, "little") for part in parts)]


def _decode(code: list[int]) -> list[Operation]:
    """Return the operations that `_encode` wrote.

    >>> from attnmesh.hf.serving.operations import Drop, Fill
    >>> _decode(_encode([Fill(3, 256, 900), Drop([1, 2])]))
    [Fill(cache_id=3, size=256, stop=900), Drop(cache_ids=[1, 2])]
    """
    text = b"".join(part.to_bytes(BYTES_PER_INTEGER, "little") for part in code[1:])[: code[0]]
    return [*map(operation_of, json.loads(text))]
