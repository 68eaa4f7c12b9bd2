"""`attnmesh plan --model --training`: the ranks that share a sequence, and the tokens that fit."""

import json
import re
from pathlib import Path
from unittest import mock

import pytest

from attnmesh.errors import ClusterError
from attnmesh_command import app
from attnmesh_command.messages import OptionError
from tests.support.process.command import run

DOCS = Path(__file__).parents[2] / "docs"
MODEL, PAGE = DOCS / "configs" / "llama-3.1-8b.json", DOCS / "finetune.md"
LAYERS = 32
"""Layers of that model."""

PLAN = ("plan", "--model", str(MODEL), "--training", "--cluster", "dgx-h100:1", "--length")


def test_the_table_begins_with_a_way_that_fits() -> None:
    code, text = run(*PLAN, "128k")
    assert code == 0
    assert "\n1 4 x 2 " in text
    assert "2 ranks share a sequence, as 2x1x1 (heads x queries x keys).\nSequences at once: 4." in text
    assert "Inputs of layers" not in text
    assert "what is computed again for its backward pass, attention included." in run(*PLAN, "128k", "-v")[1]
    assert text.count("!") == 1 + 1  # one way does not fit, and the caption says what the sign means


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
    assert "1 8 x 1     4.16 GB " in adapter
    assert "1 8 x 1     12.3 GB " in model


def test_json_has_all_figures() -> None:
    report = json.loads(run(*PLAN, "128k", "--json")[1])
    assert report["parameters"] == 8_030_261_248
    for way in report["ways"]:
        assert way["memory"] == max(way["moments"].values())
        assert way["moments"]["last layer"] > way["states"] + way["inputs"] + way["layer"]


def test_logits_that_are_never_there_take_no_ranks() -> None:
    assert json.loads(run(*PLAN, "128k", "--json")[1])["loss"] == "fused"  # TRL is installed
    fused, full = (json.loads(run(*PLAN, "128k", "--loss", loss, "--json")[1])["ways"] for loss in ("fused", "full"))
    assert (fused[0]["context"], full[0]["context"]) == (2, 4)
    with mock.patch("attnmesh.cli.plan_training.find_spec", return_value=None):
        assert json.loads(run(*PLAN, "128k", "--json")[1])["loss"] == "full"
    with pytest.raises(OptionError, match="--loss: expected one of full, fused, given 'chunked'"):
        app([*PLAN, "128k", "--loss", "chunked"], standalone_mode=False)


def test_offloaded_inputs_are_on_the_host() -> None:
    here, away = (json.loads(run(*PLAN, "256k", *more, "--json")[1])["ways"] for more in ((), ("--offload",)))
    assert not any(one["host"] for one in here)
    for one in away:
        (same,) = (x for x in here if x["context"] == one["context"])
        assert one["host"] == LAYERS * one["inputs"] == same["inputs"]
        assert one["tokens"] > same["tokens"]
    assert "inputs on" in run(*PLAN, "256k", "--offload")[1]


def test_rollouts_have_keys_beside_whole_weights() -> None:
    more = ("--lora", "16", "--rollout", "16")
    report = json.loads(run(*PLAN, "8k", *more, "--json")[1])
    assert (report["ddp"], report["rollout"]) == (True, 16)
    assert report["ways"][0]["completions"] == 16 * 8000 * LAYERS * 8 * 256 * 2 / report["ways"][0]["context"]
    assert "whole on each rank (DDP)" in (text := run(*PLAN, "8k", *more)[1])
    assert "keys of" in text
    with pytest.raises(OptionError, match="--rollout: expected --model and --training beside it, given 8"):
        app(["plan", "--heads", "8", "--cluster", "local", "--length", "1k", "--rollout", "8"], standalone_mode=False)


def test_an_adapter_takes_less_memory_than_the_model() -> None:
    code, text = run(*PLAN, "128k", "--lora", "16")
    assert code == 0
    assert "Trained: 41,943,040 of 8,030,261,248 parameters." in text
    assert "Saved: checkpoints of 503 MB, the adapter alone of 168 MB." in text
    found = [json.loads(run(*PLAN, "128k", *more, "--json")[1])["ways"][0]["states"] for more in ((), ("--lora", "16"))]
    assert found[0] - found[1] == (8 * 8_030_261_248 - 12 * 41_943_040) / 8
    with pytest.raises(OptionError, match="--lora: expected --model and --training beside it, given 8"):
        app(["plan", "--heads", "8", "--cluster", "local", "--length", "1k", "--lora", "8"], standalone_mode=False)


def test_too_many_tokens_are_refused() -> None:
    with pytest.raises(ClusterError, match="expected at most 944,984 tokens of a sequence, given 10,000,000"):
        app([*PLAN, "10M"], standalone_mode=False)
    app([*PLAN, "944984"], standalone_mode=False)  # 8 ranks have as many tokens each
    with pytest.raises(ClusterError, match="expected at most 944,984 tokens of a sequence, given 944,985"):
        app([*PLAN, "944985"], standalone_mode=False)
    with pytest.raises(ClusterError, match="Fix: leave --ddp and --rollout out"):
        app([*PLAN, "1k", "--ddp"], standalone_mode=False)
