"""The guard: ranks compare their calls before one waits for another, or in the messages of a merge.

If any rank's call differs, all ranks raise.

A rank describes its call by a text, with a line for each argument that must be equal, or by the error that it has
found. Ranks compare a hash of the text: in a small all-gather, or in the messages of a merge. Only where the hashes
differ do they exchange the texts.

    fields     arguments that must be equal, by name
    text       the fields as lines, below the name of the call: what is hashed, and shown where calls differ
    payload    numbers that are gathered beside the hash, and may differ
    signature  what the checks of a call depend on; a rank finds by it what it has prepared; not compared
    hashed values  options, dtypes and shapes of a call that ends in a merge: their hash is compared, and once it was,
                   the call is known by them
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NoReturn, Self

import torch
import torch.distributed as dist
from torch import Tensor

from attnmesh.comm.gather import all_gather_ints, all_gather_texts, announce_comparison, drop_unreceived
from attnmesh.comm.topology import agreed_axis_mailboxes
from attnmesh.comm.transport import agreed_transport
from attnmesh.cost.agreement_cost import PAYLOAD_SIZE
from attnmesh.errors import InputError, MeshError, RankFailure, UnforeseenError
from attnmesh.guard.call_text import describe_call, describe_error, hash_of_call, shared_error
from attnmesh.mesh.axes import Axis, RankMesh, mesh_of_axis
from attnmesh.runtime.memo import Memo
from attnmesh.runtime.world import collective_once

Fields = Mapping[str, object] | Callable[[], Mapping[str, object]] | str
"""Arguments that must be equal: by name, or what returns them once they are checked, or the text of the call."""

RAISED_ON_ALL_RANKS = "raised_on_all_ranks"
"""Attribute of an error that all ranks of a mesh raise. A rank does not share it again: no other would answer."""


def may_compare(device: torch.device) -> bool:
    """Return False while a graph is compiled or captured. Ranks cannot compare calls then."""
    return not (torch.compiler.is_compiling() or is_capturing(device))


def is_capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph is being captured. The CPU must not wait then."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Agreement:
    """One call on which all ranks of a mesh agree, as a `with` around checks, or other work, that may fail on one rank.

    Ranks compare once, before any tensor is sent: by `compare` as the last line of the `with`, or at its end if
    `compare` was not called. If a check fails on rank A alone, A compares the error in place of its call. Rank B, whose
    checks pass, compares its call, gets A's error, and raises it too. With `is_compared=False` nothing is sent: an
    error is raised on its own rank alone.

        with Agreement(mesh, "halo") as agreement:
            check(x)  # an error here is raised on all ranks
            table = agreement.compare({"dtype": x.dtype}, payload=[len(x)])  # what must be equal, and what may differ
        lengths = [row[0] for row in table]
    """

    def __init__(
        self,
        mesh: RankMesh,
        name: str,
        fields: Fields = dict,
        *,
        is_compared: bool = True,
        compared_calls: Memo[bool] | None = None,
    ) -> None:
        self.mesh, self.name, self.fields, self.is_compared = mesh, name, fields, is_compared
        self.compared_calls = compared_calls  # gets the name of the call, once it is compared
        self.is_over = False  # True once ranks compare: the end of the `with` does not compare again

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
        """Return the payloads of all ranks by shard. All ranks raise if their calls differ, or if one has an error.

        Args:
            fields: Arguments that must be equal; by default the fields that the agreement was made with.
            payload: Up to `PAYLOAD_SIZE` numbers of this rank, which may differ.
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
        if self.compared_calls is not None:
            self.compared_calls.keep(self.name, True)
        return payloads

    def raise_on_all(self, error: Exception) -> NoReturn:
        """Raise an error of this rank, on all ranks if they compare the call.

        This rank compares a text of the error, which no call has, so every rank finds a difference. All raise the error
        of the first shard that has one. An error that no check has found, such as a lack of memory, is raised as it is
        on its own rank, and as an `UnforeseenError` on the others.
        """
        if self.is_compared:
            if isinstance(error, InputError):
                shared = error
            else:
                given = " ".join(f"{type(error).__name__}: {error}".split())
                fix = "see the error of the rank that raised"
                shared = UnforeseenError(self.name, "what each rank can do", given, fix)
            self._compare_texts(describe_error(shared), error=error)
        raise error

    def raise_unequal(self) -> NoReturn:
        """Raise on all ranks. Collective: each of them calls it once a merge has shown that their checksums differ."""
        self.compare()
        all_gather_ints([0], self.mesh)  # a barrier: all ranks are out of the merge
        drop_unreceived(self.mesh)  # messages of a merge that some rank broke off
        all_gather_ints([0], self.mesh)  # a barrier: no rank sends before all have dropped their messages
        given, fix = "different checksums of equal calls", "report this bug, with the arguments of each rank"
        raise _mark(MeshError(self.name, "the same checksum on every rank", given, fix))

    def _compare_texts(self, text: str, payload: Sequence[int] = (), error: Exception | None = None) -> list[list[int]]:
        """Return the payloads of all ranks if their texts are equal. Otherwise all ranks raise."""
        assert len(payload) <= PAYLOAD_SIZE
        self.is_over = True
        announce_comparison(self.mesh)
        padded = [*payload, *[0] * (PAYLOAD_SIZE - len(payload))]
        table = all_gather_ints([hash_of_call(text), error is not None, *padded], self.mesh)
        hashes, failed, *_ = zip(*table, strict=True)
        if any(failed) or len(set(hashes)) > 1:
            drop_unreceived(self.mesh)  # as those of rank A, which merges by a tree, while rank B merges directly
            texts = all_gather_texts(text, self.mesh)
            ranks = all_gather_ints([dist.get_rank() if dist.is_initialized() else 0], self.mesh)
            if error is not None and not isinstance(error, InputError):
                raise _mark(error)
            raise _mark(shared_error(texts, failed, [rank for (rank,) in ranks])) from None
        return [row[2 : 2 + len(payload)] for row in table]


