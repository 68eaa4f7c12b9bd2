"""Tokens of a cache on their way from CPU memory to a device: one part is copied while another is attended.

Two buffers take turns. The CPU copies part 0 to pinned memory of buffer 0, from where a stream of its own copies it to
the device. While the device attends part 0, part 1 goes the same way by buffer 1. Part 2 goes by buffer 0 again: the
CPU writes it once the copy of part 0 has ended, and the stream overwrites part 0 once the device has attended it.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from math import prod

import torch
from torch import Tensor

from attnmesh.core.storage import is_prefix, storage_of, width_in_memory
from attnmesh.kernels.cache_view import LENGTH, CacheView

PART_BYTES = 1 << 24
"""Bytes of a part, about. Nothing hides the copy of the first part, and each part costs launches."""

PART_ALIGN_BYTES = 256
"""Bytes at which each tensor of a part begins."""


class Buffer:
    """Memory for a part on the CPU, free after the event `copied`, and on the device, free after `attended`."""

    def __init__(self, size: int, device: torch.device) -> None:
        with torch.inference_mode(False):
            self.cpu = torch.empty(size, dtype=torch.uint8, pin_memory=True, device="cpu")
            self.device = torch.empty(size, dtype=torch.uint8, device=device)
        self.copied, self.attended = torch.cuda.Event(), torch.cuda.Event()
        self.attended.record(torch.cuda.current_stream(device))  # kernels may still use what was in this memory


class Uploader:
    """Copies of parts to one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.buffers: list[Buffer] = []

    def upload(self, piece: CacheView, start: int, stop: int) -> Iterator[CacheView]:
        """Yield the slots from `start` to `stop` of a piece on the device, part by part.

        A part is valid until the next one is asked for.
        """
        kv_tensors = [piece.keys] if is_prefix(piece.values, piece.keys) else [piece.keys, piece.values]
        part_slots = _slots_of_part(kv_tensors)
        current = torch.cuda.current_stream(self.device)
        for index, first in enumerate(range(start, stop, part_slots)):
            last = min(stop, first + part_slots)
            slots = slice(first, last + 1)  # one more slot follows, as kernels expect
            length = int(piece.device_counts[LENGTH])
            tensors = [torch.tensor([length, last - first], device="cpu"), piece.token_index[slots]]
            tensors += [x[:, :, slots] for x in kv_tensors]
            buffer = self._buffer(index % 2, tensors)
            offsets = _offsets(tensors, self.device)
            buffer.copied.synchronize()
            for x, to in zip(tensors, _views(buffer.cpu, tensors, offsets), strict=True):
                to.copy_(x)
            with torch.cuda.stream(self.stream):
                self.stream.wait_event(buffer.attended)
                buffer.device[: offsets[-1]].copy_(buffer.cpu[: offsets[-1]], non_blocking=True)
                buffer.copied.record(self.stream)
            current.wait_event(buffer.copied)
            device_counts, token_index, keys, *values = _views(buffer.device, tensors, offsets)
            prefix = keys if storage_of(keys) is not None else keys[..., : piece.value_dim]
            yield CacheView(keys, values[0] if values else prefix, token_index, device_counts, None, piece.value_dim)
            buffer.attended.record(current)

    def _buffer(self, index: int, tensors: Sequence[Tensor]) -> Buffer:
        """Return buffer `index`. Without room for the tensors it is made anew, after all copies of the stream."""
        needed = _offsets(tensors, self.device)[-1]
        if len(self.buffers) <= index or len(self.buffers[index].cpu) < needed:
            self.stream.synchronize()
            self.buffers[index : index + 1] = [Buffer(needed, self.device)]
        return self.buffers[index]


@cache
def uploader_to(device: torch.device) -> Uploader:
    """Return the uploader to a device, with its stream and buffers: a process has one."""
    return Uploader(device)


def _slots_of_part(kv_tensors: Sequence[Tensor]) -> int:
    """Return the slots of a part of keys, or of keys and values."""
    size = sum(x.shape[0] * x.shape[1] * x.shape[3] * x.itemsize for x in kv_tensors)
    return max(1, PART_BYTES // size)


def _shape(x: Tensor, device: torch.device) -> tuple[int, ...]:
    """Return the shape of a tensor's memory on a device, where rows of bytes may be wider."""
    return x.shape if x.ndim < 4 else (*x.shape[:3], width_in_memory(x.shape[3], x.dtype, device))


def _offsets(tensors: Sequence[Tensor], device: torch.device) -> list[int]:
    """Return where each tensor begins in a buffer, and the bytes of all."""
    offsets = [0]
    for x in tensors:
        offsets.append(offsets[-1] + -(-prod(_shape(x, device)) * x.itemsize // PART_ALIGN_BYTES) * PART_ALIGN_BYTES)
    return offsets


def _views(flat: Tensor, tensors: Sequence[Tensor], offsets: Sequence[int]) -> list[Tensor]:
    """Return the tensors in a buffer's memory."""
    views = []
    for x, start in zip(tensors, offsets, strict=False):
        shape = _shape(x, torch.device("cuda"))
        view = flat[start : start + prod(shape) * x.itemsize].view(x.dtype).view(shape)
        views.append(view[..., : x.shape[-1]])
    return views
