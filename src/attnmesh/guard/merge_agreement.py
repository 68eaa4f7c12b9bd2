"""Agreements on calls that end in a merge, whose messages carry a hash of the call."""

from collections.abc import Callable, Hashable
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from attnmesh.comm.merges import is_collective
from attnmesh.errors import RankFailure
from attnmesh.guard.agreement import RAISED_ON_ALL_RANKS, Agreement, CallGuard, Fields, may_compare
from attnmesh.kernels.triton_runtime import interpreted


class MergeDescription(NamedTuple):
    """A call that ends in a merge, as ranks compare it."""

    facts: Hashable
    """All that a call needs to be known."""
    fields: Fields
    """All that must be equal, in words: it is compared where ranks ask, or found that calls differ."""
    ask: Callable[[], Tensor] | None
    """Part in the merge by a question; None where the CPU reads the messages."""


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

    An error in a check, or before this rank has merged, is raised by `raise_through_merge`: the others would wait for
    this rank. `poison` takes part in the merge without a call, so that they find it.

        if agreement.compare_before_merge(description):
            try:
                out, checksum = merge(partial, hash_of_call(description.facts))
            except Exception as error:
                agreement.raise_through_merge(error)
            agreement.check_merged(description, checksum)
    """

    def __init__(
        self,
        guard: CallGuard,
        device: torch.device,
        merge_name: str,
        checked: bool | None,
        name: str,
        poison: Callable[[], object],
    ) -> None:
        self.guard, self.merge_name, self.checked, self.name, self.poison = guard, merge_name, checked, name, poison
        self.is_compared = not guard.is_alone and may_compare(device)
        self.checksum_stays_on_device = device.type != "cpu" or interpreted() or guard.repeat_last_merge is not None
        """True if no CPU reads the merged checksum. So a rank asks about a call that is new to it.

        True on GPUs, when GPU kernels are interpreted on a CPU, and for the rest of the object's life after one such
        call.
        """

    def compare_before_merge(self, description: MergeDescription) -> bool:
        """Compare a call where ranks ask, or its messages need it. Return False if this rank asked and not all did.

        On a CPU nothing is sent here, but for a merge by a collective. On a GPU, with `checked=None`:

            the call is      this rank              others                 returns
            known here       sends nothing          by the rows below      True
            new to all       asks, then compares    ask, then compare      True, or all raise
            new to some      asks                   merge, and get NaN     False: this rank has NaN too
        """
        # A CPU that reads the checksum compares each call.
        checksum_stays = self.checksum_stays_on_device
        is_known = checksum_stays and description.ask is not None and description.facts in self.guard.known
        if self.is_compared and (not is_known if self.checked is None else self.checked):
            if checksum_stays and not self.ask_all_ranks():
                return False
            if checksum_stays or is_collective(self.merge_name):
                Agreement(self.guard.mesh, self.name, description.fields).compare()
        return True

    def check_merged(self, description: MergeDescription, checksum: Tensor) -> None:
        """Raise if the merged checksum shows that calls differ. All ranks raise.

        Where no CPU reads it, keep how to repeat the messages instead.
        """
        if not self.checksum_stays_on_device:
            if self.is_compared and self.checked is not False and float(checksum.sum()) != 0:
                self.raise_unequal(description.fields)
        elif description.facts != self.guard.last_known:
            guard = self.guard
            guard.known.keep(description.facts, True)
            guard.last_known, guard.repeat_last_merge = description.facts, description.ask or guard.repeat_last_merge

    def raise_unequal(self, fields: Fields) -> NoReturn:
        """Raise on all ranks, whose merge has shown that their calls differ."""
        Agreement(self.guard.mesh, self.name, fields).raise_unequal()

    def ask_all_ranks(self) -> bool:
        """Repeat the last merge, in which ranks wait that know their call. Return whether all ranks ask."""
        repeat = self.guard.repeat_last_merge
        return repeat is None or float(repeat().sum()) == 0

    def raise_through_merge(self, error: Exception) -> NoReturn:
        """Raise an error of this rank, and let the others raise it or get NaN, as the table of the class says.

        A lost rank, and an error that all ranks raise already, as of an append within the call, is raised as it is:
        none waits.
        """
        if isinstance(error, RankFailure) or hasattr(error, RAISED_ON_ALL_RANKS):
            raise error
        is_shared = self.is_compared and self.checked is not False
        if self.is_compared and self.checksum_stays_on_device:
            if is_shared:
                is_shared = self.ask_all_ranks()
            else:
                (self.guard.repeat_last_merge or self.poison)()
        elif self.is_compared and not is_collective(self.merge_name):
            self.poison()
        Agreement(self.guard.mesh, self.name, is_compared=is_shared).raise_on_all(error)
