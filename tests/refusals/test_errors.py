"""Errors: the one form of their texts, what they survive, and the checks that values make of themselves."""

import pickle
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from attnmesh import errors
from attnmesh.errors import (
    ArgumentError,
    InputError,
    KernelError,
    RankFailure,
    ShapeError,
    VersionError,
    check_choice,
    check_int,
    checked_count,
    short,
    type_and_shape,
    warn_once,
)

pytestmark = pytest.mark.quick

CLASSES = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, InputError)]


def test_a_text_has_what_was_expected_what_was_given_and_a_fix() -> None:
    error = ShapeError("attend q", "4 dims", "3 dims", "add the batch with q[None]")
    assert str(error) == "attend q: expected 4 dims, given 3 dims. Fix: add the batch with q[None]."
    table = errors.MeshError("decode", "equal calls", "    0  Causal()\n    1  Full()", "pass one mask")
    assert str(table) == "decode: expected equal calls, given:\n    0  Causal()\n    1  Full()\nFix: pass one mask."


@pytest.mark.parametrize("kind", CLASSES)
def test_each_kind_is_a_value_error_that_ranks_can_send(kind: type[InputError]) -> None:
    error = kind("attend q", "4 dims", "3 dims", "add one")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (kind, str(error))
    assert isinstance(error, ValueError)
    assert isinstance(error, TypeError) == (kind is ArgumentError)
    assert isinstance(error, ImportError) == (kind is VersionError)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [([], "some rank is lost"), ([3], "rank 3 is lost"), ([3, 5], "ranks 3, 5 are lost")],
)
def test_a_failure_names_the_ranks_that_are_lost(ranks: list[int], expected: str) -> None:
    error = pickle.loads(pickle.dumps(RankFailure(ranks, "gathering keys", "queries", "Connection closed")))
    assert str(error) == f"{expected} along the queries axis, gathering keys: Connection closed"
    assert (error.ranks, error.step, error.axis) == (tuple(ranks), "gathering keys", "queries")
    assert not isinstance(error, ValueError)


@pytest.mark.parametrize("value", [2, np.int64(2), torch.tensor(2)], ids=["int", "numpy", "tensor"])
def test_a_count_is_a_whole_number_of_any_type(value: Any) -> None:
    count = checked_count("test", value, "pass one", least=2)
    assert (count, type(count)) == (2, int)


@pytest.mark.parametrize("value", [1, -3, 2.0, "2", None, True, np.float64(2), torch.tensor(2.0)])
def test_other_values_are_no_count(value: Any) -> None:
    with pytest.raises(KernelError, match=r"test: expected a whole number, 2 or more, given .*Fix: pass one"):
        checked_count("test", value, "pass one", least=2, error=KernelError)
    with pytest.raises(ShapeError, match="a whole number, 2 or more"):
        check_int("test", value, 2, "pass one")


def test_true_is_no_count_although_python_has_it_for_1() -> None:
    with pytest.raises(ShapeError, match="a whole number, 1 or more, given True"):
        checked_count("test", True, "pass one")


def test_a_number_for_json_is_an_int_of_python() -> None:
    check_int("test", 2, 2, "pass one")
    with pytest.raises(ShapeError):
        check_int("test", np.int64(2), 2, "pass one")  # type: ignore[arg-type]


def test_a_choice_is_one_of_some_texts() -> None:
    check_choice("test", "a", ("a", "b"))
    for value in ("c", 1, None, ["a"]):
        with pytest.raises(KernelError, match="expected one of a, b, given"):
            check_choice("test", value, ("a", "b"))  # type: ignore[arg-type]


def test_values_are_short_in_texts() -> None:
    values = [2.5, None, "x", "x" * 100, torch.ones(2, 3), [1, 2]]
    assert [*map(short, values)] == ["2.5", "None", "'x'", "'" + "x" * 39, "a tensor (2, 3)", "list"]
    assert [*map(type_and_shape, (torch.ones(2, 3), [1]))] == ["torch.float32 (2, 3)", "list"]


def warn_within_the_package(message: str) -> None:
    """Warn as a function of the package does that another one of it calls."""
    source = "def inner(): warn_once(message)\ndef outer(): inner()\nouter()"
    exec(source, {"__name__": "attnmesh.made_up", "warn_once": warn_once, "message": message})


def test_a_warning_is_given_once_and_points_at_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "_warned", set())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for message in ("one", "one", "other"):
            warn_within_the_package(message)
    assert [str(one.message) for one in caught] == ["one", "other"]
    assert {one.filename for one in caught} == {__file__}


def test_a_warning_that_is_an_error_is_raised_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "_warned", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with pytest.raises(UserWarning, match="one"):
                warn_within_the_package("one")
