"""Options of several subcommands: shares and the mesh that goes with them, and bits that do not depend on ranks."""

import os
from pathlib import Path

import pytest

from attnmesh_command.messages import OptionError
from attnmesh_command.shared_options import (
    check_caches,
    check_reproducible_option,
    check_weights,
    mesh_of_shares,
    named_shares,
    writable,
)

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("text", ["", "3,", "3,0", "3,-1", "inf,1", "nan", "3;1"])
def test_shares_are_numbers_above_0(text: str) -> None:
    with pytest.raises(OptionError, match="--shares: expected auto, or a number above 0 for each rank, given"):
        named_shares(text)


def test_shares_make_a_mesh_of_keys_unless_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    assert mesh_of_shares("auto", None, 4) == "auto"
    assert mesh_of_shares("auto", "3,1", None) == "keys=2"
    assert mesh_of_shares("auto", "auto", 3) == "keys=3"
    assert mesh_of_shares("queries=2,keys=2", "4,3,2,1", None) == "queries=2,keys=2"
    with pytest.raises(OptionError, match="expected 4 of them, for queries=2,keys=2, given '3,1'"):
        mesh_of_shares("queries=2,keys=2", "3,1", None)
    with pytest.raises(OptionError, match="expected 4 of them, for keys=4"):
        mesh_of_shares("auto", "3,1", 4)


@pytest.mark.parametrize("ranks", range(1, 18))
def test_bits_are_the_same_on_powers_of_two(ranks: int) -> None:
    check_reproducible_option(False, ranks, "direct")
    if ranks in (1, 2, 4, 8, 16):
        check_reproducible_option(True, ranks, "auto")
        with pytest.raises(OptionError, match="and merge 'direct'"):
            check_reproducible_option(True, ranks, "direct")
        return
    below = max(n for n in (1, 2, 4, 8, 16) if n < ranks)
    with pytest.raises(
        OptionError, match=f"{ranks} ranks and merge 'tree'. Fix: give these axes {below} or {2 * below}"
    ):
        check_reproducible_option(True, ranks, "tree")


def test_options_of_caches_that_do_not_go_together_are_refused() -> None:
    check_caches("auto", "auto", True, "auto", "keys=2", "1,1")
    check_caches("auto", "auto", False, "auto", "keys=2", "3,1")
    for shares in ("3,1", "auto"):
        with pytest.raises(OptionError, match=f"--reproducible: expected even shares, given --shares {shares}"):
            check_caches("auto", "auto", True, "auto", "keys=2", shares)
    with pytest.raises(OptionError, match="--reproducible: expected 1, 2, 4, 8"):
        check_caches("auto", "auto", True, "auto", "tp=keys=3", None)
    with pytest.raises(OptionError, match="--kv: expected one of auto, "):
        check_caches("auto", "auto", False, "int3", "keys=2", None)


def test_weights_are_shared_once() -> None:
    check_weights("shared", "keys=2")
    check_weights("auto", "tp=2,keys=2")
    for mesh in ("tp=2,keys=2", "tp=keys=2"):
        with pytest.raises(OptionError, match="--weights shared: expected a mesh without tp"):
            check_weights("shared", mesh)


def test_a_file_that_cannot_be_written_is_refused_at_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert writable("--out", tmp_path / "a.json").exists()
    with pytest.raises(
        OptionError, match=r"--out: expected a file that can be written, .*\(No such file or directory\)"
    ):
        writable("--out", tmp_path / "missing" / "a.json")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(OptionError, match=r"a.json \(Permission denied\)"):
        writable("--out", tmp_path / "a.json")
