"""Figures of a server: they count what was served, and are as Prometheus reads them."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from attnmesh.hf.serving.engine import Engine
from attnmesh.hf.serving.prefix_store import PrefixStore
from attnmesh.serve.metrics import ENGINE
from tests.support.models import families
from tests.support.serving.fake_engine import ThreadWorld
from tests.support.serving.served import Served, chat, served, until


@pytest.fixture(scope="module")
def running() -> Iterator[Served]:
    """A server that has answered a request and heard of its engine: figures of what never was are not shown."""
    with served(ThreadWorld()) as one:
        one.ask("/v1/chat/completions", chat())
        until(lambda: "attnmesh_engine_" in one.ask("/metrics")[1])
        yield one


def test_figures_count_what_was_served(running: Served) -> None:
    before, tokens = running.figure('attnmesh_responses_total{status="200"}'), running.figure("attnmesh_tokens_total")
    assert running.ask("/v1/chat/completions", chat())[0] == 200
    assert running.figure('attnmesh_responses_total{status="200"}') == before + 1
    assert running.figure("attnmesh_tokens_total") == tokens + 20
    assert running.figure("attnmesh_gap_seconds_count") > 0
    assert running.figure('attnmesh_engine_cache_bytes{rank="1"}') == 12
    assert running.figure('attnmesh_state{state="ready"}') == 1


@pytest.mark.parametrize("path", ["/health", "/metrics"])
def test_what_is_polled_is_not_counted(path: str, running: Served) -> None:
    before = running.ask("/metrics")[1].splitlines()
    for _ in range(3):
        assert running.ask(path)[0] == 200
    counts = [
        [line for line in lines if line.startswith("attnmesh_responses_total")]
        for lines in (before, running.ask("/metrics")[1].splitlines())
    ]
    assert counts[0] == counts[1]


def test_figures_have_types_names_and_texts_as_prometheus_has_them(running: Served) -> None:
    families = [*text_string_to_metric_families(running.ask("/metrics")[1])]
    kinds = {family.name: family.type for family in families if not family.name.endswith("_created")}
    assert kinds["attnmesh_responses"] == kinds["attnmesh_engine_tokens"] == "counter"
    assert kinds["attnmesh_first_token_seconds"] == "histogram"
    assert kinds["attnmesh_engine_running"] == kinds["attnmesh_engine_cache_bytes"] == "gauge"
    for family in families:
        assert re.fullmatch("attnmesh(_[a-z0-9]+)+", family.name), family.name
        assert not family.name.endswith(("_total", "_count", "_sum", "_bucket")), family.name
        assert len(family.documentation.split()) > 2, family.name
        assert family.documentation.endswith("."), family.name
        endings = {"counter": "_total", "gauge": ""}.get(family.type)
        assert endings is None or {sample.name for sample in family.samples} == {family.name + endings}


def test_each_figure_of_an_engine_has_a_text(tmp_path: Path) -> None:
    model, folder = families.model("llama", "attnmesh"), tmp_path / "prefixes"
    folder.mkdir(mode=0o700)
    engine = Engine(model, None, store=PrefixStore(folder), draft=families.model("llama", "attnmesh"))
    assert engine.metrics().keys() == ENGINE.keys()
