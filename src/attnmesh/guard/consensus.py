"""Consensus: ranks compare their calls before any of them waits for data, and raise the same error if they differ.

A rank that raised alone would leave the others waiting. So each rank contributes a digest of its call, or of its error,
to one small all-gather. If the digests differ, ranks exchange the texts and all raise the same error.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from hashlib import blake2b
from itertools import chain
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from attnmesh import errors
from attnmesh.comm.shared_memory import Mailboxes
from attnmesh.comm.topology import share_numbers
from attnmesh.core.digest import EXTRA_VALUES
from attnmesh.errors import InputError, MeshError, RankFailure, UnforeseenError
from attnmesh.kernels.triton_runtime import interpreted
from attnmesh.mesh.axes import Mesh
from attnmesh.runtime.caches import Kinds
from attnmesh.runtime.world import WORLD, cached_per_world

T = TypeVar("T")


SEPARATOR = "\x1f"

HOST = "\x1ehost: "
"""Before the name of a rank's host at the end of a text. Hosts may differ; they are shown where calls do."""

VERSIONS = "versions: "
"""Before the versions of packages, in a line of the texts that say them."""

MOST_HOSTS = 3
"""Hosts that a row of the table names."""


def describe_call(name: str, /, **fields: object) -> str:
    """Return the text of a call that ranks compare: a line for each argument that must be equal.

    >>> describe_call("decode", tokens=60, mask=None)
    'decode\\ntokens: 60'
    """
    lines = [f"{field}: {'-' if value == '' else value}" for field, value in fields.items() if value is not None]
    return "\n".join([name, *(" ".join(line.split()) for line in lines)])


def may_compare(device: torch.device) -> bool:
    """Return whether ranks may compare calls now: not while a graph is compiled or captured."""
    return not (torch.compiler.is_compiling() or is_capturing(device))


def is_capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph is being captured, which the host must not wait for."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def asks(device: torch.device) -> bool:
    """Return whether ranks ask before they compare a call: where some may run it without a look at the host."""
    return device.type != "cpu" or interpreted()


def attempt(act: Callable[[], T], call: str | Callable[[T], str]) -> tuple[Any, str | InputError]:
    """Return the result of `act` and the text of this rank's call; None and the error if it raises one."""
    try:
        result = act()
        return result, call if isinstance(call, str) else call(result)
    except InputError as error:
        return None, error
    except RankFailure:
        raise
    except Exception as error:
        return None, unforeseen(call.splitlines()[0] if isinstance(call, str) else "attnmesh", error)


def unforeseen(subject: str, error: Exception) -> UnforeseenError:
    """Return what the other ranks raise of an error that no check has found."""
    given, fix = f"{type(error).__name__}: {error}", "see the error of the rank that raised"
    found = UnforeseenError(subject, "what each rank can do", " ".join(given.split()), fix)
    found.__cause__ = error
    return found


def run_agreed(mesh: Mesh, act: Callable[[], T], call: str | Callable[[T], str]) -> T:
    """Return the result of `act` if it succeeds on all ranks with the same call. Raise the same error on all if not."""
    return run_agreed_with(mesh, act, call, lambda _: ())[0]


def run_agreed_with(
    mesh: Mesh, act: Callable[[], T], call: str | Callable[[T], str], numbers: Callable[[T], Sequence[int]]
) -> tuple[T, list[list[int]]]:
    """Return the result of `act`, and the numbers of all ranks by shard, as `run_agreed` does."""
    result, text = attempt(act, call)
    table = agree(mesh, text, () if isinstance(text, InputError) else numbers(result))
    return cast(T, result), table


def agree_on_call(
    mesh: Mesh, device: torch.device, checked: bool | None, check: Callable[[], None], describe: Callable[[], str]
) -> None:
    """Run `check`, and compare the call of `describe` with that of the other ranks, unless `checked` is False."""
    if mesh.ranks == 1 or checked is False or not may_compare(device):
        check()
    else:
        run_agreed(mesh, check, lambda _: describe())


