"""`attnmesh generate` as a user runs it: the tokens of stock transformers, errors of one line, nobody left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, GPT2Config, T5Config

from attnmesh import __main__
from attnmesh.cli.generate_prompt import PromptOptions, prepare_prompt
from attnmesh.cli.mesh_option import MeshOptions
from attnmesh.errors import MeshError
from attnmesh.hf.load import PACKAGED, locate, open_tokenizer
from tests.support.models import families
from tests.support.process.command import Done, run_main
from tests.support.process.needs import needs_smollm2
from tests.support.serving.fake_engine import save_tiny

pytestmark = needs_smollm2

ASK = ["generate", "--model", PACKAGED, "--prompt", "What is the capital of France?", "--max-new-tokens", "8"]
COMMAND = [sys.executable, "-m", "attnmesh"]
SCRIPT = [sys.executable, "-c", "from attnmesh_command import main; main()"]  # as an installed `attnmesh`
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]


def launched(*arguments: str, launch: list[str] = COMMAND) -> Done:
    """The command in a process of its own, as a user types it."""
    return subprocess.run([*launch, *arguments], capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def expected() -> list[int]:
    """What stock transformers says to the question."""
    place = locate(PACKAGED)
    said = [{"role": "user", "content": ASK[4]}]
    ids = open_tokenizer(place).apply_chat_template(said, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    made = AutoModelForCausalLM.from_pretrained(place).generate(ids, max_new_tokens=8, do_sample=False)
    return made[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize(
    ("more", "run"),
    [
        pytest.param((), launched, marks=pytest.mark.long),
        pytest.param(("--ranks", "3", "--mesh", "heads=3"), run_main, marks=pytest.mark.long),
        (("--ranks", "2", "--mesh", "keys=2", "--reproducible"), run_main),
        pytest.param(("--mesh", "tp=3,keys=1"), run_main, marks=pytest.mark.long),
        pytest.param(("--mesh", "tp=keys=3"), run_main, marks=pytest.mark.long),
    ],
)
def test_the_json_has_the_tokens_of_stock_transformers(
    more: tuple[str, ...], run: Callable[..., Done], expected: list[int]
) -> None:
    done = run_main(*ASK, *more, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["tokens"] == expected
    assert "Paris" in report["text"]
    assert report["ended"] == "stop"  # with the last token that it may have
    assert sum(report["keys"]) == (report["prompt_tokens"] + 7) * (3 if report["mesh"] in ("heads=3", "tp=3") else 1)
    assert 0 <= report["merging_share"] < 1


def test_a_cache_in_8_bits_on_unequal_shares_holds_a_quarter_of_float32() -> None:
    report = json.loads(run_main(*ASK, "--shares", "3,1", "--kv", "int8", "--json").stdout)
    assert "Paris" in report["text"]
    assert report["mesh"] == "keys=2"
    assert report["keys"][0] > 2 * report["keys"][1] > 0
    layers, heads, row = 30, 3, 64 + 2  # a byte for each column, and a scale
    assert sum(report["cache_bytes"]) == sum(report["keys"]) * layers * heads * 2 * row
    assert "error: --kv: expected one of auto, int8, fp8_e4m3, given 'int4'" in run_main(*ASK, "--kv", "int4").stderr


@pytest.mark.parametrize(("mesh", "typed"), [("keys=2", "H"), ("tp=keys=2", "Hi, how are you?")])
def test_a_prompt_by_standard_input_gives_stock_tokens_on_two_ranks(mesh: str, typed: str, tmp_path: Path) -> None:
    """One token, which the first rank alone holds, and ranks that share weights and keys."""
    folder = save_tiny(tmp_path)
    ask = ("generate", "--model", folder, "--raw", "--prompt-file", "-", *ASK[5:], "--temperature", "0")
    done = run_main(*ask, "--mesh", mesh, "--json", typed=typed)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    ids = open_tokenizer(folder)(typed, return_tensors="pt")["input_ids"]
    made = AutoModelForCausalLM.from_pretrained(folder).generate(ids, max_new_tokens=8, do_sample=False)
    assert (report["prompt_tokens"], report["tokens"]) == (len(typed), made[0, len(typed) :].tolist())
    assert report["ended"] == "length"


def test_it_streams_up_to_a_stop_string_and_ends_with_a_table() -> None:
    done = run_main(*ASK, "--ranks", "2", "-v", "--stop", "capital of Italy", "--stop", "France is")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("The capital of \n")
    assert "5 tokens, to the end of the answer" in done.stdout
    for row in ("prefill", "time per token", "keys and values, MB by rank", "received per token", "mesh"):
        assert row in done.stdout
    assert "Merging counts, for each merge," in " ".join(done.stdout.split())


def test_without_transformers_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "attnmesh.cli.generate_worker", None)
    monkeypatch.setattr(sys, "argv", ["attnmesh", *ASK])
    with pytest.raises(SystemExit) as left:
        __main__.main()
    assert left.value.code == 1
    assert "pip install 'attnmesh[hf]'" in capsys.readouterr().err


@pytest.mark.long
def test_a_folder_of_keys_goes_on(expected: list[int], tmp_path: Path) -> None:
    for hot in ((), ("--hot", "9")):
        done = run_main(*ASK, "--mesh", "keys=2", "--kv-folder", str(tmp_path / "kept"), *hot, "--json")
        assert json.loads(done.stdout)["tokens"] == expected
    said = run_main(*ASK, "--mesh", "keys=3", "--kv-folder", str(tmp_path / "kept"), "--json")
    assert said.returncode
    assert "expected a folder of 1 x 3 ranks (heads x tokens), given 1 x 2" in said.stderr


@pytest.mark.long
def test_the_command_runs_under_torchrun(expected: list[int]) -> None:
    """`make test` starts it under torchrun in hf/test_generation_checkpoint.py, where a rank is killed too."""
    done = launched("-m", "attnmesh", *ASK, "--json", launch=[*TORCHRUN, "--rdzv-endpoint", "localhost:0"])
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["tokens"] == expected
    assert len(report["keys"]) == 2


@pytest.mark.long
def test_sampling_says_the_same_on_any_number_of_ranks() -> None:
    options = ("--temperature", "1.5", "--top-k", "40", "--seed", "3", "--json")
    said = [json.loads(run_main(*ASK, "--ranks", ranks, *options).stdout)["tokens"] for ranks in ("1", "2")]
    assert said[0] == said[1]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models that are none: one of another kind, one of an unserved family, one of nothing, one without weights."""
    place = tmp_path_factory.mktemp("models")
    (place / "bent").mkdir()
    sizes = {**families.CONFIGS["llama"].to_dict(), "hidden_size": True}
    (place / "bent" / "config.json").write_text(json.dumps(sizes))
    (place / "empty").mkdir()
    T5Config().save_pretrained(place / "t5")
    GPT2Config().save_pretrained(place / "gpt2")
    families.CONFIGS["llama"].save_pretrained(place / "no-tokenizer")
    (place / "text").write_text("word " * 9000)
    (place / "bytes").write_bytes(bytes(range(128, 256)))
    (place / "no.gguf").write_bytes(b"GGUF but not really")
    (place / "recurrent").mkdir()
    (place / "recurrent" / "config.json").write_text('{"model_type": "rwkv", "num_hidden_layers": 2}')
    return place


