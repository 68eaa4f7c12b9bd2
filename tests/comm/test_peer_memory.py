"""Messages through memory that GPUs share: one launch sends, merges and receives."""

from random import Random

import pytest
import torch

from attnmesh.comm import peer_memory
from attnmesh.comm.message import MessageForm
from attnmesh.core.partial import Partial, merge_stack
from tests.support.truth.seeds import seeds
from tests.support.truth.tolerances import FLOAT32

pytestmark = pytest.mark.usefixtures("interpreted")


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of what an earlier step left in a box
@pytest.mark.parametrize("seed", seeds(10, 100))
def test_random_messages_are_merged_in_one_launch(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process plays all ranks: each sends its message to all, then each receives."""
    monkeypatch.setattr(peer_memory, "BOX_FLAGS", 3)
    monkeypatch.setattr(peer_memory, "BOX_ELEMENTS", 1 << 12)
    monkeypatch.setattr(peer_memory, "MAX_POLLS", 3)
    random = Random(seed)
    torch.manual_seed(seed)
    ranks = random.choice((2, 2, 3, 5))
    memories = [torch.zeros(peer_memory.memory_size(ranks)) for _ in range(ranks)]
    addresses = torch.tensor([x.data_ptr() for x in memories])
    everyone = [peer_memory.PeerMemory(addresses, rank, torch.zeros(1, dtype=torch.int32)) for rank in range(ranks)]
    for _ in range(random.choice((1, 2, 3))):
        shape = (random.choice((1, 2)), random.choice((1, 3)), random.choice((1, 3)), random.choice((8, 64, 80)))
        partials = Partial(torch.randn(ranks, *shape), 30 * torch.randn(ranks, *shape[:-1]))
        blind = torch.rand(partials.lse.shape) < 0.3
        partials.lse[blind], partials.out[blind] = -torch.inf, 0.0
        fault = random.choice(("none", "none", "none", "another call", "empty message", "no message"))
        form = MessageForm(shape, torch.float32, torch.float32)
        for rank, (out, lse) in enumerate(zip(*partials, strict=True)):
            last = rank == ranks - 1
            number = 18.0 if last and fault == "another call" else 17.0
            if last and fault == "empty message":
                none = MessageForm((1, 0, 0, 1), torch.float32, torch.float32)
                inf = torch.full((2,), torch.inf)
                message = none.pack(inf, Partial(torch.zeros(none.shape), torch.zeros(none.shape[:-1])))
                everyone[rank].merge(message, none.shape, take=False)
            elif last and fault == "no message":
                everyone[rank].steps.add_(1)
            else:
                checksum = torch.tensor([number, -number])
                everyone[rank].merge(form.pack(checksum, Partial(out, lse)), shape, take=False)
        exact = merge_stack(Partial(*(x.double() for x in partials)))
        for rank in range(ranks):
            if rank == ranks - 1 and fault.endswith("message"):
                continue
            checksum, (out, lse) = everyone[rank].merge(torch.zeros(form.size, dtype=torch.uint8), shape, put=False)
            if fault != "none":
                assert out.isnan().all()
                continue
            assert checksum.tolist() == [17.0, -17.0]
            assert torch.allclose(out.double(), exact.out, atol=2 * FLOAT32)
            assert torch.allclose(lse.double(), exact.lse, rtol=FLOAT32)
