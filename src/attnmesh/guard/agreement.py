"""The guard: ranks say what they call before one waits for another, or as they merge.

If any rank's call differs, all ranks raise.

What a rank says is a text, with a line for each argument that must be equal, or the error that it has found. A hash
of it is compared: in a small all-gather, or in the messages of a merge. Texts are exchanged where the numbers differ.

    fields     arguments that must be equal, by name
    text       the fields as lines, below the name of the call: what is hashed, and shown where calls differ
    payload    numbers that are gathered beside the hash, and may differ
    signature  what the checks of a call depend on, by which a rank finds what it prepared; not compared
    facts      options, dtypes and shapes of a call that ends in a merge: it is known by them, and they are hashed
    Compared   what the checksum of a merge is made of: tensors, a hash of the facts, and tokens (of decoding)
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from itertools import chain
from typing import NamedTuple, NoReturn, Self

import torch
import torch.distributed as dist
from torch import Tensor

from attnmesh import errors
from attnmesh.comm.topology import mailboxes_of_all_ranks
from attnmesh.comm.transport import (
    all_gather_ints,
    all_gather_texts,
    announce_comparison,
    drop_unreceived,
    transport_of,
)
from attnmesh.errors import InputError, MeshError, RankFailure, UnforeseenError
from attnmesh.kernels.triton_runtime import interpreted
from attnmesh.mesh.axes import Axis, Mesh, mesh_of_axis
from attnmesh.mesh.merge_cost import AGREEMENT_PAYLOAD
from attnmesh.mesh.merges import is_collective
from attnmesh.runtime.memo import Memo
from attnmesh.runtime.world import collective_once

Fields = Mapping[str, object] | Callable[[], Mapping[str, object]] | str
"""Arguments that must be equal: by name, or what returns them once they are checked, or the text of the call."""

SEPARATOR = "\x1f"

HOST_FIELD = "\x1ehost: "
"""Name of a field that ends a text: a rank's host. Hosts may differ; they are shown where calls do."""

VERSIONS = "versions: "
"""Words before the versions of packages, in a line of the texts that say them."""

MAX_NAMED_HOSTS = 3
"""Hosts that a row of the table names."""

RAISED_ON_ALL_RANKS = "raised_on_all_ranks"
"""Attribute of an error that all ranks of a mesh raise, so that none shares it again with ranks that have left."""


def may_compare(device: torch.device) -> bool:
    """Return False while a graph is compiled or captured. Ranks cannot compare calls then."""
    return not (torch.compiler.is_compiling() or is_capturing(device))


