"""Operations of plans: what ranks do in a step, each with the code that rank 0 sends to all ranks."""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from attnmesh.store.block_names import StoredBlock


class ReadFrom(IntEnum):
    """The place from which a block is read: in its file, in memory, or in its file to be kept in memory."""

    DISK = 0
    MEMORY = 1
    DISK_TO_MEMORY = 2


class BlockToRead(NamedTuple):
    """A stored block, and where it is read."""

    block: StoredBlock
    read_from: ReadFrom


class BlockToSave(NamedTuple):
    """A block of a cache, and whether it is written to the folder, too."""

    block: StoredBlock
    to_disk: bool


class Start(NamedTuple):
    """Begin a prompt with a new cache, or with one that is kept, or a fork of it.

    The `later` last tokens are computed at the end, as those of an answer are.
    """

    number: int
    ids: Sequence[int]
    source: int | None
    moves: bool
    later: int
    images: Any
    """The words of a plan on inputs for images; the inputs by name, once they are shared."""


class Fill(NamedTuple):
    """Compute the next chunk of a prompt, of so many tokens, and up to the token `stop` at most."""

    number: int
    size: int
    stop: int


class Fork(NamedTuple):
    """Keep a cache as it is under another number."""

    number: int
    other: int


class DecodeRows(NamedTuple):
    """Add tokens to each cache by its number, of which some grow or none."""

    rows: Sequence[tuple[int, Sequence[int]]]
    grows: bool


class Crop(NamedTuple):
    """Take tokens back from the ends of caches: their numbers, each with a count."""

    rows: Sequence[tuple[int, int]]


class Drop(NamedTuple):
    """Forget caches."""

    numbers: Sequence[int]


class OpenStored(NamedTuple):
    """Make a cache for so many tokens, and begin to read stored blocks into it."""

    number: int
    layers: Sequence[list[int]]
    tokens: int
    rope: Sequence[int]
    blocks: Sequence[BlockToRead]


class LoadBlocks(NamedTuple):
    """Copy blocks that have been read to a cache, of about so many bytes. Wait so long for the first one."""

    number: int
    nbytes: int
    patience: float


class CloseStored(NamedTuple):
    """End the reading of a cache, which has the first `length` tokens."""

    number: int
    length: int


class SaveBlocks(NamedTuple):
    """Copy blocks of a cache to the memory of their ranks."""

    number: int
    blocks: Sequence[BlockToSave]


class ForgetBlocks(NamedTuple):
    """Forget blocks in memory, and remove files."""

    in_memory: Sequence[StoredBlock]
    on_disk: Sequence[StoredBlock]


class Draft(NamedTuple):
    """Run operations of the draft model."""

    plan: "Sequence[Operation]"


class EndOfPlans(NamedTuple):
    """End the engine."""


StoreOperation = LoadBlocks | CloseStored | SaveBlocks | ForgetBlocks

Operation = Start | Fill | Fork | DecodeRows | Crop | Drop | OpenStored | Draft | EndOfPlans | StoreOperation

PLAIN: dict[str, Any] = {
    "start": Start,
    "fill": Fill,
    "fork": Fork,
    "rows": DecodeRows,
    "crop": Crop,
    "drop": Drop,
    "load": LoadBlocks,
    "close": CloseStored,
    "end": EndOfPlans,
}
"""Operations whose fields JSON has as they are, by the names of their codes."""

NAMES: dict[type, str] = {one: name for name, one in PLAIN.items()}
NAMES |= {OpenStored: "open", SaveBlocks: "save", ForgetBlocks: "forget", Draft: "draft"}


def operation_code(operation: Operation) -> list[Any]:
    """Return an operation as JSON has it.

    >>> operation_code(Draft([Fill(3, 256, 900)]))
    ['draft', [['fill', 3, 256, 900]]]
    """
    fields = [[*map(operation_code, operation.plan)]] if isinstance(operation, Draft) else operation
    return [NAMES[type(operation)], *fields]


def operation_of(code: Sequence[Any]) -> Operation:
    """Return the operation that `operation_code` wrote, after JSON.

    >>> operation_of(["fill", 3, 256, 900])
    Fill(number=3, size=256, stop=900)
    """
    name, *fields = code
    match name, fields:
        case "draft", [plan]:
            return Draft([*map(operation_of, plan)])
        case "save", [number, blocks]:
            return SaveBlocks(number, [BlockToSave(StoredBlock(*block), to_disk) for block, to_disk in blocks])
        case "forget", [in_memory, on_disk]:
            return ForgetBlocks(
                [StoredBlock(*block) for block in in_memory], [StoredBlock(*block) for block in on_disk]
            )
        case "open", [number, layers, tokens, rope, blocks]:
            to_read = [BlockToRead(StoredBlock(*block), ReadFrom(read_from)) for block, read_from in blocks]
            return OpenStored(number, layers, tokens, rope, to_read)
    operation: Operation = PLAIN[name](*fields)
    return operation
