"""The bench of storage: grains round as they say, the cache as a stock one, and needles stand where they should."""

import pytest
import torch

from attnmesh.core.storage import STORAGES
from attnmesh.hf.load import PACKAGED, locate, open_tokenizer
from benchmarks import storage as bench
from tests.support.models import families
from tests.support.models.families import prompt
from tests.support.process.needs import needs_smollm2


@pytest.mark.parametrize("grain", bench.GRAINS, ids=lambda grain: grain.name)
@pytest.mark.parametrize("storage", STORAGES)
def test_numbers_move_by_half_a_step_of_their_group_at_most(grain: bench.Grain, storage: str) -> None:
    x = torch.randn(1, 2, 37, 64) * torch.logspace(-3, 3, 64)
    moved, most = (grain.round(x, storage) - x).abs(), x.abs().amax()
    assert moved.shape == x.shape
    assert 0 < float(moved.amax()) <= float(most / STORAGES[storage].largest) * (0.5001 if storage == "int8" else 16.01)
    small = moved[..., 0].amax() / x[..., 0].abs().amax()  # a column beside others that are a million times as large
    assert bool(small < 0.01) == (grain.columns == 1 and storage == "int8") or storage == "fp8_e4m3"


def test_bits_count_the_scales() -> None:
    shape = 3, 7000, 64
    assert [round(grain.bits(shape), 3) for grain in bench.GRAINS] == [8.5, 8.25, 8.083, 8.016, 9.0, 8.125, 8.0]


@pytest.mark.parametrize("storage", STORAGES)
@torch.no_grad()
def test_the_cache_reads_on_as_a_stock_one_that_rounds(storage: str) -> None:
    stock, ours = families.model("llama", "sdpa"), families.model("llama", "attnmesh")
    keys, by = bench._computed(stock, prompt(90)), STORAGES[storage]
    given = bench._ours(ours, storage, keys, prompt(20, seed=1))
    expected = bench._stock(stock, lambda x: by.dequantize(by.quantize(x)), keys, prompt(20, seed=1))
    plain = bench._stock(stock, lambda x: x, keys, prompt(20, seed=1))
    assert float((given - expected).abs().max()) < 0.05 * float((plain - expected).abs().max())


@needs_smollm2
def test_each_needle_stands_once_at_each_depth() -> None:
    tokenizer = open_tokenizer(locate(PACKAGED))
    text = torch.tensor(tokenizer("Nothing happens here. " * 300)["input_ids"])
    turns = [bench._Haystack.of(tokenizer, text, turn) for turn in range(len(bench.DEPTHS))]
    for depths in zip(*(each.depths for each in turns), strict=True):
        assert sorted(depths) == list(bench.DEPTHS)
    for each in turns:
        asked = each.questions[0].tolist()
        answers = [tokenizer.decode(asked[start:stop]) for start, stop in each.spans]
        said = tokenizer.decode(each.ids[0])
        places = []
        for place, answer, depth in zip(bench.PLACES, answers, each.depths, strict=True):
            needle = f"\nThe code of {place} is{answer}.\n"
            assert said.count(needle) == 1
            places.append((said.index(needle) / len(said), depth))
        assert [depth for _, depth in sorted(places)] == sorted(each.depths)
        right = each.answers(torch.nn.functional.one_hot(torch.tensor([*asked[1:], 0])).float())
        assert each.right(right) == list(each.depths)
