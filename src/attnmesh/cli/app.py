"""The subcommands of the command `attnmesh`, all imported; `attnmesh_command` imports them when one is run."""

import typer

from attnmesh.cli.check import check
from attnmesh.cli.generate import generate
from attnmesh.cli.plan import plan
from attnmesh.cli.probe import probe
from attnmesh.cli.serve import serve
from attnmesh_command import COMMANDS, SETTINGS, root

app = typer.Typer(name="attnmesh", add_completion=False, **SETTINGS)
app.callback()(root)
for command in (generate, serve, probe, plan, check):
    app.command(short_help=COMMANDS[command.__name__])(command)
