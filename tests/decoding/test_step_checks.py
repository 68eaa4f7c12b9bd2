"""What the checks of a step settle: the spec that it runs by. Calls that they refuse are in tests/refusals/cases."""

import math
from typing import Any

import pytest
import torch

import attnmesh as am
from attnmesh.comm.merges import MERGES
from attnmesh.core.partial import Partial
from attnmesh.core.scaling import Scaling, bias_columns
from attnmesh.decoding.step_arguments import StepInputs, StepOptions
from attnmesh.decoding.step_checks import check_reproducible, inputs_and_spec, reads_length_on_device
from attnmesh.errors import DtypeError, InputError, KernelError, MaskError, ShapeError

pytestmark = pytest.mark.quick

OPTIONS = StepOptions(am.Causal(), None, None, "auto", "replicated", reproducible=False, kernel="auto")
Q = torch.ones(2, 4, 1, 16)


def cache_of(**options: Any) -> am.KVCache:
    """Return a cache of six tokens, with two key heads."""
    sizes = {"batch": 2, "kv_heads": 2, "head_dim": 16, "value_dim": 8, "capacity": 32, "block": 4}
    cache = am.KVCache(None, **{**sizes, "dtype": torch.float32, **options})
    cache.append(torch.ones(2, 2, 6, 16), torch.ones(2, 2, 6, 8))
    return cache


def test_a_plain_step_has_the_options_of_its_caller_and_the_sizes_of_its_cache() -> None:
    given = StepInputs(Q, [cache_of()])
    inputs, spec = inputs_and_spec(given, OPTIONS, None, {})
    assert inputs.q is Q
    assert (spec.block, spec.capacity, spec.value_dim) == (4, 32, 8)
    assert (spec.heads_axis.size, spec.token_axis.size) == (1, 1)
    assert spec.options == OPTIONS._replace(scale=16**-0.5, softcap=math.inf)
    assert spec.index_block is None


def test_a_scale_and_a_cap_are_those_of_the_caller() -> None:
    _, spec = inputs_and_spec(StepInputs(Q, [cache_of()]), OPTIONS._replace(scale=-0.5, softcap=3.0), None, {})
    assert spec.scaling == Scaling(-0.5, 3.0)


def test_a_selection_says_how_many_tokens_an_index_selects() -> None:
    selection = am.Selection(torch.zeros(2, 1, 1, 1, dtype=torch.int32), block=4)
    _, spec = inputs_and_spec(StepInputs(Q, [cache_of()], selected=selection), OPTIONS, None, {})
    assert spec.index_block == 4


def test_a_bias_is_columns_of_the_queries_which_the_reference_kernel_reads() -> None:
    bias = torch.arange(24.0).view(2, 4, 1, 3)
    inputs, spec = inputs_and_spec(StepInputs(Q, [cache_of()]), OPTIONS, bias, {})
    assert spec.options.kernel == "reference"
    assert bias_columns(inputs.q, 16) == 3
    assert torch.equal(inputs.q[..., :16], Q)
    assert torch.equal(inputs.q[..., 16:], bias)


@pytest.mark.parametrize(
    ("out", "lse", "error"),
    [
        (torch.ones(2, 4, 1, 8), torch.ones(2, 4, 1), None),
        (torch.ones(2, 4, 1, 16), torch.ones(2, 4, 1), ShapeError),
        (torch.ones(2, 4, 1, 8), torch.ones(2, 2, 1), ShapeError),
        (torch.ones(2, 4, 1, 8).half(), torch.ones(2, 4, 1), DtypeError),
        (torch.ones(2, 4, 1, 8), torch.ones(2, 4, 1).double(), DtypeError),
        (torch.ones(2, 4, 1, 8, requires_grad=True), torch.ones(2, 4, 1), KernelError),
    ],
    ids=["fits", "key columns", "key heads", "half", "double", "gradients"],
)
def test_the_partial_of_other_keys_has_the_rows_of_the_queries_and_the_columns_of_values(
    out: torch.Tensor, lse: torch.Tensor, error: type[Exception] | None
) -> None:
    inputs = StepInputs(Q, [cache_of()], other_partial=Partial(out, lse))
    if error is None:
        inputs_and_spec(inputs, OPTIONS, None, {})
        return
    with pytest.raises(error, match="decode partial"):
        inputs_and_spec(inputs, OPTIONS, None, {})


@pytest.mark.parametrize("reach", [2, 3, 4])
def test_queries_see_no_further_back_than_the_cache_remembers(reach: int) -> None:
    inputs, options = StepInputs(Q, [cache_of(mask=am.Window(3))]), OPTIONS._replace(mask=am.Window(reach))
    if reach <= 3:
        assert inputs_and_spec(inputs, options, None, {})[1].options.mask == am.Window(reach)
        return
    with pytest.raises(MaskError, match="by which the cache forgets tokens, or a narrower mask"):
        inputs_and_spec(inputs, options, None, {})


@pytest.mark.parametrize("merge", ["auto", *MERGES])
def test_bits_are_reproducible_on_a_power_of_two_of_ranks_that_merge_along_a_tree(merge: str) -> None:
    def is_served(ranks: int) -> bool:
        try:
            check_reproducible("decode reproducible", True, ranks, merge)
        except InputError:
            return False
        return True

    served = [ranks for ranks in range(1, 20) if is_served(ranks)]
    assert served == ([1, 2, 4, 8, 16] if merge in ("auto", "tree") else [])
    check_reproducible("decode reproducible", False, 3, merge)
    with pytest.raises(KernelError, match="expected True or False, given 1"):
        check_reproducible("decode reproducible", 1, 2, merge)


def test_the_cpu_reads_the_length_of_a_cache_beside_it() -> None:
    assert not reads_length_on_device(cache_of().own_shard.view, "auto", torch.float32)
