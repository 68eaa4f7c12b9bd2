"""Ways to share a model's weights and keys: bytes by hand, and those of a cache that runs."""

from dataclasses import replace

import pytest
import torch
from transformers import Gemma3TextConfig, GptOssConfig, LlamaConfig

import attnmesh as am
import attnmesh.hf as hf
from attnmesh.cost.cluster import Cluster
from attnmesh.cost.rates import NO_LINK
from attnmesh.errors import ClusterError, KernelError, ShapeError
from attnmesh.hf.model_size import model_size, other_layer_counts
from attnmesh.planner.decode_cost import Experts
from attnmesh.planner.serving import ModelSizes, ServingPlan, choose_plan, over_hosts, serving_plans, why_not_shared
from tests.support.models import families
from tests.support.models.families import prompt
from tests.support.models.tiny_models import Case, build
from tests.support.planning.planned import LAYERS, LLAMA_70B, cpus, model_of_cpus


def ways(length: int = 1_000_000, hosts: int = 2) -> dict[tuple[int, bool], ServingPlan]:
    """Return the ways to serve Llama 3 70B by the ranks that share its weights."""
    model = model_size(LLAMA_70B, length=length, phase="decode")
    return {
        (one.sharding.tp, one.sharding.is_joint): one
        for one in serving_plans(model, am.Cluster.preset("dgx-h100", hosts))
    }


def test_a_price_leaves_the_configuration_as_it_is() -> None:
    before = LLAMA_70B.to_dict()
    model_size(LLAMA_70B, length=1000, phase="decode")
    assert LLAMA_70B.to_dict() == before
    assert LLAMA_70B.dtype is None


def test_weights_and_keys_are_those_of_the_sizes() -> None:
    matrices = 80 * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672) + 2 * 128256 * 8192
    norms, found = (2 * 80 + 1) * 8192, ways()
    token = 80 * 2 * 8 * 128 * 2  # layers, keys and values, heads, columns, bytes
    assert set(found) == {(1, False), (2, False), (4, False), (8, False), (16, False), (16, True)}
    assert found[1, False].weight_bytes == 2 * (matrices + norms)
    for (tp, shared), one in found.items():
        copied = 80 * 2 * 8192 * 128 * 2 - 80 * 2 * 8192 * 1024 * 2 / 16 if (tp, shared) == (16, False) else 0
        assert one.weight_bytes == pytest.approx(2 * (matrices / tp + norms) + copied)
        ranks = 8 if (tp, shared) == (16, False) else 16  # each of 8 key heads lies on two ranks
        assert one.key_bytes == pytest.approx(1_000_000 * token / ranks)
        free = 80e9 - one.weight_bytes
        assert one.tokens == (pytest.approx(free * ranks / token, abs=1) if free > 0 else 0)


def test_ways_that_fit_come_first_and_the_fastest_of_them() -> None:
    found = list(ways(2_000_000).values())
    fitting = [one.tokens >= 2_000_000 for one in found]
    assert fitting == sorted(fitting, reverse=True)
    times = [one.seconds for one, fits in zip(found, fitting, strict=True) if fits]
    assert times == sorted(times)
    assert found[0].sharding.is_joint


def test_the_first_token_takes_products_attention_and_all_reduces() -> None:
    length, layers, rate = 1000, 80, 648e12
    matrices = layers * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672)
    pairs = layers * 4 * 128 * 64 * length * (length + 1) / 2
    one = serving_plans(model_size(LLAMA_70B, length=length, phase="decode"), am.Cluster.preset("dgx-h200", 1, 1))[0]
    products = (2 * matrices * length + pairs) / rate
    assert one.first_token_seconds == pytest.approx(products, rel=0.02)  # and a start of each kernel
    found = ways(length)
    sent = {tp: 2 * layers * 2 * (tp - 1) / 16 * length * 8192 * 2 / rate for tp, rate in ((8, 360e9), (16, 360e9))}
    for tp, bytes_alone in sent.items():
        assert found[tp, False].first_token_seconds > one.first_token_seconds / 16 + bytes_alone


