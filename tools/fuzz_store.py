"""Fuzz of checkpoints: reading a damaged file returns what was written or raises `StoreError`."""

import argparse
import json
import re
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random

import torch

import attnmesh as am
from attnmesh.errors import StoreError
from attnmesh.store.manifest import MANIFEST, MORE, read_manifest
from attnmesh.store.tensor_file import TensorFile

STRANGE = (
    *("-1", "0", "1", "2", "7", "8", "255", "65536", "4294967296", "9223372036854775807", "1e308", "-0.0", "1.5"),
    *("NaN", "Infinity", "null", "true", "{}", "[]", '""', '"x"', '"F64"', '"I64"', "[" * 5000, '{"a":' * 5000),
    "9" * 5000,
)
"""Replacements for a number or a word."""


TENSORS = "0.0.0-20.safetensors"


def mutated(content: bytes, random: Random) -> bytes:
    """Return the content after up to three mutations."""
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        place = random.randrange(len(content) + 1)
        match random.randrange(7):
            case 0:
                content = content[:place] + bytes([random.randrange(256)]) + content[place + 1 :]
            case 1:
                content = content[:place]
            case 2:
                content = content[:place] + random.randbytes(random.choice((1, 8, 40))) + content[place:]
            case 3:
                content = content[:place] + content[place + random.choice((1, 2, 8)) :]
            case 4:
                other = random.randrange(len(content) + 1)
                content = content[:place] + content[other:]
            case 5:
                content = (random.getrandbits(random.choice((3, 12, 63)))).to_bytes(8, "little") + content[8:]
            case 6:
                words = list(re.finditer(rb'-?\d+|"[A-Za-z0-9_ ]+"|\[|\]', content[:4000]))
                if words:
                    word = random.choice(words)
                    content = content[: word.start()] + random.choice(STRANGE).encode() + content[word.end() :]
    return content


class DamagedCache:
    """Small saved cache whose files are damaged repeatedly."""

    def __init__(self, folder: Path) -> None:
        cache = am.KVCache(None, batch=2, kv_heads=2, head_dim=3, value_dim=5, capacity=40, dtype=torch.bfloat16)
        token_mask = torch.rand(2, 20, generator=torch.Generator().manual_seed(0)) < 0.7
        cache.append(torch.randn(2, 2, 20, 3).bfloat16(), torch.randn(2, 2, 20, 5).bfloat16(), token_mask=token_mask)
        cache.save(folder)
        self.folder, self.scratch = folder, folder / "scratch.safetensors"
        self.manifest = (folder / MANIFEST).read_bytes()
        (self.saved,) = folder.glob("1-*")
        self.tensors, self.more = ((self.saved / name).read_bytes() for name in (TENSORS, MORE))
        self.whole = {name: TensorFile(self.saved / TENSORS).read(name) for name in ("columns", "keys 0")}

    def read(self, seed: int) -> str:
        """Damage one file and read it. Return "read" or "refused"; raise on any other outcome."""
        random = Random(seed)
        if random.random() < 0.3:
            content = mutated(self.manifest, random)
            (self.folder / MANIFEST).write_bytes(content)
            try:
                read_manifest(self.folder)
                return "read"
            except StoreError:
                return "refused"
        self.scratch.write_bytes(mutated(self.tensors, random))
        try:
            stored = TensorFile(self.scratch)
            for name in list(stored.entries):
                tensor = stored.read(name)
                if name in self.whole and tensor.dtype == self.whole[name].dtype:
                    assert torch.equal(tensor, self.whole[name]), f"seed {seed}: other numbers without an error"
            return "read"
        except StoreError:
            return "refused"

    def load(self, seed: int) -> str:
        """Damage several files and call `KVCache.load`. Return "read" or "refused"."""
        random = Random(seed)
        files = {
            self.folder / MANIFEST: self.manifest,
            self.saved / TENSORS: self.tensors,
            self.saved / MORE: self.more,
        }
        for file, content in files.items():
            file.write_bytes(mutated(content, random) if random.random() < 0.6 else content)
        try:
            am.KVCache.load(self.folder, None)
            return "read"
        except StoreError:
            return "refused"


def main() -> None:
    """Run many inputs. Stop at the first that neither loads nor raises `StoreError`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--out", type=Path, help="also write a JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    start, counts = time.monotonic(), Counter[str]()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        cache = DamagedCache(Path(folder) / "cache")
        for seed in range(options.first, options.first + options.inputs):
            try:
                counts[cache.load(seed) if seed % 20 == 0 else cache.read(seed)] += 1
            except BaseException:
                print(f"\nseed {seed}", file=sys.stderr)
                raise
            if seed % 100_000 == 0:
                print(f"\r{seed:,} inputs", end="", file=sys.stderr, flush=True)
    seconds = round(time.monotonic() - start)
    print(f"\n{options.inputs:,} inputs in {seconds} s: {dict(counts)}")
    if options.out:
        command = f"python -m tools.fuzz_store --inputs {options.inputs} --first {options.first}"
        report = {"command": command, "torch": torch.__version__, "seconds": seconds, "came": dict(counts)}
        options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
