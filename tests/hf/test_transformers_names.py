"""Names of other packages: one that is missing is an error with the version, and all are in one place of a room."""

import ast
import runpy
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import transformers
import transformers.cache_utils
import transformers.masking_utils

import attnmesh.hf as hf
from attnmesh import errors
from attnmesh.diffusers import diffusers_names as of_diffusers
from attnmesh.hf import transformers_names as upstream
from attnmesh.runtime.upstream import OPT_IN, Upstream
from tools.rooms import FILES
from tools.versions import ROOT, TESTS, requirements

UPSTREAMS = [upstream.TRANSFORMERS, upstream.ACCELERATE, upstream.TRL, upstream.PEFT, of_diffusers.DIFFUSERS]


def test_versions_are_those_of_the_package_and_the_pins_are_among_them() -> None:
    assert {x.package: x.requirement for x in UPSTREAMS} == {
        name: name + found for name, found in requirements().items()
    }
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
    for each in UPSTREAMS:
        assert pins[each.package] == each.version
        each.check()


@pytest.mark.parametrize("name", ["cache_utils:CacheLayerMixin", "masking_utils:causal_mask_function"])
def test_a_missing_name_is_an_error_at_import(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, attribute = name.split(":")
    monkeypatch.delattr(getattr(transformers, module), attribute)
    expected = (
        f"transformers: expected transformers>=5.23,<5.24 with transformers.{name}, given transformers "
        f'{transformers.__version__} without it. Fix: run pip install "transformers>=5.23,<5.24".'
    )
    with pytest.raises(errors.VersionError) as caught:
        runpy.run_path(str(upstream.__file__))
    assert str(caught.value) == expected
    assert isinstance(caught.value, ImportError)


def test_a_missing_method_of_the_trainer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(transformers.Trainer, "floating_point_ops")
    with pytest.raises(
        errors.VersionError, match=r"with transformers:Trainer.floating_point_ops, given transformers 5"
    ):
        hf.on_mesh(transformers.Trainer, None)


@pytest.mark.parametrize("name", ["DummyLayer", "LinearAttentionLayer", "apply_tensor_parallelism"])
def test_a_name_that_few_calls_need_is_an_error_where_it_is_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = getattr(upstream, name).__module__
    monkeypatch.delattr(import_module(module), name)
    missing = runpy.run_path(str(upstream.__file__))[name]

    class Derived(missing): ...  # type: ignore[misc, valid-type]

    for called in (missing, Derived):
        with pytest.raises(errors.VersionError, match=f"with {module}:{name}, given transformers .* without it"):
            called(1, to=2)


@pytest.mark.parametrize("version", ["5.22.2", "5.24.0", "5.24.0.dev0", "6.0"])
def test_a_version_that_is_not_tested_is_an_error(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(OPT_IN, raising=False)
    monkeypatch.setattr(import_module("transformers"), "__version__", version)  # peft loads another one
    with pytest.raises(errors.VersionError) as caught:
        runpy.run_path(str(upstream.__file__))
    assert str(caught.value) == (
        f"transformers: expected transformers>=5.23,<5.24, given transformers {version}. Fix: run pip install "
        '"transformers>=5.23,<5.24"; to run it untested, set ATTNMESH_UNTESTED_VERSIONS=1.'
    )


@pytest.mark.parametrize("each", UPSTREAMS[1:], ids=lambda each: each.package)
def test_a_newer_version_of_each_other_package_is_refused(each: Upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module(each.package), "__version__", each.ceiling)
    with pytest.raises(errors.VersionError, match=f"expected {each.requirement}, given {each.package} {each.ceiling}"):
        each.check()


def test_the_environment_allows_one_that_has_all_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OPT_IN, "1")
    monkeypatch.setattr(errors, "_warned", set())
    monkeypatch.setattr(import_module("transformers"), "__version__", "5.24.0")
    tested = "transformers: tested with transformers>=5.23,<5.24, and this is transformers 5.24.0"
    with pytest.warns(UserWarning, match=tested):
        upstream.TRANSFORMERS.check()
    monkeypatch.delattr(transformers.PreTrainedModel, "is_backend_compatible")
    with pytest.raises(errors.VersionError, match="is_backend_compatible, given"):
        upstream.TRANSFORMERS.check()


@pytest.mark.parametrize("version", ["5.23", "5.23.1", "5.23.9.dev0"])
def test_a_version_that_is_tested_is_accepted(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("transformers"), "__version__", version)  # peft loads another one
    upstream.TRANSFORMERS.check()


def inner_imports() -> Iterator[tuple[str, str]]:
    """Yield the files of the rooms, each with a module inside another package that it imports from."""
    for name, file in FILES.items():
        if name.split(".")[0] in ("hf", "diffusers") and not name.endswith(".upstream"):
            nodes: Any = ast.walk(ast.parse(Path(file).read_text()))
            modules = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
            yield from ((name, module) for module in modules if module.split(".")[0] in TESTS and "." in module)


def test_modules_inside_other_packages_are_imported_in_one_place() -> None:
    assert not [*inner_imports()]
