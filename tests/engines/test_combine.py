"""Merges for serving engines equal attention over the keys of all ranks."""

import ast
import functools
import inspect
import json
import math
import sys
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from attnmesh import errors
from attnmesh.engines import combine, sglang, vllm
from tests.support.ranks.pool import Pool, on_each_rank

TOKENS, HEADS, DIM = 7, 6, 8
STARTS = torch.tensor([0, 1, 4, 7])
"""Three sequences of one, three and three tokens, as in speculative decoding."""


class Coordinator:
    """What engines pass as their group."""

    def __init__(self) -> None:
        self.device_group = dist.group.WORLD
        self.world_size, self.rank_in_group = dist.get_world_size(), dist.get_rank()


def partials(ranks: int, rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a rank's output and lse of its keys, and those over all keys. Rank 1 has no keys of the last sequence."""
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(TOKENS, HEADS, DIM, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, ranks, 5, HEADS, DIM, generator=generator, dtype=torch.float64).unbind()
    logits = torch.einsum("thd,rnhd->trnh", q, k)
    logits[4:, 1:2] = -torch.inf
    whole, own = logits.flatten(1, 2), logits[:, rank]
    expected = torch.einsum("tnh,nhd->thd", whole.softmax(1), v.flatten(0, 1))
    out = torch.einsum("tnh,nhd->thd", own.softmax(1), v[rank])  # NaN without keys
    return out, own.logsumexp(1), expected, whole.logsumexp(1)


@on_each_rank
def merge_shares(base: str, mark: float, dtype: torch.dtype, empty: str) -> dict[str, Any]:
    """Return the shares of this rank by each function, and what they should be."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    out, lse, expected, total = (x.to(dtype) for x in partials(ranks, rank))
    factor = 1 if base == "e" else math.log2(math.e)
    lse, total = (lse.to(torch.float32 if dtype != torch.float64 else dtype) * factor for lse in (lse, total))
    options: dict[str, Any] = {"is_lse_base_on_e": base == "e"}
    if empty == "marked":
        lse = lse.masked_fill(lse == -torch.inf, mark)
    else:  # the lengths say it, and the row holds garbage
        lse, out = lse.masked_fill(lse == -torch.inf, 9.0), out.nan_to_num(7.0)
        options |= {"seq_lens": torch.tensor([5, 5, 0 if rank == 1 else 5]), "query_start_loc": STARTS}
    share = list(expected.tensor_split(ranks, 1))[rank], list(total.tensor_split(ranks, 1))[rank]
    group = Coordinator()
    found = {
        "combine": combine(out, lse, cp_group=group, return_lse=True, **options),
        "vllm": vllm.cp_lse_ag_out_rs(out, lse, group, return_lse=True, **options),
        "vllm, all heads": vllm.cp_lse_ag_out_ar(out, lse, group, return_lse=True, **options),
    }
    found["protocol"] = functools.partial(combine, cp_group=group, **options)(out, lse), share[1]
    if empty == "marked":
        base_e = base == "e"
        found["mla"] = sglang.cp_lse_ag_out_rs_mla(out, lse, group, is_lse_base_on_e=base_e), share[1]
        found["a2a"] = sglang.dcp_a2a_lse_reduce(out, lse, group, is_lse_base_on_e=base_e), share[1]
        if base_e:
            found["mha"] = sglang.cp_lse_ag_out_rs_mha(out, lse, group, return_lse=True)
    wanted = dict.fromkeys(found, share) | {"vllm, all heads": (expected, total)}
    return {name: (given, wanted[name]) for name, given in found.items()}


CASES = [
    (1, "e", torch.nan, torch.float64, "marked"),
    (2, "e", -torch.inf, torch.float64, "marked"),
    (3, "2", torch.nan, torch.float64, "marked"),
    (4, "e", torch.inf, torch.float64, "marked"),  # 6 heads on 4 ranks
    (4, "2", torch.nan, torch.float64, "by length"),
    (2, "2", torch.inf, torch.bfloat16, "marked"),
]


@pytest.mark.parametrize(("ranks", "base", "mark", "dtype", "empty"), CASES)
def test_merges_equal_attention_over_all_keys(
    ranks: int, base: str, mark: float, dtype: torch.dtype, empty: str, pool: Pool
) -> None:
    tolerance = 1e-12 if dtype == torch.float64 else 2e-2  # bfloat16 has three digits
    for answer in pool.run(ranks, merge_shares, base, mark, dtype, empty):
        for name, (given, wanted) in answer.items():
            for x, y in zip(given, wanted, strict=True):
                assert x.shape == y.shape, name
                assert torch.allclose(x.double(), y.double(), rtol=tolerance, atol=tolerance), name


def test_tokens_beyond_the_last_sequence_are_ignored() -> None:
    from attnmesh.engines.combine import _without_keys

    lengths, starts = torch.tensor([0, 2]), torch.tensor([0, 2, 3])
    assert _without_keys(5, lengths, starts).tolist() == [True, True, False, False, False]
    assert _without_keys(4, lengths, None).tolist() == [True, False, False, False]


# --- contracts: signatures that tools.engine_signatures has read in the engines' sources ---

RECORD = json.loads((Path(__file__).parent / "signatures.json").read_text())
OURS = {
    "vllm": (vllm.cp_lse_ag_out_rs, vllm.cp_lse_ag_out_ar),
    "sglang": (sglang.cp_lse_ag_out_rs_mha, sglang.cp_lse_ag_out_rs_mla, sglang.dcp_a2a_lse_reduce),
}
PLACES = {"vllm": "vllm/v1/attention/ops/dcp.py", "sglang": sglang.MERGE_MODULE.replace(".", "/") + ".py"}
HOOKS = "sglang/srt/plugins/hook_registry.py"


def recorded(engine: str, file: str, name: str) -> ast.arguments:
    """Return the parameters of an engine's function, without annotations."""
    (node,) = ast.parse(f"def f({RECORD[engine]['files'][file][name]}): ...").body
    assert isinstance(node, ast.FunctionDef)
    for parameter in (*node.args.args, *node.args.kwonlyargs):
        parameter.annotation = None
    return node.args


@pytest.mark.parametrize(("engine", "function"), [(engine, one) for engine in OURS for one in OURS[engine]])
def test_signatures_are_those_of_the_engines(engine: str, function: Any) -> None:
    """Names, order and defaults: an engine may pass each argument by position or by name."""
    ours = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in inspect.signature(function).parameters.values()
    ]
    theirs = recorded(engine, PLACES[engine], function.__name__)
    assert str(inspect.Signature(ours)) == f"({ast.unparse(theirs)})"