def agree(mesh: Mesh, call: str | InputError, numbers: Sequence[int] = ()) -> list[list[int]]:
    """Return the numbers of all ranks by shard, if all make the same call; else raise the same error on all.

    A call is the text of `describe_call`, or the error that it raised on this rank.
    """
    failed = isinstance(call, InputError)
    text = SEPARATOR.join((type(call).__name__, *call.args)) if isinstance(call, InputError) else call
    number = int.from_bytes(blake2b(_encoded(text.partition(HOST)[0]), digest_size=7).digest())
    for mailboxes in _mailboxes_of(mesh):
        mailboxes.enter_agreement()
    padded = [*numbers, *[0] * (EXTRA_VALUES - len(numbers))]
    table = share_numbers([number, failed, *padded], mesh)
    all_numbers, failures, *_ = zip(*table, strict=True)
    if any(failures) or len(set(all_numbers)) > 1:
        _realign(mesh)  # a merge along a tree sends other messages than one that is direct
        all_texts = texts(mesh, text)
        ranks = share_numbers([dist.get_rank() if dist.is_initialized() else 0], mesh)
        if isinstance(call, UnforeseenError) and call.__cause__ is not None:
            raise call.__cause__
        _raise(all_texts, failures, [rank for (rank,) in ranks])
    return [row[2 : 2 + len(numbers)] for row in table]


def drop_messages(mesh: Mesh) -> None:
    """Drop what no call has received, on all ranks at the same time."""
    share_numbers([0], mesh)
    _realign(mesh)
    share_numbers([0], mesh)


def _realign(mesh: Mesh) -> None:
    """Drop what stands in the mailboxes of a mesh, between two exchanges of numbers."""
    for mailboxes in _mailboxes_of(mesh):
        mailboxes.realign()


def _mailboxes_of(mesh: Mesh) -> list[Mailboxes]:
    """Return the mailboxes between ranks of the mesh: those of one of its axes, or of all its ranks."""
    lines = _lines(mesh) if WORLD.mailboxes else []
    return [boxes for boxes in tuple(WORLD.mailboxes) if boxes.ranks in lines or _are_all(boxes.ranks, mesh, lines)]


@cached_per_world(1024)
def _lines(mesh: Mesh) -> list[frozenset[int]]:
    """Return the ranks of the world along each axis of this rank."""
    return [frozenset(dist.get_process_group_ranks(axis.group)) for axis in mesh.axes if axis.group is not None]


def _are_all(ranks: frozenset[int], mesh: Mesh, lines: Sequence[frozenset[int]]) -> bool:
    return len(ranks) == mesh.ranks and all(line <= ranks for line in lines)


class CallChecker:
    """Comparison of the calls on one object, by its `checked`: always, never, or when they are new.

    On a GPU, ranks that know a call are already in its exchange, where a rank that compares alone would never meet
    them. So there the first call on the object is compared at once, and a later one by `ask`.
    """

    def __init__(self, mesh: Mesh, device: torch.device, checked: bool | None) -> None:
        self.mesh, self.device, self.checked = mesh, device, checked
        self.is_alone = mesh.ranks == 1
        self.kinds = Kinds[bool]()  # kinds of calls that ranks have compared
        self.last_kind: object = None  # of the last call that asked, or need not ask
        self.last_exchange: Callable[[], Tensor] | None = None
        """Repeats the last exchange that no host looked at, with `QUESTION` for a checksum. Returns the merged one."""

    def compares(self, name: str, *, must: bool = False) -> bool:
        """Return whether ranks compare the next call of this name."""
        if self.is_alone:
            return False
        is_new = not self.kinds if self.device.type == "cuda" else name not in self.kinds
        wanted = must or (is_new if self.checked is None else self.checked)
        return wanted and may_compare(self.device)

    def ask(self, call: str | InputError) -> bool:
        """Compare a call that is new to this rank, if it is new to all ranks. Return False if some rank knows its own.

        Ranks that know their call go on with the exchange of the last one, and look at nothing. This rank takes part in
        it with a question instead of a checksum, so that they get NaN. If all ranks ask, all compare on the host.
        """
        if self.last_exchange is not None and float(self.last_exchange().sum()) != 0:
            return False
        agree(self.mesh, call)
        return True

    def learn(self, kind: Hashable, last_exchange: Callable[[], Tensor] | None) -> None:
        """Keep a kind of calls that was served, and how to repeat its exchange if no host looked at it."""
        self.kinds.keep(kind, True)
        self.last_kind, self.last_exchange = kind, last_exchange or self.last_exchange

    def check(
        self,
        name: str,
        check: Callable[[], Sequence[int] | None],
        fields: Callable[[], Mapping[str, object]],
        *,
        must: bool = False,
    ) -> list[list[int]]:
        """Return the numbers that `check` returns on every rank, by shard; only this rank's if calls are not compared.

        An error of `check` is raised on all ranks if calls are compared, else on its own rank only.
        """
        if not self.compares(name, must=must):
            return [list(check() or ())]
        _, table = run_agreed_with(self.mesh, lambda: check() or (), lambda _: describe_call(name, **fields()), tuple)
        self.kinds.keep(name, True)
        return table


