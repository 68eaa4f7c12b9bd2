"""Saves of caches: the record that a cache has of its own, and calls to save and load, whose work `store` binds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import NamedTuple

from torch import Tensor

from attnmesh.cache.cache_config import CacheConfig
from attnmesh.cache.cache_properties import CacheProperties
from attnmesh.comm.topology import dist_all_gather_ints
from attnmesh.errors import StoreError
from attnmesh.guard.agreement import Agreement
from attnmesh.mesh.axes import RankMesh
from attnmesh.runtime.late_bound import LateBound
from attnmesh.runtime.world import WORLD

WRITTEN_POLL_SECONDS = 1.0
"""Seconds between checks that all ranks have written; less under a short deadline. A save ends later by as much."""


class Saving:
    """Save that may still be writing. The previous save is current until every rank has called `wait`.

    >>> import tempfile, torch
    >>> import attnmesh as am
    >>> cache = am.KVCache(None, batch=1, kv_heads=2, head_dim=4, capacity=100, dtype=torch.float32)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saving = cache.save(folder, wait=False)
    ...     cache.append(*torch.randn(2, 1, 2, 5, 4))
    ...     saving.wait()
    ...     am.KVCache.load(folder, None).length
    0
    """

    def __init__(
        self, mesh: RankMesh, write: Callable[[], None], publish: Callable[[], None], end: Callable[..., None]
    ) -> None:
        """Start to `write` in a thread; `publish` runs once all ranks have written, and `end(failed=)` at the end."""
        self.concluded = False
        self._mesh, self._publish, self._end = mesh, publish, end
        self._error: StoreError | None = None
        self._failure: BaseException | None = None
        self._start(write)

    def _start(self, act: Callable[[], None]) -> None:
        self._all_done = False
        self._thread = Thread(target=self._run, args=[act], name="attnmesh saving")
        self._thread.start()

    def _run(self, act: Callable[[], None]) -> None:
        try:
            act()
        except StoreError as error:
            self._error = error
        except Exception as error:  # raised on all ranks by `wait`
            given = f"{type(error).__name__}: {error}"
            self._error = StoreError("save", "tensors that can be written", given, "save again")

    @property
    def written(self) -> bool:
        """True once this rank's files are on the disk, or writing them has failed."""
        return self.concluded or not self._thread.is_alive()

    def finish_writing(self) -> None:
        """Wait until all ranks' files are on the disk, or have failed, so that the cache may change.

        Every rank calls it. Ranks compare their state repeatedly, so that the deadline does not apply to a slow disk.
        """
        while not self._all_done:
            self._thread.join(min(WRITTEN_POLL_SECONDS, (WORLD.deadline or WRITTEN_POLL_SECONDS) / 4))
            self._all_done = all(
                done for (done,) in dist_all_gather_ints([not self._thread.is_alive()], self._mesh.axes)
            )

    def wait(self) -> None:
        """Wait until all ranks have written and this save is the current one. Every rank calls it.

        Raises:
            StoreError: A rank could not write its files, or another job saved to the same folder; on every rank.
        """
        self.finish_writing()
        if not self.concluded:
            self.concluded = True
            try:
                self._raise_any()
                self._start(self._publish)
                self.finish_writing()
                self._raise_any()
            except BaseException as error:
                self._failure = error
                # If a rank was lost instead, the files stay: the next save links to them.
                self._end(failed=isinstance(error, StoreError))
                raise
            self._end(failed=False)
        elif self._failure is not None:
            raise self._failure

    def _raise_any(self) -> None:
        """Raise the error of a rank's thread on all ranks."""
        with Agreement(self._mesh, "save"):
            if self._error is not None:
                raise self._error


class SavedPieces(dict[tuple[int, int], Mapping[str, int]]):
    """Checksums of the saved files by slots, kept while the slots are unchanged; and the last save."""

    def __init__(self, caches: Sequence[object] = ()) -> None:
        self.cache_ids = tuple(map(id, caches))  # one per layer
        self.folder: Path | None = None  # folder in which this process has written the files
        self.last: Saving | None = None

    def forget(self, used: int = 0) -> None:
        """Drop the files with slots from `used` on, before these slots change."""
        for start, stop in [piece for piece in self if piece[1] > used]:
            del self[start, stop]

    @property
    def at_rest(self) -> bool:
        """True unless a save was started on which no rank has called `wait`: the same on every rank."""
        return self.last is None or self.last.concluded

    def check_written(self) -> None:
        """Raise if the last save is still writing."""
        if not self.at_rest:
            fix = "call wait() on the result of save first"
            raise StoreError("fork", "a cache at rest", "a cache whose save is writing", fix)

    def finish_writing(self) -> None:
        """Wait until the last save has written its files, so that the cache may change. Every rank calls it."""
        if self.last is not None:
            self.last.finish_writing()


class LayersToLoad(NamedTuple):
    """How many layers a folder should have, None for any number, and the room to make for their tokens."""

    layers: int | None = None
    capacity: int | None = None
    """Tokens to reserve memory for; None for the saved capacity."""
    tokens_per_key: Sequence[int] | None = None
    """Tokens that a key of each layer stands for; None where each is one."""
    hot: int | None = None
    """Newest tokens on the device, of layers that keep all tokens; None for all."""

    def configs(self, saved: tuple[CacheConfig, ...]) -> tuple[CacheConfig, ...]:
        """Return the configurations of the saved layers, with this room."""
        saved = tuple(config if config.mask is not None else replace(config, hot=self.hot) for config in saved)
        if self.capacity is None:
            return saved
        layers = zip(saved, self.tokens_per_key or [1] * len(saved), strict=True)
        return tuple(replace(config, capacity=-(-self.capacity // tokens)) for config, tokens in layers)


save_caches = LateBound[..., Saving]("attnmesh.store")
"""Write caches to a folder: `store.save_layers.save_layers`."""

load_caches = LateBound[..., tuple[Sequence[CacheProperties], dict[str, Tensor], str]]("attnmesh.store")
"""Return the caches of a folder, further tensors and a note: `store.load_layers.load_layers`."""