class MergeHistory:
    """Merges on one object whose checksums stayed on the device. `MergeAgreement` asks, and adds each new one."""

    def __init__(self, compared: Memo[bool]) -> None:
        self.compared = compared  # of the guard: on GPUs a merge counts as the first call on the object
        self.last_hashed_values: object = None
        """Those of the last merge."""
        self.repeat_last: Callable[[], Tensor] | None = None
        """Sends the messages of the last merge again, with `QUESTION` for a checksum. Returns the merged checksum."""

    def add(self, hashed_values: Hashable, repeat: Callable[[], Tensor] | None) -> None:
        """Add a merge. One that cannot be repeated leaves an earlier one to repeat."""
        self.compared.keep(hashed_values, True)
        self.last_hashed_values, self.repeat_last = hashed_values, repeat or self.repeat_last


class CallGuard:
    """When ranks compare their calls on one object, such as a cache, by its `checked`.

        checked   compared on CPUs              compared on GPUs
        None      the first call of each name   the first call on the object, which is new to all ranks
        True      every call                    every call
        False     no call                       no call

    On GPUs a later call may be new to rank B alone. Rank A knows the call and begins its exchange at once. If B
    compared, it would wait for A, which compares nothing. So B does not compare it.

    Calls that end in a merge follow the table of `MergeAgreement` instead. There B joins A's merge with a question.
    """

    def __init__(self, mesh: RankMesh, device: torch.device, checked: bool | None) -> None:
        self.mesh, self.device, self.checked = mesh, device, checked
        self.is_alone = mesh.ranks == 1
        self.compared: Memo[bool] = Memo()  # by name, or by hashed values
        self.merges = MergeHistory(self.compared)

    def will_compare(self, name: str, *, always: bool = False) -> bool:
        """Return whether ranks compare the next call of this name, by the table or `always`, but never in a graph."""
        if self.is_alone:
            return False
        is_new = not self.compared if self.device.type == "cuda" else name not in self.compared
        compares = always or (is_new if self.checked is None else self.checked)
        return compares and may_compare(self.device)

    def raise_uncompared(self, name: str, error: InputError) -> NoReturn:
        """Raise an error of this rank in a call that no agreement is around, such as a later `append`.

        ranks                          who raises
        CPUs of one host               all: the others, which wait in their next merge, see that this rank compares
        any others, or checked=False   this rank alone: the others wait in their next merge, and join no comparison
        """
        tells = self.device.type == "cpu" and not self.is_alone and self.checked is not False
        share_host = tells and all(agreed_axis_mailboxes(axis) is not None for axis in self.mesh.axes if axis.size > 1)
        Agreement(self.mesh, name, is_compared=share_host).raise_on_all(error)

    def agreement(self, name: str, fields: Fields = dict, *, always: bool = False) -> Agreement:
        """Return the agreement on the next call of this name."""
        is_compared = self.will_compare(name, always=always)
        return Agreement(self.mesh, name, fields, is_compared=is_compared, compared_calls=self.compared)


@collective_once
def agree_on_merges(axis: Axis) -> None:
    """Make the transport of an axis of CPUs, and time its merges. Collective at its first call, before any merge.

    Ranks compare this call first. Otherwise rank A, which times merges, could get a message that rank B sends in
    another call.
    """
    Agreement(mesh_of_axis(axis), "the first merge along an axis").compare()
    agreed_transport(axis, torch.device("cpu")).agreed_fastest()


def _mark(error: Exception) -> Exception:
    setattr(error, RAISED_ON_ALL_RANKS, True)
    return error
