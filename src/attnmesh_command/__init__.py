"""The command `attnmesh`: its options, checked before the library is imported.

Importing `attnmesh` imports PyTorch, which takes seconds. This package stands beside it, so that `--version`, `--help`,
the completion of a shell and errors of options need neither.
"""

import inspect
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from io import TextIOWrapper
from typing import Annotated, Any, NoReturn

INTERRUPTED = 130
"""Exit code after an interrupt."""

try:
    import typer
    from typer.core import TyperGroup

    from attnmesh_command.messages import OptionError, print_option_error
    from attnmesh_command.model_options import GenerateOptions, ServeOptions
    from attnmesh_command.plan_options import CheckOptions, PlanOptions, ProbeOptions
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

OPTIONS: dict[str, type] = {
    "generate": GenerateOptions,
    "serve": ServeOptions,
    "probe": ProbeOptions,
    "plan": PlanOptions,
    "check": CheckOptions,
}
"""Options of each subcommand. Making them checks them."""

SETTINGS: dict[str, Any] = {"no_args_is_help": True, "rich_markup_mode": None, "pretty_exceptions_enable": False}
"""Settings of each of our Typer applications."""


class CommandGroup(TyperGroup):
    """The subcommands, and one that has moved."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the subcommand that is named first; say where `bench`, which was one, has gone."""
        if args[:1] == ["bench"]:
            ctx.fail("bench is no command of an installed attnmesh. Run python -m benchmarks decode in a checkout.")
        return super().resolve_command(ctx, args)


def subcommand(name: str) -> Callable[..., None]:
    """Return the function of a subcommand: it checks the options, then imports the work and does it."""

    def call(**given: Any) -> None:
        options = OPTIONS[name](**given)
        import_work(name)(options)

    fields = inspect.signature(OPTIONS[name])
    call.__signature__ = fields.replace(return_annotation=None)  # type: ignore[attr-defined]
    call.__annotations__ = {field.name: field.annotation for field in fields.parameters.values()}
    call.__doc__ = OPTIONS[name].__doc__
    return call


def import_work(name: str) -> Callable[[Any], None]:
    """Return the function of `attnmesh.cli` that does a subcommand; an interrupt during the imports ends the process.

    Imported packages may catch the `KeyboardInterrupt` of Python's handler, and the command would go on.
    """
    ours = threading.current_thread() is threading.main_thread()  # others cannot change how signals are handled
    handled = ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if handled:
        signal.signal(signal.SIGINT, _leave)
    try:
        work: Callable[[Any], None] = getattr(import_module(f"attnmesh.cli.{name}_command"), name)
        return work
    finally:
        if handled:
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


app = typer.Typer(name="attnmesh", cls=CommandGroup, **SETTINGS)
app.callback()(root)
for name, text in COMMANDS.items():
    app.command(name, short_help=text)(subcommand(name))


def show_errors(run: Callable[[], None], verbose: bool) -> int:
    """Run a command and return its exit code; an error is printed as one line, with `verbose` it is raised."""
    try:
        run()
    except SystemExit as left:
        if left.code == INTERRUPTED:
            print("interrupted: all ranks have ended", file=sys.stderr)
        raise
    except OptionError as error:
        return print_option_error(error)
    except Exception as error:
        if verbose and not isinstance(error, ModuleNotFoundError):
            raise
        from attnmesh.cli.output import print_error

        return print_error(error)
    return 0


def run(command: Callable[[], None]) -> None:
    """Run a command as this process, and exit."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as of standard error: not each encoding has all characters
    verbose = bool({"-v", "--verbose"} & {*sys.argv})
    if not verbose:
        # Warnings of PyTorch, here and in child processes, are about PyTorch's own internals.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        warnings.filterwarnings("ignore", module=r"torch\b")
    sys.exit(show_errors(command, verbose))


def main() -> None:
    """Run the command `attnmesh`."""
    run(app)
