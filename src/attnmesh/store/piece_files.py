"""Files of a save that have ranks' tokens, and shards that are filled from them: of a save, or of a growing folder."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial as partial_of
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch

from attnmesh.cache.cache_shard import CacheShard
from attnmesh.cache.local_shards import LocalShards
from attnmesh.errors import StoreError
from attnmesh.mesh.axes import Axis
from attnmesh.store.journal import Journal
from attnmesh.store.layer_files import (
    PIECE_TOKENS,
    TOKEN_INDEX,
    LastPieceFile,
    LayerFiles,
    RowShapes,
    check_chain,
    extend_chain,
)
from attnmesh.store.manifest import Manifest
from attnmesh.store.shard_filler import ShardFiller
from attnmesh.store.tensor_file import DAMAGED_FIX, TensorFile

PIECE_NAME = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})\.([0-9]{1,15})-([0-9]{1,15})(?:\.([0-9]{1,9}))?\.safetensors")


class PieceFile(NamedTuple):
    """File of one rank's tokens `start` to `stop` of those saved, by its indices along heads and tokens.

    It has the layers that keep the same tokens as layer `leader`. In a folder that grows each layer has files of its
    own, and is its `leader`.
    """

    head_rank: int
    token_rank: int
    start: int
    stop: int
    leader: int
    path: Path
    last_piece: LastPieceFile | None = None
    """The same file, where it has the last tokens in a folder that grows."""

    def open(self) -> TensorFile | LastPieceFile:
        """Return the file, its header checked."""
        return TensorFile(self.path) if self.last_piece is None else self.last_piece


def piece_files(path: Path, manifest: Manifest) -> Iterator[PieceFile]:
    """Yield the files of a save that hold ranks' tokens."""
    folder = path / manifest.folder_name
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise StoreError(
            "load", "a folder that KVCache.save wrote", f"{folder} ({error.strerror})", DAMAGED_FIX
        ) from error
    for name in names:
        if match := PIECE_NAME.fullmatch(name):
            head_rank, token_rank, start, stop, leader = (int(digits or 0) for digits in match.groups())
            is_of_a_rank = head_rank < manifest.head_ranks and token_rank < manifest.token_ranks
            if is_of_a_rank and start < stop <= manifest.length:
                yield PieceFile(head_rank, token_rank, start, stop, leader, folder / name)


def _layer_files(path: Path, manifest: Manifest, layer: int) -> Iterator[LayerFiles]:
    """Yield where each rank's files of a layer are."""
    leader = next(first for first, layers in manifest.groups.items() if layer in layers)
    for head_rank, token_rank in product(range(manifest.head_ranks), range(manifest.token_ranks)):
        yield LayerFiles(path / manifest.folder_name, head_rank, token_rank, layer, leader)


def _read_journal(files: LayerFiles) -> Journal:
    """Return the journal of a rank's layer, read."""
    journal = files.journal()
    if not journal.read():
        raise StoreError("load", "a journal of each rank and layer", f"no {journal.path}", DAMAGED_FIX)
    return journal


def with_length_now(path: Path, manifest: Manifest) -> Manifest:
    """Return the manifest of a folder that grows with the length that all its ranks and layers have."""
    if not manifest.growing:
        return manifest
    layers = (files for layer in range(len(manifest.configs)) for files in _layer_files(path, manifest, layer))
    return manifest._replace(length=min(_read_journal(files).last.length for files in layers))


def growing_pieces(path: Path, manifest: Manifest, layer: int) -> Iterator[PieceFile]:
    """Yield the files of a layer in a folder that grows.

        whole  whole  being filled    the last piece has tokens, and room for more
        whole  whole  whole           the last piece is full, and its file has the name of a whole one
        whole  whole                  the last piece has no token yet

    A rank's journal begins with its last piece, and has the digests of all pieces before it as a chain.
    """
    config = manifest.configs[layer]
    shapes = RowShapes(config.row_dtype, config.batch, config.kv_heads // manifest.head_ranks, config.row_widths)
    for files in _layer_files(path, manifest, layer):
        journal = _read_journal(files)
        last_start, stop = journal.records[0].stop, journal.last.stop
        earlier_pieces = last_start // PIECE_TOKENS
        filling = files.filling(earlier_pieces)
        last_is_whole = stop == last_start + PIECE_TOKENS and not filling.exists()
        whole_paths = [files.whole_or_shared(index) for index in range(earlier_pieces + last_is_whole)]
        chain = 0
        for whole_path in whole_paths[:earlier_pieces]:
            chain = extend_chain(chain, TensorFile(whole_path), [*shapes.named(layer)])
        check_chain(files, journal, chain)
        piece_of = partial_of(PieceFile, head_rank=files.head_rank, token_rank=files.token_rank, leader=layer)
        for index, whole_path in enumerate(whole_paths):
            yield piece_of(start=index * PIECE_TOKENS, stop=(index + 1) * PIECE_TOKENS, path=whole_path)
        if stop > last_start and not last_is_whole:
            last_piece = LastPieceFile(filling, journal, shapes, layer)
            yield piece_of(start=last_start, stop=stop, path=filling, last_piece=last_piece)


def fill_shards(layers: Sequence[LocalShards], path: Path, manifest: Manifest) -> None:
    """Write this rank's tokens into its shards, one per layer, from the files of all ranks that saved."""
    for layer, (shards, start) in enumerate(zip(layers, manifest.window_starts, strict=True)):
        shards.make_room_to_load(manifest.length_of(layer), start)
    if manifest.growing:
        for layer, shards in enumerate(layers):
            _fill_group({layer: shards.own.join_pieces()}, path, manifest, [*growing_pieces(path, manifest, layer)])
        return
    pieces = list(piece_files(path, manifest))
    for leader, group in manifest.groups.items():
        own = {layer: layers[layer].own.join_pieces() for layer in group}
        _fill_group(own, path, manifest, [piece for piece in pieces if piece.leader == leader])


def _fill_group(shards: Mapping[int, CacheShard], path: Path, manifest: Manifest, pieces: Sequence[PieceFile]) -> None:
    """Write this rank's tokens into its shards of layers that keep the same tokens."""
    leader = next(iter(shards))
    start, end = manifest.window_starts[leader].oldest_kept_token, manifest.length_of(leader)
    by_heads: dict[int, dict[int, CacheShard]] = {}
    for layer, shard in shards.items():
        by_heads.setdefault(shard.config.kv_heads, {})[layer] = shard
    fillers = [ShardFiller(alike, start, end, oldest_kept_token=start) for alike in by_heads.values()]
    for piece in pieces:
        file = piece.open()
        index = file.read(TOKEN_INDEX, torch.int64, (piece.stop - piece.start,))
        if len(index) and (int(index.min()) < start or (int(index.max()) >= end and not manifest.growing)):
            raise StoreError("load", "every token once", f"tokens beyond the last in {piece.path}", DAMAGED_FIX)
        for filler in fillers:
            filler.put(index, Axis(manifest.head_ranks, piece.head_rank), file.read, str(piece.path))
    for filler in fillers:
        filler.check_all_filled(str(path))