WRONG = {
    "no prompt": (("--model", PACKAGED), "prompt: expected some text, given none"),
    "blank prompt": (("--model", PACKAGED, "--prompt", " "), "prompt: expected some text, given an empty one"),
    "no file": (
        ("--model", PACKAGED, "--prompt-file", "nowhere"),
        "--prompt-file: expected a file of text, given nowh",
    ),
    "bytes": (("--model", PACKAGED, "--prompt-file", "{}/bytes"), "--prompt-file: expected a file of text, given"),
    "long": (
        ("--model", PACKAGED, "--prompt-file", "{}/text"),
        "prompt: expected at most 8192 tokens, the model's context, given 9",
    ),
    "nowhere": (
        ("--model", "./nowhere", "--prompt", "a"),
        "model: expected a model, given './nowhere', where there is n",
    ),
    "empty": (("--model", "{}/empty", "--prompt", "a"), "model: expected a model of transformers, given"),
    "not gguf": (("--model", "{}/no.gguf", "--prompt", "a"), "model: expected a GGUF file of a language model, given"),
    "t5": (("--model", "{}/t5", "--prompt", "a"), "model: expected a causal language model, given"),
    "recurrent": (
        ("--model", "{}/recurrent", "--prompt", "a"),
        "attnmesh.hf: expected a model of layers of full_attention",
    ),
    "no tokenizer": (
        ("--model", "{}/no-tokenizer", "--prompt", "a"),
        "tokenizer: expected the model's tokenizer, given",
    ),
    "mesh": (
        ("--model", PACKAGED, "--prompt", "a", "--mesh", "heads=2,queries=2"),
        "--mesh: expected a heads axis that divides 3 key heads, given heads=2,queries=2, with 9/3 heads on a rank",
    ),
    "no mesh": (
        ("--model", PACKAGED, "--prompt", "a", "--mesh", "two"),
        '--mesh: expected axes by name, as "queries=2,keys=2", "tp=2,keys=4" or "tp=keys=8", or "auto", given \'two\'',
    ),
    "mesh without names": (
        ("--model", PACKAGED, "--prompt", "a", "--mesh", "1x2x2"),
        "given '1x2x2'. Fix: write --mesh heads=1,queries=2,keys=2.",
    ),
    "mesh of other ranks": (
        ("--model", PACKAGED, "--prompt", "a", "--ranks", "4", "--mesh", "keys=2"),
        "--mesh: expected 4 ranks, given keys=2, which is 2.",
    ),
    "heads that tp does not divide": (
        ("--model", PACKAGED, "--prompt", "a", "--mesh", "tp=2,keys=2"),
        "--mesh: expected a tp that divides the ranks and the heads, given tp=2,keys=2 on 4 ranks, with 9/3 heads.",
    ),
    "tp of keys beside another": (
        ("--model", PACKAGED, "--prompt", "a", "--mesh", "tp=keys=3,queries=2"),
        "--mesh: expected tp=keys alone, given",
    ),
    "an axis of none": (("--model", PACKAGED, "--prompt", "a", "--mesh", "keys=0"), "--mesh: expected axes by name"),
    "dtype": (("--model", PACKAGED, "--prompt", "a", "--dtype", "int8"), "--dtype: expected one of auto, float64"),
    "merge": (("--model", PACKAGED, "--prompt", "a", "--merge", "magic"), "--merge: expected one of auto, tree"),
    "gpt2 without heads": (("--model", "{}/gpt2", "--prompt", "a"), "prompt: expected at least one token"),
    "no markup": (
        ("--model", "[/]", "--prompt", "a"),
        "model: expected a model of transformers, given '[/]'",
    ),
    "nobody's": (("--model", "~nobody/x", "--prompt", "a"), "model: expected a model, given '~nobody/x', where there"),
    "long name": (("--model", "x" * 5000, "--prompt", "a"), "model: expected a model of transformers, given 'xxx"),
    "bent": (("--model", "{}/bent", "--prompt", "a"), "model: expected a model of transformers, given"),
    "no digits": (
        ("--model", PACKAGED, "--prompt", "a", "--mesh", "keys=\u00b2"),
        "--mesh: expected axes by name",
    ),
    "many digits": (
        ("--model", PACKAGED, "--prompt", "a", "--mesh", "keys=" + "9" * 5000),
        "--mesh: expected axes by name",
    ),
    "half a sign": (("--model", PACKAGED, "--prompt", "\udc80"), "prompt: expected text in UTF-8, given"),
    "a path of two lines": (
        ("--model", PACKAGED, "--prompt-file", "no\nwhere\x1b[31m"),
        r"--prompt-file: expected a file of text, given no\nwhere\x1b[31m: ",
    ),
    "no end of heat": (
        ("--model", PACKAGED, "--prompt", "a", "--temperature", "inf"),
        "--temperature: expected 0, or 0.00001 to 1,000,000, given inf",
    ),
    "no heat": (
        ("--model", PACKAGED, "--prompt", "a", "--temperature", "1e-320"),
        "--temperature: expected 0, or 0.00001 to 1,000,000, given 1e-320",
    ),
    "seed": (
        ("--model", PACKAGED, "--prompt", "a", "--seed", str(2**64)),
        "--seed: expected -2^63 to 2^64 - 1, given 1.84e+19",
    ),
    "all ranks there are": (
        ("--model", PACKAGED, "--prompt", "a", "--ranks", "100000"),
        "--ranks: expected 1 to 1,024 ranks on this machine, given 100,000",
    ),
    "new tokens": (
        ("--model", PACKAGED, "--prompt", "a", "--max-new-tokens", "9000"),
        "Fix: pass --max-new-tokens 8161 or less.",
    ),
    "three ranks": (
        ("--model", PACKAGED, "--prompt", "a", "--ranks", "3", "--mesh", "queries=3", "--reproducible"),
        "--reproducible: expected 1, 2, 4, 8, ... ranks along queries and keys, and a tree, given 3 ranks",
    ),
    "three ranks, on a mesh that is chosen": (
        ("--model", PACKAGED, "--prompt", "a", "--ranks", "3", "--reproducible"),
        "given 3 ranks and merge 'auto'. Fix: give these axes 2 or 4 ranks, with --merge auto, or leave --repro",
    ),
    "shares": (
        ("--model", PACKAGED, "--prompt", "a", "--shares", "3,-1"),
        "--shares: expected auto, or a number above 0 for each rank, given '3,-1'. Fix: write one as 3,1",
    ),
    "shares of other ranks": (
        ("--model", PACKAGED, "--prompt", "a", "--ranks", "3", "--shares", "3,1"),
        "--shares: expected 3 of them, for keys=3, given '3,1'",
    ),
    "shares and the same bits": (
        ("--model", PACKAGED, "--prompt", "a", "--shares", "auto", "--ranks", "2", "--reproducible"),
        "--reproducible: expected even shares, given --shares auto",
    ),
    "no stop": (("--model", PACKAGED, "--prompt", "a", "--stop", ""), "--stop: expected some text, given an empty one"),
    "a stop that is no text": (
        ("--model", PACKAGED, "--prompt", "a", "--stop", "END", "--stop", "\udcff"),
        "--stop: expected text in UTF-8, given '\\udcff'",
    ),
    "stop of a saved state": (
        ("--model", PACKAGED, "--prompt", "a", "--stop", "END", "--checkpoint", "saved"),
        "--stop: expected no --checkpoint beside it, given 'END'. Fix: leave one out.",
    ),
    "a folder and a checkpoint": (
        ("--model", PACKAGED, "--prompt", "a", "--kv-folder", "kept", "--checkpoint", "saved"),
        "--kv-folder: expected no --checkpoint beside it, given kept. Fix: leave one of them out.",
    ),
    "top p": (("--model", PACKAGED, "--prompt", "a", "--top-p", "1.5"), "--top-p"),
    "temperature": (("--model", PACKAGED, "--prompt", "a", "--temperature", "-1"), "temperature"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_said_in_one_line(
    name: str, folders: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, said = WRONG[name]
    monkeypatch.setattr(sys, "argv", ["attnmesh", "generate", *(part.format(folders) for part in arguments)])
    with pytest.raises(SystemExit) as left:
        __main__.main()
    error = capsys.readouterr().err
    assert left.value.code in (1, 2)
    assert said in error, error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    "launch", [pytest.param(way, marks=pytest.mark.long) for way in ("ranks", "script", "torchrun")]
)
def test_an_interrupt_ends_all_ranks(launch: str) -> None:
    """While they decode, as the first text shows."""
    ask = ["generate", "--model", PACKAGED, "--prompt", "Tell me a long story.", "--max-new-tokens", "3000"]
    start = [*(SCRIPT if launch == "script" else COMMAND), *ask, "--ranks", "2"]
    if launch == "torchrun":
        start = [*TORCHRUN, "--rdzv-endpoint", "localhost:0", "-m", "attnmesh", *ask]
    with subprocess.Popen(start, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True) as running:
        assert running.stdout is not None
        assert running.stdout.read(1)
        began = time.monotonic()
        os.killpg(running.pid, signal.SIGINT)  # as a terminal does
        _, error = running.communicate(timeout=100)
        assert running.returncode != 0
        if launch != "torchrun":
            assert b"interrupted: all ranks have ended" in error
            assert b"Traceback" not in error
        while _members(running.pid):
            assert time.monotonic() - began < 100, "ranks are left behind"
            time.sleep(0.1)


def _members(group: int) -> list[int]:
    """The processes of a group that still run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, member = stat.read_text().rsplit(")", 1)[1].split()[:3]
        except OSError:
            continue
        if int(member) == group and state != "Z":
            found.append(int(stat.parent.name))
    return found


def test_latents_have_one_head_that_no_axis_splits(tmp_path: Path) -> None:
    open_tokenizer(locate(PACKAGED)).save_pretrained(tmp_path)
    DeepseekV3Config(num_hidden_layers=1).save_pretrained(tmp_path)
    asked = str(tmp_path), PromptOptions("a prompt of some tokens"), 4, 4
    model, _ = prepare_prompt(*asked, MeshOptions(), mock.Mock())
    assert (model.heads, model.mesh.shape.heads) == ((128, 1), 1)
    with pytest.raises(MeshError, match="a heads axis that divides 1 key heads"):
        prepare_prompt(
            str(tmp_path), PromptOptions("a prompt of some tokens"), 4, 4, MeshOptions("heads=2,queries=2"), mock.Mock()
        )


@pytest.mark.gpu
def test_a_rank_has_a_gpu_where_there_is_one(expected: list[int]) -> None:
    report = json.loads(run_main(*ASK, "--ranks", "1", "--json").stdout)
    assert torch.cuda.is_available()
    assert report["tokens"] == expected
