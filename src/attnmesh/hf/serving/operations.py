"""Operations of steps: each is a piece of work for all ranks, with a code that rank 0 sends to their `RankWorker`s."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from attnmesh.errors import InputError
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


@dataclass
class StepResults:
    """Results of the operations of a step. Of several operations of one kind the last result stays."""

    cached_tokens: int | None = None
    """Tokens in the cache of the prompt that began, as it began; None if no prompt began."""
    computed_tokens: int = 0
    """Tokens in the cache of the prompt whose chunk was computed, after the chunk."""
    logits: Tensor | None = None
    """Logits after the last token of this prompt, (1, vocabulary); None before its last chunk."""
    rows: Sequence[Tensor] = ()
    """Logits of each row that decoded, (tokens, vocabulary)."""
    draft: "StepResults | None" = None
    """Results of the operations of the draft model."""
    errors: dict[type, InputError] = field(default_factory=dict)
    """The first error of each kind of operation that failed."""
    seconds: dict[type, float] = field(default_factory=dict)
    """Seconds of each kind of operation."""

    def error_of(self, *kinds: type) -> InputError | None:
        """Return the error of the first of these kinds that has one; None if none has."""
        return next((self.errors[kind] for kind in kinds if kind in self.errors), None)


OPERATIONS: "dict[str, type[Operation]]" = {}
"""All operations, by the names of their codes."""


@dataclass(frozen=True)
class Operation:
    """An operation of a step. `name` is the first entry of its code."""

    name: ClassVar[str]

    def __init_subclass__(cls, name: str) -> None:
        cls.name = name
        OPERATIONS[name] = cls

    def to_code(self) -> list[Any]:
        """Return the code of the operation, which JSON can spell.

        >>> Draft([Fill(3, 256, 900)]).to_code()
        ['draft', [['fill', 3, 256, 900]]]
        """
        return [self.name, *(getattr(self, field.name) for field in fields(self))]

    @classmethod
    def _of_values(cls, *values: Any) -> "Operation":
        """Return the operation of a code, from the values after its name."""
        return cls(*values)


@dataclass(frozen=True)
class Start(Operation, name="start"):
    """Begin a prompt with a new cache, or with one that is kept, or a fork of it."""

    cache_id: int
    ids: Sequence[int]
    source: int | None
    """Id of the cache from which the prompt goes on; None for a new one."""
    moves: bool
    """True if the prompt gets the source itself, which loses its id; False for a fork of the source."""
    later: int
    """Last tokens that are those of an answer: they are computed after the prompt, by the rule for answers."""
    images: Any
    """Descriptions of inputs for images; the inputs by name, once `StepExchange.share_images` has sent them."""


@dataclass(frozen=True)
class Fill(Operation, name="fill"):
    """Compute the next chunk of a prompt: `size` tokens, but none from token `stop` on."""

    cache_id: int
    size: int
    stop: int


@dataclass(frozen=True)
class Fork(Operation, name="fork"):
    """Keep a cache as it is under another id."""

    cache_id: int
    fork_id: int


@dataclass(frozen=True)
class DecodeRows(Operation, name="rows"):
    """Add tokens to caches."""

    rows: Sequence[tuple[int, Sequence[int]]]
    """Ids of the caches, each with its new tokens."""
    grows: bool
    """True if a cache allocates memory, so that bytes are counted anew."""


@dataclass(frozen=True)
class Crop(Operation, name="crop"):
    """Take tokens back from the ends of caches."""

    rows: Sequence[tuple[int, int]]
    """Ids of the caches, each with the number of tokens."""


@dataclass(frozen=True)
class Drop(Operation, name="drop"):
    """Forget caches."""

    cache_ids: Sequence[int]


@dataclass(frozen=True)
class OpenStored(Operation, name="open"):
    """Make a cache for `tokens` tokens, and begin to read stored blocks into it."""

    cache_id: int
    layers: Sequence[list[int]]
    """Codes of the layers' `CacheConfig`s."""
    tokens: int
    rope: Sequence[int]
    """The `rope_regime` of the prompt."""
    blocks: Sequence[BlockToRead]

    @classmethod
    def _of_values(cls, *values: Any) -> "OpenStored":
        cache_id, layers, tokens, rope, blocks = values
        to_read = [BlockToRead(StoredBlock(*block), ReadFrom(read_from)) for block, read_from in blocks]
        return cls(cache_id, layers, tokens, rope, to_read)


@dataclass(frozen=True)
class LoadBlocks(Operation, name="load"):
    """Copy blocks that have been read to a cache, about `nbytes` bytes. Wait `patience` seconds for the first block."""

    cache_id: int
    nbytes: int
    patience: float


@dataclass(frozen=True)
class CloseStored(Operation, name="close"):
    """End the reading of a cache, which has the first `length` tokens."""

    cache_id: int
    length: int


@dataclass(frozen=True)
class SaveBlocks(Operation, name="save"):
    """Copy blocks of a cache to the memory of their ranks."""

    cache_id: int
    blocks: Sequence[BlockToSave]

    @classmethod
    def _of_values(cls, *values: Any) -> "SaveBlocks":
        cache_id, blocks = values
        return cls(cache_id, [BlockToSave(StoredBlock(*block), to_disk) for block, to_disk in blocks])


@dataclass(frozen=True)
class ForgetBlocks(Operation, name="forget"):
    """Forget blocks in memory, and remove files."""

    in_memory: Sequence[StoredBlock]
    on_disk: Sequence[StoredBlock]

    @classmethod
    def _of_values(cls, *values: Any) -> "ForgetBlocks":
        in_memory, on_disk = ([StoredBlock(*block) for block in blocks] for blocks in values)
        return cls(in_memory, on_disk)


@dataclass(frozen=True)
class Draft(Operation, name="draft"):
    """Run operations of the draft model."""

    operations: Sequence[Operation]

    def to_code(self) -> list[Any]:
        """Return the code, which has the codes of the draft's operations."""
        return [self.name, [operation.to_code() for operation in self.operations]]

    @classmethod
    def _of_values(cls, *values: Any) -> "Draft":
        (operations,) = values
        return cls([*map(operation_of, operations)])


@dataclass(frozen=True)
class EndOfSteps(Operation, name="end"):
    """End the engine."""


def operation_of(code: Sequence[Any]) -> Operation:
    """Return the operation of a code that `to_code` wrote and JSON has read.

    >>> operation_of(["fill", 3, 256, 900])
    Fill(cache_id=3, size=256, stop=900)
    """
    name, *values = code
    return OPERATIONS[name]._of_values(*values)
