"""The blocks of README on ranks. The suite also runs the one with prompts in one process, as it stands."""

import doctest
import os
import subprocess
import venv
from pathlib import Path

import pytest

from tests.support import families
from tests.support.fake_engine import byte_tokenizer
from tests.support.pool import Pool, on_each_rank
from tests.support.scripts import run_script

README = Path(__file__).parents[2] / "README.md"


def block_with(start: str, words: str) -> str:
    """Return the first block of the page that begins so and has these words."""
    blocks = (after.split("```")[0] for after in README.read_text().split(start)[1:])
    return next(block for block in blocks if words in block)


@on_each_rank
def lines_on_a_mesh() -> list[str]:
    """On a rank: run the lines, and return what failed."""
    failed: list[str] = []
    text = README.read_text().replace("mesh, layout = None,", "mesh, layout = am.init_mesh((1, 2, 2)),")
    assert "am.init_mesh((1, 2, 2))," in text
    test = doctest.DocTestParser().get_doctest(text, {}, "README.md", None, None)
    doctest.DocTestRunner(verbose=False).run(test, out=failed.append)
    return failed


def test_the_lines_of_the_readme_run_on_ranks(pool: Pool) -> None:
    assert pool.run(4, lines_on_a_mesh) == [[]] * 4


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
