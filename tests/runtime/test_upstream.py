"""Versions of a package that are taken for tested, those with a local label too."""

import sys
from types import SimpleNamespace

import pytest

from attnmesh.errors import VersionError
from attnmesh.runtime.upstream import Upstream

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("version", "is_tested"),
    [
        ("2.11", False),
        ("2.11.0+cpu", False),
        ("2.11.1", True),
        ("2.11.1+cpu", True),
        ("2.11.10+cu128", True),
        ("2.11.2.dev20261101+cpu", True),
        ("2.12", False),
        ("2.12.0+cpu", False),
    ],
)
def test_a_local_label_does_not_change_a_version(
    version: str, is_tested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ATTNMESH_UNTESTED_VERSIONS", raising=False)
    monkeypatch.setitem(sys.modules, "made_up", SimpleNamespace(__version__=version))
    package = Upstream("made_up", "2.11.1", "2.12")
    if is_tested:
        package.check()
    else:
        with pytest.raises(VersionError, match=r"made_up: expected made_up>=2\.11\.1,<2\.12, given made_up 2\.1"):
            package.check()
