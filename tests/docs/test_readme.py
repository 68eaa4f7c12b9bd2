"""The blocks of README on ranks. The suite also runs the one with prompts in one process, as it stands."""

import os
import subprocess
import venv
from pathlib import Path

import pytest

from tests.support.models import families
from tests.support.process.scripts import run_script
from tests.support.serving.fake_engine import byte_tokenizer

README = Path(__file__).parents[2] / "README.md"


def block_with(start: str, words: str) -> str:
    """Return the first block of the page that begins so and has these words."""
    blocks = (after.split("```")[0] for after in README.read_text().split(start)[1:])
    return next(block for block in blocks if words in block)


def test_the_call_on_ranks_is_a_script_that_runs(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(block_with("```python\n", "am.init_mesh((1, 2, 2))"))
    done = run_script(script, ranks=4)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (
        done.stdout.replace("\n", "") == "torch.Size([1, 8, 75, 64])" * 4
    )  # ranks may write between each other's lines


def test_the_first_screen_shows_the_demo_a_call_its_ranks_and_what_gpus_have_run() -> None:
    screen = "\n".join(README.read_text().splitlines()[:60])
    headings = [line for line in screen.splitlines() if line.startswith("## ")]
    assert headings[:4] == ["## Try it", "## Install", "## One call", "## The same on ranks"]
    assert screen.index("several GPUs") < screen.index("make demo") < screen.index("## Install")


def test_the_block_of_a_model_is_a_script_that_runs(tmp_path: Path) -> None:
    block, text = block_with("```python\n", "from_pretrained"), "Once upon a time"
    tokenizer, model = byte_tokenizer(), families.model("llama", "sdpa", vocab_size=257)
    tokenizer.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    small = {'"Qwen/Qwen3-4B"': repr(str(tmp_path)), "(1, 8, 1)": "(1, 2, 1)", "max_new_tokens=100": "max_new_tokens=9"}
    for given, scaled in small.items():
        assert block.count(given) == 1
        block = block.replace(given, scaled)
    script = tmp_path / "script.py"
    script.write_text(block)
    done = run_script(script, ranks=2)
    assert done.returncode == 0, done.stderr[-2000:]
    expected = model.generate(tokenizer(text, return_tensors="pt")["input_ids"], max_new_tokens=9, do_sample=False)
    assert done.stdout.rstrip("\n") == tokenizer.decode(expected[0])


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_start_without_a_gpu_works_in_a_fresh_environment(tmp_path: Path) -> None:
    """Its lines as they stand, but for PyTorch, of the version and from the index that the tests have."""
    block = block_with("```\n", "python3 -m venv")
    made, torch, install, generate, serve = (line.split("  #")[0].rstrip() for line in block.splitlines())
    assert made == "python3 -m venv .venv && . .venv/bin/activate"
    venv.create(tmp_path / ".venv", with_pip=True)
    programs = tmp_path / ".venv" / "bin"
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "HF_HOME": str(tmp_path / "models"), "HOME": str(tmp_path)}
    environment |= {name: text for name, text in os.environ.items() if name.startswith(("PIP_", "SSL_"))}
    environment |= {"PIP_CONSTRAINT": str(README.parent / "constraints.txt"), "PIP_REQUIRE_VIRTUALENV": "1"}
    environment |= {"COLUMNS": "120"}
    environment |= {"VIRTUAL_ENV": str(programs.parent)}

    def run(line: str) -> str:
        words = ["bash", "-ec", line]
        done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    assert run("command -v pip") == f"{programs}/pip\n"  # never that of another environment
    run(torch.split(" --index-url")[0])
    run(install.replace("'.[", f"'{README.parent}["))
    assert "8 tokens, as many as --max-new-tokens allows" in run(f"{generate} --max-new-tokens 8")
    assert serve == "attnmesh serve --model smollm2 --mesh keys=2"
    run(f"timeout --signal INT 300 {serve} --port 0 2>&1 | grep -m 1 'serving smollm2 on http://127.0.0.1:'")
