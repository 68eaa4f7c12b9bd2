"""`attnmesh plan --model`: sizes from a configuration, and how many tokens fit beside the weights."""

import json
from pathlib import Path

import pytest
from transformers import (
    DeepseekV3Config,
    DeepseekV4Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GPT2Config,
    MambaConfig,
    T5Config,
)
from typer.testing import CliRunner

from attnmesh_command import app, show_errors
from tests.support.planning.planned import LLAMA_70B
from tests.support.process.command import planned_serve

HOSTS = ("--cluster", "dgx-h100:2", "--length", "1M")


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "160"})
    return result.exit_code, result.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("models")
    LLAMA_70B.save_pretrained(place / "llama")
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    Gemma3TextConfig(num_hidden_layers=6, layer_types=kinds, sliding_window=1024).save_pretrained(place / "gemma")
    DeepseekV3Config(num_hidden_layers=2).save_pretrained(place / "latent")
    DeepseekV4Config(num_hidden_layers=2).save_pretrained(place / "entries")
    GPT2Config(n_embd=8192, n_head=64, n_layer=40).save_pretrained(place / "unsplit")
    T5Config().save_pretrained(place / "t5")
    MambaConfig(num_hidden_layers=1).save_pretrained(place / "mamba")
    Gemma4TextConfig(num_hidden_layers=6, layer_types=kinds, global_head_dim=64).save_pretrained(place / "layers")
    return place


def test_the_table_has_weights_keys_and_tokens(folder: Path) -> None:
    code, text = run(*HOSTS, "--model", str(folder / "llama"), "--decode")
    assert code == 0
    assert "141 GB of weights; a token of a sequence has 328 kB of keys and values." in text
    assert "tp=8,queries=2" in text
    assert text.splitlines()[-1].endswith(f" serve --model {folder / 'llama'} --mesh tp=keys=16 --host 0.0.0.0")
    assert max(map(len, text.splitlines())) <= 160
    _, text = run("--cluster", "dgx-h100:2", "--length", "9k", "--model", str(folder / "llama/config.json"), "--decode")
    assert "\nMost tokens fit with tp=keys=16: 3,475,503.\n" in text


def test_rows_that_do_not_fit_have_no_times_and_one_is_typed(folder: Path) -> None:
    _, text = run(*HOSTS, "--model", str(folder / "llama"), "--decode", "--kv", "int8")
    (row,) = [line for line in text.splitlines() if " queries=8,keys=2 " in line]
    assert row.split()[-6:] == ["none", "-", "-", "does", "not", "fit"]
    first = next(line.split()[1] for line in text.splitlines() if line.startswith("1 "))
    assert f"Recommended is {first}: of the ways that fit" in text
    command = (
        "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HEAD:29500 -m attnmesh generate"
    )
    typed = " ".join(text.replace("\\\n", "").split())
    assert f"{command} --model {folder / 'llama'} --mesh {first} --kv int8 --prompt-file FILE" in typed


def test_a_folder_with_a_space_is_one_word_of_the_command(tmp_path: Path) -> None:
    LLAMA_70B.save_pretrained(place := tmp_path / "my llama")
    words = planned_serve(str(place), "dgx-h100:2")
    assert words[words.index("--model") + 1] == str(place)


