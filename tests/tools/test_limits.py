"""The sizes that `make check` prints and enforces."""

from pathlib import Path

import pytest

from tools import limits

LONG_FUNCTION = "def long():\n" + "    pass\n" * limits.MAX_FUNCTION
MANY_PARAMETERS = f"def many({', '.join(f'x{n}' for n in range(limits.MAX_PARAMETERS + 1))}): ..."

OVER = {
    "long file": ("x = 1\n" * (limits.MAX_FILE + 1), "core.mask has 651 lines of 650"),
    "long function": (LONG_FUNCTION, "core.mask.long has 61 lines of 60"),
    "many parameters": (MANY_PARAMETERS, "core.mask.many has 8 parameters without a default, of 7"),
}


@pytest.mark.parametrize("name", OVER)
def test_what_is_over_a_limit_fails(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mask.py"
    file.write_text(OVER[name][0])
    monkeypatch.setattr(limits, "FILES", {"core.mask": file})
    with pytest.raises(SystemExit) as ended:
        limits.main()
    assert ended.value.code == OVER[name][1]


def test_code_is_counted_without_blank_lines_comments_and_docstrings() -> None:
    file = '"""A file.\n\nIt has text.\n"""\n\n'
    constant = 'SIZE = 3  # why\n"""A constant."""\n\n'
    function = '# why\ndef f():\n    """Do."""\n    return 1\n'
    assert limits.code_lines(file + constant + function) == 3
