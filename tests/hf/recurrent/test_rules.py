"""Links of recurrent layers: shards folded one after the other give what stock transformers gives for all tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from itertools import accumulate, pairwise
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from transformers import MiniMaxConfig
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru

from attnmesh.hf.families.minimax import lightning_link
from attnmesh.hf.families.recurrent_gemma import rg_lru_link
from attnmesh.hf.family import recurrences
from attnmesh.hf.recurrent import rules as recurrent_rules
from attnmesh.hf.recurrent.rules import Rule, StateLink
from tests.support.models.families import prompt
from tests.support.models.tiny_models import Case, all_types, build

GATED_DELTA = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "qwen4_exp")
KIMI_DELTA = ("kimi_linear", "bailing_hybrid", "glm5_next")
MAMBA2 = ("mamba2", "bamba", "granitemoehybrid", "nemotron_h", "zamba2", "falcon_h1")
MAMBA1 = ("mamba", "falcon_mamba", "jamba", "zamba")
FAMILIES: dict[str, tuple[str, ...]] = {
    "torch_chunk_gated_delta_rule": GATED_DELTA,
    "torch_recurrent_gated_delta_rule": GATED_DELTA,
    "chunk_kimi_delta_attention": KIMI_DELTA,
    "recurrent_kimi_delta_attention": KIMI_DELTA,
    "mamba2_chunk_scan": MAMBA2,
    "mamba_selective_scan": MAMBA1,
}
RULES = {
    name: rule for kind in recurrences().values() for name, rule in kind.functions.items() if isinstance(rule, Rule)
}
CUTS = (1, 37, 64, 1, 27)
"""Tokens per shard."""

BATCH, TOKENS = 2, sum(CUTS)

TOLERANCE = 2e-5
"""Largest error relative to the largest element: float32 rounds 130 dependent steps, each to 6e-8, in two orders."""


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute in segments shorter than shards, so that states pass from one segment to the next."""
    monkeypatch.setattr(recurrent_rules, "SEGMENT_TOKENS", dict.fromkeys(recurrent_rules.SEGMENT_TOKENS, 32))


def module_of(family: str) -> ModuleType:
    return import_module(f"transformers.models.{family}.modeling_{family}")


@dataclass
class Inputs:
    """Arguments of a rule, and the dimension of the tokens, by name. The first five are positional in the models."""

    tensors: dict[str, Tensor]
    token_dim: dict[str, int]
    options: dict[str, Any]
    positional: tuple[str, ...]

    def arguments(self, tensors: dict[str, Tensor]) -> tuple[list[Tensor], dict[str, Any]]:
        keywords = {name: x for name, x in tensors.items() if name not in self.positional}
        return [tensors[name] for name in self.positional], keywords | self.options

    def shards(self, tensors: dict[str, Tensor], cuts: tuple[int, ...] = CUTS) -> list[dict[str, Tensor]]:
        spans = pairwise(accumulate(cuts, initial=0))
        return [
            {n: x.narrow(self.token_dim[n], a, b - a) if n in self.token_dim else x for n, x in tensors.items()}
            for a, b in spans
        ]


def inputs_of(rule: str) -> Inputs:
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    if rule == "mamba2_chunk_scan":
        tensors = {
            "hidden_states": normal(BATCH, TOKENS, 4, 8), "dt": normal(BATCH, TOKENS, 4) - 2, "A": -normal(4).exp(),
            "B": normal(BATCH, TOKENS, 2, 5), "C": normal(BATCH, TOKENS, 2, 5), "D": normal(4), "dt_bias": normal(4),
        }  # fmt: skip
        options = {
            "chunk_size": 16,
            "z": None,
            "dt_softplus": True,
            "dt_limit": (1e-3, 0.5),
            "return_final_states": True,
        }
        return Inputs(tensors, dict.fromkeys(("hidden_states", "dt", "B", "C"), 1), options, tuple(tensors)[:5])
    if rule == "mamba_selective_scan":
        tensors = {
            "hidden_states": normal(BATCH, 6, TOKENS), "dt": normal(BATCH, 6, TOKENS) - 3, "A": -normal(6, 5).exp(),
            "B": normal(BATCH, 5, TOKENS), "C": normal(BATCH, 5, TOKENS), "D": normal(6),
            "z": normal(BATCH, 6, TOKENS), "delta_bias": normal(6),
        }  # fmt: skip
        options = {
            "delta_softplus": True,
            "return_last_state": True,
            "use_mambapy": False,
            "use_associative_scan": True,
        }
        return Inputs(tensors, dict.fromkeys(("hidden_states", "dt", "B", "C", "z"), -1), options, tuple(tensors)[:5])
    kimi = "kimi" in rule
    heads = 4 if kimi else 2  # the gated delta rule repeats its heads of keys
    tensors = {
        "query": normal(BATCH, TOKENS, heads, 8), "key": normal(BATCH, TOKENS, heads, 8),
        "value": normal(BATCH, TOKENS, 4, 6), "g": -softplus(normal(BATCH, TOKENS, 4, *([8] if kimi else [])) - 2),
        "beta": normal(BATCH, TOKENS, 4).sigmoid(),
    }  # fmt: skip
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    return Inputs(tensors, dict.fromkeys(tensors, 1), options, ("query", "key", "value"))


