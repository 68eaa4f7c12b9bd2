"""Plans of models that select their keys: bytes counted by hand, and those of caches and steps that run."""

import pytest
import torch
from transformers import DeepseekV32Config

import attnmesh as am
import attnmesh.hf as hf
from attnmesh import errors
from attnmesh.cost.candidate_mesh import CandidateMesh
from attnmesh.decoding.index_search import top_k_tokens
from attnmesh.hf.model_size import model_size
from attnmesh.mesh.shapes import Shape
from attnmesh.planner.serving import serving_plans
from attnmesh.planner.workload_cost import cost, index_cost
from attnmesh.runtime.counters import count_traffic
from tests.support.models.families import prompt
from tests.support.models.tiny_models import Case, build
from tests.support.ranks.pool import Pool, on_each_rank

pytestmark = pytest.mark.quick

MILLION, RANKS, HOSTS = 2**20, 16, am.Cluster.preset("dgx-h100", 2)

SELECTED = am.Selected(2048, 64, 128)


def deepseek(phase: str = "decode", length: int = MILLION, selected: am.Selected | None = SELECTED) -> am.Workload:
    """Return the attention of DeepSeek-V3.2."""
    sizes = {"value_dim": 128, "latent": (512, 64), "layers": 61, "phase": phase, "selected": selected}
    return am.Workload(128, 128, 192, length, **sizes)


