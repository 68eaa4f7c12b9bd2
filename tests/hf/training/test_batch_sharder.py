"""Packed batches of collators: documents are those of positions, and lengths that contradict these are refused."""

import pytest
import torch
from transformers import DataCollatorWithFlattening

import attnmesh.hf as hf
from attnmesh import errors
from tests.support.models import families
from tests.support.models.families import prompt
from tests.support.truth.tolerances import FLOAT32_SUMS

SEQUENCES = [{"input_ids": prompt(n, seed=n)[0].tolist()} for n in (10, 33, 21)]


def test_batches_of_padding_free_collators_are_accepted() -> None:
    packed = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)(SEQUENCES)
    assert {"cu_seq_lens_q", "max_length_k", "seq_idx", "position_ids"} <= packed.keys()
    part = hf.shard_batch(packed, None)
    assert not {"cu_seq_lens_q", "max_length_k", "seq_idx"} & part.keys()
    assert part["attention_mask"].sequence.documents.ends == (10, 43, 64)
    with torch.no_grad():
        given = families.model("llama", "attnmesh")(**part).loss
        stock = families.model("llama", "eager")
        losses = [stock(torch.tensor([x["input_ids"]]), labels=torch.tensor([x["input_ids"]])).loss for x in SEQUENCES]
    counts = [len(x["input_ids"]) - 1 for x in SEQUENCES]
    expected = sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)
    assert float(given) == pytest.approx(float(expected), rel=FLOAT32_SUMS)


@pytest.mark.parametrize("name", ["cu_seq_lens_q", "cu_seq_lens_k"])
def test_lengths_that_contradict_positions_are_refused(name: str) -> None:
    packed = DataCollatorWithFlattening(return_flash_attn_kwargs=True)(SEQUENCES)
    with pytest.raises(errors.MaskError, match=f"{name}: expected .0, 10, 43, 64., as in position_ids, given .0"):
        hf.shard_batch({**packed, name: torch.tensor([0, 64])}, None)
    del packed["position_ids"]
    with pytest.raises(errors.MaskError, match="expected position_ids and no attention_mask"):
        hf.shard_batch(packed, None)