@pytest.mark.parametrize("phase", ["--decode", "--prefill"])
def test_a_length_beyond_the_positions_is_warned_of(
    phase: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["plan", "--cluster", "dgx-h100:2", "--model", str(folder / "llama"), phase]
    app([*model, "--length", "2048"], standalone_mode=False)
    assert "warning" not in capsys.readouterr().err
    app([*model, "--length", "2049"], standalone_mode=False)
    assert "2,049 tokens are more than the model's 2,048 positions, and generate refuses" in capsys.readouterr().err


def test_the_json_plans_again(folder: Path) -> None:
    code, text = run(*HOSTS, "--model", str(folder / "llama"), "--decode", "--batch", "2", "--json")
    assert code == 0
    report = json.loads(text)
    assert {one["mesh"] for one in report["ways"]} >= {"queries=8,keys=2", "tp=8,queries=2", "tp=keys=16"}
    assert json.loads(run(*report["command"].split()[2:], "--json")[1]) == report


def test_layers_with_windows_and_latents_are_told(folder: Path) -> None:
    _, text = run("--cluster", "dgx-h100:1x4", "--length", "128k", "--model", str(folder / "gemma"), "--decode")
    assert "Left out is the time of 5 layers with windows, which keep " in text
    _, text = run("--cluster", "dgx-h100:1", "--length", "128k", "--model", str(folder / "latent"), "--decode")
    assert "latents of 512 and 64, bfloat16, causal, 2 layers" in " ".join(text.split())
    assert "tp=keys" not in text.replace("tp=keys: the", "")  # latents have no heads to share


def test_heads_that_differ_between_layers_are_those_of_layers_without_windows(folder: Path) -> None:
    _, text = run(
        "--cluster", "dgx-h100:1x4", "--length", "128k", "--model", str(folder / "layers"), "--prefill", "--json"
    )
    work = json.loads(text)["workload"]
    assert (work["head_dim"], work["layers"]) == (64, 1)


def test_other_phases_take_the_sizes_of_the_model(folder: Path) -> None:
    _, text = run(*HOSTS, "--model", str(folder / "llama"), "--prefill", "--json")
    work = json.loads(text)["workload"]
    assert (work["q_heads"], work["kv_heads"], work["head_dim"], work["layers"]) == (64, 8, 128, 80)


@pytest.mark.parametrize(
    ("more", "error"),
    [
        (("--model", "llama", "--decode", "--heads", "8"), "--heads: expected sizes of the model alone, given '8'"),
        (("--model", "llama", "--decode", "--window", "8"), "--window: expected sizes of the model alone, given 8"),
        (
            ("--model", "llama", "--decode", "--report", "a.html"),
            "--report: expected no picture of a model in decoding, given",
        ),
        (("--model", "t5", "--decode"), "model: expected a causal language model, given 't5', a t5"),
        (("--model", "mamba", "--decode"), "plan model: expected layers of attention, given mamba without any."),
        (
            ("--model", "entries", "--decode"),
            "plan model: expected layers that keep keys of tokens, given deepseek_v4",
        ),
        (("--model", "nothing.json", "--decode"), "model: expected a model, given 'nothing.json', where there is none"),
        (("--model", "./nowhere", "--decode"), "model: expected a model, given './nowhere', where there is none"),
        (("--decode",), "attnmesh plan: expected --heads or --model, given neither"),
        (
            ("--model", "llama", "--decode", "--length", "9M"),
            "plan for decode: expected at most 3,475,503 tokens of each sequence, given 9,000,000, beside 8.82 GB of",
        ),
        (
            ("--model", "llama", "--decode", "--cluster", "rtx4090"),
            "plan for decode: expected at most 0 tokens of each sequence, given 1,000,000, beside 70.6 GB of weights",
        ),
    ],
)
def test_bad_input_is_one_line(
    more: tuple[str, ...], error: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert show_errors(lambda: app(["plan", *HOSTS, *more], standalone_mode=False), verbose=False) == 1
    shown = capsys.readouterr()
    assert error in shown.err
    assert shown.err.count("\n") == 1


MORE_MEMORY = "take devices with more memory: the model's plan in transformers does not split its weights"


@pytest.mark.parametrize(
    ("model", "cluster", "length", "fix"),
    [
        ("gemma", "dgx-h100:1x1", "99M", "take fewer tokens, or more hosts"),  # one GPU splits nothing
        ("gemma", "dgx-h100:1x2", "99M", "take fewer tokens, or more hosts"),  # two split all but a part
        ("unsplit", "dgx-h100:1x2", "99M", "take fewer tokens, or more hosts"),  # the weights fit on each
        ("llama", "rtx4090:1x1", "1k", "take more hosts"),
        ("unsplit", "rtx4090:1x2", "1k", MORE_MEMORY),
    ],
)
def test_the_fix_of_tokens_that_do_not_fit_helps(
    model: str, cluster: str, length: str, fix: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["plan", "--cluster", cluster, "--length", length, "--model", str(folder / model), "--decode"]
    assert show_errors(lambda: app(command, standalone_mode=False), verbose=False) == 1
    assert capsys.readouterr().err.rstrip().endswith(f". Fix: {fix}.")
