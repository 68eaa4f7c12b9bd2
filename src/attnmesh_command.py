"""The command `attnmesh`: its front, which imports the library only when a subcommand is run.

Importing `attnmesh` imports PyTorch, which takes seconds. This module stands beside the package, so that `--version`,
`--help` and the completion of a shell need neither.
"""

import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any, NoReturn

INTERRUPTED = 130
"""Exit code after an interrupt."""

try:
    import typer
    from typer.core import TyperCommand, TyperGroup
    from typer.main import get_command
except ModuleNotFoundError as missing:
    sys.exit(f"the attnmesh command needs {missing.name}: pip install 'attnmesh[cli]'")
except KeyboardInterrupt:
    sys.exit(INTERRUPTED)

COMMANDS = {
    "generate": "Generate text with a model whose context is spread over ranks.",
    "serve": "Serve a model over HTTP, its contexts spread over ranks.",
    "probe": "Measure the links and devices of a world of ranks.",
    "plan": "The best shape of mesh for a workload on a cluster, before it is run.",
    "check": "What this installation can do, each kernel proved.",
}
"""Subcommands and their short help, in the order of `--help`."""

SETTINGS: dict[str, Any] = {"no_args_is_help": True, "rich_markup_mode": None, "pretty_exceptions_enable": False}
"""Settings of each of our Typer applications."""


class DeferredCommand(TyperCommand):
    """A subcommand that is imported when its arguments are parsed."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Return the context of the imported subcommand."""
        group: Any = get_command(import_subcommands())
        return group.commands[self.name].make_context(info_name, args, parent, **extra)


class DeferredGroup(TyperGroup):
    """The subcommands of `COMMANDS`, none of them imported."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = {name: DeferredCommand(name, short_help=text) for name, text in COMMANDS.items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the subcommand that is named first; say where `bench`, which was one, has gone."""
        if args[:1] == ["bench"]:
            ctx.fail("bench is no command of an installed attnmesh. Run python -m benchmarks decode in a checkout.")
        return super().resolve_command(ctx, args)


def import_subcommands() -> Any:
    """Return the application of all subcommands; an interrupt during the imports ends the process.

    Imported packages may catch the `KeyboardInterrupt` of Python's handler, and the command would go on.
    """
    ours = threading.current_thread() is threading.main_thread()  # others cannot change how signals are handled
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return import_module("attnmesh.cli.app").app
    signal.signal(signal.SIGINT, _leave)
    try:
        return import_module("attnmesh.cli.app").app
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(*_: object) -> NoReturn:
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version("attnmesh"))
        raise typer.Exit


def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Exact attention across a mesh of devices."""


app = typer.Typer(name="attnmesh", cls=DeferredGroup, **SETTINGS)
app.callback()(root)


def show_errors(run: Callable[[], None], verbose: bool) -> int:
    """Run a command and return its exit code; an error is printed as one line, with `verbose` it is raised."""
    try:
        run()
    except SystemExit as left:
        if left.code == INTERRUPTED:
            print("interrupted: all ranks have ended", file=sys.stderr)
        raise
    except Exception as error:
        if verbose and not isinstance(error, ModuleNotFoundError):
            raise
        from attnmesh.cli.output import print_error

        return print_error(error)
    return 0


def run(command: Callable[[], None]) -> None:
    """Run a command as this process, and exit."""
    verbose = bool({"-v", "--verbose"} & {*sys.argv})
    if not verbose:
        # Warnings of PyTorch, here and in child processes, are about PyTorch's own internals.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        warnings.filterwarnings("ignore", module=r"torch\b")
    sys.exit(show_errors(command, verbose))


def main() -> None:
    """Run the command `attnmesh`."""
    run(app)


if __name__ == "__main__":
    main()