def is_capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph is being captured. The CPU must not wait then."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Agreement:
    """One call on which all ranks of a mesh agree, as a `with` around checks, or other work, that may fail on one rank.

    Ranks compare once: by `compare`, as the last line of the `with`, or else at its end. That comes before any tensor
    is sent. A rank on which an error ends the `with` compares the error instead. Then all ranks raise it. Without
    `is_compared` a rank is alone.

        with Agreement(mesh, "halo") as agreement:
            check(x)  # an error here is raised on all ranks
            table = agreement.compare({"dtype": x.dtype}, payload=[len(x)])  # what must be equal, and what may differ
        lengths = [row[0] for row in table]
    """

    def __init__(
        self,
        mesh: Mesh,
        name: str,
        fields: Fields = dict,
        *,
        is_compared: bool = True,
        known_calls: Memo[bool] | None = None,
    ) -> None:
        self.mesh, self.name, self.fields, self.is_compared = mesh, name, fields, is_compared
        self.known_calls = known_calls  # gets the name of the call
        self.is_over = False  # True once ranks compare: the end of the `with` has nothing to say

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self.is_over:
            return
        if error is None:
            self.compare()
        elif isinstance(error, Exception) and not isinstance(error, RankFailure):
            self.raise_on_all(error)

    def compare(self, fields: Fields | None = None, payload: Sequence[int] = ()) -> list[list[int]]:
        """Return the payloads of all ranks by shard, or raise on all. It raises if their calls differ.

        Args:
            fields: What must be equal; that which the agreement was made with unless it is given.
            payload: Up to `AGREEMENT_PAYLOAD` numbers of this rank, which may differ.
        """
        if not self.is_compared:
            return [[*payload]]
        fields = self.fields if fields is None else fields
        try:
            fields = fields() if callable(fields) else fields
            text = fields if isinstance(fields, str) else describe_call(self.name, **fields)
        except Exception as error:
            self.raise_on_all(error)
        payloads = self._compare_texts(text, payload)
        if self.known_calls is not None:
            self.known_calls.keep(self.name, True)
        return payloads

    def raise_on_all(self, error: Exception) -> NoReturn:
        """Raise an error of this rank, on all ranks if they compare the call.

        It is compared in place of the call. No text of a call equals it. All raise the error of the first shard that
        has one. What no check has found this rank raises as it is, and the others as an `UnforeseenError`.
        """
        if self.is_compared:
            shared = error
            if not isinstance(error, InputError):
                given = " ".join(f"{type(error).__name__}: {error}".split())
                fix = "see the error of the rank that raised"
                shared = UnforeseenError(self.name, "what each rank can do", given, fix)
            self._compare_texts(SEPARATOR.join((type(shared).__name__, *shared.args)), error=error)
        raise error

    def raise_unequal(self) -> NoReturn:
        """Raise on all ranks, whose merge has shown that their numbers differ."""
        self.compare()
        all_gather_ints([0], self.mesh)  # a barrier: all are out of the merge
        drop_unreceived(self.mesh)  # messages of a call that some rank broke off
        all_gather_ints([0], self.mesh)  # a barrier: no rank sends before all have dropped them
        given, fix = "different checksums of equal calls", "report this bug, with the arguments of each rank"
        raise MeshError(self.name, "the same checksum on every rank", given, fix)

    def _compare_texts(self, text: str, payload: Sequence[int] = (), error: Exception | None = None) -> list[list[int]]:
        """Return all ranks' payloads if all say this text, or raise. All raise the same error."""
        assert len(payload) <= AGREEMENT_PAYLOAD
        self.is_over = True
        announce_comparison(self.mesh)
        padded = [*payload, *[0] * (AGREEMENT_PAYLOAD - len(payload))]
        table = all_gather_ints([hash_of_call(text), error is not None, *padded], self.mesh)
        hashes, failed, *_ = zip(*table, strict=True)
        if any(failed) or len(set(hashes)) > 1:
            drop_unreceived(self.mesh)  # a merge along a tree sends other messages than one that is direct
            texts = all_gather_texts(text, self.mesh)
            ranks = all_gather_ints([dist.get_rank() if dist.is_initialized() else 0], self.mesh)
            if error is not None and not isinstance(error, InputError):
                raise _marked(error)
            _raise(texts, failed, [rank for (rank,) in ranks])
        return [row[2 : 2 + len(payload)] for row in table]


class ComparedCalls:
    """The calls on one object that its ranks have compared, by its `checked`: always, never, or when they are new.

    On a GPU, ranks that know a call begin its exchange without a comparison, and a rank to which it is new would wait
    for them in vain. So there the first call on the object is compared at once. A later one that ends in a merge joins
    the merge of the others first, with a question: see `MergeAgreement`.
    """

    def __init__(self, mesh: Mesh, device: torch.device, checked: bool | None) -> None:
        self.mesh, self.device, self.checked = mesh, device, checked
        self.is_alone = mesh.ranks == 1
        self.known: Memo[bool] = Memo()  # by name, or by compared facts
        self.last_known: object = None  # compared facts of the last call that asked, or need not ask
        self.repeat_last_merge: Callable[[], Tensor] | None = None
        """Replays the last merge whose checksum stayed on the device, sending `QUESTION`. Returns the merged one."""

    def will_compare(self, name: str, *, always: bool = False) -> bool:
        """Return whether ranks compare the next call of this name."""
        if self.is_alone:
            return False
        is_new = not self.known if self.device.type == "cuda" else name not in self.known
        compares = always or (is_new if self.checked is None else self.checked)
        return compares and may_compare(self.device)

    def raise_uncompared(self, name: str, error: InputError) -> NoReturn:
        """Raise an error of this rank in a call that ranks do not compare, such as a later `append`.

        ranks                          who raises
        CPUs of one host               all: those that wait in the next merge find that this rank compares
        any others, or checked=False   this rank: they would wait for its message, and not for its comparison
        """
        tells = self.device.type == "cpu" and not self.is_alone and self.checked is not False
        share_host = tells and all(mailboxes_of_all_ranks(axis) is not None for axis in self.mesh.axes if axis.size > 1)
        Agreement(self.mesh, name, is_compared=share_host).raise_on_all(error)

    def agreement(self, name: str, fields: Fields = dict, *, always: bool = False) -> Agreement:
        """Return the agreement on the next call of this name."""
        is_compared = self.will_compare(name, always=always)
        return Agreement(self.mesh, name, fields, is_compared=is_compared, known_calls=self.known)


