"""PyTorch traces and transforms a model with attnmesh attention on one device, as it does one with stock attention."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.modules import module as module_calls
from transformers import AutoModelForCausalLM, CompileConfig, MambaConfig, StaticCache

from attnmesh import errors, hf
from attnmesh.hf.recurrent.prepare_recurrent import RecurrentLayer
from tests.support.models import families
from tests.support.models.families import STOCK, prompt
from tests.support.truth.tolerances import FLOAT64_LOSS, FLOAT64_MODEL

LOCAL = ["llama", "mistral", "gemma2", "llama4", "gpt-oss"]
"""Families with causal masks, windows, capped logits, chunks and sinks."""


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns when it imports its compiler
        torch._dynamo.reset()
        counters.clear()
        yield
    torch._dynamo.reset()


def model(family: str, attention: str) -> Any:
    """Return a model of one layer, the windowed or chunked one, in one graph: the eager experts of gpt-oss break it."""
    one: dict[str, Any] = {"num_hidden_layers": 1}
    if kinds := getattr(families.CONFIGS[family], "layer_types", None):
        one["layer_types"] = kinds[:1]
    if family == "llama4":
        one["no_rope_layers"] = [1]
    made: Any = families.model(family, attention, torch.float64, **one)
    if family == "gpt-oss":
        made.set_experts_implementation("batched_mm")
    return made


def padded(length: int = 30) -> dict[str, Tensor]:
    """Return two sequences, one of which has padding on the left."""
    ids, mask = prompt(length, batch=2), torch.ones(2, length, dtype=torch.long)
    ids[1, :11], mask[1, :11] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


BATCHES: dict[str, dict[str, Tensor]] = {
    "ids": {"input_ids": prompt(30)},
    "padded": padded(),
    "packed": {"input_ids": prompt(30), "position_ids": torch.arange(30)[None] % 17},
}


def graphs() -> tuple[int, int]:
    """Return the graphs that were compiled, and the breaks between them."""
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def labels_of(batch: dict[str, Tensor]) -> Tensor:
    """Return labels, of which padding learns none and predicts none."""
    padding = batch["input_ids"] == 0
    return batch["input_ids"].masked_fill(padding | padding.roll(1, 1), -100)


def loss_and_gradients(model: Any, call: Any, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    loss = call(**batch, labels=labels_of(batch), use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def batches(*names: str, short: set[tuple[str, str]]) -> list[Any]:
    """Return families and batches, of ids alone for two families. Those of `short` are not long."""
    found = [(family, name) for family in LOCAL for name in names if name != "ids" or family in LOCAL[:2]]
    found = [each for each in found if each != ("gpt-oss", "packed")]  # stock ignores its packing
    return [pytest.param(*each, marks=[] if each in short else [pytest.mark.long]) for each in found]


ONE_GRAPH = {("llama", "ids"), ("gemma2", "padded"), ("llama4", "packed")}
"""Each batch, and a causal mask, a window with capped logits, and chunks."""


@pytest.mark.parametrize(("family", "name"), batches("ids", "padded", "packed", short=ONE_GRAPH))
def test_a_compiled_model_is_one_graph_with_stock_gradients(family: str, name: str) -> None:
    ours, stock = model(family, "attnmesh"), model(family, STOCK[family])
    compiled = torch.compile(ours, backend="eager", fullgraph=True)
    loss, gradients = loss_and_gradients(ours, compiled, BATCHES[name])
    assert graphs() == (1, 0)
    expected, stock_gradients = loss_and_gradients(stock, stock, BATCHES[name])
    torch.testing.assert_close(loss, expected, rtol=FLOAT64_MODEL, atol=FLOAT64_LOSS)
    for key, gradient in stock_gradients.items():
        assert (gradients[key] - gradient).abs().max() <= FLOAT64_MODEL * max(1, float(gradient.abs().max())), key


STATIC: dict[str, dict[str, Any]] = {
    "default": {},
    "static shapes": {"dynamic": False},
    "one graph": {"fullgraph": True},
}


def compiled_tokens(model: Any, batch: dict[str, Tensor], **options: Any) -> list[list[int]]:
    """Return the tokens that a model generates with a static cache, compiled as transformers does it on GPUs."""
    config = CompileConfig(backend="eager", mode=None, **options)
    config._compile_all_devices = True
    more: dict[str, Any] = {"cache_implementation": "static", "max_new_tokens": 7, "do_sample": False}
    tokens: list[list[int]] = model.generate(**batch, **more, compile_config=config).tolist()
    return tokens


@pytest.mark.parametrize(
    ("name", "batch"),
    [("default", "padded"), ("static shapes", "ids"), pytest.param("one graph", "padded", marks=pytest.mark.long)],
)
def test_compiled_generation_with_a_static_cache_is_one_graph(name: str, batch: str) -> None:
    ours, stock = (families.model("llama", attention) for attention in ("attnmesh", "sdpa"))
    given = compiled_tokens(ours, BATCHES[batch], **STATIC[name])
    assert graphs() == (1, 0)
    assert given == stock.generate(**BATCHES[batch], max_new_tokens=7, do_sample=False).tolist()


@pytest.mark.long
def test_compiled_generation_with_windows_takes_as_many_graphs_as_stock() -> None:
    counts = []
    tokens = []
    for attention in ("attnmesh", "sdpa"):
        torch._dynamo.reset()
        counters.clear()
        tokens.append(
            compiled_tokens(
                families.model("gemma3", attention),
                BATCHES["padded"],
            )
        )
        counts.append(graphs())
    assert tokens[0] == tokens[1]
    assert counts[0] == counts[1]


def test_a_static_cache_of_the_caller_is_one_graph() -> None:
    logits = []
    for attention, traced in (("attnmesh", True), ("sdpa", False)):
        made = model("llama", attention)
        cache = StaticCache(made.config, max_cache_len=40)
        step = torch.compile(made, backend="eager", fullgraph=True) if traced else made
        counters.clear()
        with torch.no_grad():
            made(prompt(20), past_key_values=cache)
            logits.append([step(prompt(1, seed=n), past_key_values=cache).logits for n in range(4)])
        assert graphs() == (int(traced), 0)
    torch.testing.assert_close(*logits)


class Logits(nn.Module):
    """A model without a cache, as it is exported."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        return self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits


