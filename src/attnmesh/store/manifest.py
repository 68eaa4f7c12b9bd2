"""The manifest of a save, which names its folder and says what its files hold."""

import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from attnmesh.cache.cache_config import CacheConfig
from attnmesh.cache.window import WindowStart
from attnmesh.core.mask import FAR
from attnmesh.errors import StoreError
from attnmesh.store.tensor_file import DAMAGED_FIX, appearing, checked_size, sync_folders

MANIFEST_VERSION = 7

MANIFEST = "cache.json"
"""Name of the manifest's file."""

MORE = "more.safetensors"
"""Name of the file of tensors that belong to no rank."""

MAX_MANIFEST = 1 << 20
"""Bytes of the longest manifest: no more of a file is read, whatever it is."""

SAVE_NAME = re.compile("[0-9a-f]{16}")

SAVE_FOLDER = re.compile("([0-9]{1,15})-[0-9a-f]{16}")


class Manifest(NamedTuple):
    """Contents of `cache.json`."""

    configs: tuple[CacheConfig, ...]
    """Configuration of each layer."""
    padded: bool
    """True if the batch has padding."""
    has_extra: bool
    """True if there is a file of tensors that belong to no rank."""
    length: int
    """Tokens of each sequence, on all ranks together."""
    head_ranks: int
    """Ranks along the heads axis that saved."""
    token_ranks: int
    """Ranks along the tokens axis that saved."""
    save_number: int
    """Number of this save, counted per folder."""
    note: str
    """Text of the caller."""
    name: str
    """Random name of this save alone."""
    window_starts: tuple[WindowStart, ...] = ()
    """Start of each layer's window. Tokens before it are not saved."""
    lengths: tuple[int, ...] = ()
    """Number of keys of each layer, if keys of some stand for several tokens. If empty, each layer has `length`."""
    growing: bool = False
    """True if a cache lives in the folder: journals have the length, and the tokens after whole pieces."""

    def length_of(self, layer: int) -> int:
        """Return the keys of a layer."""
        return self.lengths[layer] if self.lengths else self.length

    @property
    def groups(self) -> dict[int, list[int]]:
        """Layers that keep the same tokens, by the first of them."""
        groups: dict[tuple[object, int, int], list[int]] = {}
        for layer, config in enumerate(self.configs):
            groups.setdefault((config.mask, config.keep, self.length_of(layer)), []).append(layer)
        return {layers[0]: layers for layers in groups.values()}

    @property
    def tokens_in_files(self) -> int:
        """Tokens in the files of all ranks along the tokens axis, for each group of layers."""
        return sum(self.length_of(layer) - self.window_starts[layer].oldest_kept_token for layer in self.groups)

    @property
    def folder_name(self) -> str:
        """Name of the folder with this save's files."""
        return f"{self.save_number}-{self.name}"

    @property
    def name_bits(self) -> int:
        """The first 62 bits of the name, a number that ranks can gather as an int64."""
        return int(self.name, 16) >> 2

    def with_layer(self, config: CacheConfig) -> "Manifest":
        """Return the manifest with one more layer, which keeps all tokens."""
        return self._replace(configs=(*self.configs, config), window_starts=(*self.window_starts, WindowStart()))

    def to_json(self) -> str:
        """Return the manifest as text. Raise if it could not be read back."""
        if not isinstance(self.note, str):
            raise StoreError("save note", "a str", type(self.note).__name__, "pass json.dumps(note)")
        fields = {
            "format": "attnmesh cache",
            "version": MANIFEST_VERSION,
            "sizes": [config.to_code() for config in self.configs],
            "padded": self.padded,
            "more": self.has_extra,
            "length": self.length,
            "heads": self.head_ranks,
            "ranks": self.token_ranks,
            "saving": self.save_number,
            "note": self.note,
            "name": self.name,
            "forgotten": self.window_starts,
            "lengths": self.lengths,
            "growing": self.growing,
        }
        text = json.dumps(fields)
        if len(text) > MAX_MANIFEST:
            expected = f"a note of less than {MAX_MANIFEST} characters"
            raise StoreError("save", expected, f"{len(self.note)}", "pass long data as a tensor in more=")
        return text


