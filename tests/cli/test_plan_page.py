"""The page of a plan: its data, and what a browser shows of it."""

import base64
import json
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import attnmesh as am
from attnmesh.cli.plan_page import PagePoints, grid_of, page
from attnmesh.planner.plan import Plan
from attnmesh.planner.schemes import best_by_scheme
from attnmesh.planner.units import bytes_text, seconds_text
from tests.support.planning.planned import CLUSTER, SMALL
from tests.support.serving.browser import Browser

GRID = PagePoints(kv_heads=(4, 16), ranks=(2, 4), hosts=(1, 2, 4), lengths=(16384, 131072, 8 << 20))


@cache
def best_at(kv_heads: int, ranks: int, hosts: int, length: int) -> dict[str, Plan]:
    """Return the best plan of each scheme at a point of the grid."""
    return best_by_scheme(am.Workload(16, kv_heads, 64, length), CLUSTER.sized(hosts, ranks))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page in a file."""
    file = tmp_path_factory.mktemp("page") / "plan.html"
    file.write_text(page(SMALL, CLUSTER, GRID), encoding="utf-8")
    return file


def data_of(text: str) -> Any:
    """Return the data of a page."""
    held = text.split('type="application/json">')[1].split("</script>")[0]
    assert "<" not in held
    return json.loads(held)


def test_the_data_of_the_page_is_that_of_plans(written: Path) -> None:
    known = data_of(written.read_text(encoding="utf-8"))
    assert len(known["points"]) == 36
    for point, schemes in zip(product(*GRID), known["points"], strict=True):
        best = best_at(*point)
        assert [known["schemes"][one[0]][0] for one in schemes] == [*best]
        # The page has six digits.
        assert [one[2] for one in schemes] == pytest.approx([one.seconds for one in best.values()], rel=1e-5)
    assert [] in known["points"]  # 8 million tokens do not fit two devices


def test_the_page_needs_nothing_from_elsewhere() -> None:
    text = page(SMALL, CLUSTER, PagePoints((4,), (4,), (1, 2), (16384,)))
    assert "goes here" not in text
    for foreign in ("src=", "@import", "url(", "<link"):
        assert foreign not in text
    assert text.count("http") == text.count("http://www.w3.org/2000/svg")


def test_no_name_ends_the_data_of_a_page() -> None:
    """In a script element, a browser interprets even a comment and an opening script tag."""
    text = page(SMALL, replace(CLUSTER, name="</script><!--<script>"), PagePoints((4,), (4,), (1,), (16384,)))
    assert data_of(text)["cluster"] == "</script><!--<script>"


def test_the_grid_of_a_page_holds_the_given_sizes() -> None:
    grid = grid_of(am.Workload(48, 6, 128, 5_000_000), am.Cluster.preset("gb200-nvl72", 3))
    assert grid == PagePoints(
        (3, 6, 12, 24, 48),
        (1, 2, 4, 8, 72),
        (1, 2, 3, 4, 8, 16, 32, 64),
        (*(8192 * 4**n for n in range(5)), 5_000_000, 8 << 20),
    )
    assert grid_of(SMALL, am.Cluster.preset("dgx-h100", 1, 1)).ranks == (1,)


SHOWN = """
const rows = [...document.querySelectorAll("#schemes .scheme")].map(row => [
  row.dataset.scheme, row.querySelector(".time").textContent,
  ...[...row.querySelectorAll("dd")].map(one => one.textContent)]);
const lines = id => Object.fromEntries([...document.querySelectorAll(`#${id} polyline`)].map(
  line => [line.dataset.scheme, line.getAttribute("points").split(" ").length]));
return {rows, devices: lines("devices"), lengths: lines("lengths"), why: document.getElementById("reason").textContent};
"""


def shown_for(kv_heads: int, ranks: int, hosts: int, length: int) -> dict[str, Any]:
    """Return the expected content of the page at a point of the grid."""
    best = best_at(kv_heads, ranks, hosts, length)
    figures = {
        name: [seconds_text(p.seconds), p.name, *map(bytes_text, (*reversed(p.bytes), p.memory))]
        for name, p in best.items()
    }
    over = (
        [best_at(kv_heads, ranks, h, length) for h in GRID.hosts],
        [best_at(kv_heads, ranks, hosts, n) for n in GRID.lengths],
    )
    devices, lengths = ({name: sum(name in one for one in many) for one in many for name in one} for many in over)
    why = am.plan(am.Workload(16, kv_heads, 64, length), CLUSTER.sized(hosts, ranks))[0].explain() if best else None
    rows = [[name, *texts] for name, texts in figures.items()]
    return {"rows": rows, "devices": devices, "lengths": lengths, "why": why or "No plan fits the memory."}


@pytest.fixture
def opened(browser: Browser, written: Path) -> Browser:
    browser.call("POST", "/url", {"url": written.as_uri()})
    return browser


def test_sliders_change_curves_and_table(opened: Browser) -> None:
    assert opened.run(SHOWN) == shown_for(4, 4, 2, 16384)
    opened.move("hosts", 2)
    opened.move("kv", 1)
    assert opened.run(SHOWN) == shown_for(16, 4, 4, 16384)
    opened.move("length", 1)
    opened.move("ranks", 0)
    assert opened.run(SHOWN) == shown_for(16, 2, 4, 131072)
    assert opened.run("return document.getElementById('kv-value').textContent") == "16 / 16"
    opened.move("length", 2)
    opened.move("hosts", 0)
    assert opened.run(SHOWN) == shown_for(16, 2, 1, 8 << 20)
    assert "does not fit the 80 GB" in opened.run("return document.getElementById('schemes').textContent")
    assert opened.call("POST", "/se/log", {"type": "browser"}) == []


SMALLEST = """
const seen = one => one.getClientRects().length > 0;
const texts = [...document.querySelectorAll("main *")].filter(one => seen(one) && one.textContent.trim());
const targets = [...document.querySelectorAll("input, summary")].map(one => one.getBoundingClientRect().height);
const unnamed = [...document.querySelectorAll("input")].filter(one => !one.labels.length).length;
return [document.documentElement.scrollWidth, Math.min(...texts.map(one => parseFloat(getComputedStyle(one).fontSize))),
  Math.min(...targets), unnamed];
"""


def test_the_page_can_be_read_on_a_phone(opened: Browser) -> None:
    opened.resize(360)
    width, text, target, unnamed = opened.run(SMALLEST)
    assert width <= 360
    assert text >= 14
    assert target >= 40
    assert unnamed == 0
    assert base64.b64decode(opened.call("GET", "/screenshot")).startswith(b"\x89PNG")
    assert opened.call("POST", "/se/log", {"type": "browser"}) == []
