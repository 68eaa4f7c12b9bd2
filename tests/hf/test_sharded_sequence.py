"""A forward pass over shards: its configuration is looked at once, and nothing waits for a batch that is gone."""

from typing import Any
from unittest.mock import Mock
from weakref import ref

import pytest

import attnmesh.hf as hf
from attnmesh import errors
from attnmesh.hf import layer_checks
from attnmesh.hf.sharded_sequence import BegunPass
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
    begun.sequence_ref = waits
    del first
    assert begun.sequence_ref is None
    begun.sequence_ref = others = ref(second, begun.forget)  # type: ignore[assignment]
    begun.forget(waits)  # of an earlier batch
    assert begun.sequence_ref is others


def test_a_configuration_is_looked_at_once_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    look = Mock(return_value=2)
    monkeypatch.setattr(layer_checks, "num_mixing_calls", look)
    model, ids = families.model("llama", "attnmesh"), prompt(20)
    batch = hf.shard_batch({"input_ids": ids, "labels": ids}, None)
    for passes in (1, 2):
        model(**batch)
        assert look.call_count == passes
        assert batch["input_ids"].sequence.forward_pass.layers == 2


def test_the_old_name_of_a_sequence_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "_warned", set())
    with pytest.warns(FutureWarning, match="Shards is now attnmesh.hf.ShardedSequence") as caught:
        assert hf.Shards is hf.ShardedSequence
    assert caught[0].filename == __file__
    with pytest.raises(AttributeError, match="has no attribute 'Shard'"):
        hf.Shard  # noqa: B018
