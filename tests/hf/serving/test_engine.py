"""An engine: each stream has the tokens that its request has alone, whatever else runs, fails, or waits."""

from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import attnmesh.hf as hf
from attnmesh import errors
from attnmesh.hf.serving.engine import Engine
from attnmesh.hf.serving.operations import DecodeRows, Fill, Start
from attnmesh.hf.serving.step_plan import StepPlan
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.models import families
from tests.support.models.tiny_models import Case, build
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.serving.engines import SAMPLED, greedy, ids, running, started, stock_draws, tokens
from tests.support.truth.mesh_problems import named_mesh
from tests.support.truth.seeds import pairs
from tests.support.truth.tolerances import FLOAT32_MODEL

SHAPES = [Shape(1, 1, 1), Shape(1, 1, 2), Shape(2, 1, 1)]


@on_each_rank
def stream_together(shape: Shape, family: str) -> None:
    """Compare streams that join as others run with `generate`, sampled ones with what it draws."""
    model, mesh = families.model(family, "attnmesh"), named_mesh(shape, AXES)
    prompts = [ids(length, seed=length) for length in (150, 1, 37, 5, 90, 3)]
    wanted = [greedy(model, text, 4 + row, mesh=mesh) for row, text in enumerate(prompts)]
    alone = [stock_draws(model, text, 7, mesh=mesh, **SAMPLED) for text in prompts[:3]]
    with running(model, mesh, max_rows=4, max_gap=0.01) as engine:
        if engine is None:
            return
        streams = [engine.submit(text, max_new_tokens=4 + row) for row, text in enumerate(prompts)]
        drawn = [engine.submit(text, max_new_tokens=7, **SAMPLED) for text in prompts[:3]]
        assert [tokens(stream) for stream in streams] == wanted
        assert [tokens(stream) for stream in drawn] == alone
        assert {stream.finish_reason for stream in streams + drawn} == {"length"}
        other = engine.submit(prompts[0], max_new_tokens=7, **(SAMPLED | {"seed": 6}))
        assert tokens(other) != alone[0]


@pytest.mark.parametrize(("family", "shape"), pairs(["gemma3", "llama4", "llama"], SHAPES, 2))
def test_streams_do_not_depend_on_what_else_runs(shape: Shape, family: str, pool: Pool) -> None:
    pool.run(shape.ranks, stream_together, shape, family)


@on_each_rank
def stream_recurrent_together(name: str, ranks: int) -> None:
    model, mesh = build(Case(name, name), "attnmesh", torch.float32), named_mesh(Shape(1, 1, ranks), AXES)
    prompts = [ids(length, seed=length) for length in (37, 2, 22)]
    wanted = [greedy(model, text, 9, mesh=mesh) for text in prompts]
    turn, cache = prompts[0] + wanted[0] + ids(9), hf.ShardedCache(model.config, mesh)
    greedy(model, prompts[0], 9, cache=cache)
    after = greedy(model, turn, 5, cache=cache)  # states of one turn go on in the next
    with running(model, mesh) as engine:
        if engine is None:
            return
        streams = [engine.submit(text, max_new_tokens=9) for text in prompts]
        assert [tokens(stream) for stream in streams] == wanted
        stream = engine.submit(turn, max_new_tokens=5)
        assert (tokens(stream), stream.cached_tokens) == (after, len(prompts[0]) + 8)


@pytest.mark.parametrize(("name", "ranks"), pairs(["qwen3_next", "falcon_h1", "deepseek_v3"], [2, 1], 2))
def test_recurrent_states_and_latents_give_the_text_of_generate(name: str, ranks: int, pool: Pool) -> None:
    pool.run(ranks, stream_recurrent_together, name, ranks)


@on_each_rank
def serve_while_sharing_weights(keys: int, tp: int) -> None:
    """Serve on ranks that share weights beside the keys axis; with `tp` 0 on ranks that share both."""
    prompts = [ids(length, seed=length) for length in (70, 1, 22)]
    wanted = [greedy(families.model("llama", "attnmesh"), text, 5, mesh=None) for text in prompts]
    whole = init_device_mesh("cpu", (keys, max(tp, 1)), mesh_dim_names=("keys", "tp"))
    mesh, output = whole["keys"], "replicated" if tp else "heads"
    model = hf.tensor_parallel(families.model("llama", "attnmesh"), whole["tp"] if tp else mesh, output=output)
    with running(model, mesh, output=output, max_gap=0.01) as engine:
        if engine is None:
            return
        streams = [engine.submit(text, max_new_tokens=5) for text in prompts]
        drawn = [tokens(engine.submit(prompts[0], max_new_tokens=5, **SAMPLED)) for _ in range(2)]
        assert [tokens(stream) for stream in streams] == wanted
        assert drawn[0] == drawn[1]
        with pytest.raises(errors.InputError, match="submit ids"):
            engine.submit([-1], max_new_tokens=9)
        with pytest.raises(errors.InputError, match=r"submit logit_bias: .*, each once"):
            engine.submit([1], max_new_tokens=9, logit_bias=[(7, 1.0), (7, 2.0)])


