"""Clusters: each constant of a preset has a source."""

import pytest

from attnmesh.cost.cluster import PRESETS

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "local"])
def test_presets_name_the_sources_of_their_constants(name: str) -> None:
    sources = dict(PRESETS[name].sources)
    assert {"device", "inside" if PRESETS[name].ranks > 1 else "between", "the rest"} <= set(sources)
