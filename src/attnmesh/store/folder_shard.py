"""Shard of a cache whose keys and values are files: whole pieces in place, and a last one that new tokens fill.

An append writes rows to the mapped last piece, and then a record to the journal. Where a process ends between the two,
the rows are no tokens. A piece that is full gets its checksums before the next append, and is read alone from then on.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import addressof, c_int64
from errno import ENOENT
from functools import partial as partial_of
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from attnmesh.cache.block_cyclic import BlockCyclic
from attnmesh.cache.cache_config import CacheConfig
from attnmesh.cache.frozen_piece import FrozenPiece
from attnmesh.cache.memory_shard import MemoryShard, usual_slots
from attnmesh.cache.ordered_shard import Fail, OrderedShard
from attnmesh.core.digest import cpu_weights
from attnmesh.errors import KernelError, StoreError
from attnmesh.kernels.cache_view import LENGTH, USED
from attnmesh.kernels.native.append import FILE_FIELDS, native_append
from attnmesh.mesh.axes import Axis
from attnmesh.runtime.tensors import Tensors
from attnmesh.runtime.unbroken import Action, unbroken
from attnmesh.store.journal import Record
from attnmesh.store.layer_files import (
    PIECE_TOKENS,
    LayerFiles,
    MappedPiece,
    PieceSums,
    RowShapes,
    check_chain,
    check_filling,
    check_whole_piece,
    extend_chain,
    make_filling,
    make_whole,
    open_filling,
    open_whole,
)
from attnmesh.store.tensor_file import DAMAGED_FIX, TensorFile

FOLDER_SUBJECT = "KVCache folder"


class FolderShard(OrderedShard):
    """Tokens of one rank in the files of a layer. `earlier_pieces` are whole, `kv_tensors` are of the last one."""

    unpadded = ("sequences without padding in a folder", "give each sequence a folder of its own")

    def __init__(
        self,
        files: LayerFiles,
        reserve_memory: Callable[[int], bool],
        fail: Fail,
        config: CacheConfig,
        heads_axis: Axis,
        ranks: int,
        index: int,
    ) -> None:
        self.files = files
        self.reserve_memory = reserve_memory
        self.fail = fail
        self.opened_in: object = None
        """The folder, whose lock and journals live as long as its shards."""
        self.journal = files.journal()
        self.chains = [0]
        """Digests that chain the checksums of the first pieces."""
        self.digest = c_int64()
        """Digest of the rows of the last native call."""
        super().__init__(config, heads_axis, BlockCyclic(config.block, ranks), torch.device("cpu"), index)
        self.slots = config.capacity  # files grow

    @property
    def outlives_process(self) -> bool:
        """True: the files stay."""
        return True

    @property
    def shapes(self) -> RowShapes:
        """Dtype and shapes of rows in a file."""
        config = self.config
        return RowShapes(config.row_dtype, config.batch, config.kv_heads // self.heads_axis.size, config.row_widths)

    @property
    def whole_count(self) -> int:
        """Number of whole pieces."""
        return len(self.earlier_pieces)

    def begin(self) -> None:
        """Begin without tokens."""
        with opening(self.files.folder):
            self.journal.open()
            self.journal.begin(0, 0, 0)
            self._fill(make_filling(self.files, 0, self.shapes), 0, 0)

    def resume(self) -> None:
        """Open the tokens that the journal has. Raise unless all are as they were written."""
        journal, files = self.journal, self.files
        with opening(files.folder):
            if not journal.read():
                raise StoreError("load", "a journal of each rank and layer", f"no {journal.path}", DAMAGED_FIX)
            journal.open()
            base, last = journal.records[0].stop, journal.last
            piece_index = base // PIECE_TOKENS
            full = last.stop == base + PIECE_TOKENS and not files.filling(piece_index).exists()
            self._open_whole(piece_index + full)
            check_chain(files, journal, self.chains[piece_index])
            if full:  # the last piece got its name, and the process ended
                journal.begin(last.stop, last.length, self.chains[-1])
                last, base, piece_index = journal.last, last.stop, piece_index + 1
            if last.stop == base:
                self._fill(make_filling(files, piece_index, self.shapes), 0, last.length)
            else:
                piece = open_filling(files, piece_index, self.shapes)
                check_filling(files.filling(piece_index), piece, journal)
                self._fill(piece, last.stop - base, last.length)

    def adopt_save(self, whole_pieces: int, rows: Tensors, token_index: Tensor, length: int) -> None:
        """Go on after a save: open its whole pieces in place, and copy the rows after them to a piece to be filled."""
        with opening(self.files.folder):
            self._open_whole(whole_pieces)
            piece = make_filling(self.files, whole_pieces, self.shapes)
            used = len(token_index)
            if used:  # else there are no rows: the tokens of this rank fill whole pieces, or it has none
                for x, new in zip(piece.kv_tensors, rows, strict=True):
                    x[:, :, :used] = new
            piece.token_index[:used] = token_index
            end = [(whole_pieces * PIECE_TOKENS + used, piece.digest(0, used))] if used else []
            self.journal.open()
            self.journal.begin(whole_pieces * PIECE_TOKENS, length, self.chains[-1], end)
            self._fill(piece, used, length)

    def _open_whole(self, count: int) -> None:
        """Open and check the first `count` whole pieces. Each is read ahead, and may leave memory after its check."""
        names = [*self.shapes.named(self.files.layer)]
        shapes = self.shapes
        opened = [open_whole(self.files.whole_or_shared(n), self.files.layer, shapes) for n in range(count)]
        for _, piece in opened:
            self._keep(piece)
        for index, (file, piece) in enumerate(opened):
            for _, next_piece in opened[index : index + 4]:
                next_piece.file.fetch(*(x[:, :, :PIECE_TOKENS] for x in next_piece.kv_tensors))
            check_whole_piece(file, piece, names)
            piece.file.leave(*piece.kv_tensors)
            self.earlier_pieces = self._with_whole(file, piece)

    def _keep(self, piece: MappedPiece) -> None:
        """Let a whole piece stay in memory once it is read, if there is room."""
        piece.file.kept = self.reserve_memory(sum(x.nbytes for x in piece.kv_tensors))

    def _with_whole(self, file: TensorFile, piece: MappedPiece) -> tuple[FrozenPiece, ...]:
        """Return the whole pieces, with one more after them. Note its checksums."""
        chain = extend_chain(self.chains[self.whole_count], file, [*self.shapes.named(self.files.layer)])
        self.chains = [*self.chains[: self.whole_count + 1], chain]
        index = torch.cat((piece.token_index, piece.token_index[-1:]))
        return (*self.earlier_pieces, FrozenPiece(piece.kv_tensors, index, None, piece.file))

    def _fill(self, piece: MappedPiece, used: int, length: int) -> None:
        """Let new tokens go to a piece, after its first `used` rows, which are tokens."""
        self.piece, self.kv_tensors, self.token_index = piece, piece.kv_tensors, piece.token_index
        self.sums = PieceSums(self.shapes, used)
        self._set_counts(length, used)

    def _turn_to(self, whole_pieces: tuple[FrozenPiece, ...], piece: MappedPiece, used: int, length: int) -> None:
        """Replace the whole pieces, and let new tokens go to another piece."""
        unbroken(
            [partial_of(setattr, self, "earlier_pieces", whole_pieces), partial_of(self._fill, piece, used, length)]
        )

    def _set_counts(self, length: int, used: int) -> None:
        self.device_counts[LENGTH], self.device_counts[USED] = length, used

    def try_append_run(self, new: Tensors, new_count: int, length: int, used: int) -> bool:
        """Add new tokens that fit the last piece and that one rank owns. Otherwise return False."""
        try:
            return used + new_count <= PIECE_TOKENS and super().try_append_run(new, new_count, length, used)
        except StoreError as error:
            self.fail("append", error)

    def _try_append_parts(self, new: Tensors, new_count: int, length: int, used: int) -> bool:
        """Return False: a record of the journal has all new tokens, or none."""
        return False

    def _skip_run(self, new_count: int, length: int, used: int) -> None:
        """Count new tokens that other ranks hold."""
        with self._writing():
            self._record(used, used, length + new_count)
        self._set_counts(length + new_count, used)

    def _write_run(self, new: Sequence[Tensor], new_count: int, length: int, used: int) -> None:
        """Write new tokens with this rank's heads after those in the last piece."""
        self._write_rows(new, None, (length, used), length + new_count)

    def _append_rows(self, rows: Sequence[Tensor], indices: Tensor, length: int) -> None:
        """Write rows, piece by piece. If the process ends after a piece, the folder has all tokens of that piece."""
        done = 0
        count = len(indices)
        while True:
            if self.used_slots == PIECE_TOKENS and done < count:
                self._next_piece()
            start = done
            done = min(count, done + PIECE_TOKENS - self.used_slots)
            after = length if done == count else int(indices[done])
            self._write_rows(
                [new[:, :, start:done] for new in rows], indices[start:done], (self.length, self.used_slots), after
            )
            if done == count:
                return

    def _repair_journal(self, length_and_used: tuple[int, int]) -> None:
        """Let the journal say what the shard has, after an error or Ctrl-C between a record and its rows' count.

        Every write begins with it. Raise in a process that was forked from the writer, before anything is written.
        """
        self.journal.check_writer()
        length, used = length_and_used
        base = self.whole_count * PIECE_TOKENS
        if self.journal.slot_counts != (base, base + used, length):
            end = [(base + used, self.piece.digest(0, used))] if used else []
            self.journal.begin(base, length, self.chains[self.whole_count], end)

    def _write_rows(
        self, rows: Sequence[Tensor], indices: Tensor | None, length_and_used: tuple[int, int], length: int
    ) -> None:
        """Write rows after those in the last piece, and then a record of them, in one native call where there is one.

        `indices` are those of the tokens, by default the next ones. `length_and_used` are the tokens of all ranks
        and those in the last piece before the call. `length` are the tokens of all ranks after it.
        """
        used = length_and_used[1]
        count = rows[0].shape[2]
        base = self.whole_count * PIECE_TOKENS
        stop = used + count
        try:
            self._repair_journal(length_and_used)
            serial = self.journal.last.serial + 1
            fields = self._fields(indices, length, serial)
            if native_append(self.kv_tensors, rows, self.token_index, self.device_counts, fields):
                self.journal.count_written(Record(serial, base + used, base + stop, length, self.digest.value))
                return
            for x, new in zip(self.kv_tensors, rows, strict=True):
                self.piece.file.write(x[:, :, used:stop], new)
            own_indices = torch.arange(length - count, length, device="cpu") if indices is None else indices
            self.token_index[used:stop] = own_indices
            self._record(used, stop, length, rows)
        except OSError as error:
            raise self._store_error(error) from error
        self._set_counts(length, stop)

    def _fields(self, indices: Tensor | None, length: int, serial: int) -> bytes:
        """Return what a native call needs to know of the files."""
        file, journal = self.piece.file, self.journal
        return FILE_FIELDS.pack(
            file.address,
            cpu_weights().data_ptr(),
            0 if indices is None else indices.data_ptr(),
            addressof(self.digest),
            addressof(self.sums.memory),
            file.handle,
            journal.handle,
            journal.record_bytes,
            journal.key,
            serial,
            self.whole_count * PIECE_TOKENS,
            length,
        )

    def _record(self, start: int, stop: int, length: int, rows: Sequence[Tensor] | None = None) -> None:
        """Write a record by which rows `start` to `stop` of the last piece are tokens."""
        base = self.whole_count * PIECE_TOKENS
        digest = self.piece.digest(start, stop, rows) if start < stop else 0
        self.journal.add(base + start, base + stop, length, digest)

    def _next_piece(self) -> None:
        """Give the last piece, which is full, its name, and begin another one."""
        with self._writing():
            following = make_filling(self.files, self.whole_count + 1, self.shapes)
            length = self.length
            file, piece = make_whole(self.files, self.whole_count, self.shapes, self.piece, self.sums.checksums())
            self._keep(piece)
            self._turn_to(self._with_whole(file, piece), following, 0, length)
            self._repair_journal((length, 0))

    def actions_to_truncate(self, length: int) -> list[Action]:
        """Remove the tokens from `length` on. No actions are left: an error of the system is raised at once."""
        count = self.count_before(length)
        base = self.whole_count * PIECE_TOKENS
        if (length, count) == (self.length, base + self.used_slots):
            return []
        with self._writing():
            if count < base:
                self._cut(count, length)
                return []
            starts = (record.start for record in self.journal.records[1:])
            start = max((start for start in starts if start <= count), default=count)
            digest = self.piece.digest(start - base, count - base) if start < count else 0
            self.sums.forget()
            self.journal.add(start, count, length, digest)
            self._set_counts(length, count - base)
        return []

    def _cut(self, count: int, length: int) -> None:
        """Keep the first `count` rows, and fill again the piece in which they end."""
        piece_index, used = divmod(count, PIECE_TOKENS)
        last = self.earlier_pieces[piece_index]
        removed = range(piece_index, self.whole_count)
        piece = make_filling(self.files, piece_index, self.shapes)
        old = self.files.filling(self.whole_count)
        for x, row in zip(piece.kv_tensors, last.kv_tensors, strict=True):
            x[:, :, :used] = row[:, :, :used]
        piece.token_index[:used] = last.token_index[:used]
        end = [(count, piece.digest(0, used))] if used else []
        self.journal.begin(piece_index * PIECE_TOKENS, length, self.chains[piece_index], end)
        self._turn_to(self.earlier_pieces[:piece_index], piece, used, length)
        old.unlink(missing_ok=True)
        for path in map(self.files.whole, removed):
            # A file with tensors of other layers may be needed by them yet.
            if path.exists() and len(TensorFile(path).entries) <= len(self.kv_tensors) + 1:
                path.unlink()

    def fork(self) -> MemoryShard:
        """Return a shard of the same tokens in memory, which reads whole pieces in place and copies the last one."""
        used = self.used_slots
        memory = [x[:, :, : used + 1] for x in self.kv_tensors], self.token_index[: used + 1]
        other = MemoryShard(self.config, self.heads_axis, self.block_cyclic, self.device, self.index, memory)
        other.device_counts, other.earlier_pieces = self.device_counts.clone(), self.earlier_pieces
        other.resize(self.config, max(used, usual_slots(self.config, self.turn) - self.earlier_tokens))
        return other

    def clone(self) -> MemoryShard:
        """Return a copy in memory."""
        other = self.fork()
        other.join_pieces()
        return other

    def grow(self, config: CacheConfig) -> None:
        """Let the cache have a larger capacity."""
        self.config, self.slots = config, config.capacity

    def join_pieces(self) -> NoReturn:
        """Refuse to copy the pieces to memory."""
        self._refuse("a call that reads pieces where they are", "one that needs all keys in memory, or moves them")

    def check_in_one_memory(self, subject: str) -> None:
        """Refuse the tokens of files."""
        raise KernelError(subject, "a cache in memory", "one in a folder", "call cache.fork() first")

    def check_in_graph(self, subject: str) -> None:
        """Refuse the pieces of files."""
        self.raise_in_pieces(subject, "one in a folder")

    def check_order(self, index: Tensor) -> None:
        """Refuse to move sequences, unless each stays."""
        if not torch.equal(index.cpu(), torch.arange(self.config.batch, device="cpu")):
            self._refuse("sequences that stay in their order", f"{index.tolist()}")

    def actions_to_reorder(self, index: Tensor) -> list[Action]:
        """Return no actions: `check_order` refuses other orders."""
        return []

    def _refuse(self, expected: str, given: str) -> NoReturn:
        fix = "call it on cache.fork(), or load the folder with KVCache.load"
        raise StoreError(FOLDER_SUBJECT, expected, given, fix)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Mend the journal, and raise the system's errors as a `StoreError` that says what is lost."""
        try:
            self._repair_journal((self.length, self.used_slots))
            yield
        except OSError as error:
            raise self._store_error(error) from error

    def _store_error(self, error: OSError) -> StoreError:
        """Return a `StoreError` that says what an error of the system loses."""
        given = f"{str(error.filename or self.files.folder)!r} ({error.strerror})"
        fix = f"free space there, and append again from token {self.length} on: the cache has those before"
        if self.heads_axis.size > 1 or self.turn.period > self.turn.width:
            fix = f"free space there, and open the folder again: it has the tokens before {self.length}"
        if error.errno == ENOENT:
            fix = "call cache.fork() and save it elsewhere: the folder is gone, and its tokens go with this process"
        return StoreError(FOLDER_SUBJECT, "a folder that can be written to", given, fix)


@contextmanager
def opening(folder: Path, subject: str = FOLDER_SUBJECT) -> Iterator[None]:
    """Raise the system's errors as `StoreError` while a folder is opened."""
    try:
        yield
    except OSError as error:
        given = f"{str(error.filename or folder)!r} ({error.strerror})"
        fix = "check the path, its rights and the free space, and that all ranks see it"
        raise StoreError(subject, "a folder that can be read and written", given, fix) from error