def fold(links: list[StateLink], state: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The outputs of all shards and the last state. Each leaving state is the affine map of the entering state."""
    outputs = []
    for link in links:
        expected = link.map(state)
        out, state = link.finish(state)
        assert_close(state, expected)
        outputs.append(out)
    return torch.cat(outputs, dim), state


def error(given: Tensor, expected: Tensor) -> float:
    given, expected = given.detach().double(), expected.detach().double()
    return float((given - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


def assert_close(given: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    assert given.shape == expected.shape
    assert given.dtype == expected.dtype
    assert error(given, expected) < tolerance


def gradients(results: tuple[Tensor, ...], inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """Gradients of a random sum of the results."""
    generator = torch.Generator().manual_seed(3)
    total = sum((x * torch.randn(x.shape, generator=generator).to(x)).sum() for x in results)
    return torch.autograd.grad(total, inputs)  # type: ignore[arg-type]


def run_stock(
    family: str, name: str, inputs: Inputs, tensors: dict[str, Tensor], **states: Any
) -> tuple[Tensor, Tensor]:
    args, kwargs = inputs.arguments(tensors)
    if name == "recurrent_kimi_delta_attention":
        states = {"initial_state": None, **states}
    outputs, state = getattr(module_of(family), name)(*args, **kwargs, **states)
    return outputs, RULES[name].from_stock(state)


def run_links(
    family: str, name: str, inputs: Inputs, tensors: dict[str, Tensor], state: Tensor
) -> tuple[Tensor, Tensor]:
    stock = getattr(module_of(family), name)
    assert stock.__name__ == name
    links = [RULES[name](stock, *args, **kwargs) for args, kwargs in map(inputs.arguments, inputs.shards(tensors))]
    return fold(links, state, inputs.token_dim["hidden_states" if "mamba" in name else "query"])


CASES = [pytest.param(family, name, id=f"{family}-{name}") for name, all_ in FAMILIES.items() for family in all_]


@pytest.mark.parametrize(("family", "name"), CASES)
def test_folded_links_give_stock_outputs_states_and_gradients(family: str, name: str) -> None:
    inputs = inputs_of(name)
    tensors = {n: x.requires_grad_() for n, x in inputs.tensors.items()}
    expected = run_stock(family, name, inputs, tensors)
    given = run_links(family, name, inputs, tensors, torch.zeros_like(expected[1]))
    for x, y in zip(given, expected, strict=True):
        assert_close(x, y)
    leaves = list(tensors.values())
    for n, x, y in zip(tensors, gradients(given, leaves), gradients(expected, leaves), strict=True):
        assert error(x, y) < 10 * TOLERANCE, n  # a sum over all tokens of both rounded passes


@pytest.mark.parametrize("name", [name for name in FAMILIES if RULES[name].initial_state is not None])
def test_an_initial_state_enters_the_first_shard_and_gets_its_gradient(name: str) -> None:
    family, inputs = FAMILIES[name][0], inputs_of(name)
    zero = run_stock(family, name, inputs, inputs.tensors)[1]
    start = torch.randn(zero.shape, generator=torch.Generator().manual_seed(5)).requires_grad_()
    stock_start = {str(RULES[name].initial_state): RULES[name].to_stock(start)}
    expected = run_stock(family, name, inputs, inputs.tensors, **stock_start)
    given = run_links(family, name, inputs, inputs.tensors, start)
    for x, y in zip(given, expected, strict=True):
        assert_close(x, y)
    assert_close(*gradients(given, [start]), *gradients(expected, [start]))


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_is_no_worse_than_stock(name: str) -> None:
    family, inputs = FAMILIES[name][0], inputs_of(name)
    kept = ("A", "D", "g", "delta_bias")  # float32 in the models
    half = {n: x if n in kept else x.bfloat16() for n, x in inputs.tensors.items()}
    exact = run_stock(family, name, inputs, {n: x.float() for n, x in half.items()})
    stock = run_stock(family, name, inputs, half)
    given = run_links(family, name, inputs, half, torch.zeros_like(exact[1]))
    for x, y, z in zip(given, stock, exact, strict=True):
        assert x.dtype == y.dtype
        assert (x - z).norm() <= 1.01 * (y - z).norm() + TOLERANCE * z.norm()


@pytest.mark.parametrize("name", FAMILIES)
def test_states_stay_float32_and_no_worse_than_stock_in_autocast(name: str) -> None:
    family, inputs = FAMILIES[name][0], inputs_of(name)
    exact = run_stock(family, name, inputs, inputs.tensors)
    with torch.autocast("cpu", torch.bfloat16):
        stock = run_stock(family, name, inputs, inputs.tensors)
        args, kwargs = inputs.arguments(inputs.tensors)
        link = RULES[name](getattr(module_of(family), name), *args, **kwargs)
        given = link.finish(torch.zeros_like(link.map.bias))
    assert link.map.linear.dtype == link.map.bias.dtype == torch.float32
    for x, y, z in zip(given, stock, exact, strict=True):
        assert x.dtype == y.dtype
        assert (x - z).norm() <= 1.1 * (y - z).norm() + TOLERANCE * z.norm()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_link_is_scalar_diagonal_or_matrix(name: str) -> None:
    inputs = inputs_of(name)
    args, kwargs = inputs.arguments(inputs.shards(inputs.tensors)[1])
    link = RULES[name](getattr(module_of(FAMILIES[name][0]), name), *args, **kwargs)
    shapes = {"mamba2_chunk_scan": (BATCH, 4), "mamba_selective_scan": (BATCH, 6, 5)}
    assert link.map.linear.shape == shapes.get(name, (BATCH, 4, 8, 8))
    assert link.map.linear.dtype == link.map.bias.dtype == torch.float32
    states = {"mamba2_chunk_scan": (BATCH, 4, 5, 8), "mamba_selective_scan": (BATCH, 6, 5, 1)}
    assert link.map.bias.shape == states.get(name, (BATCH, 4, 8, 6))


@pytest.mark.parametrize("name", FAMILIES)
def test_rules_refuse_packed_sequences_and_initial_states(name: str) -> None:
    with pytest.raises(ValueError, match="cu_seqlens: expected None over a mesh, given Tensor"):
        RULES[name](print, cu_seqlens=torch.zeros(2))
    if RULES[name].initial_state:
        with pytest.raises(ValueError, match="expected None, given a tensor"):
            RULES[name](print, **{str(RULES[name].initial_state): torch.zeros(2)})


def split_call(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], cuts: tuple[int, ...]) -> list[Any]:
    """The arguments of a model's call, cut along the tokens."""
    dim = -1 if name == "mamba_selective_scan" else 1
    whole = {2} if "mamba" in name else set()  # the decay rates have no tokens
    cut: list[Any] = [(x,) * len(cuts) if at in whole else x.split(cuts, dim) for at, x in enumerate(args)]
    named = {n: kwargs[n].split(cuts, dim) for n in ("z", "g", "beta") if isinstance(kwargs.get(n), Tensor)}
    return [([x[i] for x in cut], kwargs | {n: x[i] for n, x in named.items()}) for i in range(len(cuts))]


def sharded(rule: Rule, name: str, stock: Callable[..., Any], cuts: tuple[int, ...]) -> Callable[..., Any]:
    """A function of the stock rule's signature, which folds the links of shards."""

    def function(*args: Any, **kwargs: Any) -> Any:
        start = kwargs.pop(rule.initial_state, None) if rule.initial_state else None
        requested = kwargs.get(rule.returns_state, False)
        links = [rule(stock, *some, **named) for some, named in split_call(name, args, kwargs, cuts)]
        state = torch.zeros_like(links[0].map.bias) if start is None else rule.from_stock(start)
        outputs, state = fold(links, state, -1 if name == "mamba_selective_scan" else 1)
        return rule.stock_result(outputs, state, requested)

    return function


MODELS = [
    pytest.param(name, family, marks=[] if family in families[:2] else [pytest.mark.long])
    for name, families in FAMILIES.items()
    for family in families
    if "recurrent" not in name and family in all_types()
]
"""Rules, and models that call them: two of each rule are not long."""


@pytest.mark.parametrize(("name", "family"), MODELS)
def test_models_give_stock_logits_with_their_rule_in_shards(
    name: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a cache, and in generation, where decoding continues from the last leaving state."""
    model = build(Case(family, family), "eager", torch.float32)
    ids = prompt(40, 2)
    functions = list[Mock]()

    def logits() -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            generated = model.generate(
                ids, max_new_tokens=4, do_sample=False, output_logits=True, return_dict_in_generate=True
            )
            return model(ids, use_cache=False).logits, torch.stack(generated.logits)

    expected = logits()
    for module in {type(part).__module__ for part in model.modules()}:
        stock = getattr(import_module(module), name, None)
        if stock is not None:
            function = Mock(wraps=sharded(RULES[name], name, stock, (1, 22, 17)))
            monkeypatch.setattr(f"{module}.{name}", function)
            functions.append(function)
    given = logits()
    assert any(function.called for function in functions)
    for x, y in zip(given, expected, strict=True):
        assert_close(x, y, 1e-4)  # the layers after it, with their normalizations, enlarge differences


class Full(nn.Module):
    """A gate which is open: the sigmoid of 100 is 1."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.full_like(x[..., : x.shape[-1] // 3], 100.0)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, TOLERANCE), (torch.float64, 1e-12)])
def test_links_of_lightning_attention_fold_to_its_layer(dtype: torch.dtype, tolerance: float) -> None:
    config = MiniMaxConfig(hidden_size=32, num_attention_heads=4, head_dim=8, num_hidden_layers=2, block_size=16)
    layer = MiniMaxLightningAttention(config, 0).to(dtype)
    layer.qkv_proj, layer.act_fn, layer.norm, layer.out_proj = (nn.Identity() for _ in range(4))
    layer.output_gate = Full()
    layer.query_decay, layer.key_decay, layer.diagonal_decay = layer.decay_factors(layer.slope_rate)
    qkv = torch.randn(BATCH, TOKENS, 96, dtype=dtype, generator=torch.Generator().manual_seed(2)).requires_grad_()
    expected = layer(qkv, position_embeddings=None, attention_mask=None)
    q, k, v = qkv.view(BATCH, TOKENS, 4, 24).transpose(1, 2).split(8, dim=-1)
    shards = zip(*(x.split(CUTS, dim=2) for x in (q, k, v)), strict=True)
    links = [lightning_link(*shard, layer.slope_rate) for shard in shards]
    outputs, state = fold(links, torch.zeros_like(expected[1]), 2)
    given = outputs.transpose(1, 2).flatten(2), state
    for x, y in zip(given, expected, strict=True):
        assert_close(x, y, tolerance)
    assert_close(*gradients(given, [qkv]), *gradients(expected, [qkv]), tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_links_of_rg_lru_fold_to_its_scan(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(BATCH, TOKENS, 12, generator=generator).to(dtype).requires_grad_()
    gate = torch.rand(BATCH, TOKENS, 12, generator=generator).pow(0.1).to(dtype).requires_grad_()
    positions = torch.stack((torch.arange(TOKENS), (torch.arange(TOKENS) + 50) % 90))
    reset = positions[:, :, None] == 0
    start = torch.randn(BATCH, 12, generator=generator).requires_grad_()
    scan: Any = RecurrentGemmaRglru._rnn_scan
    for entering in (None, start):
        expected = scan(None, hidden_states=x, recurrent_gate=gate, reset=reset, recurrent_states=entering)
        shards = zip(*(part.split(CUTS, dim=1) for part in (x, gate, reset)), strict=True)
        state = torch.zeros(BATCH, 12, 1, 1) if entering is None else entering[..., None, None]
        outputs, state = fold([rg_lru_link(*shard) for shard in shards], state, 1)
        given = outputs, state[..., 0, 0]
        for got, want in zip(given, expected, strict=True):
            assert_close(got, want, TOLERANCE if got.dtype == torch.float32 else 2**-8)
        leaves = [x, gate] if entering is None else [x, gate, start]
        for got, want in zip(gradients(given, leaves), gradients(expected, leaves), strict=True):
            assert_close(got, want, TOLERANCE if got.dtype == torch.float32 else 2**-7)
