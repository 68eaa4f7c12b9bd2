"""Files are read the same in any locale: text is UTF-8, and names of processes are any bytes."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from attnmesh.runtime import shutdown
from attnmesh.runtime.processes import RunningProcess
from tools.rooms import FILES, PACKAGES

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
"""Variables under which Python decodes files as ASCII."""

READ = """
import sys
from pathlib import Path
from attnmesh_command.option_texts import read_prompt
print(ascii(read_prompt("", Path(sys.argv[1]))))
"""


def test_the_command_starts_and_reads_a_prompt_in_any_locale(tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("caf\u00e9", encoding="utf-8")
    words = [sys.executable, "-c", READ, str(file)]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | ASCII, check=False)
    assert (done.stdout, done.returncode) == ("'caf\\xe9'\n", 0), done.stderr


def without_encoding() -> Iterator[str]:
    """Yield the place of each call in the package that reads or writes text in the encoding of the locale."""
    command = Path(__file__).parents[1] / "src" / "attnmesh_command"
    for file in (*FILES.values(), *PACKAGES.values(), *command.glob("*.py")):
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            match call:
                case ast.Call(func=ast.Attribute(attr="read_text"), args=[], keywords=[]):
                    yield f"{file.name}:{call.lineno}"
                case ast.Call(func=ast.Attribute(attr="write_text"), args=[_], keywords=[]):
                    yield f"{file.name}:{call.lineno}"


def test_each_file_of_text_has_an_encoding() -> None:
    assert [*without_encoding()] == []


@pytest.fixture
def half_a_character() -> Iterator[None]:
    """Name this process as Linux cuts names: after 15 bytes, here within a character."""
    name = Path("/proc/self/comm")
    before = name.read_bytes()
    name.write_bytes(b"fourteen byte_\xc3")
    yield
    name.write_bytes(before)


@pytest.mark.usefixtures("half_a_character")
def test_a_name_that_ends_within_a_character_is_read() -> None:
    assert RunningProcess.of().is_alive()
    assert isinstance(shutdown._threads(), dict)
