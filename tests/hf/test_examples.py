"""The examples print the same loss, or text, on one rank and on several."""

from pathlib import Path

import pytest

from tests.support.models import families
from tests.support.process.scripts import run_script
from tests.support.training.trainers import tokenizer

EXAMPLES = Path(__file__).parents[2] / "examples"


def loss(name: str, *arguments: str, ranks: int = 1) -> float:
    """Return the loss that an example prints."""
    run = run_script(EXAMPLES / f"{name}.py", *arguments, ranks=ranks)
    assert run.returncode == 0, run.stderr[-2000:]
    return float(run.stdout.split("loss ")[-1].split(" on ")[0])


@pytest.mark.parametrize("data", [1, pytest.param(2, marks=pytest.mark.long)])
def test_plain_pytorch_does_not_depend_on_the_mesh(data: int) -> None:
    mesh, steps = ("--dp", str(data), "--tp", "2", "--cp", "2"), ("--steps", "4")
    expected = pytest.approx(loss("plain", *steps), abs=2e-4)  # two losses of four digits
    assert loss("plain", *mesh, *steps, ranks=4 * data) == expected


def test_generate_writes_the_text_of_one_process(tmp_path: Path) -> None:
    model, words = families.model("llama", "sdpa", num_attention_heads=8, hidden_size=64), tokenizer()
    model.save_pretrained(tmp_path)
    words.save_pretrained(tmp_path)
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{3 + number % 7}" for number in range(60)))
    ids = words(text.read_text(), return_tensors="pt")["input_ids"]
    expected = model.generate(ids, max_new_tokens=30, do_sample=False)
    run = run_script(EXAMPLES / "generate.py", tmp_path, text, ranks=2)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.strip() == words.decode(expected[0, ids.shape[1] :]).strip()


def test_generate_says_what_it_expects() -> None:
    run = run_script(EXAMPLES / "generate.py", "smollm2")
    assert run.returncode != 0
    assert "MODEL is a folder, a name on the hub, or smollm2" in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.long
def test_generate_takes_the_model_of_a_package(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The capital of France is")
    run = run_script(EXAMPLES / "generate.py", "smollm2", text, ranks=2)
    assert run.returncode == 0, run.stderr[-2000:]
    assert "Paris" in run.stdout
