"""A new kind of mask is a function of `core/mask.py`: what it sees is seen by every call and every kernel."""

import pytest
import torch

import attnmesh as am
from attnmesh.core.mask import Mask
from tests.support.dense import dense

pytestmark = pytest.mark.quick


def prefix(tokens: int) -> Mask:
    """Return a made-up kind: a prompt whose tokens see each other both ways, and causal tokens after it."""
    return Mask(right=0, spans=(0, tokens))


@pytest.mark.parametrize("kernel", ["auto", "cpu", "reference"])
def test_a_made_up_mask_is_served_by_each_call(kernel: str) -> None:
    mask, positions = prefix(7), torch.arange(20)
    visible = (positions <= positions[:, None]) | ((positions < 7) & (positions[:, None] < 7))
    assert torch.equal(mask.visible(positions, positions), visible)
    assert Mask.decode(mask.encode()) == mask
    q, k, v = torch.randn(3, 1, 2, 20, 8).unbind()
    expected, _, _ = dense(q, k, v, visible, 8**-0.5)
    torch.testing.assert_close(am.attend(q, k, v, mask=mask, kernel=kernel).out, expected)
    torch.testing.assert_close(am.attention(q, k, v, mesh=None, mask=mask, kernel=kernel), expected)
    cache = am.KVCache(None, batch=1, kv_heads=2, head_dim=8, capacity=20, dtype=torch.float32)
    cache.append(k, v)
    given = am.decode(q[:, :, -15:], cache, mask=mask, kernel=kernel)
    torch.testing.assert_close(given, expected[:, :, -15:])
