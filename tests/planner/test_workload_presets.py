"""Presets of diffusion transformers are the sizes of their classes, and their tokens those of their videos."""

import inspect
import json
from pathlib import Path

import pytest

import attnmesh as am
from attnmesh import errors
from attnmesh.planner.workload_presets import WORKLOADS, workload_preset
from attnmesh_command import app
from attnmesh_command.messages import OptionError
from tests.support.process.command import run_plan

TOKENS = {
    "wan-14b-720p": 21 * 45 * 80,
    "wan-14b-480p": 21 * 30 * 52,
    "wan-5b-720p": 31 * 22 * 40,
    "hunyuanvideo-720p": 33 * 45 * 80 + 256,
    "hunyuanvideo-1.5-720p": 31 * 45 * 80,
    "flux-1024": 64 * 64 + 512,
    "flux-2048": 128 * 128 + 512,
    "qwen-image-1328": 83 * 83 + 512,
    "ltx-video": 21 * 16 * 22,
}


DEFAULTS = [name for name in WORKLOADS if ", defaults of diffusers" in WORKLOADS[name].source]


@pytest.mark.parametrize("name", DEFAULTS)
def test_presets_are_the_sizes_of_their_classes(name: str) -> None:
    diffusers, found = pytest.importorskip("diffusers"), WORKLOADS[name]
    kind = getattr(diffusers, found.source.split(",")[0])
    sizes = {key: value.default for key, value in inspect.signature(kind.__init__).parameters.items()}
    assert (found.heads, found.head_dim) == (sizes["num_attention_heads"], sizes["attention_head_dim"])
    assert found.layers == sizes["num_layers"] + sizes.get("num_single_layers", 0)


def test_tokens_are_those_of_the_images_and_videos() -> None:
    assert {name: found.length for name, found in WORKLOADS.items()} == TOKENS
    assert {name: workload_preset(name).length for name in WORKLOADS} == TOKENS


def test_only_wan_5b_is_not_of_a_class() -> None:
    found = WORKLOADS["wan-5b-720p"]
    assert set(WORKLOADS) - set(DEFAULTS) == {"wan-5b-720p"}
    assert (found.heads, found.head_dim, found.layers) == (24, 128, 30)
    assert "not a default of diffusers" in found.source


def test_presets_are_workloads() -> None:
    work = workload_preset("flux-1024", length=1000, phase="training")
    assert work == am.Workload(24, 24, 128, 1000, layers=57, mask=am.Full(), phase="training")
    with pytest.raises(errors.KernelError, match=r"workload: expected one of wan-14b-720p, .* given 'sora'"):
        workload_preset("sora")


def test_the_guide_has_a_row_of_each_preset() -> None:
    text = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
    rows = [f"| `{n}` | {w.length:,} | {w.heads} x {w.head_dim} | {w.layers} |" for n, w in WORKLOADS.items()]
    assert [row for row in rows if row not in text] == []


# --- the command ---


def test_the_command_plans_a_preset() -> None:
    code, text = run_plan("--workload", "wan-14b-720p", "--cluster", "dgx-h100:4")
    assert code == 0
    assert "preset: wan-14b-720p" in text
    assert "21 x 45 x 80 without text" in text
    assert "prefill, 75,600 tokens, 40/40 heads of 128, bfloat16, no mask, 40 layers" in text
    assert "attnmesh.diffusers.enable(pipeline.transformer, am.init_mesh((" in text


def test_options_change_a_preset() -> None:
    options = ("--length", "8k", "--training", "--batch", "2", "--dtype", "float16", "--json")
    record = json.loads(run_plan("--workload", "flux-1024", "--cluster", "dgx-h100:2", *options)[1])
    named = {key: record["workload"][key] for key in ("length", "phase", "batch", "dtype", "layers")}
    assert named == {"length": 8000, "phase": "training", "batch": 2, "dtype": "float16", "layers": 57}
    assert (record["preset"], record["tokens"]) == ("flux-1024", "given by --length")
    assert record["source"].startswith("FluxTransformer2DModel")
    again = json.loads(run_plan(*record["command"].split()[2:], "--json")[1])
    assert again["plans"] == record["plans"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--workload", "sora"), "--workload: expected one of wan-14b-720p"),
        (("--workload", "flux-1024", "--heads", "8"), "leave --heads or --workload out"),
        (("--workload", "flux-1024", "--window", "0"), "leave --window or --workload out"),
        (("--workload", "flux-1024", "--full"), "leave --full or --workload out"),
        (("--workload", "flux-1024", "--recurrent", "8x64x64"), "leave --recurrent or --workload out"),
        (("--workload", "flux-1024", "--model", "smollm2"), "leave --model or --workload out"),
        (("--workload", "flux-1024", "--decode"), "given --decode"),
        (("--workload", "flux-1024", "--prefill", "--training"), "expected one phase"),
        (("--workload", "flux-1024", "--length", "many"), "--length: expected tokens"),
        (("--heads", "8"), "expected --length or --workload, given neither"),
    ],
)
def test_options_that_do_not_go_together_raise(options: tuple[str, ...], expected: str) -> None:
    with pytest.raises((errors.InputError, OptionError)) as error:
        app(["plan", "--cluster", "dgx-h100:2", *options], standalone_mode=False)
    assert expected in str(error.value)
