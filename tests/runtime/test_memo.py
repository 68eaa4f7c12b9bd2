"""Memos of tensors: what is kept, for how long, and what goes first."""

import gc

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from attnmesh.runtime.memo import TensorMemo, index_on


def nbytes(x: torch.Tensor) -> int:
    return x.nbytes


def test_a_value_is_made_once_as_long_as_its_tensor_lives():
    kept, owner = TensorMemo(), torch.arange(4)
    double = owner.double()
    first, again = (kept.get_or_make(owner, "double", double.clone, nbytes) for _ in range(2))
    assert first is again
    assert kept.get_or_make(owner, "another name", double.clone, nbytes) is not first
    assert kept.size == 64
    del owner
    gc.collect()
    assert (len(kept.values), kept.size) == (0, 0)


def test_what_was_used_least_lately_goes_first():
    kept = TensorMemo(max_bytes=64)
    owners = [torch.arange(4) for _ in range(3)]
    for number in (0, 1, 0, 2):
        kept.get_or_make(owners[number], "double", owners[number].double, nbytes)
    assert [owner for owner, _ in kept.values] == [id(owners[0]), id(owners[2])]
    assert kept.size == 64


def test_a_value_that_is_too_large_is_not_kept():
    kept, owner = TensorMemo(max_bytes=8), torch.arange(4)
    assert torch.equal(kept.get_or_make(owner, "same", owner.clone, nbytes), owner)
    assert (len(kept.values), kept.size) == (0, 0)


def test_an_index_of_one_gpu_is_copied_to_another():
    with FakeTensorMode():
        index = torch.zeros(2, dtype=torch.int64, device="cuda:0")
        assert index_on(index, index.device) is index
        assert index_on(index, torch.device("cuda")) is index
        assert index_on(index, torch.device("cuda:1")).device == torch.device("cuda:1")
