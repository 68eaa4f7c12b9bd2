"""Messages of the command: errors of its options, on one line, and the rank that prints them."""

import os
from collections.abc import Collection
from difflib import get_close_matches

import typer


class OptionError(ValueError):
    """Raised on options before the library is imported; its message has the form of `attnmesh.errors.InputError`."""

    def __init__(self, option: str, expected: str, given: str, fix: str) -> None:
        super().__init__(option, expected, given, fix)

    def __str__(self) -> str:
        option, expected, given, fix = self.args
        return f"{option}: expected {expected}, given {given}. Fix: {fix}."


def check_option(fits: bool, option: str, expected: str, given: object, fix: str) -> None:
    """Raise unless the condition holds."""
    if not fits:
        raise OptionError(option, expected, str(given), fix)


def check_named(option: str, value: str, names: Collection[str], suffix: str = "") -> None:
    """Raise unless the value is one of the names; the fix has the nearest one."""
    near = nearest(value, names)
    fix = f"write {option} {near}" if near else "name one of these"
    check_option(value in names, option, f"one of {', '.join(names)}{suffix}", f"{value[:60]!r}", fix)


def nearest(value: str, names: Collection[str]) -> str:
    """Return the name that is spelled most like a value; nothing if none is.

    >>> nearest("int3", ("auto", "int8")), nearest("magic", ("auto", "int8"))
    ('int8', '')
    """
    return next(iter(get_close_matches(value[:60].lower(), names, 1, 0.6)), "")


def under_torchrun() -> bool:
    """Return True if torchrun started this process as a rank."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_first_rank() -> bool:
    """Return True on the rank of torchrun that prints, and without torchrun."""
    return not under_torchrun() or os.environ.get("RANK") == "0"


def printable(text: str) -> str:
    """Return the text on one line, with escapes in place of what a terminal would obey or cannot show.

    >>> print(printable("new\\nline, \\x1b[31mred"))
    new\\nline, \\x1b[31mred
    """
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text)


def print_note(text: str) -> None:
    """Print one line on standard error, on one rank alone."""
    if is_first_rank():
        typer.echo(printable(text), err=True)


def print_option_error(error: OptionError) -> int:
    """Print the error of an option, on one rank alone, and return the exit code."""
    if is_first_rank():
        typer.echo(f"{typer.style('error:', fg='red', bold=True)} {printable(str(error))}", err=True)
    return 1
