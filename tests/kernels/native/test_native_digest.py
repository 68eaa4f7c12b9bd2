"""Digests on the CPU: those of the formula, and others for other bits."""

import pytest
import torch

from attnmesh.comm.mismatch import call_checksum
from attnmesh.core.digest import SUM_ELEMENTS, digest, digest_of_run, wide_bits
from attnmesh.kernels.native.native_digest import digest_of_rows, digest_on_cpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.int64])
@pytest.mark.parametrize("count", [0, 1, 1000, SUM_ELEMENTS, SUM_ELEMENTS + 1, 4 * SUM_ELEMENTS, 9 * SUM_ELEMENTS + 5])
def test_digests_on_the_host_are_those_of_the_formula(dtype: torch.dtype, count: int) -> None:
    x = (100 * torch.randn(count)).to(dtype)
    assert digest_on_cpu(x) == int(digest(x))
    assert digest_on_cpu(x[::2]) == int(digest(x[::2]))
    device_counts = torch.tensor([5, 3])
    like, number = torch.zeros(2), 7 + 5 + int(digest(x))
    checksum = call_checksum([x], 7, device_counts, like, None)
    assert checksum.tolist() == [number % ((1 << 24) - 3), -(number % ((1 << 24) - 3))]


@pytest.mark.parametrize(
    ("dtype", "width"), [(torch.bfloat16, 4), (torch.bfloat16, 3), (torch.float32, 3), (torch.int8, 5)]
)
@pytest.mark.parametrize(("heads", "slots"), [(1, 20), (3, 9000)])
def test_digests_of_runs_are_those_of_tensors_with_zeros(
    dtype: torch.dtype, width: int, heads: int, slots: int
) -> None:
    whole = torch.zeros(2, heads, slots, width, dtype=dtype)
    run = whole[:, :, 5:18]
    run.copy_((100 * torch.randn(run.shape)).to(dtype))
    expected = int(digest(wide_bits(whole)))
    assert digest_of_rows(run, 5, slots) == digest_of_rows(run.contiguous(), 5, slots) == expected
    assert int(digest_of_run(run.flatten(0, 1), 5, slots)) == expected
    tokens = torch.zeros(slots, dtype=torch.int64)
    tokens[3:9] = torch.randint(2**62, (6,))
    assert digest_of_rows(tokens[3:9], 3, slots) == int(digest(tokens))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
@pytest.mark.parametrize("count", [1, 5, SUM_ELEMENTS + 1])
def test_other_bits_have_another_digest(dtype: torch.dtype, count: int) -> None:
    bits = torch.randint(-(2**62), 2**62, (count,))
    others = [
        ~bits,
        bits ^ (1 << 62),
        bits ^ torch.iinfo(torch.int64).min,
        bits ^ 1,
        bits.roll(1) if count > 1 else -bits,
    ]
    found = [digest_on_cpu(x.view(dtype)) for x in (bits, *others)]
    assert len({*found}) == len(found)
    assert found == [int(digest(x.view(dtype))) for x in (bits, *others)]