@pytest.mark.parametrize(
    ("keys", "tp"),
    [pytest.param(2, 0, marks=pytest.mark.long), (3, 0), pytest.param(1, 2, marks=pytest.mark.long), (2, 2)],
)
def test_ranks_that_share_weights_give_the_same(keys: int, tp: int, pool: Pool) -> None:
    pool.run(keys * max(tp, 1), serve_while_sharing_weights, keys, tp)


@on_each_rank
def check_ends() -> None:
    model = families.model("llama", "attnmesh")
    whole = greedy(model, ids(20), 12, mesh=None)
    end = whole[5]
    expected = whole[: whole.index(end)]
    with running(model, None, tokens_end=[end]) as engine:
        assert engine is not None
        stream = engine.submit(ids(20), max_new_tokens=12)
        assert (tokens(stream), stream.finish_reason) == (expected, "stop")
    with running(model, None) as engine:
        assert engine is not None
        stream = engine.submit(ids(20), max_new_tokens=12, stop_ids=[end])
        assert (tokens(stream), stream.finish_reason) == (expected, "stop")
        for options in ({}, SAMPLED):
            all_new = tokens(engine.submit(ids(20), max_new_tokens=12, **options))
            again = engine.submit(ids(20), max_new_tokens=12, replay=all_new[:7], **options)
            assert tokens(again) == all_new[7:]
        done = engine.submit(ids(20), max_new_tokens=7, replay=whole[:7])
        assert (tokens(done), done.finish_reason) == ([], "length")
        chosen = list(engine.submit(ids(20), max_new_tokens=3, logprobs=2))
        assert [token.top[0] for token in chosen] == [(token.id, token.logprob) for token in chosen]
        logits = model(torch.tensor([ids(20)])).logits[0, -1].detach().log_softmax(-1)
        assert chosen[0].logprob == pytest.approx(float(logits.max()), abs=FLOAT32_MODEL)


def test_ends_replays_and_log_probabilities_are_right(pool: Pool) -> None:
    pool.run(1, check_ends)


@on_each_rank
def fail_one_row() -> None:
    """Serve five requests, one of which fails at its fourth token with those beside it."""
    model = families.model("llama", "attnmesh")
    texts = [ids(20, seed=seed) for seed in range(5)]
    wanted = [greedy(model, text, 12, mesh=None) for text in texts]
    engine = Engine(model, None)
    rows = engine.worker.do_rows

    def failing(chosen: Any, grows: bool) -> Any:
        ids_of = [engine.worker.caches[cache_id].tokens[0, :20].tolist() for cache_id, _ in chosen]
        lengths = [engine.worker.caches[cache_id].get_seq_length() for cache_id, _ in chosen]
        if texts[2] in ids_of and lengths[ids_of.index(texts[2])] >= 23:
            raise errors.ShapeError("KVCache capacity", "tokens that fit the device's memory", "no room", "wait")
        return rows(chosen, grows)

    engine.worker.do_rows = failing  # type: ignore[method-assign]
    streams = [engine.submit(text, max_new_tokens=12) for text in texts]
    with started(engine):
        for number, stream in enumerate(streams):
            if number != 2:
                assert tokens(stream) == wanted[number]
        with pytest.raises(errors.ShapeError, match="KVCache capacity"):
            tokens(streams[2])
        assert wanted[2][:4] == streams[2].answer[:4]
        assert len(streams[2].answer) < 12


def test_a_row_that_cannot_go_on_ends_alone(pool: Pool) -> None:
    pool.run(1, fail_one_row)


@on_each_rank
def read_plans_of_a_long_prompt() -> None:
    """Read the plans while a long prompt is computed beside short ones: these are done first, and it goes on."""
    model = families.model("llama", "attnmesh", max_position_embeddings=8192)
    engine = Engine(model, None)
    run = Mock(wraps=engine.worker.run)
    engine.worker.run = run  # type: ignore[method-assign]
    long = engine.submit(ids(6000), max_new_tokens=1)
    short = [engine.submit(ids(3 + seed, seed=seed), max_new_tokens=1) for seed in range(2)]
    with started(engine):
        for stream in (*short, long):
            assert len(tokens(stream)) == 1
    operations = [operation for call in run.call_args_list for operation in call.args[0]]
    chunks = [operation.cache_id for operation in operations if isinstance(operation, Fill)]
    last = {stream.cache_id: len(chunks) - chunks[::-1].index(stream.cache_id) for stream in (*short, long)}
    assert max(last[stream.cache_id] for stream in short) < last[long.cache_id]
    between = [number for number, chunk in enumerate(chunks) if chunk == long.cache_id]
    assert max(later - earlier for earlier, later in pairwise(between)) <= 3  # the long one goes on, too


def test_several_prompts_are_computed_in_turn(pool: Pool) -> None:
    pool.run(1, read_plans_of_a_long_prompt)


