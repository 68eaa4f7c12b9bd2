"""A row of a table of fixes: a mistake, the fix that its error gives, and the call that follows it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from attnmesh import errors


class Fixed(NamedTuple):
    """A mistake, a part of the fix that its error gives, the call that follows it, and what that has to return."""

    mistake: Callable[[], Any]
    fix: str
    mended: Callable[[], Any]
    expected: Callable[[], Any]

    def __str__(self) -> str:
        return self.fix[:60]

    def check(self, tolerance: float) -> None:
        """Assert that the error gives the fix, and that the call that follows it is right."""
        with pytest.raises(errors.InputError) as error:
            self.mistake()
        assert self.fix in str(error.value).split("Fix: ")[-1]
        found, expected = self.mended(), self.expected()
        if not isinstance(expected, Tensor):
            assert found == expected
        elif expected.is_floating_point():
            assert torch.allclose(found.to(expected), expected, rtol=tolerance, atol=tolerance)
        else:
            assert found.tolist() == expected.tolist()
