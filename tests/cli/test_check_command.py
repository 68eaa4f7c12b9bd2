"""`attnmesh check`: a proof of each kernel, whose failure ends it."""

import json

import pytest

from attnmesh.cli import proofs
from attnmesh.kernels.native.build import library
from tests.support.process.command import run


def test_check_proves_every_kernel_here() -> None:
    code, text = run("check", "--json")
    report = json.loads(text)
    assert code == 0
    assert report["sound"] is True
    assert report["energy_law_error"] < 1e-13  # float64, over many keys
    here = {(p["kernel"], p["dtype"]) for p in report["proofs"] if p["device"] == "cpu" and p["absent"] is None}
    narrow = ("float32", "bfloat16", "float16", "int8", "fp8_e4m3")
    found = {(kernel, dtype) for kernel in ("cpu", "reference") for dtype in ("float64", *narrow)}
    assert here == found | {("native", dtype) for dtype in narrow if library().attend is not None}


@pytest.mark.long
def test_check_reads_as_a_table_and_says_why_a_kernel_is_absent() -> None:
    code, text = run("check", "-v")
    assert code == 0
    assert "reference" in text
    assert "it runs on CUDA, the tensors are on cpu" in text
    assert "All kernels here are exact, to the rounding of their dtype." in text


def test_check_names_kernels_of_other_devices_when_it_explains(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = [
        proofs.Proof("cuda", "cpu", "float32", "it runs on CUDA, the tensors are on cpu", is_elsewhere=True),
        proofs.Proof("native", "cpu", "float32", "a compiler is missing"),
    ]
    monkeypatch.setattr(proofs, "proofs", lambda: iter(absent))
    text, explained = run("check")[1], run("check", "-v")[1]
    assert "Kernel native does not serve cpu tensors in float32: a compiler is missing." in text
    assert "CUDA" not in text
    assert "Kernel cuda does not serve cpu tensors in float32: it runs on CUDA" in explained
    assert text.index('what kernel="auto" takes') < text.index("each kernel beside attention in float64")


def test_check_fails_when_a_kernel_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = proofs.Proof("cpu", "cpu", "float32", None, 1e-2, 1e-2, 1e-6)
    monkeypatch.setattr(proofs, "proofs", lambda: iter([wrong]))
    code, text = run("check")
    assert code == 1
    assert "WRONG" in text
    code, text = run("check", "--json")
    assert code == 1
    assert json.loads(text)["sound"] is False
