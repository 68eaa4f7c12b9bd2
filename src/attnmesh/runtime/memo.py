"""Memos: values that no call makes anew, by the signature of a call or by the index tensor that they were made of."""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import RLock
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

T = TypeVar("T")

MAX_TENSOR_BYTES = 1 << 27
"""Bytes that are kept on all devices together: 128 MiB, the indices of calls of some dozens of signatures."""


class Memo(dict[Hashable, T]):
    """Values by the signatures of calls, of up to `maxsize` of them. Beyond that all are made anew.

    >>> memo = Memo[str](maxsize=2)
    >>> memo.keep("one", "first"), memo.find("one"), memo.find([])
    ('first', 'first', None)
    """

    def __init__(self, maxsize: int = 1024) -> None:
        self.maxsize = maxsize

    def find(self, signature: Any) -> T | None:
        """Return the value of a signature; None if there is none, or an option in it has no hash."""
        try:
            return self.get(signature)
        except TypeError:
            return None

    def keep(self, signature: Hashable, value: T) -> T:
        """Keep a value, and return it."""
        if len(self) >= self.maxsize:
            self.clear()
        self[signature] = value
        return value


class TensorMemo:
    """Values by the tensor that they were made of, such as its copy on a GPU, for which the CPU would wait.

    A value goes with its tensor. Beyond `max_bytes` the values that were used longest ago go first.
    """

    def __init__(self, max_bytes: int = MAX_TENSOR_BYTES) -> None:
        self.max_bytes, self.size = max_bytes, 0
        self.values: OrderedDict[tuple[int, Hashable], tuple[Any, int]] = OrderedDict()
        self.watched = set[tuple[int, Hashable]]()
        """Keys of tensors that live."""
        self.lock = RLock()  # a backward pass has a thread of its own

    def get_or_make(self, owner: Tensor, name: Hashable, make: Callable[[], T], size: Callable[[T], int]) -> T:
        """Return the value of that name, made now if it is not kept. `size` counts its bytes.

        `make` runs without the lock. Two threads may both make a value: each gets its own, and the first is kept.
        """
        key = id(owner), name
        with self.lock:
            if key in self.values:
                self.values.move_to_end(key)
                return cast(T, self.values[key][0])
        with torch.inference_mode(False):  # later calls may be in any mode
            value = make()
        with self.lock:
            if key not in self.values:
                if key not in self.watched:  # a value that was dropped has a finalizer already
                    weakref.finalize(owner, self._forget, key).atexit = False
                    self.watched.add(key)
                self.values[key] = value, size(value)
                self.size += size(value)
            while self.size > self.max_bytes:
                self._drop(next(iter(self.values)))
        return value

    def _forget(self, key: tuple[int, Hashable]) -> None:
        with self.lock:
            self.watched.discard(key)
            self._drop(key)

    def _drop(self, key: tuple[int, Hashable]) -> None:
        with self.lock:
            self.size -= self.values.pop(key, (None, 0))[1]


TENSOR_MEMO = TensorMemo()
"""Results of all rooms that live as long as a tensor does."""


def index_on(index: Tensor, device: torch.device) -> Tensor:
    """Return an index tensor on a device, copied once as long as it lives if it is on another.

    >>> order = torch.tensor([1, 0])
    >>> index_on(order, torch.device("cpu")) is order
    True
    """
    device_index, wanted_index = index.device.index, device.index  # None for the current device
    is_there = device_index == wanted_index or None in (device_index, wanted_index)
    if index.device.type == device.type and is_there:
        return index
    return TENSOR_MEMO.get_or_make(index, device, lambda: index.to(device), lambda copy: copy.nbytes)
