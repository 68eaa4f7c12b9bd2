"""Saved caches on disk, and loading them: each rank writes its own tokens, and any number of ranks reads them.

        cache.json                      the manifest, which names the current save; replaced atomically
        7-3f../0.1.0-4096.safetensors   seventh save: the first 4,096 tokens of one rank, all layers. The name starts
        7-3f../0.1.4096-5000.safet..    with the rank's indices along the heads and tokens axes
        7-3f../0.1.0-128.3.safetensors  its first 128 tokens that layers forget later, under the mask of layer 3
        7-3f../more.safetensors         tensors that belong to no rank, such as the token mask

Only `cache.json` makes a save current, so an interrupted save leaves the previous one valid. Each save has its own
folder, even where several jobs save to the same place. In a folder that grows (`kv_folder.py`) a cache lives: its last
tokens are in the files of `layer_files.py`.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.cache.cache import KVCache
from attnmesh.cache.cache_config import CacheSizes
from attnmesh.cache.cache_shard import CacheShard
from attnmesh.cache.local_shards import LocalShards, check_placement
from attnmesh.cache.saved_cache import LayersToLoad
from attnmesh.core.mask import FAR
from attnmesh.errors import ShapeError, StoreError
from attnmesh.guard.agreement import Agreement
from attnmesh.mesh.axes import Axis, Mesh, overlap
from attnmesh.runtime.memory import host_memory
from attnmesh.setup.init_mesh import device_fault, device_for
from attnmesh.store.journal import Journal
from attnmesh.store.layer_files import (
    PIECE_TOKENS,
    TOKEN_INDEX,
    LastPieceFile,
    LayerFiles,
    RowShapes,
    chained,
    check_chain,
)
from attnmesh.store.tensor_file import DAMAGED_FIX, TensorFile, check_size
from attnmesh.store.token_ids import TokenIds

VERSION = 7

MANIFEST, MORE = "cache.json", "more.safetensors"
"""Names of the files of a save: its manifest, and the tensors that belong to no rank."""

HELD = "more held"
"""Name of the ids of all tokens among the tensors of `MORE`."""

MAX_MANIFEST = 1 << 20
"""Bytes of the longest manifest that is read."""

NAME = re.compile("[0-9a-f]{16}")

FOLDER = re.compile("([0-9]{1,15})-[0-9a-f]{16}")

PIECE_NAME = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})\.([0-9]{1,15})-([0-9]{1,15})(?:\.([0-9]{1,9}))?\.safetensors")


class Manifest(NamedTuple):
    """Contents of `cache.json`."""

    sizes: tuple[CacheSizes, ...]  # sizes of each layer
    padded: bool
    more: bool  # True if there is a file of tensors that belong to no rank
    length: int
    heads: int  # ranks along the heads axis that saved
    ranks: int  # ranks along the tokens axis that saved
    saving: int  # number of this save, counted per folder
    note: str
    name: str  # random name of this save alone
    forgotten: tuple[tuple[int, int], ...] = ()  # per layer: tokens not saved, and the first query that can be decoded
    lengths: tuple[int, ...] = ()  # per layer, where keys of some stand for several tokens; else each has `length`
    growing: bool = (
        False  # True if a cache lives in the folder: journals have the length, and the tokens after whole pieces
    )

    def length_of(self, layer: int) -> int:
        """Return the keys of a layer."""
        return self.lengths[layer] if self.lengths else self.length

    @property
    def groups(self) -> dict[int, list[int]]:
        """Layers that keep the same tokens, by the first such layer."""
        groups: dict[tuple[object, int, int], list[int]] = {}
        for layer, sizes in enumerate(self.sizes):
            groups.setdefault((sizes.mask, sizes.keep, self.length_of(layer)), []).append(layer)
        return {layers[0]: layers for layers in groups.values()}

    @property
    def tokens_in_files(self) -> int:
        """Tokens in the files of all ranks along the tokens axis, for each group of layers."""
        return sum(self.length_of(layer) - self.forgotten[layer][0] for layer in self.groups)

    @property
    def folder(self) -> str:
        """Name of the folder with this save's files."""
        return f"{self.saving}-{self.name}"

    def to_json(self) -> str:
        """Return the manifest as text. Raise if it could not be read back."""
        fields = {"format": "attnmesh cache", "version": VERSION, "sizes": [sizes.to_code() for sizes in self.sizes]}
        fields |= {name: value for name, value in self._asdict().items() if name != "sizes"}
        if not isinstance(self.note, str):
            raise StoreError("save note", "a str", type(self.note).__name__, "pass json.dumps(note)")
        text = json.dumps(fields)
        if len(text) > MAX_MANIFEST:
            expected, given = f"a note of less than {MAX_MANIFEST} characters", f"{len(self.note)}"
            raise StoreError("save", expected, given, "pass long data as a tensor in more=")
        return text


