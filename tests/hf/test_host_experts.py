"""Experts that ranks of a host share: tokens of stock transformers, the bits of one rank, each expert on one rank."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import attnmesh as am
import attnmesh.hf as hf
from attnmesh.hf import host_experts
from attnmesh.hf.host_experts import HostExperts
from tests.support.models.tiny_models import Case, build
from tests.support.process.needs import needs_library
from tests.support.ranks.groups import world_axis
from tests.support.ranks.pool import Pool, on_each_rank

pytestmark = needs_library

FAMILIES = ("mixtral", "gpt_oss", "deepseek_v3", "qwen3_next", "jamba")
"""Plain experts, transposed ones with biases, groups of experts beside a shared one, and recurrent layers."""

PROMPT = torch.randint(2, 90, (1, 37), generator=torch.Generator().manual_seed(0))


def shared_model(folder: str, mesh: Any) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="attnmesh").eval()
    host_experts.LEAST_EXPERT_BYTES = 0
    return hf.share_weights(model, mesh)


class Answer(NamedTuple):
    """Tokens, the logits with reproducible bits, and the number of experts that this rank has computed for these."""

    tokens: list[int]
    logits: Tensor | None
    experts: int


@on_each_rank
def answer_and_count_experts(folder: str, ranks: int) -> Answer:
    mesh, computed = am.init_mesh((1, 1, ranks)) if ranks > 1 else None, 0
    model = shared_model(folder, mesh)

    def count(forward: Any) -> Any:
        def counted(tokens: Tensor, chosen: Tensor, weights: Tensor) -> Any:
            nonlocal computed
            computed += len(chosen.unique()) if chosen.shape[1] == 1 else 0
            return forward(tokens, chosen, weights)

        return counted

    for module in model.modules():
        if isinstance(shared := vars(module).get("forward"), HostExperts):
            shared.forward = count(shared.forward)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    tokens = hf.generate(model, PROMPT, mesh=mesh, **options)[0].tolist()
    computed, logits = 0, None
    if not ranks & (ranks - 1):
        cache = hf.ShardedCache(model.config, mesh, block=4, reproducible=True)
        options |= {"return_dict_in_generate": True, "output_logits": True}
        logits = torch.stack(hf.generate(model, PROMPT, cache=cache, **options).logits)
    hf.restore(model)
    assert not any("forward" in vars(module) for module in model.modules())
    return Answer(tokens, logits, computed)


@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        pytest.param(family, ranks, marks=[] if ranks == 2 + place % 3 and family != "jamba" else pytest.mark.long)
        for place, family in enumerate(FAMILIES)
        for ranks in (2, 3, 4)
    ],
)
def test_each_expert_is_computed_by_one_rank(family: str, ranks: int, pool: Pool, tmp_path: Path) -> None:
    stock = build(Case(family, family), "eager", torch.float32)
    stock.save_pretrained(tmp_path)
    expected = stock.generate(PROMPT, max_new_tokens=6, do_sample=False)[0].tolist()
    found = pool.run(ranks, answer_and_count_experts, str(tmp_path), ranks)
    (alone,) = pool.run(1, answer_and_count_experts, str(tmp_path), 1)
    assert [answer.tokens for answer in found] == [expected] * ranks
    if ranks == 3:  # which have no bits in common with one
        return
    assert sum(answer.experts for answer in found) == alone.experts > 0
    assert max(answer.experts for answer in found) < alone.experts
    for answer in found:
        assert torch.equal(answer.logits, alone.logits)


@on_each_rank
def choose_experts(given: tuple[list[list[int]], bool]) -> Tensor:
    """The results of experts that multiply by their number, on the ranks or on one."""
    chosen, is_shared = given

    def forward(tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return tokens * ((index + 1) * weights).sum(1, keepdim=True)

    tokens, index = torch.arange(3 * len(chosen), dtype=torch.float64).view(-1, 3), torch.tensor(chosen)
    weights = torch.linspace(1, 2, index.numel(), dtype=torch.float64).view(index.shape)
    axis = world_axis()
    return HostExperts(forward, axis, lambda: is_shared)(tokens, index, weights)


@pytest.mark.parametrize(
    "chosen",
    [[[5]], [[0, 1]], [[7, 2, 4, 0]], [[3, 1], [1, 3], [3, 0]], [[2, 2], [2, 2]], [[n % 8, 7] for n in range(40)]],
)
def test_any_choice_gives_the_sum_of_one_rank(chosen: list[list[int]], pool: Pool) -> None:
    """Also where fewer experts are chosen than there are ranks, and one expert twice."""
    (expected, *_), shared = (pool.run(3, choose_experts, (chosen, is_shared)) for is_shared in (False, True))
    for found in shared:
        torch.testing.assert_close(found, expected, rtol=1e-15, atol=0)  # float64: one sum in another order
        assert torch.equal(found, shared[0])


def test_experts_are_shared_again_by_a_second_call(tmp_path: Path) -> None:
    build(Case("mixtral", "mixtral"), "eager", torch.float32).save_pretrained(tmp_path)
    model = hf.share_weights(shared_model(str(tmp_path), None), None)
    assert any(isinstance(vars(module).get("forward"), HostExperts) for module in model.modules())
