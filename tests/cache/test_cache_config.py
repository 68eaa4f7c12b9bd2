"""A cache's configuration: what it keeps and stores, as codes, and held against the memory of a cache."""

from dataclasses import fields, replace

import pytest
import torch

import attnmesh as am
from attnmesh.cache.cache_config import CacheConfig, check_key_heads
from attnmesh.core.mask import FAR, Mask
from attnmesh.core.partial import DTYPE_NAMES
from attnmesh.errors import ShapeError
from tests.support.truth.tolerances import assert_near

pytestmark = pytest.mark.quick

PLAIN = CacheConfig(2, 3, 8, 4, 64, 16, torch.float32)
"""Two sequences of three key heads, with keys of 8 columns and values of 4."""
WINDOW = replace(PLAIN, mask=am.Window(20), keep=5)
CONFIGS = [
    PLAIN,
    WINDOW,
    replace(PLAIN, dtype=torch.float64, storage="int8"),
    replace(PLAIN, values="prefix"),
    replace(PLAIN, values="none", value_dim=0, storage="fp8_e4m3"),
    replace(WINDOW, mask=am.Causal() & am.Chunks(8), storage="int8", dtype=torch.bfloat16),
]


def test_a_token_has_a_key_and_a_value_of_each_head_and_sequence() -> None:
    assert PLAIN.kept == 64
    assert PLAIN.nbytes == 64 * 2 * 3 * (8 + 4) * 4
    assert replace(PLAIN, values="prefix").nbytes == 64 * 2 * 3 * 8 * 4
    assert replace(PLAIN, storage="int8").nbytes == 64 * 2 * 3 * (8 + 2 + 4 + 2)  # and a scale of 2 bytes a row


@pytest.mark.parametrize("config", [config for config in CONFIGS if config.mask is None], ids=str)
def test_bytes_are_those_of_a_cache(config: CacheConfig) -> None:
    arguments = config.arguments()
    if config.values != "separate":
        arguments["value_dim"] = None if config.values == "none" else config.value_dim
    cache = am.KVCache(None, **arguments)
    assert cache.config == config
    assert cache.own_shard.slots == config.capacity
    assert sum(x.nbytes for x in cache.own_shard.kv_tensors) >= config.nbytes
    assert [x.shape[-1] for x in cache.own_shard.kv_tensors] == [*config.row_widths]
    assert {x.dtype for x in cache.own_shard.kv_tensors} == {config.row_dtype}


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_code_gives_the_configuration(config: CacheConfig) -> None:
    code = config.to_code()
    assert all(type(number) is int for number in code)
    assert CacheConfig.from_code(code) == config
    others = [other.to_code() for other in CONFIGS if other != config]
    assert code not in others


def test_codes_in_files_keep_their_meaning() -> None:
    sizes = [2, 3, 8, 4, 64, 16]
    codes = [[*sizes, 1, 0], [*sizes, 1, 0, 5, 20, 0, 0], [*sizes, 0, 3], [*sizes, 1, 1], [2, 3, 8, 0, 64, 16, 1, 8]]
    assert [config.to_code() for config in CONFIGS] == [*codes, [*sizes, 2, 3, 5, FAR, 0, 1, 8]]
    spans = replace(WINDOW, mask=am.Spans([(3, 7)]) & am.Documents((30, 34)))
    assert spans.to_code() == [*sizes, 1, 0, 5, FAR, 0, 0, 30, 64, -4, -8]
    assert DTYPE_NAMES == ("float64", "float32", "bfloat16", "float16")


@pytest.mark.parametrize("mask", [am.Window(20), am.Causal() & am.Chunks(8), am.Causal(), am.Window(200)], ids=str)
@pytest.mark.parametrize("keep", [0, 5])
def test_a_cache_keeps_what_one_query_sees_and_what_it_may_take_back(mask: Mask, keep: int) -> None:
    tokens = torch.arange(64)
    seen = int((mask.visible(tokens, tokens) & (tokens <= tokens[:, None])).sum(1).max())
    assert replace(PLAIN, mask=mask, keep=keep).kept == min(64, seen + keep)


@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[2], CONFIGS[3]], ids=["plain", "int8", "prefix"])
def test_rows_are_read_as_the_numbers_that_were_appended(config: CacheConfig) -> None:
    new = [torch.randn(2, 3, 5, columns, dtype=config.dtype) for columns in config.columns]
    keys, values = config.keys_and_values([config.rows_of(x) for x in new])
    storage = config.storage_format
    if storage is None:
        assert torch.equal(keys, new[0])
        assert torch.equal(values, new[1] if len(new) > 1 else new[0][..., :4])
        return
    for rows, x in zip((keys, values), new, strict=True):
        assert_near(storage.dequantize(rows).double(), x, float(x.abs().max()) / 127)  # a step of 8 bits


def test_what_caches_of_one_call_may_differ_in_is_not_in_their_common_configuration() -> None:
    others = {"capacity": 128, "block": 4, "keep": 0, "hot": 3}
    assert replace(WINDOW, **others).common_config == WINDOW.common_config  # type: ignore[arg-type]
    unlike = replace(WINDOW, batch=1), replace(WINDOW, dtype=torch.float64), replace(WINDOW, mask=am.Window(21))
    assert all(other.common_config != WINDOW.common_config for other in unlike)
    assert WINDOW.arguments().keys() == {field.name for field in fields(CacheConfig)}


def test_a_heads_axis_divides_the_key_heads() -> None:
    for config in CONFIGS:
        config.check(3)
    with pytest.raises(ShapeError, match="3 key heads and a heads axis of 2"):
        PLAIN.check(2)
    check_key_heads("test", 4, 2)


def test_a_lack_of_memory_names_the_capacity_and_other_errors_stay() -> None:
    with pytest.raises(ShapeError, match="no room for 64"), PLAIN.allocating():
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
    with pytest.raises(RuntimeError, match="another"), PLAIN.allocating():
        raise RuntimeError("another")