def check_folder(subject: str, folder: object) -> Path:
    """Return the absolute path of a folder. Raise unless `folder` is a path."""
    path = os.fspath(folder) if isinstance(folder, (str, os.PathLike)) else None
    if not isinstance(path, str) or not path or "\0" in path:
        fix = 'pass its path as a str or a pathlib.Path, without null bytes, and "." for the current one'
        raise StoreError(subject, "the path of a folder", f"{folder!r} of type {type(folder).__name__}", fix)
    return Path(path).absolute()


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of a folder, checked. Raise if the folder holds no cache of this version."""
    version, fields = None, {}
    try:
        if not (path / MANIFEST).is_file():
            raise FileNotFoundError(MANIFEST)
        with (path / MANIFEST).open(encoding="utf-8") as file:
            fields = json.loads(file.read(MAX_MANIFEST))
        if fields["format"] != "attnmesh cache":
            raise ValueError("another format")
        version = fields["version"]
        length, heads, ranks, saving = (check_size(fields[name]) for name in ("length", "heads", "ranks", "saving"))
        padded = fields["padded"] is True
        note = str(fields["note"])
        name = str(fields["name"])
        has_extra = padded or fields["more"] is True
        codes = [[x if type(x) is int and x == FAR else check_size(x) for x in code] for code in fields["sizes"]]
        forgotten = [(check_size(first), check_size(floor)) for first, floor in fields.get("forgotten", [])]
        lengths = [check_size(length) for length in fields.get("lengths", [])]
        growing = fields["growing"] is True
        if version != VERSION or not NAME.fullmatch(name):
            raise ValueError("another version, or no name")
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        if version not in (None, VERSION):
            given = f"version {str(version)[:20]} in {path}"
            fix = "load it with the attnmesh that saved it, or prefill again"
            raise StoreError("load", f"a cache of version {VERSION}", given, fix) from error
        expected, given = "a folder that KVCache.save wrote", f"{path} ({type(error).__name__})"
        raise StoreError("load", expected, given, "check the path, or save again") from error
    try:
        sizes = tuple(map(CacheSizes.from_code, codes))
        for layer_sizes in sizes:
            layer_sizes.check(heads)
        alike = len({(layer_sizes.block, layer_sizes.batch) for layer_sizes in sizes}) == 1
        forgotten = forgotten or [(0, 0)] * len(sizes)
        ends = lengths or [length] * len(sizes)
        windows = [(*starts, end, layer_sizes) for starts, end, layer_sizes in zip(forgotten, ends, sizes, strict=True)]
        alike &= all(
            first <= floor <= end and (layer_sizes.mask or not floor) for first, floor, end, layer_sizes in windows
        )
        alike &= all(end <= min(length, layer_sizes.capacity) for *_, end, layer_sizes in windows)
        if not alike or not heads or not ranks:
            raise ValueError("sizes that contradict each other")
    except (ValueError, IndexError, TypeError, ZeroDivisionError) as error:
        given = f"{fields['sizes']!r}, length={length}, heads={heads}, ranks={ranks} in {path}"
        raise StoreError("load", "the sizes of a cache", given, DAMAGED_FIX) from error
    by_layer = tuple(forgotten), tuple(lengths)
    return Manifest(sizes, padded, has_extra, length, heads, ranks, saving, note, name, *by_layer, growing)


def save_folders(path: Path) -> list[Path]:
    """Return the folders of all saves, newest first, interrupted saves included."""
    saves = []
    for folder in path.iterdir():
        with suppress(FileNotFoundError):  # another job may remove it meanwhile
            if match := FOLDER.fullmatch(folder.name):
                saves.append((int(match[1]), folder.stat().st_mtime_ns, folder))
    return [folder for *_, folder in sorted(saves, reverse=True)]


class PieceFile(NamedTuple):
    """File of one rank's tokens `start` to `stop` of those saved, by its indices along heads and tokens.

    It has the layers that keep the same tokens as layer `group`.
    """

    head_rank: int
    token_rank: int
    start: int
    stop: int
    group: int
    path: Path
    filling: LastPieceFile | None = None  # the same file, where it has the last tokens in a folder that grows

    def opened(self) -> TensorFile | LastPieceFile:
        """Return the file, its header checked."""
        return TensorFile(self.path) if self.filling is None else self.filling


def piece_files(path: Path, manifest: Manifest) -> Iterator[PieceFile]:
    """Yield the files of a save that hold ranks' tokens."""
    folder = path / manifest.folder
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise StoreError(
            "load", "a folder that KVCache.save wrote", f"{folder} ({error.strerror})", DAMAGED_FIX
        ) from error
    for name in names:
        if match := PIECE_NAME.fullmatch(name):
            head_rank, token_rank, start, stop, group = (int(number or 0) for number in match.groups())
            if head_rank < manifest.heads and token_rank < manifest.ranks and start < stop <= manifest.length:
                yield PieceFile(head_rank, token_rank, start, stop, group, folder / name)


