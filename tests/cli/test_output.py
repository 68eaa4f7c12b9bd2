"""Output of commands: their status without a terminal."""

import time

import pytest

from attnmesh.cli import output


def test_a_status_without_a_terminal_prints_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "INTERVAL", 0.05)
    with output.Status("one [/] step") as status:
        time.sleep(0.3)
        status.update("two")
        time.sleep(0.3)
    lines = capsys.readouterr().err.splitlines()
    time.sleep(0.2)
    assert capsys.readouterr().err == ""
    assert lines[0].startswith("one [/] step (")
    assert lines[-1].startswith("two (")