@pytest.mark.parametrize(("family", "name"), batches("ids", "padded", short={("llama", "ids"), ("gpt-oss", "padded")}))
def test_a_model_can_be_exported(family: str, name: str) -> None:
    batch = BATCHES[name]
    # the router of Llama 4 fixes the length, also with stock attention
    shapes = None if family == "llama4" else {key: {1: torch.export.Dim("length", min=2, max=99)} for key in batch}
    exported = torch.export.export(Logits(model(family, "attnmesh")), (), batch, dynamic_shapes=shapes).module()
    stock = model(family, STOCK[family])
    other = batch if shapes is None else padded(41) if name == "padded" else {"input_ids": prompt(41, seed=2)}
    with torch.no_grad():
        for example in (batch, other):
            real = example.get("attention_mask", example["input_ids"]).bool()
            given, expected = exported(**example)[real], stock(**example).logits[real]
            # Logits are of 20, and norms and angles are float32.
            torch.testing.assert_close(given, expected, rtol=FLOAT64_MODEL, atol=2e-4)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt-oss"])
def test_gradients_of_torch_func_are_those_of_autograd(family: str) -> None:
    ours, stock, batch = model(family, "attnmesh"), model(family, STOCK[family]), padded()
    weights = {name: x.detach() for name, x in ours.named_parameters()}

    def loss(weights: dict[str, Tensor]) -> Any:
        given = {**batch, "labels": labels_of(batch), "use_cache": False}
        return torch.func.functional_call(ours, weights, (), given).loss

    gradients = torch.func.grad(loss)(weights)
    _, expected = loss_and_gradients(stock, stock, batch)
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).abs().max() <= FLOAT64_MODEL * max(1, float(gradient.abs().max())), name
    ones = {name: torch.ones_like(x) for name, x in weights.items()}
    slope = sum(float(x.sum()) for x in gradients.values())
    # A sum of all gradients.
    assert float(torch.func.jvp(loss, (weights,), (ones,))[1]) == pytest.approx(slope, rel=1e-4, abs=1e-4)
    both = {name: torch.stack((x, 1.1 * x)) for name, x in weights.items()}
    losses = torch.func.vmap(loss, randomness="same")(both)
    torch.testing.assert_close(losses[0], loss(weights), rtol=FLOAT64_MODEL, atol=FLOAT64_MODEL)


def test_a_traced_model_refuses_the_masks_that_it_refuses_otherwise() -> None:
    compiled = torch.compile(model("llama", "attnmesh"), backend="eager")
    mask = torch.ones(1, 1, 9, 9, dtype=torch.bool).tril()
    with pytest.raises(errors.MaskError, match="attention_mask: expected one made by transformers for attnmesh"):
        compiled(prompt(9), attention_mask=mask, use_cache=False)


def test_a_mask_that_leaves_out_a_static_cache_is_refused() -> None:
    made = families.model("llama", "attnmesh")
    cache = StaticCache(made.config, max_cache_len=40)
    with torch.no_grad():
        made(prompt(20), past_key_values=cache)
        with pytest.raises(errors.ShapeError, match="attention_mask: expected one of all 21 tokens, given one of 1"):
            made(prompt(1), past_key_values=cache, attention_mask=torch.ones(1, 1, dtype=torch.long))


def test_a_batch_of_shards_leaves_other_models_alone() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}
    recurrent: Any = AutoModelForCausalLM.from_config(MambaConfig(**sizes))
    ids = prompt(20)
    expected = recurrent(ids, labels=ids).loss
    part = hf.shard_batch({"input_ids": ids, "labels": ids}, None)
    torch.testing.assert_close(recurrent(**part).loss, expected)
    assert sum(isinstance(layer, RecurrentLayer) for layer in recurrent.modules()) == 2
    stock = families.model("llama", "sdpa")
    with torch.no_grad():
        logits = torch.compile(stock, backend="eager", fullgraph=True)(ids).logits  # while the batch is alive
        torch.testing.assert_close(logits, stock(ids).logits)
    assert not module_calls._global_forward_pre_hooks
