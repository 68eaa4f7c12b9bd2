"""Ids of the tokens of a folder in which caches live: the first rank writes them, all ranks read them."""

import os
import struct
from errno import ENOSPC
from pathlib import Path

import torch
from torch import Tensor

from attnmesh.errors import StoreError
from attnmesh.kernels.native.native_digest import digest_on_cpu
from attnmesh.store.journal import Journal, read_file
from attnmesh.store.manifest import MORE, Manifest
from attnmesh.store.tensor_file import DAMAGED_FIX, PRIVATE_FILE, TensorFile

CACHED_IDS = "held"
"""Name of the ids of all tokens among the extra tensors of a save. Files that exist have this name."""

TOKEN_IDS = f"more {CACHED_IDS}"
"""The same name among the tensors of `MORE`."""

MAX_RECORDS = 4096
"""Records after which a journal begins anew, with one for all ids. That takes the digest of all ids."""


class TokenIds:
    """Ids of the tokens of a folder, (batch, tokens), with a journal as keys have one."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "tokens.ids"
        self.journal = Journal(folder / "tokens.journal", f"{folder.name} tokens")
        self.written: Tensor | None = None
        self.is_open = False
        """True once this process writes."""

    def read(self, batch: int) -> Tensor | None:
        """Return the ids. Raise unless they are as they were written."""
        if not self.journal.read():
            return None
        first, *later = self.journal.records
        try:
            content = bytearray(read_file(self.path))
        except FileNotFoundError as error:
            if self.journal.last.stop:
                raise StoreError("load", "the ids of all tokens", f"no {self.path}", DAMAGED_FIX) from error
            content = bytearray()  # the file is made with the first ids
        whole = len(content) // 8 // batch * batch
        ids = torch.empty(0, dtype=torch.int64, device="cpu")
        if whole:
            ids = torch.frombuffer(content, dtype=torch.int64, count=whole)
        ids_by_token = ids.view(-1, batch)
        for start, stop, digest in ((0, first.stop, first.digest), *((x.start, x.stop, x.digest) for x in later)):
            if stop > len(ids_by_token) or (start != stop and digest_on_cpu(ids_by_token[start:stop]) != digest):
                raise StoreError("load", "the ids of all tokens", f"damage in {self.path}", DAMAGED_FIX)
        self.written = ids_by_token[: self.journal.last.stop]
        return self.written.t().contiguous()

    def write(self, new_ids: Tensor) -> None:
        """Replace the ids by `new_ids`. Only ids from the first difference on are written."""
        ids_by_token = new_ids.t().cpu().contiguous()
        ids_before = self.written
        if not self.is_open:
            self.journal.open()
            self.is_open = True
        if ids_before is None:
            ids_before = ids_by_token[:0]
            self.journal.begin(0, 0, digest_on_cpu(ids_before))
        start = _count_equal_tokens(ids_by_token, ids_before)
        if start < len(ids_before) or len(self.journal.records) > MAX_RECORDS:
            self.journal.begin(start, start, digest_on_cpu(ids_by_token[:start]))
        self.written = ids_by_token[:start]
        if start == len(ids_by_token):
            return
        handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, PRIVATE_FILE)
        try:
            ids = ids_by_token[start:].flatten().tolist()
            packed = struct.pack(f"{len(ids)}q", *ids)
            if os.pwrite(handle, packed, start * 8 * ids_by_token.shape[1]) != len(packed):
                raise OSError(ENOSPC, os.strerror(ENOSPC))
        finally:
            os.close(handle)
        self.journal.add(start, len(ids_by_token), len(ids_by_token), digest_on_cpu(ids_by_token[start:]))
        self.written = ids_by_token


def ids_in(written: TokenIds, manifest: Manifest) -> Tensor | None:
    """Return the ids of all tokens: those written since a save, or else those of the save; None without any."""
    ids = written.read(manifest.configs[0].batch) if manifest.growing else None
    if ids is None and manifest.has_extra:
        file = TensorFile(written.path.with_name(MORE))
        ids = file.read(TOKEN_IDS, torch.int64) if TOKEN_IDS in file.entries else None
    return ids


def _count_equal_tokens(ids: Tensor, other_ids: Tensor) -> int:
    """Return how many tokens at the start are equal."""
    shorter = min(len(ids), len(other_ids))
    if torch.equal(ids[:shorter], other_ids[:shorter]):
        return shorter
    return int((ids[:shorter] == other_ids[:shorter]).all(1).long().cumprod(0).sum())
