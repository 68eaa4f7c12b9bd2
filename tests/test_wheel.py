"""The wheel: it holds the package and its command, and needs PyTorch alone."""

import os
import platform
import runpy
import shutil
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

from attnmesh import __version__

ROOT = Path(__file__).parents[1]
USE = """
import sys, warnings
warnings.simplefilter("ignore")  # PyTorch's own, about numpy
import torch, attnmesh as am
assert am.__file__.startswith(sys.argv[1]), am.__file__
q, k, v = torch.randn(3, 1, 2, 64, 16).unbind()
out = am.attention(q, k, v, mask=am.Causal())
expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
torch.testing.assert_close(out, expected)
cache = am.KVCache(None, batch=1, kv_heads=2, head_dim=16, capacity=64, dtype=torch.float32)
cache.append(k, v)
torch.testing.assert_close(am.decode(q[:, :, -1:], cache), expected[:, :, -1:])
absent = "typer", "rich", "transformers", "safetensors", "numpy", "pytest"
assert not [name for name in absent if name in sys.modules]
print("exact")
"""


def needed(name: str, found: dict[str, Path]) -> dict[str, Path]:
    """Top-level files of a distribution and of all that it requires, by name."""
    dist = distribution(name)
    tops = {Path(file).parts[0] for file in dist.files or () if ".." not in Path(file).parts}
    if not tops <= found.keys():
        found |= {top: Path(str(dist.locate_file(top))) for top in tops}
        for text in dist.requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                needed(requirement.name, found)
    return found


@pytest.mark.long
def test_the_wheel_needs_torch_alone(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", tmp_path, ROOT], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = ZipFile(wheel).namelist()
    compiled = [name for name in names if name.endswith(".so")]
    assert wheel.name.startswith(f"attnmesh-{__version__}-py3-none-{'linux' if compiled else 'any'}")
    assert bool(compiled) == (shutil.which("c++") is not None)
    assert {name.split("/")[0] for name in names} == {
        "attnmesh",
        "attnmesh_command",
        f"attnmesh-{__version__}.dist-info",
    }
    assert {"attnmesh/py.typed", "attnmesh/cli/plan_page.html", "attnmesh/serve/page.html"} <= set(names)
    installed, torch_alone = tmp_path / "installed", tmp_path / "torch"
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", installed, wheel], check=True)
    torch_alone.mkdir()
    for name, place in needed("torch", {}).items():
        (torch_alone / name).symlink_to(place)
    environment = {**os.environ, "PYTHONPATH": f"{installed}:{torch_alone}"}
    words = [sys.executable, "-S", "-c", USE, str(installed)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    assert (done.stdout, done.returncode) == ("exact\n", 0), done.stderr


@pytest.mark.parametrize(
    ("change", "reason"), [({"PATH": ""}, "there is no compiler"), ({"failing": "1"}, "c++ fails with 1")]
)
def test_a_pure_wheel_is_said_to_be_one(
    change: dict[str, str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler of the second case is one that fails."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        pytest.skip("no library is compiled into wheels here")
    (tmp_path / "c++").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "c++").chmod(0o700)
    monkeypatch.delenv("ATTNMESH_NATIVE", raising=False)
    monkeypatch.setenv("PATH", change.get("PATH", f"{tmp_path}:{os.environ['PATH']}"))
    said, data = list[str](), dict[str, Any](force_include={})
    interface = ModuleType("interface")
    vars(interface)["BuildHookInterface"] = object  # of the package that builds wheels, which need not be here
    for name in ("", ".builders", ".builders.hooks", ".builders.hooks.plugin", ".builders.hooks.plugin.interface"):
        monkeypatch.setitem(sys.modules, f"hatchling{name}", interface)
    hook = runpy.run_path(str(ROOT / "hatch_build.py"))["NativeHook"]()
    hook.app = SimpleNamespace(display_warning=said.append)
    hook.initialize("standard", data)
    assert len(said) == 1
    assert said[0].startswith("attnmesh: a wheel without the native kernel")
    assert said[0].endswith(reason)
    assert data == {"force_include": {}}
