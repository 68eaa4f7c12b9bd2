"""Texts of calls, and of errors in their place, as ranks exchange them: a line for each argument that must be equal."""

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from itertools import chain

from attnmesh import errors
from attnmesh.errors import InputError, MeshError

SEPARATOR = "\x1f"
"""Character between the parts of an error in its text."""

HOST_FIELD = "\x1ehost: "
"""Name of a field that ends a text: a rank's host. Hosts may differ; they are shown where calls do."""

VERSIONS_LINE = "versions: "
"""Beginning of the line of a text that has the versions of packages."""

MAX_NAMED_HOSTS = 3
"""Hosts that a row of the table names."""


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
    """Return a hash of a text without its host, or of values that have a text."""
    text = " ".join(map(str, values)).partition(HOST_FIELD)[0]
    return int.from_bytes(blake2b(text.encode(errors="backslashreplace"), digest_size=7).digest())


def describe_error(error: InputError) -> str:
    """Return the text of an error, which equals that of no call."""
    return SEPARATOR.join((type(error).__name__, *error.args))


def shared_error(texts: Sequence[str], failed: Sequence[int], ranks: Sequence[int]) -> InputError:
    """Return the error of the first shard that failed. If none did, return one with a table of the calls by rank."""
    for text, is_error in zip(texts, failed, strict=True):
        if is_error:
            name, *parts = text.split(SEPARATOR)
            error: InputError = getattr(errors, name)(*parts)
            return error
    subject = texts[0].splitlines()[0]
    fix = "call it alike on all ranks of the mesh"
    if len({line for text in texts for line in [*text.splitlines(), ""] if line.startswith(VERSIONS_LINE)}) > 1:
        fix = "install the same versions of attnmesh and PyTorch on all hosts"
    if any(" of digest " in text for text in texts):
        fix += ", with the same inputs and, in a model, the same weights"
    return MeshError(subject, "the same call on every rank", _table(texts, ranks), fix)


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
