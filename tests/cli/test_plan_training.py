"""`attnmesh plan --model --training`: the ranks that share a sequence, and the tokens that fit."""

import json
import re
from pathlib import Path

import pytest

from attnmesh.errors import ClusterError
from attnmesh_command import app
from attnmesh_command.messages import OptionError
from tests.cli.test_app import run

DOCS = Path(__file__).parents[2] / "docs"
MODEL, PAGE = DOCS / "configs" / "llama-3.1-8b.json", DOCS / "finetune.md"
PLAN = ("plan", "--model", str(MODEL), "--training", "--cluster", "dgx-h100:1", "--length")


def test_the_table_begins_with_a_way_that_fits() -> None:
    code, text = run(*PLAN, "128k")
    assert code == 0
    assert "\n1 1 x 8 " in text
    assert "8 ranks share a sequence, as 8x1x1 (heads x queries x keys).\nSequences at once: 1." in text
    assert "Inputs of layers" not in text
    assert "Inputs of layers\nare what gradient checkpointing keeps." in run(*PLAN, "128k", "-v")[1]
    assert text.count("!") == 3 + 1  # three ways do not fit, and the caption says what the sign means


def test_the_page_shows_what_the_command_prints() -> None:
    blocks = re.findall(r"^```\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    number, other = [number for number, block in enumerate(blocks) if block.startswith("attnmesh plan ")]
    code, text = run(*blocks[number].split()[1:])
    assert code == 0
    printed, page = (re.sub("─+", "", lines).split() for lines in (text, blocks[number + 1]))
    assert page == printed
    _, adapter = run(*blocks[other].split()[1:])
    _, model = run(*blocks[other].replace(" --lora 16", "").split()[1:])
    for figure, said in (("43,646,976 of 8,190,735,360 parameters", adapter), ("524 MB", adapter), ("98.3 GB", model)):
        assert figure in said
        assert figure in PAGE.read_text()
    assert "1 4 x 2     7.58 GB " in adapter
    assert "1 4 x 2     19.8 GB " in model


def test_json_has_all_figures() -> None:
    report = json.loads(run(*PLAN, "128k", "--json")[1])
    assert report["parameters"] == 8_030_261_248
    for way in report["ways"]:
        assert way["memory"] == sum(way[part] for part in ("states", "inputs", "layer", "logits"))


def test_an_adapter_takes_less_memory_than_the_model() -> None:
    code, text = run(*PLAN, "128k", "--lora", "16")
    assert code == 0
    assert "Trained: 41,943,040 of 8,030,261,248 parameters." in text
    assert "Saved: checkpoints of 503 MB, the adapter alone of 168 MB." in text
    found = [json.loads(run(*PLAN, "128k", *more, "--json")[1])["ways"][0]["states"] for more in ((), ("--lora", "16"))]
    assert found[0] - found[1] == (12 * 8_030_261_248 - 16 * 41_943_040) / 8
    with pytest.raises(OptionError, match="--lora: expected --model and --training beside it, given 8"):
        app(["plan", "--heads", "8", "--cluster", "local", "--length", "1k", "--lora", "8"], standalone_mode=False)


def test_too_many_tokens_are_refused() -> None:
    with pytest.raises(ClusterError, match="expected at most 223,853 tokens of a sequence, given 10,000,000"):
        app([*PLAN, "10M"], standalone_mode=False)
    app([*PLAN, "223853"], standalone_mode=False)
