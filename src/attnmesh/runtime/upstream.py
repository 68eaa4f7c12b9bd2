"""Packages that attnmesh builds on: the versions that it is tested with, and the names that it takes from them."""

import os
from dataclasses import dataclass
from importlib import import_module
from pkgutil import resolve_name
from typing import Any

from attnmesh.errors import VersionError, warn_once

OPT_IN = "ATTNMESH_UNTESTED_VERSIONS"
"""Environment variable that lets untested versions run if it is 1. Names that they lack are errors all the same."""


@dataclass(frozen=True)
class Upstream:
    """Names that a room of attnmesh uses of one package beyond its stable interface.

    Args:
        package: Name of the package.
        floor: First version that is tested.
        ceiling: First version that is not tested yet.
        names: Names that must exist, as "module:name" or "module:Class.attribute".

    >>> Upstream("torch", "2.11", "99", ("torch.nn:Module.forward",)).check()
    >>> Upstream("torch", "2.11", "99", ("torch.nn:Molecule",)).check()  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    attnmesh.errors.VersionError: torch: expected torch>=2.11,<99 with torch.nn:Molecule, given torch 2... without it...
    """

    package: str
    floor: str
    ceiling: str
    names: tuple[str, ...] = ()

    @property
    def requirement(self) -> str:
        """The versions that are tested, as pip reads them."""
        return f"{self.package}>={self.floor},<{self.ceiling}"

    @property
    def fix(self) -> str:
        """Fix in errors about another version."""
        return f'run pip install "{self.requirement}"'

    @property
    def version(self) -> str:
        """Version of the installed package."""
        return str(import_module(self.package).__version__)

    @property
    def installed(self) -> str:
        """Name and version of the installed package."""
        return f"{self.package} {self.version}"

    def find(self, name: str, subject: str = "") -> Any:
        """Return what has this name. Raise if the installed version does not have it."""
        try:
            return resolve_name(name)
        except (ImportError, AttributeError) as error:
            expected, given = f"{self.requirement} with {name}", f"{self.installed} without it"
            raise VersionError(subject or self.package, expected, given, self.fix) from error

    def find_if_used(self, name: str) -> Any:
        """Return what has this name, or else a class that raises when it is called: most models never call it."""
        try:
            return self.find(name)
        except VersionError:
            return type(name.split(":")[1], (), {"__new__": lambda *_, **__: self.find(name)})

    def check(self) -> None:
        """Raise unless the installed version is tested, and all names exist."""
        if not _version_numbers(self.floor) <= _version_numbers(self.version) < _version_numbers(self.ceiling):
            self.refuse_or_warn(self.package, self.requirement, self.installed)
        for name in self.names:
            self.find(name)

    def refuse_or_warn(self, subject: str, expected: str, given: str) -> None:
        """Raise on a version, or on code, that no test has run with. Where `OPT_IN` allows it, warn once."""
        if os.environ.get(OPT_IN) != "1":
            raise VersionError(subject, expected, given, f"{self.fix}; to run it untested, set {OPT_IN}=1")
        warn_once(f"{subject}: tested with {expected}, and this is {given}. Fix: {self.fix}.")


def _version_numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of a version up to the first part that is none: those of "2.11.0+cpu" are 2, 11 and 0."""
    parts = text.partition("+")[0].split(".")
    count = next((index for index, part in enumerate(parts) if not part.isdigit()), len(parts))
    return tuple(map(int, parts[:count]))
