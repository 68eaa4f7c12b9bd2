"""Names of stored blocks: hashes of what their keys were computed from, with the tokens up to a block's end."""

import json
import re
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

BLOCK_GRAIN = 16
"""Tokens between two places where a block may end. A state ends at any token."""

HASH_BYTES = 16
"""Bytes of a hash."""

BLOCK_FILE = re.compile(
    r"([0-9a-f]{32})\.([0-9]{1,15})-([0-9]{1,15})(\.state)?\.([0-9]{1,6})-([0-9]{1,6})\.safetensors"
)


class StoredBlock(NamedTuple):
    """Keys and values of consecutive tokens; or what layers that forget know after the last of them: a state."""

    name: str
    """Hash of all tokens up to `stop`, and of all else that the keys depend on."""
    start: int
    stop: int
    is_state: bool = False
    file_count: int = 1
    """Number of files: one for each part of the key heads; one of each rank for a state, and with unequal shares."""

    def file(self, file_number: int) -> str:
        """Return the name of one of its files.

        >>> StoredBlock("0" * 32, 128, 256).file(0)
        '00000000000000000000000000000000.128-256.0-1.safetensors'
        """
        kind = ".state" if self.is_state else ""
        return f"{self.name}.{self.start}-{self.stop}{kind}.{file_number}-{self.file_count}.safetensors"

    @staticmethod
    def of_file(file: str) -> "tuple[StoredBlock, int] | None":
        """Return the block and the number that a file is named by; None for another file."""
        if not (match := BLOCK_FILE.fullmatch(file)):
            return None
        name, start, stop, state, file_number, file_count = match.groups()
        return StoredBlock(name, int(start), int(stop), bool(state), int(file_count)), int(file_number)


class BlockNames:
    """Names of the blocks of one growing sequence, by all that its keys depend on."""

    def __init__(self, *source: Any) -> None:
        self.hashes = [blake2b(json.dumps(source).encode(), digest_size=HASH_BYTES).digest()]
        """Hash of the first `BLOCK_GRAIN * i` tokens, for each i."""

    def at(self, ids: Sequence[int], stop: int) -> str:
        """Return the name of the block of a sequence that ends at a multiple of `BLOCK_GRAIN`.

        >>> names = BlockNames("a model")
        >>> names.at(range(40), 32) == names.at([*range(32), 5], 32) != names.at(range(40), 16)
        True
        """
        while len(self.hashes) <= stop // BLOCK_GRAIN:
            first = BLOCK_GRAIN * (len(self.hashes) - 1)
            self.hashes.append(_hash(self.hashes[-1], ids[first : first + BLOCK_GRAIN]))
        return self.hashes[stop // BLOCK_GRAIN].hex()

    def state_at(self, ids: Sequence[int], stop: int) -> str:
        """Return the name of the state after any number of tokens."""
        first = stop // BLOCK_GRAIN * BLOCK_GRAIN
        return _hash(bytes.fromhex(self.at(ids, first)) + b"state", ids[first:stop]).hex()


def _hash(before: bytes, ids: Sequence[int]) -> bytes:
    return blake2b(before + array("q", ids).tobytes(), digest_size=HASH_BYTES).digest()
