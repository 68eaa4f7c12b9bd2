"""Before anyone waits for anyone, the ranks of a mesh agree on what they are about to do.

A rank that raised alone would leave the others waiting for it. So each says what it was called with, or what is wrong
with that, in one small exchange; and if they do not all say the same, all raise the same error.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from itertools import chain
from typing import Any, NoReturn, TypeVar, cast

import torch

from attnmesh import errors
from attnmesh.comm.p2p import all_gather_ints
from attnmesh.comm.topology import mesh_hosts
from attnmesh.core.digest import EXTRA_VALUES
from attnmesh.errors import InputError, MeshError, RankFailure, UnforeseenError
from attnmesh.mesh.axes import Mesh

T = TypeVar("T")


SEPARATOR = "\x1f"


def describe_call(name: str, /, **fields: object) -> str:
    """A call as ranks tell each other of it, a line for each thing that they have to agree on.

    >>> describe_call("decode", tokens=60, mask=None)
    'decode\\ntokens: 60'
    """
    lines = [f"{field}: {'-' if value == '' else value}" for field, value in fields.items() if value is not None]
    return "\n".join([name, *(" ".join(line.split()) for line in lines)])


def askable(device: torch.device) -> bool:
    """Whether ranks may ask each other anything: not while a graph is made of what they do."""
    return not (torch.compiler.is_compiling() or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()))


def attempt(act: Callable[[], T], call: str | Callable[[T], str]) -> tuple[Any, str | InputError]:
    """What acting gives, or None, and what this rank says of it: its call, or what is wrong with that."""
    try:
        result = act()
        return result, call if isinstance(call, str) else call(result)
    except InputError as error:
        return None, error
    except RankFailure:
        raise
    except Exception as error:
        subject = call.splitlines()[0] if isinstance(call, str) else "attnmesh"
        given, fix = f"{type(error).__name__}: {error}", "see what the rank says that raised it"
        said = UnforeseenError(subject, "what each rank can do", " ".join(given.split()), fix)
        said.__cause__ = error
        return None, said


def run_agreed(mesh: Mesh, act: Callable[[], T], call: str | Callable[[T], str]) -> T:
    """What acting gives, once all ranks have and say the same call, or the same of what came; else the error of all."""
    result, said = attempt(act, call)
    agree(mesh, said)
    return cast(T, result)


def agree(mesh: Mesh, call: str | InputError, numbers: Sequence[int] = ()) -> list[list[int]]:
    """Every rank's numbers, by shard, once all have been found to make the same call; else the error that all raise.

    A call is what is `describe_call` of it.
    """
    failed = isinstance(call, InputError)
    text = SEPARATOR.join((type(call).__name__, *call.args)) if isinstance(call, InputError) else call
    number = int.from_bytes(blake2b(_letters(text), digest_size=7).digest())
    mesh_hosts(mesh)  # who is lost later may take its host along
    padded = [*numbers, *[0] * (EXTRA_VALUES - len(numbers))]
    table = all_gather_ints([number, failed, *padded], mesh.axes)
    if any(row[1] for row in table) or len({row[0] for row in table}) > 1:
        said = texts(mesh, text)
        if isinstance(call, UnforeseenError) and call.__cause__ is not None:
            raise call.__cause__
        _raise(said, [bool(row[1]) for row in table])
    return [row[2 : 2 + len(numbers)] for row in table]


class CallChecker:
    """When the ranks that hold something ask each other of calls on it: always, never, or at the first of each kind."""

    def __init__(self, mesh: Mesh, device: torch.device, checked: bool | None) -> None:
        self.mesh, self.device, self.checked = mesh, device, checked
        self.kinds = set[Any]()  # of calls that ranks have found to be the same

    def check(
        self,
        name: str,
        check: Callable[[], Sequence[int] | None],
        fields: Callable[[], Mapping[str, object]],
        *,
        must: bool = False,
    ) -> list[list[int]]:
        """What `check` gives on every rank, by shard; on this one alone where ranks do not ask each other.

        What is wrong with a call then all raise, and else the rank that makes it.
        """
        asks = must or (name not in self.kinds if self.checked is None else self.checked)
        if not asks or self.mesh.shape.ranks == 1 or not askable(self.device):
            return [list(check() or ())]
        numbers, said = attempt(check, lambda _: describe_call(name, **fields()))
        table = agree(self.mesh, said, numbers or ())
        self.kinds.add(name)
        return table


def texts(mesh: Mesh, text: str) -> list[str]:
    """Every rank's text, by shard: first how long they are, then the letters."""
    letters = _letters(text)
    lengths = [row[0] for row in all_gather_ints([len(letters)], mesh.axes)]
    padded = [*letters, *[0] * (max(lengths) - len(letters))]
    return [bytes(row[:n]).decode() for row, n in zip(all_gather_ints(padded, mesh.axes), lengths, strict=True)]


def unlike(subject: str) -> NoReturn:
    """Raise where ranks have been found to differ, though they say the same."""
    given, fix = "calls that say the same", "report it, with what each rank was given"
    raise MeshError(subject, "the same checksum on every rank", given, fix)


def _letters(text: str) -> bytes:
    """Also of what no encoding has, as a path may be."""
    return text.encode(errors="backslashreplace")


def _raise(texts: list[str], failed: list[bool]) -> None:
    for text, is_error in zip(texts, failed, strict=True):
        if is_error:
            name, *parts = text.split(SEPARATOR)
            raise getattr(errors, name)(*parts) from None
    subject = texts[0].splitlines()[0]
    fix = "call it alike on all ranks of the mesh"
    raise MeshError(subject, "the same call on every rank", _table(texts), fix) from None


def _table(texts: Sequence[str]) -> str:
    """Who said what: a row for all shards that said the same, and a column for each thing that they differ in.

    >>> print(_table(["decode\\ntokens: 60", "decode\\ntokens: 61", "decode\\ntokens: 60"]))
        shards  tokens
        0, 2    60
        1       61
    """
    said = defaultdict(list)
    for shard, text in enumerate(texts):
        said[text].append(str(shard))
    fields = []
    for text in said:
        name, *lines = text.splitlines()
        fields.append({"call": name, **dict(line.split(": ", 1) for line in lines)})
    names = [name for name in dict.fromkeys(chain(*fields)) if len({each.get(name) for each in fields}) > 1]
    rows = [["shards", *names]]
    rows += [
        [", ".join(shards), *(each.get(name, "-") for name in names)]
        for shards, each in zip(said.values(), fields, strict=True)
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(f"    {line.rstrip()}" for line in lines)
