"""Tensors of several ranks in one folder, through `torch.distributed.checkpoint`, each with a sum that tells damage."""

import warnings
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from attnmesh.agree import digest
from attnmesh.errors import StoreError
from attnmesh.mesh import Axis

SUM = " sum"
"""What the name of a tensor's sum ends with."""

FIX = "restore the folder from a copy, or save again"


def write(path: str | Path, tensors: dict[str, Tensor], ranks: Axis) -> None:
    """Write this rank's tensors, whose names no other rank uses; every rank calls it."""
    # Slow to import, and seldom used.
    from torch.distributed.checkpoint.api import CheckpointException  # no Exception, but a BaseException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    sums = {name + SUM: digest(x).cpu() for name, x in tensors.items()}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled|Detected an existing", UserWarning)
            writer = FileSystemWriter(path, overwrite=True)
            save(tensors | sums, storage_writer=writer, process_group=ranks.group, no_dist=ranks.size == 1)
    except (Exception, CheckpointException) as error:
        expected, given = "a folder that can be written to", f"{path!r} ({type(error).__name__})"
        raise StoreError("save", expected, given, "check the path and the room on the disk") from error


class Stored:
    """A folder that `write` wrote, read by each rank for itself."""

    def __init__(self, path: str | Path) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        self.path = path
        try:
            entries = FileSystemReader(path).read_metadata().state_dict_metadata
        except Exception as error:
            expected, given = "a folder that KVCache.save wrote", f"{path} ({type(error).__name__})"
            raise StoreError("load", expected, given, "check the path, or save again") from error
        self.entries = {name: x for name, x in entries.items() if isinstance(x, TensorStorageMetadata)}

    def read(self, names: Iterable[str]) -> list[Tensor]:
        """The tensors of these names, or an error if any is not there or not what was written."""
        from torch.distributed.checkpoint.api import CheckpointException  # no Exception, but a BaseException
        from torch.distributed.checkpoint.state_dict_loader import load

        wanted = list(names)
        if missing := [name for name in (*wanted, *(name + SUM for name in wanted)) if name not in self.entries]:
            raise StoreError("load", "a cache that KVCache.save wrote", f"no {missing[0]!r} in {self.path}", FIX)
        shapes = ((name, self.entries[name]) for each in wanted for name in (each, each + SUM))
        tensors = {name: torch.empty(x.size, dtype=x.properties.dtype) for name, x in shapes}
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
                load(tensors, checkpoint_id=self.path, no_dist=True)
        except (Exception, CheckpointException) as error:
            given = f"{wanted[0]!r} in {self.path} ({type(error).__name__})"
            raise StoreError("load", "files as they were written", given, FIX) from error
        for name in wanted:
            if not torch.equal(digest(tensors[name]), tensors[name + SUM]):
                raise StoreError("load", "files as they were written", f"damage in {name!r} in {self.path}", FIX)
        return [tensors[name] for name in wanted]
