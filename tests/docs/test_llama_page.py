"""The page "70B on 2 x 8 GPUs": its commands run, scaled down to a tiny model and four ranks, and its figures hold."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from attnmesh_command import app
from tests.support.models import families
from tests.support.process.scripts import run_script
from tests.support.serving.fake_engine import byte_tokenizer

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "llama-70b.md").read_text()
BLOCKS = [block.strip() for block in PAGE.split("```")[1::2] if block.startswith("\n")]
COMMANDS = [shlex.split(line) for block in BLOCKS for line in block.replace("\\\n", "").splitlines()]
PLANS = [words[1:] for words in COMMANDS if words[:2] == ["attnmesh", "plan"]]
LAUNCHED = [words[words.index("HEAD:29500") + 1 :] for words in COMMANDS if words[0] == "torchrun"]
CHATS = [words for words in LAUNCHED if words[0] == "examples/chat.py"]
TEXTS = {"report.txt": "what the ranks share, " * 9, "second.txt": "and what each rank keeps. " * 5}
NEW = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a token for each byte and a chat template, and the texts."""
    made = tmp_path_factory.mktemp("page")
    families.model("llama", "sdpa", vocab_size=257, num_attention_heads=8, hidden_size=64).save_pretrained(made)
    byte_tokenizer().save_pretrained(made)
    for name, text in TEXTS.items():
        (made / name).write_text(text)
    return made


def scaled_command(words: list[str], folder: Path) -> list[str]:
    """The words of a command, for a tiny model on four ranks."""
    small = {"meta-llama/Llama-3.1-70B-Instruct": str(folder), "tp=16": "tp=4", "500": str(NEW)}
    return [small.get(word, str(folder / word) if word in TEXTS else word) for word in words]


def test_every_command_of_the_page_is_run_here() -> None:
    install = [["pip", "install", ".[hf]"], ["attnmesh", "check"]]  # those of the release and of tests/cli/test_app.py
    assert len(COMMANDS) == len(install) + len(PLANS) + len(LAUNCHED)
    assert (len(PLANS), len(LAUNCHED), len(CHATS)) == (5, 3, 2)


@pytest.mark.parametrize("words", PLANS, ids=" ".join)
def test_plans_of_the_page_end_with_its_commands(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    done = CliRunner().invoke(app, words, env={"COLUMNS": "120"})
    assert done.exit_code == 0
    first = next(line.split()[1] for line in done.stdout.splitlines() if line.startswith("1 "))
    assert f"generate --model MODEL --mesh {first} " in done.stdout
    assert re.search(rf"serve --model MODEL --mesh {first}( |$)", done.stdout, re.MULTILINE)
    assert ("more than the model's 131,072 positions" in done.stderr) == ("1e6" in words)
    if "int8" in words:
        assert "166 kB of keys and values" in done.stdout
    if "8" in words:
        assert re.search(r"^1 tp=8,queries=2 .* 17 ms *$", done.stdout, re.MULTILINE)


def test_the_table_of_the_page_is_the_planner_s_and_its_first_row_is_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    rows = [
        row.strip("| ").split(" | ")
        for row in PAGE.splitlines()
        if re.match(r"\| `(tp|queries|keys)=.* \|.* \|.* \|", row)
    ]
    shown = CliRunner().invoke(app, PLANS[0], env={"COLUMNS": "120"}).stdout
    table = [line.split(maxsplit=1)[1].split() for line in shown.splitlines() if re.match(r"\d ", line)]
    assert [" ".join(cells).replace("`", "").split() for cells in rows] == table
    (generate,) = [words for words in LAUNCHED if words not in CHATS]
    assert generate[generate.index("--mesh") + 1] == rows[0][0].strip("`")


def test_generate_says_what_stock_transformers_does(folder: Path, tmp_path: Path) -> None:
    (words,) = [words for words in LAUNCHED if words not in CHATS]
    script = tmp_path / "main.py"
    script.write_text(
        "import os\nfrom attnmesh_command import main\n\nos.environ['TORCHELASTIC_RUN_ID'] = '0'\nmain()\n"
    )
    assert words[:2] == ["-m", "attnmesh"]
    done = run_script(script, *scaled_command(words[2:], folder), "--json", ranks=4)
    assert done.returncode == 0, done.stderr[-2000:]
    asked = f"{TEXTS['report.txt']}\n\n{words[words.index('--prompt') + 1]}"
    assert json.loads(done.stdout)["text"] == stock_answers(folder, [[asked]], [], NEW)[0]


@pytest.mark.parametrize("words", [CHATS[0], pytest.param(CHATS[1], marks=pytest.mark.long)], ids=["turns", "batch"])
def test_the_chat_says_what_stock_transformers_does(words: list[str], folder: Path) -> None:
    done = run_script(ROOT / words[0], *scaled_command(words[1:], folder), "--new", NEW, ranks=4)
    assert done.returncode == 0, done.stderr[-2000:]
    asked = [words[number + 1] for number, word in enumerate(words) if word == "--ask"]
    texts = [TEXTS[word] for word in words if word in TEXTS]
    answers = stock_answers(folder, [[f"{text}\n\n{asked[0]}", *asked[1:]] for text in texts], ["END"], NEW)
    lines = [line for line in done.stdout.splitlines() if not line.startswith("[")]
    assert "--kv" in words or lines == answers
    assert done.stdout.count(" new ones: ") == len(asked)


def stock_answers(folder: Path, chats: list[list[str]], stop: list[str], new: int) -> list[str]:
    """The answers of stock transformers to each question of each chat."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    answers = []
    tokenizer: Any = byte_tokenizer()
    for questions in chats:
        messages: list[dict[str, str]] = []
        for question in questions:
            messages.append({"role": "user", "content": question})
            options = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
            ids = tokenizer.apply_chat_template(messages, **options)["input_ids"]
            ends = {"stop_strings": stop, "tokenizer": tokenizer} if stop else {}
            made = model.generate(ids, max_new_tokens=new, do_sample=False, **ends)[0, ids.shape[1] :]
            answers.append(tokenizer.decode(made, skip_special_tokens=True))
            messages.append({"role": "assistant", "content": answers[-1]})
    return answers
