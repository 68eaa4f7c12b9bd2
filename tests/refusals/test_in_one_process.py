"""Calls in one process: each error has its type, what was expected and given, and a fix that works."""

import pickle
from pathlib import Path

import pytest
import torch

import attnmesh as am
from attnmesh import errors, hf
from tests.refusals.cases import fixed, fixed_models, in_one_process
from tests.refusals.cases.in_one_process import LEARNED, append, attend, attention, decode, heads
from tests.refusals.refusal import Refusal, T
from tests.support.models import families

pytestmark = pytest.mark.quick

ROWS = [row for room in (in_one_process, fixed, fixed_models) for row in room.IN_ONE_PROCESS]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_bad_call_raises_and_one_by_its_fix_is_right(row: Refusal) -> None:
    with pytest.raises(row.error, match=row.text) as caught:
        row.call(**row.change)
    assert isinstance(caught.value, ValueError)
    assert str(caught.value).count("Fix: ") == 1
    if row.fixed:
        row.fixed.check()


@pytest.mark.parametrize("name", ["dropout_p", "logits_soft_cap", "score_mod", "attn_mask", "is_causal", "enable_gqa"])
def test_options_of_other_attention_functions_raise(name: str) -> None:
    for call in (attention, attend):
        with pytest.raises(errors.KernelError, match=f"exact softmax attention .* given {name}=0.1. Fix: "):
            call(**{name: 0.1})
    with pytest.raises(TypeError, match=r"the arguments of its signature, given mesk=Mask\. Fix: see help"):
        attention(mesk=am.Causal())


def test_options_that_say_what_is_done_anyway_are_taken() -> None:
    expected = attention()
    for options in ({"dropout_p": 0.0, "attn_mask": None}, {"dropout_p": 0, "is_causal": True, "enable_gqa": False}):
        assert torch.equal(attention(**options), expected)


@torch.no_grad()
def test_caches_take_learned_tensors_where_no_gradients_are_asked_for() -> None:
    append(k=LEARNED, v=LEARNED)
    decode(q=LEARNED)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # PyTorch's own jvp
def test_forward_mode_raises() -> None:
    q, k, v = heads()
    with pytest.raises(
        errors.KernelError, match=r"without a forward-mode tangent, given a dual number\. Fix: leave the tangent out"
    ):
        torch.func.jvp(lambda x: am.attention(x, k, v), (q,), (torch.ones_like(q),))
    with pytest.raises(errors.KernelError, match="attention sinks: expected a tensor without a forward-mode tangent"):
        torch.func.jvp(lambda x: am.attention(q, k, v, sinks=x), (T(4),), (T(4),))


def test_errors_can_be_pickled() -> None:
    error = errors.MaskError("attend mask", "one thing", "another", "change it")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is errors.MaskError
    assert str(again) == str(error) == "attend mask: expected one thing, given another. Fix: change it."


def test_a_cache_in_a_folder_has_pages_after_a_fork(tmp_path: Path) -> None:
    kv_cache = fixed.cache(fixed.LENGTH, folder=tmp_path / "keys")
    with pytest.raises(errors.KernelError, match=r"Fix: call cache.fork\(\) first"):
        kv_cache.pages()
    assert kv_cache.fork().pages()


def test_a_cache_of_several_layers_is_restored_as_its_fix_says(tmp_path: Path) -> None:
    two = families.model("llama", "attnmesh", num_hidden_layers=2)
    kv_cache = hf.ShardedCache(two.config)
    hf.prefill(two, fixed_models.IDS, kv_cache)
    kv_cache.save(tmp_path)
    with pytest.raises(errors.StoreError, match=r"Fix: call hf.ShardedCache\(config, mesh\).restore\(path\)"):
        am.KVCache.load(tmp_path, None)
    restored = hf.ShardedCache(two.config, None)
    restored.restore(tmp_path)
    assert restored.get_seq_length() == kv_cache.get_seq_length()
    with pytest.raises(errors.ShapeError, match=r"Fix: pass capacity=9\."):
        hf.ShardedCache(two.config, None).restore(tmp_path, capacity=5)
    restored.restore(tmp_path, capacity=9)
    assert restored.get_seq_length() == kv_cache.get_seq_length()