def _layer_files(path: Path, manifest: Manifest, layer: int) -> Iterator[LayerFiles]:
    """Yield where each rank's files of a layer are."""
    leader = next(first for first, layers in manifest.groups.items() if layer in layers)
    for head_rank, token_rank in product(range(manifest.heads), range(manifest.ranks)):
        yield LayerFiles(path / manifest.folder, head_rank, token_rank, layer, leader)


def _opened_journal(files: LayerFiles) -> Journal:
    """Return the journal of a rank's layer, read."""
    journal = files.journal()
    if not journal.read():
        raise StoreError("load", "a journal of each rank and layer", f"no {journal.path}", DAMAGED_FIX)
    return journal


def grown(path: Path, manifest: Manifest) -> Manifest:
    """Return the manifest of a folder that grows with the length that all its ranks and layers have."""
    if not manifest.growing:
        return manifest
    layers = (files for layer in range(len(manifest.sizes)) for files in _layer_files(path, manifest, layer))
    return manifest._replace(length=min(_opened_journal(files).last.length for files in layers))


def _grown_pieces(path: Path, manifest: Manifest, layer: int) -> Iterator[PieceFile]:
    """Yield the files of a layer in a folder that grows."""
    sizes = manifest.sizes[layer]
    shapes = RowShapes(sizes.row_dtype, sizes.batch, sizes.kv_heads // manifest.heads, sizes.row_widths)
    for files in _layer_files(path, manifest, layer):
        journal = _opened_journal(files)
        base, stop = journal.records[0].stop, journal.last.stop
        number = base // PIECE_TOKENS
        ranks = (files.head_rank, files.token_rank)
        filling = files.filling(number)
        full = stop == base + PIECE_TOKENS and not filling.exists()
        paths = [files.whole_or_shared(whole) for whole in range(number + full)]
        chain = 0
        for path in paths[:number]:
            chain = chained(chain, TensorFile(path), [*shapes.named(layer)])
        check_chain(files, journal, chain)
        for whole, path in enumerate(paths):
            yield PieceFile(*ranks, whole * PIECE_TOKENS, (whole + 1) * PIECE_TOKENS, layer, path)
        if stop > base and not full:
            yield PieceFile(*ranks, base, stop, layer, filling, LastPieceFile(filling, journal, shapes, layer))


ALL_LAYERS = LayersToLoad()
"""All layers of a folder, with the capacity that was saved."""

T = TypeVar("T")

Cache = TypeVar("Cache", bound=KVCache)

LOOKS = 8
"""Times that a folder is looked at, at most, where each time it changes while it is read."""


def load_layers(
    make: Callable[..., Cache],
    path: str | Path,
    mesh: DeviceMesh | None,
    to_load: LayersToLoad = ALL_LAYERS,
    *,
    device: torch.device | str | None = None,
    checked: bool | None = None,
    copies: int = 1,
    shares: Sequence[float] | str | None = None,
) -> tuple[list[Cache], dict[str, Tensor], str]:
    """Return the caches that `save_layers` wrote, on any number of ranks, with its `more` and its `note`.

    Every rank calls it. A save that is replaced while it is read gives way to the newer one, and a folder that a cache
    writes meanwhile is read anew. `make` is `KVCache`.
    """
    axes = Mesh.of(mesh)
    target = device_for(mesh, device)
    memory = target if to_load.hot is None else torch.device("cpu")

    def check() -> SavedLayers:
        if fault := device_fault("load", target, device):
            raise fault
        parts = check_placement("load", copies, shares, axes.queries.size * axes.keys.size)
        share = 0.0 if shares == "auto" else held_part(parts, axes)
        return inspect(path, axes, memory, to_load, copies * share)

    def attempt(*, again: bool) -> tuple[list[Cache], dict[str, Tensor], str] | None:
        before = _state_of(path)
        with Agreement(axes, "load") as agreement:
            saved_layers = _unless_changed(check, path, before, again=again)
            saved = None if saved_layers is None else saved_layers.manifest
            fields = {"of": None if again else saved, "capacity": to_load.capacity, "shares": shares}
            numbers = [0, 0] if saved is None else [int(saved.name, 16) >> 2, saved.length]
            table = agreement.compare(fields, payload=numbers)
        if saved_layers is None or len({name for name, _ in table}) > 1:
            return None
        manifest, folder, token_mask, extra_tensors = saved_layers
        length = min(length for _, length in table)  # it may grow meanwhile
        manifest = manifest._replace(length=length)
        if manifest.growing and "held" in extra_tensors:
            extra_tensors["held"] = extra_tensors["held"][:, :length]
        sizes = _sizes_of(manifest, to_load)
        caches = make_alike(make, mesh, sizes, device=device, checked=checked, copies=copies, shares=shares)

        def read() -> bool:
            fill([cache.shards for cache in caches], folder, manifest)
            return True

        with torch.no_grad():
            with Agreement(axes, "load") as agreement:
                is_read = bool(_unless_changed(read, path, before, again=again))
                table = agreement.compare(payload=[is_read])
            if not all(done for (done,) in table):
                return None
            for layer, (cache, (first, _)) in enumerate(zip(caches, manifest.forgotten, strict=True)):
                cache.shards.mark_present(manifest.length_of(layer), token_mask, first)
        return caches, extra_tensors, manifest.note

    return next(loaded for left in reversed(range(LOOKS)) if (loaded := attempt(again=left > 0)) is not None)


def make_alike(
    make: Callable[..., Cache], mesh: DeviceMesh | None, layers: Sequence[CacheSizes], **options: Any
) -> list[Cache]:
    """Return a cache for each of these sizes. Shares that are measured are those of the first for all."""
    caches: list[Cache] = []
    for sizes in layers:
        caches.append(make(mesh, **vars(sizes), **options))
        options["shares"] = caches[0].shares
    return caches


FolderState = tuple[object, ...]
"""Signs that a folder is written to: the name of its save, and sizes and times of journals."""


def _unless_changed(read: Callable[[], T], path: object, before: FolderState, *, again: bool) -> T | None:
    """Return what `read` returns of a folder; None if it has changed since `before`, to look `again`."""
    try:
        return read()
    except StoreError as error:
        if (now := _state_of(path)) == before:
            raise
        if again:
            return None
        if now[:1] != before[:1]:
            raise
        given, fix = f"{path}, which a cache writes meanwhile", "let go of that cache, or load it once it is at rest"
        raise StoreError("load", "a folder at rest", given, fix) from error


def _state_of(path: object) -> FolderState:
    """Return the state of a folder."""
    with suppress(StoreError, OSError):
        folder = check_folder("load", path)
        manifest = read_manifest(folder)
        if not manifest.growing:
            return (manifest.name,)
        journals = [(journal.name, journal.stat()) for journal in sorted((folder / manifest.folder).glob("*.journal"))]
        return manifest.name, *((name, stat.st_size, stat.st_mtime_ns) for name, stat in journals)
    return ()


class SavedLayers(NamedTuple):
    """The layers of a folder, as they are to be loaded."""

    manifest: Manifest
    folder: Path
    token_mask: Tensor | None
    extra_tensors: dict[str, Tensor]  # tensors that belong to no rank


def inspect(
    path: object,
    mesh: Mesh,
    device: torch.device,
    to_load: LayersToLoad,
    part: float,
) -> SavedLayers:
    """Return the saved layers of a folder. Raise if they cannot be loaded onto this mesh and device.

    `part` is the part of the tokens that this rank holds, copies included.
    """
    folder = check_folder("load", path)
    manifest = grown(folder, read_manifest(folder))
    if to_load.layers not in (None, len(manifest.sizes)):
        of_a_model = "pass the configuration of the model that was saved"
        fix = "call hf.ShardedCache(config, mesh).restore(path)" if to_load.layers == 1 else of_a_model
        given = f"{len(manifest.sizes)} in {folder}"
        raise StoreError("load", f"a cache of {to_load.layers} layer{'s' * (to_load.layers != 1)}", given, fix)
    sizes = _sizes_of(manifest, to_load)
    for layer, each in enumerate(sizes):
        each.check(mesh.heads.size)
        keys = manifest.length_of(layer)
        if keys > each.capacity:
            fix = f"pass capacity={keys * to_load.rates(len(sizes))[layer]}"
            raise ShapeError(
                "load", "room for the keys that were saved", f"{keys} in a capacity of {each.capacity}", fix
            )
    _check_memory(sizes, mesh, device, part, padded=manifest.padded)
    ids = ids_in(TokenIds(folder / manifest.folder), manifest) if manifest.sizes else None
    extra_tensors = {} if ids is None else {"held": ids}
    if not manifest.more:
        return SavedLayers(manifest, folder, None, extra_tensors)
    file = TensorFile(folder / manifest.folder / MORE)
    shape = manifest.sizes[0].batch, manifest.length
    token_mask = file.read("real", torch.bool, shape) if manifest.padded else None
    names = (name for name in file.entries if name.startswith("more ") and name != HELD)
    extra_tensors |= {name.removeprefix("more "): file.read(name) for name in names}
    return SavedLayers(manifest, folder, token_mask, extra_tensors)


def _sizes_of(manifest: Manifest, to_load: LayersToLoad) -> tuple[CacheSizes, ...]:
    """Return the sizes of the caches to be filled, with room for all tokens of a folder that grows."""
    sizes = to_load.sizes(manifest.sizes)
    if manifest.growing and to_load.capacity is None:
        return tuple(replace(each, capacity=max(each.capacity, manifest.length)) for each in sizes)
    return sizes


def ids_in(written: TokenIds, manifest: Manifest) -> Tensor | None:
    """Return the ids of all tokens: those written since a save, or else those of the save; None without any."""
    ids = written.read(manifest.sizes[0].batch) if manifest.growing else None
    if ids is None and manifest.more:
        file = TensorFile(written.path.with_name(MORE))
        ids = file.read(HELD, torch.int64) if HELD in file.entries else None
    return ids


def held_part(shares: Sequence[float] | None, mesh: Mesh) -> float:
    """Return the part of all tokens that this rank's shard holds."""
    if shares is None:
        return 1 / (mesh.queries.size * mesh.keys.size)
    return shares[mesh.queries.index * mesh.keys.size + mesh.keys.index] / sum(shares)


def _check_memory(layers: Sequence[CacheSizes], mesh: Mesh, device: torch.device, part: float, *, padded: bool) -> None:
    """Raise if the device could not hold the layers: a damaged manifest may give any capacity."""
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else host_memory()
    needed = 0
    for sizes in layers:
        tokens = ceil(part * sizes.kept)
        elements = sizes.batch * sizes.kv_heads // mesh.heads.size * sum(sizes.row_widths)
        needed += tokens * (elements * sizes.row_dtype.itemsize + 8)
        needed += sizes.batch * (sizes.capacity + 8 * tokens) if padded else 0
    if needed > memory:
        given = f"{needed / 1e9:,.1f} GB for a capacity of {layers[0].capacity:,}"
        raise StoreError("load", f"at most this device's {memory / 1e9:,.1f} GB", given, "pass a smaller capacity=")


def fill(layers: Sequence[LocalShards], path: Path, manifest: Manifest) -> None:
    """Write this rank's tokens into its shards, one per layer, from the files of all ranks that saved."""
    for layer, (shards, starts) in enumerate(zip(layers, manifest.forgotten, strict=True)):
        shards.prepare(manifest.length_of(layer), *starts)
    if manifest.growing:
        for layer, shards in enumerate(layers):
            _fill_group({layer: shards.own.whole()}, path, manifest, [*_grown_pieces(path, manifest, layer)])
        return
    pieces = list(piece_files(path, manifest))
    for leader, group in manifest.groups.items():
        own = {layer: layers[layer].own.whole() for layer in group}
        _fill_group(own, path, manifest, [piece for piece in pieces if piece.group == leader])


def _fill_group(shards: Mapping[int, CacheShard], path: Path, manifest: Manifest, pieces: Sequence[PieceFile]) -> None:
    """Write this rank's tokens into its shards of layers that keep the same tokens."""
    leader, first = next(iter(shards.items()))
    start = manifest.forgotten[leader][0]
    end = manifest.length_of(leader)
    forgotten = first.turn.count(start)
    used = first.turn.count(end) - forgotten
    # Tokens read, by their file's index along heads.
    filled = torch.zeros(manifest.heads, used, dtype=torch.bool, device="cpu")
    for piece in pieces:
        file = piece.opened()
        tokens = file.read(TOKEN_INDEX, torch.int64, (piece.stop - piece.start,))
        own_rows = (first.turn.holds(tokens) & (tokens < end)).nonzero().flatten()
        slots = first.turn.slot(tokens[own_rows]) - forgotten
        if len(tokens) and (int(tokens.min()) < start or (int(tokens.max()) >= end and not manifest.growing)):
            raise StoreError("load", "every token once", f"tokens beyond the last in {piece.path}", DAMAGED_FIX)
        if bool(filled[piece.head_rank, slots].any()) or len(slots.unique()) < len(slots):
            raise StoreError("load", "every token once", f"some twice in {piece.path}", DAMAGED_FIX)
        filled[piece.head_rank, slots] = True
        for layer, shard in shards.items() if len(own_rows) else ():
            _copy_heads(shard, file, layer, Axis(manifest.heads, piece.head_rank), own_rows, slots, len(tokens))
        first.token_index[slots.to(first.device)] = tokens[own_rows].to(first.device)
    for shard in shards.values():
        shared = [_shared_heads(shard, Axis(manifest.heads, h))[0] for h in range(manifest.heads)]
        needed = [to.start < to.stop for to in shared]
        if not bool(filled[needed].all()):
            given = f"{int(filled[needed].all(0).sum())} of this rank's {used} tokens in {path}"
            raise StoreError("load", "every token once", given, DAMAGED_FIX)
        shard.token_index[:used] = first.token_index[:used]


def _copy_heads(
    shard: CacheShard,
    file: TensorFile | LastPieceFile,
    layer: int,
    saved: Axis,
    own_rows: Tensor,
    slots: Tensor,
    token_count: int,
) -> None:
    """Copy this rank's heads and tokens of a file written at index `saved` along the heads axis."""
    to, source = _shared_heads(shard, saved)
    if to.start >= to.stop:
        return
    sizes = shard.sizes
    heads = saved.slice_of(shard.sizes.kv_heads)
    for kind, x in zip(("keys", "values"), shard.stored, strict=False):
        saved_rows = file.read(
            f"{kind} {layer}", x.dtype, (sizes.batch, heads.stop - heads.start, token_count, x.shape[3])
        )
        x[:, to].index_copy_(2, slots.to(shard.device), saved_rows[:, source, own_rows].to(shard.device))


def _shared_heads(shard: CacheShard, saved: Axis) -> tuple[slice, slice]:
    """Return slices of the heads of a shard and of a saved file that are the same heads; they may be empty."""
    return overlap(shard.heads.slice_of(shard.sizes.kv_heads), saved.slice_of(shard.sizes.kv_heads))
