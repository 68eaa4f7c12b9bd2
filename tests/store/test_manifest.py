"""The manifest of a save: each value is checked before a tensor is read."""

import json
from pathlib import Path

import pytest

import attnmesh as am
from attnmesh.errors import StoreError
from tests.support.caches.saves import cache_of


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 1}, "a cache of version 7, given version 1"),
        ({"length": 10**9}, "the sizes of a cache"),
        ({"heads": 3}, "the sizes of a cache"),
        ({"ranks": 0}, "the sizes of a cache"),
        ({"sizes": [[1, 2, 8, 8, 2**47, 16, 1]]}, "at most this device's .* GB, given .* GB for a capacity of"),
        ({"sizes": [[1, 2, 8, 8, 60, 16, 99]]}, "the sizes of a cache"),
        ({"sizes": "many"}, "a folder that KVCache.save wrote"),
        ({"length": 21}, "every token once, given 20 of this rank's 21 tokens"),
        ({"length": 19}, "every token once"),
    ],
)
def test_manifest_values_are_checked(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    cache_of(20).save(tmp_path)
    manifest = json.loads((tmp_path / "cache.json").read_text())
    (tmp_path / "cache.json").write_text(json.dumps(manifest | changes))
    with pytest.raises(StoreError, match=message):
        am.KVCache.load(tmp_path, None)
