"""On a GPU: steps of a model as a CUDA graph, bit by bit beside the model's own."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig

from attnmesh import hf
from attnmesh.hf.step_graph import PACKAGES, steps_as_graphs
from tests.support.emulation.noted_graphs import NotedGraph, noted_graphs

pytestmark = pytest.mark.gpu

LLAMA = LlamaConfig(
    vocab_size=500,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=3,
    num_attention_heads=8,
    eos_token_id=None,
)
MOE = Qwen3MoeConfig(
    vocab_size=500, hidden_size=256, moe_intermediate_size=128, num_hidden_layers=2, num_attention_heads=8, head_dim=32,
    num_key_value_heads=2, num_experts=8, num_experts_per_tok=2, eos_token_id=None,
)  # fmt: skip


@pytest.fixture
def graphs() -> Iterator[list[NotedGraph]]:
    """The graphs of steps that are asked for."""
    with noted_graphs() as made:
        yield made


def model_on_gpu(config: Any, kind: Any = AutoModelForCausalLM) -> Any:
    torch.manual_seed(0)
    make = getattr(kind, "from_config", None) or kind._from_config
    return make(config, attn_implementation="attnmesh").to("cuda", torch.bfloat16).eval()


@pytest.mark.parametrize("config", [LLAMA, MOE], ids=["llama", "experts"])
@pytest.mark.parametrize("rows", [1, 3])
def test_each_replay_of_a_model_has_the_bits_of_its_own_pass(graphs: list[NotedGraph], config: Any, rows: int) -> None:
    """Also where the cache grows."""
    model = model_on_gpu(config)
    ids = torch.randint(500, (rows, 320), device="cuda")
    own, cache = (hf.ShardedCache(config, None) for _ in range(2))
    with torch.no_grad():
        model(ids[:, :40], past_key_values=own)
        model(ids[:, :40], past_key_values=cache)
        expected = [model(input_ids=ids[:, [i]], past_key_values=own).logits for i in range(40, 320)]
        with steps_as_graphs(model, cache):
            for i in range(40, 320):
                found = model(input_ids=ids[:, [i]], past_key_values=cache, return_dict=True).logits
                assert torch.equal(found, expected[i - 40]), i
    assert cache.get_seq_length() == own.get_seq_length() == 320
    (steps,) = graphs
    assert steps.given_up or steps.all_captures >= 2
    assert config is MOE or not steps.given_up


class Reading(LlamaForCausalLM):
    """A model in which the CPU reads a number of the GPU."""

    def forward(self, input_ids: Tensor, position_ids: Any = None, past_key_values: Any = None, **inputs: Any) -> Any:
        """Read the first token."""
        assert int(input_ids[0, 0]) >= 0
        return super().forward(input_ids, position_ids=position_ids, past_key_values=past_key_values, **inputs)


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("kind", [LlamaForCausalLM, Reading])
def test_generate_gives_the_same_tokens_with_and_without_a_graph(
    graphs: list[NotedGraph], monkeypatch: pytest.MonkeyPatch, kind: Any, do_sample: bool
) -> None:
    monkeypatch.setattr("attnmesh.hf.step_graph.PACKAGES", (*PACKAGES, "tests"))
    model, ids = model_on_gpu(LLAMA, kind), torch.randint(500, (2, 50), device="cuda")

    def tokens() -> Tensor:
        torch.manual_seed(1)
        return hf.generate(model, ids, mesh=None, max_new_tokens=40, do_sample=do_sample)

    found = tokens()
    (steps,) = graphs
    assert steps.given_up == (kind is Reading)
    monkeypatch.setattr("attnmesh.hf.step_graph._is_capturable", lambda *_: False)
    assert torch.equal(found, tokens())