def keys_alone(queries: int = 1) -> CandidateMesh:
    """Return the ranks as one axis, of keys in decoding and of queries else."""
    shape, tile = Shape(1, queries, RANKS // queries), Shape(1, max(1, queries // 2), RANKS // queries // 2 or 1)
    return CandidateMesh(shape, tile, am.Zigzag(), "tree" if queries == 1 else "bulk")


def test_bytes_of_a_million_tokens_are_those_of_the_sizes() -> None:
    work = deepseek()
    # Two digits.
    assert work.kept_bytes / RANKS == 61 * (512 + 64) * 2 * MILLION / RANKS == pytest.approx(4.6e9, rel=0.01)
    assert work.index_bytes / RANKS == 61 * 128 * 2 * MILLION / RANKS == pytest.approx(1.02e9, rel=0.01)  # three digits
    assert cost(keys_alone(), work, HOSTS).memory == (work.kept_bytes + work.index_bytes) / RANKS


def test_candidates_are_six_percent_of_a_partial() -> None:
    """A partial has 128 heads of 512 numbers and their lse. Both go along the same tree."""
    selection, whole, plain = (
        index_cost(keys_alone(), deepseek(), HOSTS),
        cost(keys_alone(), deepseek(), HOSTS),
        cost(keys_alone(), deepseek(selected=None), HOSTS),
    )
    candidates, partials = (one.inside + one.between for one in (selection, plain))
    assert candidates == 61 * 4 * RANKS * 2048 * 8  # in each of 4 rounds all ranks send
    assert candidates / partials == pytest.approx(2048 * 8 / (128 * 513 * 4 + 8))
    assert whole.inside + whole.between == pytest.approx(candidates + partials)


def test_a_step_reads_what_is_selected() -> None:
    """So the kernel takes as long at a million tokens as at 100,000, and only the scores take ten times as long."""
    long, short = (dict(cost(keys_alone(), deepseek(length=length), HOSTS).parts) for length in (10**6, 10**5))
    call = HOSTS.device.call * 61
    assert long["kernel"] == short["kernel"] > call
    assert (long["score"] - call) / (short["score"] - call) == pytest.approx(10)
    whole = dict(cost(keys_alone(), deepseek(length=10**6, selected=None), HOSTS).parts)
    assert (whole["kernel"] - call) / (long["kernel"] - call) == pytest.approx(10**6 / 2048)


def test_prefill_gathers_index_keys_and_attends_what_is_selected() -> None:
    length = 131_072
    work = deepseek("prefill", length)
    found = index_cost(keys_alone(RANKS), work, HOSTS)
    assert found.inside + found.between == 61 * (RANKS - 1) * length * 128 * 2
    arriving, indices = length * 128 * 2, length / RANKS * 2048 * 4
    assert found.memory == pytest.approx(work.index_bytes / RANKS + arriving + indices)
    products = 2 * 64 * 128 * (length**2 / 2) / RANKS
    # Blocks on the diagonal count in whole.
    assert found.parts["score"] == pytest.approx(61 * products / HOSTS.device.forward_rate, rel=0.02)
    best = am.plan(work, HOSTS)
    assert {one.shape.keys for one in best} == {1}
    assert best[0].selection.parts == found.parts


def test_layers_without_an_indexer_have_no_index_keys() -> None:
    every, some = deepseek(), deepseek(selected=am.Selected(2048, 64, 128, layers=40, indexers=10))
    assert some.index_bytes == every.index_bytes * 10 // 61
    assert some.kept_bytes == every.kept_bytes
    parts, plain = (dict(cost(keys_alone(), one, HOSTS).parts) for one in (some, deepseek(selected=None)))
    assert parts["score"] == pytest.approx(dict(cost(keys_alone(), every, HOSTS).parts)["score"] * 10 / 61)
    assert parts["kernel"] > 21 / 61 * plain["kernel"]


@on_each_rank
def count_bytes_sent_by_a_step() -> tuple[int, int]:
    """Return the bytes that this rank sends for candidates, and for partials."""
    mesh = am.init_mesh("cpu", (1, 1, 2))
    sizes = {"batch": 1, "kv_heads": 1, "capacity": 64, "dtype": torch.float32}
    latents = am.KVCache(mesh, head_dim=24, value_dim=16, values="prefix", **sizes)
    index = am.KVCache(mesh, head_dim=8, values="none", **sizes)
    torch.manual_seed(0)
    latents.append(torch.randn(1, 1, 50, 24))
    index.append(torch.randn(1, 1, 50, 8))
    q, asked = torch.randn(1, 4, 1, 24), torch.randn(1, 1, 8)
    with count_traffic() as candidates:
        chosen = top_k_tokens(index, lambda keys, operands: operands[0] @ keys.mT, [asked], 6)
    with count_traffic() as partials:
        am.decode(q, latents, selected=am.Selection(chosen[:, None]), merge="tree", checked=False)
    return candidates.bytes, partials.bytes


def test_a_step_sends_the_bytes_that_are_predicted(pool: Pool) -> None:
    sizes = {"value_dim": 8, "latent": (16, 8), "phase": "decode", "dtype": "float32"}
    work = am.Workload(4, 4, 24, 50, selected=am.Selected(6, 1, 8), **sizes)
    candidate = CandidateMesh(Shape(1, 1, 2), Shape(1, 1, 2), am.Zigzag(), "tree")
    cluster = am.Cluster.preset("local")
    selection, whole = index_cost(candidate, work, cluster), cost(candidate, work, cluster)
    for candidates, partials in pool.run(2, count_bytes_sent_by_a_step):
        assert selection.inside == 2 * candidates
        assert whole.inside - selection.inside == pytest.approx(2 * partials, rel=0.05)


def test_a_cache_holds_the_bytes_that_are_counted() -> None:
    model, length = build(Case("deepseek_v32", "deepseek_v32"), "attnmesh", torch.float32), 90
    cache = hf.ShardedCache(model.config, block=1)
    hf.generate(model, prompt(length), cache=cache, max_new_tokens=1, do_sample=False)
    work = model_size(model.config, "float32", length=length, phase="decode").workload
    stored = [
        (layer.kv_cache.own_shard.token_bytes, layer.other_kv_caches["index"].own_shard.token_bytes)
        for layer in cache.attention_layers
    ]
    assert [sum(column) for column in zip(*stored, strict=True)] == [work.kept_bytes, work.index_bytes]


def test_tokens_that_fit_leave_room_for_index_keys() -> None:
    model = model_size(DeepseekV32Config(num_hidden_layers=61), length=MILLION, phase="decode")
    assert model.workload.selected == am.Selected(2048, 64, 128, layers=61, indexers=61)
    token = 61 * (512 + 64 + 128) * 2
    for one in serving_plans(model, am.Cluster.preset("dgx-h100", 4)):
        ranks = 32 // one.sharding.tp  # that share the keys
        assert one.key_bytes == pytest.approx(MILLION * token / ranks)
        assert one.tokens == max(0, int((80e9 - one.weight_bytes) * ranks / token))


def test_the_plan_says_what_indexers_cost() -> None:
    best = am.plan(deepseek(), HOSTS)[0]
    line = best.explain().splitlines()[2]
    assert line.startswith("Indexers (61) take ")
    assert line.endswith("index keys take 1.02 GB a rank.")
    assert "2,048 tokens selected by 64x128" in deepseek().title


INVALID = [
    (lambda: am.Selected(0, 64, 128), "Selected k: expected a whole number, 1 or more, given 0"),
    (lambda: am.Selected(2048, 64, True), "Selected index_dim"),
    (lambda: am.Selected(2048, 64, 128, block=-1), "Selected block"),
    (lambda: deepseek(selected=2048), "Workload selected: expected a Selected, given 2048"),
    (lambda: deepseek(selected=am.Selected(8, 1, 8, heads=3)), "Workload selected: expected 1 or 128 key heads"),
    (lambda: deepseek(selected=am.Selected(8, 1, 8, layers=62)), "at most 61 layers"),
    (lambda: deepseek(selected=am.Selected(8, 1, 8, layers=4, indexers=5)), "given layers=4, indexers=5"),
]


@pytest.mark.parametrize(("make", "words"), INVALID)
def test_counts_that_cannot_be_are_refused(make: object, words: str) -> None:
    with pytest.raises(errors.InputError, match=words):
        make()  # type: ignore[operator]