def texts(mesh: Mesh, text: str) -> list[str]:
    """Return the texts of all ranks, by shard: an all-gather of their lengths, then one of their bytes."""
    encoded = _encoded(text)
    lengths = [row[0] for row in share_numbers([len(encoded)], mesh)]
    padded = [*encoded, *[0] * (max(lengths) - len(encoded))]
    return [bytes(row[:n]).decode() for row, n in zip(share_numbers(padded, mesh), lengths, strict=True)]


def _encoded(text: str) -> bytes:
    """Return the bytes of a text, which may be a path that no encoding has."""
    return text.encode(errors="backslashreplace")


def _raise(texts: Sequence[str], failed: Sequence[int], ranks: Sequence[int]) -> None:
    """Raise the error of the first shard that failed, or else one with a table of the calls by rank."""
    for text, is_error in zip(texts, failed, strict=True):
        if is_error:
            name, *parts = text.split(SEPARATOR)
            raise getattr(errors, name)(*parts) from None
    subject = texts[0].splitlines()[0]
    fix = "call it alike on all ranks of the mesh"
    if len({line for text in texts for line in [*text.splitlines(), ""] if line.startswith(VERSIONS)}) > 1:
        fix = "install the same versions of attnmesh and PyTorch on all hosts"
    if any(" of digest " in text for text in texts):
        fix += ", with the same inputs and, in a model, the same weights"
    raise MeshError(subject, "the same call on every rank", _table(texts, ranks), fix) from None


def _table(texts: Sequence[str], ranks: Sequence[int]) -> str:
    """Return a table of the calls: a row for all ranks with the same text, a column for each line that differs.

    >>> print(_table(["decode\\ntokens: 60", "decode\\ntokens: 61", "decode\\ntokens: 60"], [0, 1, 2]))
        ranks  tokens
        0, 2   60
        1      61
    """
    members = defaultdict[str, list[tuple[str, str]]](list)
    for rank, text in sorted(zip(ranks, texts, strict=True)):
        call, _, host = text.partition(HOST)
        members[call].append((str(rank), host))
    fields = []
    for call, found in members.items():
        name, *lines = call.splitlines()
        hosts = [*dict.fromkeys(host for _, host in found if host)]
        places = ", ".join(hosts[:MOST_HOSTS]) + f" and {len(hosts) - MOST_HOSTS} more" * (len(hosts) > MOST_HOSTS)
        fields.append(
            {"call": name, **dict(line.split(": ", 1) for line in lines), **({"hosts": places} if hosts else {})}
        )
    names = [name for name in dict.fromkeys(chain(*fields)) if len({each.get(name) for each in fields}) > 1]
    rows = [["ranks", *names]]
    rows += [
        [", ".join(rank for rank, _ in found), *(each.get(name, "-") for name in names)]
        for found, each in zip(members.values(), fields, strict=True)
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(f"    {line.rstrip()}" for line in lines)