def test_a_token_is_multiplied_by_the_experts_that_it_takes() -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_experts_per_tok": 2}
    few, many = (GptOssConfig(**sizes, num_local_experts=count) for count in (2, 8))
    active = [model_size(config, length=1000, phase="decode").active_parameters for config in (few, many)]
    assert active[1] - active[0] == 2 * 6 * (64 + 1)  # rows of routers
    experts = model_size(many, "float32", length=1000, phase="decode").experts
    assert experts is not None
    assert (experts.per_layer, experts.per_token, experts.shareable_layers) == (8, 2, 2)
    one = 64 * 2 * 2880 + 2 * 2880 + 2880 * 64 + 64  # two matrices in one, a third, and their biases
    assert experts.weight_bytes == 4 * 2 * 8 * one


def test_windows_are_kept_but_do_not_grow() -> None:
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    config = Gemma3TextConfig(num_hidden_layers=6, layer_types=kinds, sliding_window=1024)
    short, long = (model_size(config, length=length, phase="decode") for length in (10_000, 100_000))
    assert short.window_bytes == long.window_bytes == 5 * 1024 * 2 * config.num_key_value_heads * config.head_dim * 2
    assert short.workload.layers == 1
    assert other_layer_counts(config) == {"with windows": 5}
    assert model_size(config, length=600, phase="decode").window_bytes == short.window_bytes * 600 // 1024