@on_each_rank
def read_plans_beside_streams(ranks: int) -> None:
    """Read the plans while a long prompt is computed beside three streams."""
    model = families.model("llama", "attnmesh", max_position_embeddings=8192)
    mesh, plans = named_mesh(Shape(1, 1, ranks), AXES), list[dict[type, Any]]()
    with running(model, mesh) as engine:
        if engine is None:
            return
        planned = engine.scheduler.plan

        def plan() -> StepPlan:
            step = planned()
            plans.append({type(operation): operation for operation in step.operations})
            return step

        engine.scheduler.plan = plan  # type: ignore[method-assign]
        streams = [engine.submit(ids(9, seed=seed), max_new_tokens=4000) for seed in range(3)]
        for stream in streams:
            next(iter(stream))
        assert len(tokens(engine.submit(ids(4000, seed=7), max_new_tokens=1))) == 1
        for stream in streams:
            stream.cancel()
    begin = next(number for number, one in enumerate(plans) if Start in one and len(one[Start].ids) == 4000)
    end = max(number for number, one in enumerate(plans) if Fill in one)
    assert end - begin >= 8  # the prompt came in parts
    for stream in streams:
        decoded = {n: dict(one[DecodeRows].rows) for n, one in enumerate(plans) if DecodeRows in one}
        steps = [n for n, rows in decoded.items() if stream.cache_id in rows]
        during = [begin, *(n for n in steps if begin < n < end), end]
        assert max(later - earlier for earlier, later in pairwise(during)) <= 3


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_no_stream_waits_more_than_three_steps_beside_a_long_prompt(ranks: int, pool: Pool) -> None:
    pool.run(ranks, read_plans_beside_streams, ranks)


@on_each_rank
def check_refusals() -> None:
    model = families.model("llama", "attnmesh", max_position_embeddings=64)
    engine = Engine(model, None, max_queue=2)
    wrong: dict[str, tuple[list[int], dict[str, Any]]] = {
        "submit ids: expected tokens from 0 to 96": ([97], {}),
        "submit ids: expected at most 64 tokens": ([3] * 60, {"max_new_tokens": 5}),
        "submit temperature": ([3], {"temperature": -1.0}),
        "submit top_p": ([3], {"top_p": 2}),
        "submit seed": ([3], {"seed": -1}),
        "submit min_p": ([3], {"min_p": 1.5}),
        "submit repetition_penalty": ([3], {"repetition_penalty": 0}),
        "submit frequency_penalty": ([3], {"frequency_penalty": 2.5}),
        "submit presence_penalty": ([3], {"presence_penalty": True}),
        "submit stop_ids: expected a list of ints": ([3], {"stop_ids": (token for token in "x")}),
        "submit max_new_tokens": ([3], {"max_new_tokens": 0}),
    }
    for message, (text, options) in wrong.items():
        with pytest.raises(errors.InputError, match=message):
            engine.submit(text, **({"max_new_tokens": 3} | options))
    with pytest.raises(errors.InputError, match="submit ids"):
        engine.submit([], max_new_tokens=3)
    for _ in range(2):
        engine.submit([3], max_new_tokens=3)
    with pytest.raises(errors.Busy, match="one of 2 requests that wait"):
        engine.submit([3], max_new_tokens=3)
    engine.submit([3], max_new_tokens=3, replay=[])
    with pytest.raises(errors.TooLong, match="at most 20 tokens"):
        Engine(model, None, capacity=20).submit([3] * 10, max_new_tokens=30)
    with pytest.raises(errors.ArgumentError, match="max_gap"):
        Engine(model, None, max_gap=-1.0)
    with pytest.raises(errors.ArgumentError, match=r"hf\.Engine folder: .* Fix: pass store=hf\.PrefixStore\(folder\)"):
        Engine(model, None, folder="kept")
    with pytest.raises(errors.InputError, match="max_rows"):
        Engine(model, None, max_rows=0)


def test_wrong_requests_are_refused(pool: Pool) -> None:
    pool.run(1, check_refusals)


@on_each_rank
def close_early() -> None:
    model = families.model("llama", "attnmesh")
    with running(model, None, max_rows=1) as engine:
        assert engine is not None
        streams = [engine.submit(ids(5, seed=seed), max_new_tokens=1500) for seed in range(3)]
        next(iter(streams[0]))
    for stream in streams:
        tokens(stream)
        assert stream.finish_reason == "cancelled"
    with pytest.raises(errors.Busy, match="closing"):
        engine.submit([3], max_new_tokens=3)


def test_close_ends_open_streams(pool: Pool) -> None:
    pool.run(1, close_early)


@on_each_rank
def fail_a_step() -> None:
    model = families.model("llama", "attnmesh")
    engine = Engine(model, None)
    stream = engine.submit(ids(5), max_new_tokens=5)

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such luck")

    model.forward = fails
    with pytest.raises(RuntimeError, match="no such luck"):
        engine.run()
    with pytest.raises(RuntimeError, match="no such luck"):
        tokens(stream)
    with pytest.raises(RuntimeError, match="no such luck"):
        engine.submit(ids(5), max_new_tokens=5)


def test_a_failure_reaches_all_streams(pool: Pool) -> None:
    pool.run(1, fail_a_step)
