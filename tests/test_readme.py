"""The blocks of README on ranks. The suite also runs the one with prompts in one process, as it stands."""

import doctest
from pathlib import Path

from tests.support import families
from tests.support.fake_engine import byte_tokenizer
from tests.support.pool import Pool
from tests.support.scripts import run_script

README = Path(__file__).parents[1] / "README.md"


def lines_on_a_mesh() -> list[str]:
    """On a rank: run the lines, and return what failed."""
    failed: list[str] = []
    text = README.read_text().replace("mesh, layout = None,", "mesh, layout = am.init_mesh((1, 2, 2)),")
    assert "am.init_mesh((1, 2, 2))," in text
    test = doctest.DocTestParser().get_doctest(text, {}, "README.md", None, None)
    doctest.DocTestRunner(verbose=False).run(test, out=failed.append)
    return failed


def test_the_lines_run_on_ranks(pool: Pool) -> None:
    assert pool.run(4, lines_on_a_mesh) == [[]] * 4


def test_the_first_block_is_a_script_that_runs(tmp_path: Path) -> None:
    block, text = README.read_text().split("```python\n")[1].split("```")[0], "Once upon a time"
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