@pytest.mark.parametrize("storage", [None, "int8"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral", "gpt-oss"])
def test_a_cache_holds_the_bytes_that_are_counted(family: str, storage: str | None) -> None:
    model, length = families.model(family, "attnmesh"), 90
    cache = hf.ShardedCache(model.config, block=1, storage=storage)
    hf.generate(model, prompt(length), cache=cache, max_new_tokens=1, do_sample=False)
    size = model_size(model.config, "float32", length=length - 1, phase="decode", storage=storage)
    counted = size.workload.kept_bytes + size.window_bytes
    assert cache.held_bytes == pytest.approx(counted, rel=0.1)  # a window keeps a few tokens more


def test_a_window_of_a_layer_with_a_state_is_counted_as_one() -> None:
    kinds = ["hybrid_sliding", "hybrid", "hybrid_sliding"]
    case = Case("inkling_text", "inkling_text", {"layer_types": kinds, "swa_num_key_value_heads": 4})
    model, length = build(case, "attnmesh", torch.float32), 90
    cache = hf.ShardedCache(model.config, block=1)
    hf.generate(model, prompt(length), cache=cache, max_new_tokens=1, do_sample=False)
    size = model_size(model.config, "float32", length=length - 1, phase="decode")
    assert (size.workload.layers, size.workload.kv_heads) == (1, 2)
    assert other_layer_counts(model.config) == {"with windows": 2, "recurrent": 3}
    assert size.window_bytes == 2 * 16 * 2 * 4 * 8 * 4
    keys = sum(
        kv_cache.own_shard.token_bytes for kv_cache in cache.kv_caches
    )  # beside which the layers keep their states
    assert keys == pytest.approx(size.workload.kept_bytes + size.window_bytes, rel=0.1)


def test_twice_as_many_tokens_fit_in_8_bits() -> None:
    plain, stored = (
        serving_plans(
            model_size(LLAMA_70B, length=10**6, phase="decode", storage=storage), am.Cluster.preset("dgx-h100", 2)
        )
        for storage in (None, "int8")
    )
    tokens, keys = (
        [{(one.sharding.tp, one.sharding.is_joint): getattr(one, field) for one in found} for found in (plain, stored)]
        for field in ("tokens", "key_bytes")
    )
    for way in tokens[0]:
        assert keys[1][way] == pytest.approx(keys[0][way] * 130 / 256)
        assert tokens[1][way] == pytest.approx(tokens[0][way] * 256 / 130, abs=2)
    assert stored[0].seconds < plain[0].seconds


def test_a_storage_is_planned_in_decoding_alone() -> None:
    for phase in ("training", "prefill"):
        with pytest.raises(ShapeError, match="storage in decode only"):
            am.Workload(8, 8, 64, 1000, phase=phase, storage="int8")
    with pytest.raises(KernelError, match="Workload storage"):
        am.Workload(8, 8, 64, 1000, phase="decode", storage="int4")


def test_ranks_that_divide_no_heads_are_refused() -> None:
    work = am.Workload(7, 7, 64, 1000, phase="decode")
    model = ModelSizes(work, 448, 2, lambda ranks, _: 1000 // ranks)
    found = serving_plans(model, am.Cluster.preset("dgx-h100", 1))
    assert {one.sharding.tp: one.attention_plan.shape for one in found if one.ranks == 8} == {1: (1, 1, 8)}
    sum_itemsize = serving_plans(model, am.Cluster.preset("dgx-h100", 1, 7))
    assert {(one.sharding.tp, one.sharding.is_joint) for one in sum_itemsize} == {(1, False), (7, False), (7, True)}


def test_weights_that_do_not_fit_leave_no_token() -> None:
    model = ModelSizes(am.Workload(8, 8, 64, 1000, phase="decode"), 512, 2, lambda ranks, _: 10**13 // ranks)
    assert {one.tokens for one in serving_plans(model, am.Cluster.preset("dgx-h100", 1))} == {0}
    with pytest.raises(ClusterError):
        am.plan(am.Workload(8, 8, 64, 10**12, phase="decode"), am.Cluster.preset("dgx-h100", 1))


def test_ranks_that_share_layers_read_their_part_and_exchange_outputs() -> None:
    ways = serving_plans(model_of_cpus(), cpus())
    together, apart = (choose_plan(ways, 2, layers_shared=wanted) for wanted in (True, False))
    assert (together.read_bytes, apart.read_bytes) == (101 * 10**6, 201 * 10**6)
    assert together.weight_bytes == apart.weight_bytes == 100_500_000  # both map the pages of one file
    (alone,) = [way for way in ways if way.ranks == 1]
    assert alone.weight_bytes == 201 * 10**6
    for way in (together, apart):
        assert way.tokens == pytest.approx((6e9 - 100.5e6) / (30 * 3 * 128 * 4 / 2), abs=1)
    parts, others = dict(together.parts), dict(apart.parts)
    assert parts["weights"] == pytest.approx(101e6 / 8e9)
    assert others["weights"] == pytest.approx(201e6 / 8e9)
    outputs = 30 * (960 + 576 + 3072 + 576) + 49152
    assert parts["outputs"] == pytest.approx(121 * 1e-4 + outputs * 4 / 2 / 4e9)
    assert "outputs" not in others
    for way in ways:
        assert way.seconds == pytest.approx(sum(seconds for _, seconds in way.parts))
    assert {name: parts[name] for name in ("kernel", "merge", "rest")} == pytest.approx(
        {name: others[name] for name in ("kernel", "merge", "rest")}
    )


def test_ranks_of_a_host_hold_its_pages_once_and_those_of_gpus_hold_copies() -> None:
    whole = model_of_cpus().rank_weight_bytes(1, False)
    for cluster, held in ((cpus(2, 2), whole / 2), (cpus(2, 1), whole), (am.Cluster.preset("dgx-h100", 1), whole)):
        assert {way.weight_bytes for way in serving_plans(model_of_cpus(), cluster) if way.sharding.tp == 1} == {held}
    split = [way for way in serving_plans(model_of_cpus(), cpus(ranks=3)) if way.sharding.tp == 3]
    assert {way.weight_bytes for way in split} == {whole // 3}


@pytest.mark.parametrize("rows", [1, 2, 5, 40])
def test_rows_read_the_experts_that_they_choose(rows: int) -> None:
    noise, experts = torch.Generator().manual_seed(0), Experts(16 * 10**6, 16, 3)
    draws = torch.rand(2000, rows, 16, generator=noise).topk(3).indices.flatten(1)
    distinct = sum(len(draw.unique()) for draw in draws) / len(draws)
    assert experts.read_bytes(rows) == pytest.approx(1e6 * distinct, rel=0.01)  # 2,000 draws
    model = replace(model_of_cpus(rows), experts=experts)
    (apart,) = [way for way in serving_plans(model, cpus(), am.Shape(1, 1, 2)) if way.layer_ranks == 1]
    assert apart.read_bytes == pytest.approx(201e6 - 16e6 + experts.read_bytes(rows))
    used = 201e6 - 16e6 + 3e6  # of which each row is multiplied by its own
    assert dict(apart.parts)["weights"] == pytest.approx(max(apart.read_bytes / 8e9, 2 * rows * used / 4 / 2.7e10))
    joined = [way.read_bytes for way in serving_plans(model, cpus(), am.Shape(1, 1, 2)) if way.layer_ranks == 2]
    assert joined == ([] if rows > 32 else [pytest.approx(apart.read_bytes - 1e8)])  # experts are read by every rank


def test_ranks_that_share_experts_read_their_part_and_exchange_results() -> None:
    experts = Experts(16 * 10**6, 16, 3, shareable_layers=4)
    model = replace(model_of_cpus(), experts=experts)
    (joined,) = [way for way in serving_plans(model, cpus(), am.Shape(1, 1, 2)) if way.layer_ranks == 2]
    assert joined.read_bytes == pytest.approx(101e6 - 16e6 + 2e6)  # the busiest rank computes two of three
    assert dict(joined.parts)["results"] == pytest.approx(4 * (16 * 4e-4 + 1e-4 + 3 * 576 * 4 / 2 / 4e9))


def test_outputs_that_do_not_fit_the_boards_are_exchanged_in_pieces() -> None:
    assert LAYERS.exchanges(2, 1) == 121
    assert LAYERS.exchanges(2, 32) == 30 * (1 + 1 + 2 + 1) + 25  # 2,046 outputs of a piece


def test_many_rows_take_as_long_as_their_products() -> None:
    for rows, seconds in ((1, 201e6 / 8e9), (64, 2 * 64 * 201e6 / 4 / 2.7e10)):
        way = choose_plan(serving_plans(model_of_cpus(rows), cpus()), 2, layers_shared=False)
        assert dict(way.parts)["weights"] == pytest.approx(seconds)


def test_ranks_that_share_cores_wait_for_one_at_each_merge() -> None:
    model, waiting = model_of_cpus(), replace(cpus(), device=replace(cpus().device, wait=1e-3))
    plain, waits = (choose_plan(serving_plans(model, each), 2, layers_shared=False) for each in (cpus(), waiting))
    assert waits.seconds - plain.seconds == pytest.approx(1e-3 * model.workload.layers)
    assert dict(waits.parts)["merge"] - dict(plain.parts)["merge"] == pytest.approx(waits.seconds - plain.seconds)
    assert replace(waiting.device, alone=2.0).of_cores(1.5).wait == 1e-3
    assert replace(waiting.device, alone=2.0).of_cores(2).wait == 0


def test_the_fastest_way_is_chosen_and_it_depends_on_the_price_of_an_exchange() -> None:
    slow = replace(cpus(), inside=replace(cpus().inside, short=1e-3))
    for cluster, layer_ranks in ((cpus(), 2), (slow, 1)):
        ways = serving_plans(model_of_cpus(), cluster)
        found = choose_plan(ways, 2)
        assert found.layer_ranks == layer_ranks
        assert found.seconds == min(way.seconds for way in ways if way.ranks == 2 and way.sharding.tp == 1)
        assert choose_plan(ways, 2, layers_shared=False).layer_ranks == 1
        assert found.shape == (1, 2, 1)  # a prompt sends its keys, which are fewer than its queries


@pytest.mark.parametrize(
    ("rows", "cluster", "why"),
    [
        (1, cpus(), None),
        (32, cpus(), None),
        (33, cpus(), "steps of at most 32 rows are shared"),
        (1, cpus(ranks=15), None),
        (1, cpus(ranks=16), "at most 15 ranks of a host share memory"),
        (1, cpus(2, 1), "ranks of several hosts share no memory"),
        (1, am.Cluster.preset("dgx-h100", 1), "GPUs split weights by tp"),
    ],
)
def test_ranks_that_share_no_layers_are_told_why(rows: int, cluster: Cluster, why: str | None) -> None:
    model = model_of_cpus(rows)
    assert why_not_shared(model, cluster) == why
    assert any(way.sharding.layers_shared for way in serving_plans(model, cluster)) == (why is None)
    assert why_not_shared(replace(model, shared=None), cpus()) == "none of them is a linear layer that ranks can share"


def test_the_rows_of_a_step_are_those_of_all_new_tokens() -> None:
    model = model_of_cpus(8)
    several = replace(model, workload=replace(model.workload, q_len=5))
    assert (model.step_tokens, several.step_tokens) == (8, 40)
    assert why_not_shared(several, cpus()) == "steps of at most 32 rows are shared"


def test_ranks_that_split_weights_are_not_taken_for_those_that_divide_keys_too() -> None:
    """A step on all 16 ranks alike is the fastest, but has no `tp`."""
    found = [*ways(2_000_000).values()]
    assert found[0].sharding.is_joint
    chosen = choose_plan(found, 16, tp=16)
    assert (chosen.sharding.tp, chosen.sharding.is_joint) == (16, False)
    model = model_size(LLAMA_70B, length=1000, phase="decode")
    given = serving_plans(model, am.Cluster.preset("dgx-h100", 2), am.Shape(1, 1, 1))
    assert [one.sharding.is_joint for one in given] == [False]


def test_where_no_ranks_can_share_layers_the_fastest_way_is_taken() -> None:
    plans = serving_plans(model_of_cpus(), cpus(2, 1))
    assert choose_plan(plans, 2, layers_shared=True) == choose_plan(plans, 2)


def test_one_rank_of_a_host_has_all_its_memory() -> None:
    (alone,) = [way for way in serving_plans(model_of_cpus(), cpus()) if way.ranks == 1]
    assert alone.tokens == pytest.approx((2 * 6e9 - 201e6) / (30 * 2 * 3 * 64 * 4), abs=1)


def test_ranks_of_one_tp_compete_for_the_links_of_their_host() -> None:
    """Each of 8 ranks that split the weights merges with its own peer on the other host, over one card of the host."""
    links = am.Cluster.preset("dgx-h100", 2)
    narrow = replace(links, between=replace(links.between, host_rate=links.between.rate))
    model = model_size(LLAMA_70B, length=1_000_000, phase="decode")
    model = replace(model, workload=replace(model.workload, batch=1024))
    step = {
        name: next(one for one in serving_plans(model, cluster) if (one.sharding.tp, one.ranks) == (8, 16))
        for name, cluster in (("wide", links), ("narrow", narrow))
    }
    seconds = 80 * (1024 * (64 // 8) * 129 * 4 + 8) / links.between.rate
    slower = dict(step["narrow"].parts)["merge"] - dict(step["wide"].parts)["merge"]
    assert slower == pytest.approx(7 * seconds, rel=0.01)


def test_a_rank_keeps_its_part_of_windows_and_all_states_beside_the_keys() -> None:
    recurrent = am.Recurrent(4, 32, 64, layers=3)
    work = am.Workload(8, 8, 64, 1000, phase="decode", recurrent=recurrent)
    plain, full = (
        ModelSizes(work, 512, 2, lambda ranks, _: 1000 // ranks, window_bytes=window) for window in (0, 64 * 10**6)
    )
    assert work.state_bytes > 0
    cluster = am.Cluster.preset("dgx-h100", 1)
    for one, other in zip(serving_plans(plain, cluster), serving_plans(full, cluster), strict=True):
        ranks = one.attention_plan.shape.ranks
        free = cluster.device.memory - one.weight_bytes - work.state_bytes
        token = one.key_bytes / 1000
        assert one.tokens == pytest.approx(free / token, abs=1)
        assert one.tokens - other.tokens == pytest.approx(64 * 10**6 / ranks / token, abs=2)


def test_sharing_over_hosts_takes_an_exchange_a_layer() -> None:
    """An exchange sends a rank's outputs and a tag to each other host at once."""
    model, hosts = model_of_cpus(), cpus(4, 1)
    way = over_hosts(model, hosts)
    assert way is not None
    link, outputs = hosts.between, sum(LAYERS.outputs)
    sent = 3 * (outputs * 4 / 4 + 8 * len(LAYERS.outputs)) / link.rate
    waits = len(LAYERS.outputs) * (link.merge_latency + 2 * link.message + hosts.device.call)
    assert dict(way.parts)["outputs"] == pytest.approx(waits + sent)
    assert way.read_bytes == 51 * 10**6
    assert over_hosts(model, cpus()) is None
    assert over_hosts(model, replace(cpus(), between=NO_LINK)) is None
    assert over_hosts(replace(model, shared=None), hosts) is None


def test_a_merge_of_hosts_is_many_small_calls_on_cpus() -> None:
    """A native call merges in a host, and one launch on GPUs."""
    shape, call = am.Shape(1, 1, 2), cpus().device.call
    for cluster, calls in ((cpus(2, 1), 16), (cpus(), 1), (replace(cpus(2, 1), short_collectives="tree"), 1)):
        (one,) = [way for way in serving_plans(model_of_cpus(), cluster, shape) if way.layer_ranks == 1]
        link = cluster.between if cluster.hosts > 1 else cluster.inside
        size = 9 * 65 * 4 + 8
        seconds = 30 * (link.merge_latency + size / link.rate + calls * call)
        assert dict(one.parts)["merge"] == pytest.approx(seconds)


def test_more_ranks_than_cores_read_from_one_memory() -> None:
    """Two cores read as much, by two ranks or by four; one rank with all cores is one of the ways."""
    crowded = replace(cpus(ranks=4), device=cpus().device.of_cores(0.5))
    two, four = serving_plans(model_of_cpus(), cpus()), serving_plans(model_of_cpus(), crowded)
    weights = {way.ranks: dict(way.parts)["weights"] for way in (*two, *four) if way.layer_ranks == 1}
    assert weights[4] == pytest.approx(2 * weights[2])
    assert weights[1] == pytest.approx(weights[2] / 2)
    alone = [next(way for way in ways if way.ranks == 1) for ways in (two, four)]
    assert alone[0].seconds == pytest.approx(alone[1].seconds)
    shared = [
        dict(choose_plan(ways, ranks, layers_shared=True).parts)["weights"] for ways, ranks in ((two, 2), (four, 4))
    ]
    assert shared[0] == pytest.approx(shared[1], rel=0.01)  # each rank reads 1 MB beside the 200


def test_a_given_shape_is_priced_alone() -> None:
    for shape, layer_ranks in (((1, 2, 2), 2), ((1, 1, 4), 4)):
        found = serving_plans(model_of_cpus(), cpus(ranks=4), am.Shape(*shape))
        assert {one.shape for one in found} == {shape}
        assert {one.layer_ranks for one in found} == {1, layer_ranks}


def test_the_shared_layers_of_a_model_are_those_of_its_steps() -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 4}
    config = LlamaConfig(vocab_size=4096, num_hidden_layers=2, tie_word_embeddings=False, **sizes)
    shared = model_size(config, "float32", length=1000, phase="decode").shared
    assert shared is not None
    assert shared.outputs == (1024 + 2 * 256, 1024, 2 * 2048, 1024) * 2 + (4096,)
    assert shared.weight_bytes == 4 * 1024 * (2 * (2 * 1024 + 2 * 256 + 3 * 2048) + 4096)
    small = LlamaConfig(vocab_size=96, num_hidden_layers=2, hidden_size=64, num_attention_heads=4)
    assert model_size(small, "bfloat16", length=1000, phase="decode").shared is not None  # its inner layers are large