class MergeDescription(NamedTuple):
    """A call that ends in a merge, as ranks compare it."""

    facts: Hashable  # all that a call needs to be known
    fields: Fields  # all that must be equal, in words: it is compared where ranks ask, or found that calls differ
    ask: Callable[[], Tensor] | None  # part in the merge by a question; None where the CPU reads the messages


class MergeAgreement:
    """An agreement on a call that ends in a merge, whose messages carry the hash of the call at no cost.

    Ranks whose calls differ all raise, or all get NaN, by `checked`:

        device  the call is       None       True       False
        CPU     new or known      all raise  all raise  NaN    the CPU reads the merged checksum
        GPU     new to all ranks  all raise  all raise  NaN    all ask, and compare before they merge
        GPU     new to some       NaN        all raise  NaN    those ask the others, which do not compare
        GPU     known to all      NaN        all raise  NaN    no CPU waits for the checksum
        any     in a graph        NaN        NaN        NaN    nothing can raise

    An error of one rank is raised there. The others raise it too where the table says so, and get NaN elsewhere.

    To ask, a rank replays its last merge and sends `QUESTION` where the checksum goes. The maximum tells each rank
    whether all asked.

    Merges by a collective, which hang or crash on messages of unequal sizes, are compared before, on CPUs too.

    The `with` compares nothing. It tells the other ranks of an error of this one, for which they would wait. `poison`
    takes part in the merge without a call, so that they find it.

        if agreement.compare_before_merge(description):
            with agreement:
                out, checksum = merge(partial, hash_of_call(description.facts))
            agreement.check_merged(description, checksum)
    """

    def __init__(
        self,
        calls: ComparedCalls,
        device: torch.device,
        merge_name: str,
        checked: bool | None,
        name: str,
        poison: Callable[[], object],
    ) -> None:
        self.calls, self.merge_name, self.checked, self.name, self.poison = calls, merge_name, checked, name, poison
        self.is_compared = not calls.is_alone and may_compare(device)
        self.checksum_stays_on_device = device.type != "cpu" or interpreted() or calls.repeat_last_merge is not None
        """True if no CPU reads the merged checksum. So a rank asks about a call that is new to it.

        True on GPUs, when GPU kernels are interpreted on a CPU, and for the rest of the object's life after one such
        call.
        """

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, RankFailure):
            self.raise_through_merge(error)

    def compare_before_merge(self, description: MergeDescription) -> bool:
        """Compare a call where ranks ask, or its messages need it. Return False if this rank asked and not all did.

        On a CPU nothing is sent here, but for a merge by a collective. On a GPU, with `checked=None`:

            the call is      this rank              others                 returns
            known here       sends nothing          by the rows below      True
            new to all       asks, then compares    ask, then compare      True, or all raise
            new to some      asks                   merge, and get NaN     False: this rank has NaN too
        """
        # A CPU that reads the checksum compares each call.
        on_device = self.checksum_stays_on_device
        is_known = on_device and description.ask is not None and description.facts in self.calls.known
        if self.is_compared and (not is_known if self.checked is None else self.checked):
            if on_device and not self.ask_all_ranks():
                return False
            if on_device or is_collective(self.merge_name):
                Agreement(self.calls.mesh, self.name, description.fields).compare()
        return True

    def check_merged(self, description: MergeDescription, checksum: Tensor) -> None:
        """Raise if the merged checksum shows that calls differ. All ranks raise.

        Where no CPU reads it, keep how to repeat the messages instead.
        """
        if not self.checksum_stays_on_device:
            if self.is_compared and self.checked is not False and float(checksum.sum()) != 0:
                self.raise_unequal(description.fields)
        elif description.facts != self.calls.last_known:
            calls = self.calls
            calls.known.keep(description.facts, True)
            calls.last_known, calls.repeat_last_merge = description.facts, description.ask or calls.repeat_last_merge

    def raise_unequal(self, fields: Fields) -> NoReturn:
        """Raise on all ranks, whose merge has shown that their calls differ."""
        Agreement(self.calls.mesh, self.name, fields).raise_unequal()

    def ask_all_ranks(self) -> bool:
        """Repeat the last merge, in which ranks wait that know their call. Return whether all ranks ask."""
        repeat = self.calls.repeat_last_merge
        return repeat is None or float(repeat().sum()) == 0

    def raise_through_merge(self, error: Exception) -> NoReturn:
        """Raise an error of this rank, and let the others raise it or get NaN, as the table of the class says.

        An error that all ranks raise already, as of an append within the call, is raised as it is: none waits.
        """
        if hasattr(error, RAISED_ON_ALL_RANKS):
            raise error
        is_shared = self.is_compared and self.checked is not False
        if self.is_compared and self.checksum_stays_on_device:
            if is_shared:
                is_shared = self.ask_all_ranks()
            else:
                (self.calls.repeat_last_merge or self.poison)()
        elif self.is_compared and not is_collective(self.merge_name):
            self.poison()
        Agreement(self.calls.mesh, self.name, is_compared=is_shared).raise_on_all(error)