def checked_folder(subject: str, folder: object) -> Path:
    """Return the absolute path of a folder. Raise unless `folder` is a path."""
    path = os.fspath(folder) if isinstance(folder, (str, os.PathLike)) else None
    if not isinstance(path, str) or not path or "\0" in path:
        fix = 'pass its path as a str or a pathlib.Path, without null bytes, and "." for the current one'
        raise StoreError(subject, "the path of a folder", f"{folder!r} of type {type(folder).__name__}", fix)
    return Path(path).absolute()


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of a folder, checked. Raise if the folder holds no cache of this version."""
    version = None
    try:
        fields = _fields_in(path / MANIFEST)
        version = fields["version"]
        manifest, size_codes = _parse(fields)
        if version != MANIFEST_VERSION or not SAVE_NAME.fullmatch(manifest.name):
            raise ValueError("another version, or no name")
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        if version not in (None, MANIFEST_VERSION):
            given = f"version {str(version)[:20]} in {path}"
            fix = "load it with the attnmesh that saved it, or prefill again"
            raise StoreError("load", f"a cache of version {MANIFEST_VERSION}", given, fix) from error
        expected, given = "a folder that KVCache.save wrote", f"{path} ({type(error).__name__})"
        raise StoreError("load", expected, given, "check the path, or save again") from error
    try:
        configs = tuple(map(CacheConfig.from_code, size_codes))
        starts = manifest.window_starts or (WindowStart(),) * len(configs)
        manifest = manifest._replace(configs=configs, window_starts=starts)
        _check_configs(manifest)
    except (ValueError, IndexError, TypeError, ZeroDivisionError) as error:
        ranks = f"heads={manifest.head_ranks}, ranks={manifest.token_ranks}"
        given = f"{fields['sizes']!r}, length={manifest.length}, {ranks} in {path}"
        raise StoreError("load", "the sizes of a cache", given, DAMAGED_FIX) from error
    return manifest


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Make a save the current one of a folder."""
    with appearing(path / MANIFEST, path / f"{MANIFEST}.{manifest.name}") as file:
        file.write(manifest.to_json().encode())
    sync_folders(path)


def _fields_in(file: Path) -> dict[str, Any]:
    """Return the fields of a manifest, unchecked."""
    if not file.is_file():
        raise FileNotFoundError(MANIFEST)
    with file.open(encoding="utf-8") as text:
        fields: dict[str, Any] = json.loads(text.read(MAX_MANIFEST))
    if fields["format"] != "attnmesh cache":
        raise ValueError("another format")
    return fields


def _parse(fields: dict[str, Any]) -> tuple[Manifest, list[list[int]]]:
    """Return a manifest without configurations, and their codes. Raise unless each field is of its type."""
    padded = fields["padded"] is True
    manifest = Manifest(
        configs=(),
        padded=padded,
        has_extra=padded or fields["more"] is True,
        length=checked_size(fields["length"]),
        head_ranks=checked_size(fields["heads"]),
        token_ranks=checked_size(fields["ranks"]),
        save_number=checked_size(fields["saving"]),
        note=str(fields["note"]),
        name=str(fields["name"]),
        window_starts=tuple(
            WindowStart(checked_size(token), checked_size(query)) for token, query in fields.get("forgotten", [])
        ),
        lengths=tuple(checked_size(length) for length in fields.get("lengths", [])),
        growing=fields["growing"] is True,
    )
    return manifest, [[x if type(x) is int and x == FAR else checked_size(x) for x in code] for code in fields["sizes"]]


def _check_configs(manifest: Manifest) -> None:
    """Raise `ValueError` if configurations are not possible, or contradict each other."""
    for config in manifest.configs:
        config.check(manifest.head_ranks)
    fits = len({(config.block, config.batch) for config in manifest.configs}) == 1
    fits &= manifest.head_ranks > 0 and manifest.token_ranks > 0
    ends = manifest.lengths or (manifest.length,) * len(manifest.configs)
    for config, start, end in zip(manifest.configs, manifest.window_starts, ends, strict=True):
        fits &= start.oldest_kept_token <= start.oldest_query <= end <= min(manifest.length, config.capacity)
        fits &= config.mask is not None or start.oldest_query == 0
    if not fits:
        raise ValueError("sizes that contradict each other")


def save_folders(path: Path) -> list[Path]:
    """Return the folders of all saves, newest first, interrupted saves included."""
    saves = []
    for folder in path.iterdir():
        with suppress(FileNotFoundError):  # another job may remove it meanwhile
            if match := SAVE_FOLDER.fullmatch(folder.name):
                saves.append((int(match[1]), folder.stat().st_mtime_ns, folder))
    return [folder for *_, folder in sorted(saves, reverse=True)]
