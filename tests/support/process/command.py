"""The command in this process."""

import shlex
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from unittest import mock

import pytest
import typer
from typer.testing import CliRunner

from attnmesh import __main__
from attnmesh_command import app


def run(*arguments: str, command: typer.Typer = app, columns: int = 200) -> tuple[int, str]:
    """Return the exit code, and what is printed on a terminal of `columns` columns."""
    result = CliRunner().invoke(command, arguments, env={"COLUMNS": str(columns)})
    return result.exit_code, result.stdout


def run_plan(*arguments: str, columns: int = 160) -> tuple[int, str]:
    return run("plan", *arguments, columns=columns)


Done = subprocess.CompletedProcess[str]


def run_main(*arguments: str, typed: str = "") -> Done:
    """The command in this process, which has imported by now what it needs."""
    given = mock.patch.multiple(sys, argv=["attnmesh", *arguments], stdin=StringIO(typed))
    out, error = StringIO(), StringIO()
    with given, redirect_stdout(out), redirect_stderr(error), pytest.raises(SystemExit) as left:
        __main__.main()
    return subprocess.CompletedProcess(arguments, int(left.value.code or 0), out.getvalue(), error.getvalue())


def planned_serve(model: str, cluster: str) -> list[str]:
    """The words after the launcher of the command for a server that the planner prints for a model."""
    words = ["plan", "--model", model, "--cluster", cluster, "--decode", "--length", "2k"]
    lines = CliRunner().invoke(app, words).stdout.replace("\\\n", "").splitlines()
    (line,) = [line for line in lines if " serve --model " in line]
    return shlex.split(line)
