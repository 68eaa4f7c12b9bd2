"""A sample of the sweep over all model types: nothing is wrong and nothing crashes; the rest is for `make long`."""

from collections.abc import Iterator

import pytest

from tests.tools.rows import Row
from tests.tools.sweep import MESHES, QUICK, Sweep, chosen

CASES = {case.name: case for case in chosen(",".join(QUICK), quick=False)}

LONG = {case.name: case for case in chosen(None, quick=False) if case.name not in CASES}

EXPECTED = {
    "falcon": ("refused", "refused"),
    "gemma3n_text": ("right", "right"),
    "minimax": ("refused", "right"),
    "rwkv": ("refused", "refused"),
}
"""How generation and training end, where they are not right."""


@pytest.fixture(scope="module")
def sweep() -> Iterator[Sweep]:
    swept = Sweep()
    yield swept
    swept.close()


def ended(sweep: Sweep, name: str, check: str) -> Row:
    return sweep.run((CASES | LONG)[name], check)


@pytest.mark.parametrize("check", MESHES)
@pytest.mark.parametrize("name", CASES)
def test_a_type_is_right_or_refused(name: str, check: str, sweep: Sweep) -> None:
    row = ended(sweep, name, check)
    assert row.status == EXPECTED.get(name, ("right", "right"))[check == "training"], row


@pytest.mark.long
@pytest.mark.parametrize("name", LONG)
def test_no_type_is_wrong_or_crashes(name: str, sweep: Sweep) -> None:
    for check in MESHES:
        row = ended(sweep, name, check)
        assert row.status not in ("wrong", "crashed"), row
