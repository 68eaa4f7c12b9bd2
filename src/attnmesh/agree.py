"""Before anyone waits for anyone, the ranks of a mesh agree on what they are about to do.

A rank that raised alone would leave the others waiting for it. So each says what it was called with, or what is wrong
with that, in one small exchange; and if they do not all say the same, all raise the same error.
"""

from collections import defaultdict
from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from attnmesh import errors
from attnmesh.errors import InputError, MeshError
from attnmesh.exchange import share
from attnmesh.hosts import mesh_hosts
from attnmesh.mesh import Mesh
from attnmesh.partial import bits

SEPARATOR = "\x1f"


def digest(x: Tensor) -> Tensor:
    """A number that tells a tensor's bits from others: each weighed by an odd number of its own, modulo 2^64."""
    numbers = bits(x)
    return (numbers * torch.arange(1, 2 * len(numbers) + 1, 2, device=x.device)).sum()


def agree(mesh: Mesh, device: torch.device, call: str | InputError, numbers: Sequence[int] = ()) -> list[list[int]]:
    """Every rank's numbers, by shard, once all have been found to make the same call; else the error that all raise."""
    failed = isinstance(call, InputError)
    text = SEPARATOR.join((type(call).__name__, *call.args)) if isinstance(call, InputError) else call
    digest = int.from_bytes(blake2b(text.encode(), digest_size=7).digest())
    mesh_hosts(mesh, device)  # who is lost later may take its host along
    table = share([digest, failed, *numbers], mesh.axes, device)
    if any(row[1] for row in table) or len({row[0] for row in table}) > 1:
        _raise(_texts(mesh, device, text), [bool(row[1]) for row in table])
    return [row[2:] for row in table]


def _texts(mesh: Mesh, device: torch.device, text: str) -> list[str]:
    """Every rank's text, by shard: first how long they are, then the letters."""
    letters = text.encode()
    lengths = [row[0] for row in share([len(letters)], mesh.axes, device)]
    padded = [*letters, *[0] * (max(lengths) - len(letters))]
    return [bytes(row[:n]).decode() for row, n in zip(share(padded, mesh.axes, device), lengths, strict=True)]


def _raise(texts: list[str], failed: list[bool]) -> None:
    for text, is_error in zip(texts, failed, strict=True):
        if is_error:
            name, *parts = text.split(SEPARATOR)
            raise getattr(errors, name)(*parts)
    said = defaultdict(list)
    for shard, text in enumerate(texts):
        said[text].append(shard)
    given = "; ".join(f"on {_ranks(shards)} {text}" for text, shards in said.items())
    subject = texts[0].split(" ")[0]  # what is said of a call begins with its name
    raise MeshError(subject, "the same call on every rank", given, "call it alike on all ranks of the mesh")


def _ranks(shards: list[int]) -> str:
    return f"shard{'s' if len(shards) > 1 else ''} {', '.join(map(str, shards))}"