@pytest.mark.parametrize("engine", OURS)
def test_pages_name_the_versions_that_were_read(engine: str) -> None:
    version = f"{engine} {RECORD[engine]['version']}"
    assert version in (vllm if engine == "vllm" else sglang).__doc__
    assert version in (Path(__file__).parents[2] / "docs" / "engines.md").read_text().lower()


def test_combine_follows_the_protocol_of_vllm() -> None:
    theirs = recorded("vllm", PLACES["vllm"], "DCPCombine.__call__")
    by_position, by_name = len(theirs.args) - 1, [parameter.arg for parameter in theirs.kwonlyargs]  # without self
    inspect.signature(functools.partial(combine, cp_group=None)).bind(*[None] * by_position, **dict.fromkeys(by_name))
    assert [parameter.arg for parameter in theirs.args[1:]] == [*inspect.signature(combine).parameters][:by_position]


def test_hooks_are_registered_as_sglang_declares() -> None:
    theirs = recorded("sglang", HOOKS, "HookRegistry.register")
    assert [parameter.arg for parameter in theirs.args] == ["cls", "target", "hook", "hook_type"]
    assert f"{sglang.HOOK_MODULE.replace('.', '/')}.py" == HOOKS


def test_the_plugin_replaces_the_merges_of_sglang_when_it_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[tuple[str, Any, Any]] = []
    hooks = ModuleType(sglang.HOOK_MODULE)
    kinds = Enum("HookType", ["AROUND", "REPLACE"])
    registry = type("HookRegistry", (), {"register": staticmethod(lambda *call: registered.append(call))})
    vars(hooks).update(HookType=kinds, HookRegistry=registry)
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, hooks.__name__, hooks)
    monkeypatch.delenv("ATTNMESH_SGLANG", raising=False)
    sglang.load_plugin()
    assert not registered
    monkeypatch.setenv("ATTNMESH_SGLANG", "1")
    sglang.load_plugin()
    places = {
        function: f"{PLACES['sglang'].removesuffix('.py').replace('/', '.')}.{function.__name__}"
        for function in OURS["sglang"]
    }
    assert registered == [(place, merge, kinds["REPLACE"]) for merge, place in places.items()]


# --- bad input ---

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "lse": ({"partial_lse": torch.zeros(6, 7)}, "ShapeError: combine: expected an output (tokens, heads, dim) and its"),
    "dims": (
        {"partial_output": torch.zeros(1, 7, 6, 8)},
        "ShapeError: combine: expected an output (tokens, heads, dim",
    ),
    "ints": ({"partial_lse": torch.zeros(7, 6).int()}, "DtypeError: combine: expected an output and a log-sum-exp in"),
    "list": ({"partial_output": [1.0]}, "DtypeError: combine partial_output: expected a tensor of floats, given list."),
    "lengths": (
        {"seq_lens": torch.zeros(9).long()},
        "ShapeError: combine seq_lens: expected a length of each sequence",
    ),
    "starts": (
        {"query_start_loc": [0, 7]},
        "DtypeError: combine query_start_loc: expected a tensor (sequences,) of in",
    ),
    "output": ({"output": "rows"}, "KernelError: merge_across output: expected one of"),
    "base": ({"is_lse_base_on_e": False}, "MeshError: merge_across: expected the same call on every rank, given:"),
}


@on_each_rank
def catch_error_of_bad_call(name: str) -> str:
    """Return the error of a call that is wrong on the last rank alone."""
    call: dict[str, Any] = {"partial_output": torch.zeros(7, 6, 8), "partial_lse": torch.zeros(7, 6)}
    if dist.get_rank() == 2:
        call |= BAD[name][0]
    try:
        combine(**call, cp_group=dist.group.WORLD)
    except errors.InputError as error:
        combine(torch.zeros(7, 6, 8), torch.zeros(7, 6), cp_group=dist.group.WORLD)  # ranks go on together
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_one_rank_checks_its_call_and_clears_rows_without_keys() -> None:
    out, lse = torch.full((2, 1, 3), torch.nan), torch.tensor([[torch.inf], [torch.nan]])
    assert torch.equal(combine(out, lse, cp_group=None), torch.zeros(2, 1, 3))
    with pytest.raises(errors.KernelError, match="merge_across output: expected one of"):
        combine(out, lse, cp_group=None, output="rows")


@pytest.mark.parametrize("name", BAD)
def test_bad_calls_raise_alike(name: str, pool: Pool) -> None:
    answers = pool.run(3, catch_error_of_bad_call, name)
    assert len(set(answers)) == 1, answers
    assert answers[0].startswith(BAD[name][1]), answers[0]
