"""Merges and checksums of one launch, of which messages are made: against float64 and PyTorch."""

from random import Random

import pytest
import torch

from attnmesh.comm.message import MessageForm
from attnmesh.comm.mismatch import MODULUS, checksum_of
from attnmesh.core.digest import digest
from attnmesh.core.partial import Partial, merge_stack, with_sinks
from attnmesh.kernels import stacked_merge as merging
from tests.support.truth.seeds import seeds
from tests.support.truth.tolerances import FLOAT32

pytestmark = pytest.mark.usefixtures("interpreted")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("seed", seeds(15, 100))
def test_checksums_of_random_calls_agree_with_pytorch(seed: int) -> None:
    random = Random(seed)
    torch.manual_seed(seed)
    tensors = [
        torch.randn(random.randint(1, 3000), dtype=random.choice((*DTYPES, torch.float64)))
        for _ in range(random.choice((1, 2)))
    ]
    call, device_counts, into = random.getrandbits(32), torch.tensor([random.getrandbits(20), 0]), torch.empty(2)
    expected = checksum_of(sum(map(digest, tensors), start=call + device_counts[0]), into)
    assert torch.equal(merging.launch_checksum(tensors, call, device_counts, MODULUS, into), expected)


@pytest.mark.parametrize("seed", seeds(15, 100))
def test_random_merges_agree_with_float64(seed: int) -> None:
    """In tensors of their own or packed in messages that are longer than they are, with sinks and checksums or not."""
    random = Random(seed)
    torch.manual_seed(seed)
    shape = random.choice((1, 2, 3, 8, 17)), random.choice((1, 3)), random.choice((1, 4)), random.choice((1, 5, 33))
    partials = Partial(torch.randn(*shape, random.choice((8, 64, 80))), 30 * torch.randn(shape))
    blind = torch.rand(shape) < 0.3
    partials.lse[blind], partials.out[blind] = -torch.inf, 0.0
    sinks = torch.randn(shape[2]) if random.random() < 0.5 else None
    exact = with_sinks(merge_stack(Partial(*(x.double() for x in partials))), sinks)
    if random.random() < 0.5:
        form = MessageForm(tuple(partials.out.shape[1:]), torch.float32, random.choice((torch.float32, torch.bfloat16)))
        agreed = random.random() < 0.7
        numbers = [17.0] * (shape[0] - 1) + [17.0 if agreed else 18.0]
        rows = torch.zeros(shape[0], form.size + 12, dtype=torch.uint8)
        for row, number, out, lse in zip(rows, numbers, *partials, strict=True):
            row[: form.size] = form.pack(torch.tensor([number, -number]), Partial(out, lse))
        checksum, whole = form.partial_views(form.merge_to_message(rows[:, : form.size]))
        assert checksum.tolist() == [max(numbers), -min(numbers)]
        if min(numbers) < max(numbers):
            assert whole.out.isnan().all()
            return
        given, sinks, exact = whole, None, merge_stack(Partial(*(x.double() for x in partials)))
        rounding = 2**-8 if form.out_dtype == torch.bfloat16 else 1e-6
    else:
        given, rounding = merging.merge_stack_on_device(partials, sinks=sinks), 1e-6
    largest = partials.out.abs().max().item()
    assert torch.allclose(given.out.double(), exact.out, rtol=0, atol=2 * rounding * max(1.0, largest))
    assert torch.allclose(given.lse.double(), exact.lse, rtol=FLOAT32)
