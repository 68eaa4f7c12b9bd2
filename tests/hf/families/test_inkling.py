"""Inkling's bias by distance on one device, before and after its layers are prepared for shards."""

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import attnmesh.hf as hf
from attnmesh.errors import KernelError
from attnmesh.hf.families.inkling import NearLogits
from attnmesh.hf.recurrent.prepare_recurrent import prepare_layers
from tests.support.models.checks import DoublePrecision
from tests.support.models.sizes import VOCABULARY
from tests.support.models.tiny_models import Case, build

CASE = Case("inkling_text", "inkling_text")
IDS = torch.randint(2, VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(0))


def logits(model: PreTrainedModel) -> Tensor:
    """Return logits of a batch with padding, and of its last tokens after the others in a cache of transformers."""
    mask = torch.ones_like(IDS)
    mask[1, :5] = 0
    with DoublePrecision(), torch.no_grad():
        whole = model(IDS, attention_mask=mask, use_cache=False).logits[:, 5:]
        cache = DynamicCache(config=model.config)
        parts = [model(some, past_key_values=cache).logits for some in IDS.split([37, 2, 1], 1)]
    return torch.cat((whole, *parts), 1)


@pytest.mark.parametrize("prepares", [False, True])
def test_logits_on_one_device_are_those_of_stock(prepares: bool) -> None:
    model, stock = (build(CASE, attention, torch.float64).eval() for attention in ("attnmesh", "eager"))
    expected = logits(stock)
    if prepares:
        prepare_layers(model)
    assert any(isinstance(module, NearLogits) for module in model.modules()) == prepares
    # Float64; all but attention is the same code.
    torch.testing.assert_close(logits(model), expected, rtol=1e-9, atol=1e-9)
    model.set_attn_implementation("eager")
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=0)
    hf.restore(model)
    relative = model.model.layers[0].self_attn.rel_logits_proj
    assert not isinstance(relative, NearLogits)
    assert "config" not in vars(relative)
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=0)


def test_a_bias_of_another_model_is_refused() -> None:
    model = build(Case("llama", "llama"), "attnmesh", torch.float32)
    with pytest.raises(KernelError, match="position_bias"):
        model(IDS, position_bias=torch.zeros(1))