@collective_once
def prepare_merges(axis: Axis) -> None:
    """Let the ranks of an axis of CPUs find out how they merge, before the first of them does.

    They compare this first: else its exchanges could meet those of another call.
    """
    Agreement(mesh_of_axis(axis), "the first merge along an axis").compare()
    transport_of(axis, torch.device("cpu")).fastest()


def describe_call(name: str, /, **fields: object) -> str:
    """Return the text of a call that ranks compare: a line for each argument that must be equal.

    >>> describe_call("decode", tokens=60, mask=None)
    'decode\\ntokens: 60'
    """
    host = f"{HOST_FIELD}{fields.pop(HOST_FIELD)}" if HOST_FIELD in fields else ""
    values = {field: " ".join(str(value).split()) for field, value in fields.items() if value is not None}
    return "\n".join([name, *(f"{field}: {value or '-'}" for field, value in values.items())]) + host


@lru_cache(1024)
def hash_of_call(*values: object) -> int:
    """Return a hash of what a rank says, but for its host: of a text, or of values that have one."""
    text = " ".join(map(str, values)).partition(HOST_FIELD)[0]
    return int.from_bytes(blake2b(text.encode(errors="backslashreplace"), digest_size=7).digest())


def _raise(texts: Sequence[str], failed: Sequence[int], ranks: Sequence[int]) -> None:
    """Raise the error of the first shard that failed, or else one with a table of the calls by rank."""
    for text, is_error in zip(texts, failed, strict=True):
        if is_error:
            name, *parts = text.split(SEPARATOR)
            raise _marked(getattr(errors, name)(*parts)) from None
    subject = texts[0].splitlines()[0]
    fix = "call it alike on all ranks of the mesh"
    if len({line for text in texts for line in [*text.splitlines(), ""] if line.startswith(VERSIONS)}) > 1:
        fix = "install the same versions of attnmesh and PyTorch on all hosts"
    if any(" of digest " in text for text in texts):
        fix += ", with the same inputs and, in a model, the same weights"
    raise _marked(MeshError(subject, "the same call on every rank", _table(texts, ranks), fix)) from None


def _marked(error: Exception) -> Exception:
    """Return an error with the mark that all ranks raise it."""
    setattr(error, RAISED_ON_ALL_RANKS, True)
    return error


def _table(texts: Sequence[str], ranks: Sequence[int]) -> str:
    """Return a table of the calls: a row for all ranks with the same text, a column for each line that differs.

    >>> print(_table(["decode\\ntokens: 60", "decode\\ntokens: 61", "decode\\ntokens: 60"], [0, 1, 2]))
        ranks  tokens
        0, 2   60
        1      61
    """
    members = defaultdict[str, list[tuple[str, str]]](list)
    for rank, text in sorted(zip(ranks, texts, strict=True)):
        call, _, host = text.partition(HOST_FIELD)
        members[call].append((str(rank), host))
    columns_by_call = []
    for call, callers in members.items():
        name, *lines = call.splitlines()
        hosts = [*dict.fromkeys(host for _, host in callers if host)]
        host_names = ", ".join(hosts[:MAX_NAMED_HOSTS])
        host_names += f" and {len(hosts) - MAX_NAMED_HOSTS} more" * (len(hosts) > MAX_NAMED_HOSTS)
        columns_by_call.append(
            {"call": name, **dict(line.split(": ", 1) for line in lines), **({"hosts": host_names} if hosts else {})}
        )
    names = [
        name
        for name in dict.fromkeys(chain(*columns_by_call))
        if len({columns.get(name) for columns in columns_by_call}) > 1
    ]
    rows = [["ranks", *names]]
    rows += [
        [", ".join(rank for rank, _ in callers), *(columns.get(name, "-") for name in names)]
        for callers, columns in zip(members.values(), columns_by_call, strict=True)
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(f"    {line.rstrip()}" for line in lines)
