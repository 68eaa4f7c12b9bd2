"""A forward pass over shards: its configuration is looked at once, and nothing waits for a batch that is gone."""

from typing import Any
from unittest.mock import Mock
from weakref import ref

import pytest

import attnmesh.hf as hf
from attnmesh.hf import layer_checks
from attnmesh.hf.shards import BegunPass
from tests.support.models import families
from tests.support.models.families import prompt


def batch(**more: Any) -> dict[str, Any]:
    ids = prompt(21, batch=2)
    return hf.shard_batch({"input_ids": ids, "labels": ids, **more}, None)


def test_a_pass_whose_batch_is_gone_waits_for_no_mask() -> None:
    class Gone:
        """What a batch holds, of a pass that was broken off."""

    begun, first, second = BegunPass(), Gone(), Gone()
    waits: Any = ref(first, begun.forget)
    begun.shards_ref = waits
    del first
    assert begun.shards_ref is None
    begun.shards_ref = others = ref(second, begun.forget)  # type: ignore[assignment]
    begun.forget(waits)  # of an earlier batch
    assert begun.shards_ref is others


def test_a_configuration_is_looked_at_once_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    look = Mock(return_value=2)
    monkeypatch.setattr(layer_checks, "num_mixing_calls", look)
    model, ids = families.model("llama", "attnmesh"), prompt(20)
    batch = hf.shard_batch({"input_ids": ids, "labels": ids}, None)
    for passes in (1, 2):
        model(**batch)
        assert look.call_count == passes
        assert batch["input_ids"].shards.forward_pass.layers == 2
