"""A folder in which caches live: their keys are its files, and what is appended is in them at once.

It has the form of a save (`load_layers.py`). Its manifest says that it grows, and journals say how many tokens it has.
One process of each rank writes to it. `KVCache.load` reads it on any number of ranks.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from secrets import randbits

import torch
from torch import Tensor

from attnmesh.cache.cache_config import CacheConfig
from attnmesh.cache.local_shards import LocalShards
from attnmesh.cache.ordered_shard import Fail
from attnmesh.comm.topology import agreed_hosts
from attnmesh.errors import StoreError
from attnmesh.guard.agreement import Agreement
from attnmesh.mesh.axes import Axis, RankMesh
from attnmesh.runtime.memory import free_memory, host_memory
from attnmesh.store.folder_shard import FOLDER_SUBJECT, FolderShard, opening
from attnmesh.store.journal import Journal
from attnmesh.store.layer_files import PIECE_TOKENS, LayerFiles, pieces_of_save, read_piece
from attnmesh.store.manifest import MANIFEST, Manifest, checked_folder, read_manifest, write_manifest
from attnmesh.store.piece_files import piece_files
from attnmesh.store.private_folder import check_private, lock_private_folder, make_private
from attnmesh.store.token_ids import TokenIds, ids_in


class KVFolder:
    """Folder of the caches of one model, a layer each, which the ranks of a mesh open together."""

    def __init__(self, path: str | Path, mesh: RankMesh, token_axis: Axis, subject: str = FOLDER_SUBJECT) -> None:
        """Open a folder, or make it. Every rank calls it."""
        self.mesh = mesh
        self.token_axis = token_axis
        self.is_first = mesh.shard_index == 0
        self.subject = subject
        self._lock = -1
        self.journals = list[Journal]()
        self.opened_layers = set[int]()
        with self.released_on_error():
            with Agreement(mesh, subject) as agreement:
                self.path = checked_folder(subject, path)
                if self.is_first:
                    self._make_and_lock()
                table = agreement.compare({"folder": str(path)}, payload=[randbits(62)])
            name = f"{table[0][0]:016x}"
            with Agreement(mesh, subject) as agreement, opening(self.path, subject):
                check_private(self.subject, self.path)
                self.manifest = self._read(name)
                self.save_path = self.path / self.manifest.folder_name
                make_private(self.subject, self.save_path)
                agreement.compare({"save": self.manifest.name, "grows": self.manifest.growing})
        self.ids = TokenIds(self.save_path)
        self.journals.append(self.ids.journal)
        own_hosts = (
            [host for host in agreed_hosts(token_axis) if token_axis.index in host] if token_axis.size > 1 else [[0]]
        )
        ranks_here = len(own_hosts[0]) * mesh.heads.size
        self.spare_bytes = min(host_memory() // 2, free_memory(torch.device("cpu"))) // ranks_here
        """Bytes of pieces that may stay in memory once they are read."""

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Let others write to the folder."""
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1
        for journal in self.journals:
            journal.close()

    @contextmanager
    def released_on_error(self) -> Iterator[None]:
        """Let others write to the folder after an error: code that keeps the error must not keep the lock."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _make_and_lock(self) -> None:
        """Make the folder, and lock it against other writers."""
        with opening(self.path, self.subject):
            self._lock = lock_private_folder(self.subject, self.path)

    def _read(self, name: str) -> Manifest:
        """Return the manifest, or that of a new folder. Raise unless these ranks can go on where the folder ends."""
        head_ranks, token_ranks = self.mesh.heads.size, self.token_axis.size
        if not os.path.lexists(self.path / MANIFEST):
            if files := [file.name for file in self.path.iterdir() if not file.name.startswith("1-")]:
                fix = "pass a new folder, or one of KVCache.save"
                raise StoreError(self.subject, "an empty folder", f"{files[:3]} in {self.path}", fix)
            return self._new_manifest(name)
        manifest = read_manifest(self.path)
        is_of_one = self.subject == FOLDER_SUBJECT
        fix = "load it with KVCache.load" if is_of_one else "take as many ranks, restore it into memory"
        fix += ", or append to a new folder"
        if (manifest.head_ranks, manifest.token_ranks) != (head_ranks, token_ranks):
            expected = f"a folder of {head_ranks} x {token_ranks} ranks (heads x tokens)"
            raise StoreError(self.subject, expected, f"{manifest.head_ranks} x {manifest.token_ranks}", fix)
        masks = [config.mask for config in manifest.configs if config.mask is not None]
        if manifest.padded or masks or manifest.lengths:
            given = "padding" if manifest.padded else f"mask={masks[0]}" if masks else "lengths that differ"
            raise StoreError(self.subject, "a cache that keeps all tokens, without padding", given, fix)
        return manifest

    def _new_manifest(self, name: str) -> Manifest:
        """Return the manifest of a folder without layers."""
        return Manifest(
            configs=(),
            padded=False,
            has_extra=False,
            length=0,
            head_ranks=self.mesh.heads.size,
            token_ranks=self.token_axis.size,
            save_number=1,
            note="",
            name=name,
            growing=True,
        )

    @property
    def layer_count(self) -> int:
        """Number of layers that have files."""
        return len(self.manifest.configs)

    def shard_maker(self, layer: int, config: CacheConfig, fail: Fail) -> Callable[[int], FolderShard]:
        """Return what opens the shard of a layer, given the rank's index along the tokens axis."""
        self._check_config(layer, config)
        if PIECE_TOKENS % config.block:
            expected = f"a block that divides {PIECE_TOKENS}"
            raise StoreError(self.subject, expected, f"{config.block}", "leave block= out")
        leader = next((first for first, layers in self.manifest.groups.items() if layer in layers), layer)

        def open_shard(index: int) -> FolderShard:
            files = LayerFiles(self.save_path, self.mesh.heads.index, index, layer, leader)
            shard = FolderShard(files, self._reserve_memory, fail, config, self.mesh.heads, self.token_axis.size, index)
            shard.opened_in = self
            self.journals.append(shard.journal)
            if layer >= len(self.manifest.configs):
                shard.begin()
            elif self.manifest.growing:
                shard.resume()
            else:
                self._adopt_save(shard, files)
            return shard

        return open_shard

    def _check_config(self, layer: int, config: CacheConfig) -> None:
        """Raise unless a layer is new, or configured as the files are."""
        if layer >= len(self.manifest.configs):
            return
        folder_config = self.manifest.configs[layer]
        if folder_config.to_code()[:4] + folder_config.to_code()[5:] != config.to_code()[:4] + config.to_code()[5:]:
            expected = f"a cache of the sizes in {self.path}: {folder_config}"
            fix = "pass the sizes that it was made with, or another folder"
            raise StoreError(self.subject, expected, str(config), fix)

    def _reserve_memory(self, size: int) -> bool:
        """Reserve memory for a piece of this size. Return whether there was room."""
        self.spare_bytes -= size
        return self.spare_bytes >= 0

    def _adopt_save(self, shard: FolderShard, files: LayerFiles) -> None:
        """Open the files of a save."""
        paths = {
            (piece.start, piece.stop): piece.path
            for piece in piece_files(self.path, self.manifest)
            if (piece.head_rank, piece.token_rank, piece.leader) == (files.head_rank, files.token_rank, files.leader)
        }
        whole_pieces = 0
        parts = list[list[Tensor]]()
        token_indices = [torch.empty(0, dtype=torch.int64, device="cpu")]
        for start, stop, path in pieces_of_save(files, paths):
            if stop - start == PIECE_TOKENS and not parts:
                whole_pieces += 1
                continue
            *tensors, token_index = read_piece(path, files.layer, shard.shapes, stop - start)
            parts.append(tensors)
            token_indices.append(token_index)
        rows = tuple(torch.cat(part, 2) for part in zip(*parts, strict=True))
        shard.adopt_save(whole_pieces, rows, torch.cat(token_indices), self.manifest.length)

    def settle(self, layer: int, shards: LocalShards) -> None:
        """Cut a layer to the tokens that all ranks have, and count those of each. Every rank calls it."""
        shard = shards.own
        with Agreement(self.mesh, self.subject) as agreement:
            lengths = agreement.compare(payload=[shard.length])
        length = min(own_length for (own_length,) in lengths)
        with Agreement(self.mesh, self.subject) as agreement:
            shard.truncate(length)
            parts = [
                *(piece.indices for piece in shard.earlier_pieces),
                shard.token_index[: shard.used_slots].cpu(),
            ]
            report = shard.block_cyclic.report_of(shard.index, torch.cat(parts))
            payloads = agreement.compare(payload=report)
        reports = sorted({*shard.block_cyclic.reports_in(payloads)})  # ranks along the heads axis hold the same tokens
        found = sum(report.token_count for report in reports)
        if found != length:
            given = f"{found} of {length} tokens in {self.path}"
            raise StoreError(self.subject, "every token once", given, "restore the folder from a copy")
        shards.counter.set_rank_counts(shards.counter.rank_counts.with_shards(0, reports))
        shards.counter.set_length(length)
        if length > shard.config.capacity:
            shards.grow(replace(shard.config, capacity=length))
        self._publish_layer(layer, shard.config)

    def _publish_layer(self, layer: int, config: CacheConfig) -> None:
        """Let the manifest have a new layer, or say that the folder grows."""
        self.opened_layers.add(layer)
        before, layers = self.manifest, self.manifest.configs
        if layer >= len(layers):
            self._publish(before.with_layer(config))
        elif not before.growing and len(self.opened_layers) == len(layers):
            self._publish(before._replace(growing=True, note=""))

    def identify(self, model: Callable[[], str]) -> None:
        """Raise unless the folder is of this model, by the text of the first rank. A new folder takes it."""
        with Agreement(self.mesh, self.subject):
            text = model() if self.is_first else "as the first rank has it"
            note = self.manifest.note
            if self.is_first and note not in ("", text):
                given, fix = f"one of another model in {self.path}", "pass another folder, or remove this one"
                raise StoreError(self.subject, "a folder of this model", given, fix)
        if not note:
            self._publish(self.manifest._replace(note=text))

    def _publish(self, manifest: Manifest) -> None:
        """Replace the manifest. The first rank writes it."""
        self.manifest = manifest
        with Agreement(self.mesh, self.subject):
            if self.is_first and manifest.configs:
                write_manifest(self.path, manifest)

    def read_ids(self) -> Tensor | None:
        """Return the ids of all tokens; None if they are unknown."""
        return ids_in(self.ids, self.manifest) if self.manifest.configs else None

    def write_ids(self, ids: Tensor) -> None:
        """Write the ids of all tokens. The first rank writes them."""
        if self.is_first:
            try:
                self.ids.write(ids)
            except OSError as error:
                given, fix = f"{self.path} ({error.strerror})", "free space there: the keys are whole, the ids are not"
                raise StoreError(self.subject, "a folder that can be written to", given, fix) from error
