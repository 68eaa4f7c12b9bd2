"""Agreements on calls that end in a merge, whose messages carry a hash of the call."""

from collections.abc import Callable, Hashable
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from attnmesh.comm.merges import detects_mismatch
from attnmesh.comm.mismatch import cpu_reads_checksums
from attnmesh.errors import RankFailure
from attnmesh.guard.agreement import RAISED_ON_ALL_RANKS, Agreement, CallGuard, Fields, may_compare


class MergeDescription(NamedTuple):
    """A call that ends in a merge, as ranks compare it."""

    hashed_values: Hashable
    """Options, dtypes and shapes, by which the call is known again."""
    fields: Fields
    """Arguments that must be equal. Ranks compare them after a question, or after a merge of unequal checksums."""
    send_question: Callable[[], Tensor] | None
    """Sends a question in messages of this call's sizes. Returns the merged checksum. None if no question uses them."""


class MergeAgreement:
    """An agreement on a call that ends in a merge, whose messages carry the hash of the call at no cost.

    Ranks whose calls differ all raise, or all get NaN, by `checked`:

        device  the call is       None       True       False
        CPU     new or known      all raise  all raise  NaN    the CPU reads the merged checksum
        GPU     new to all ranks  all raise  all raise  NaN    all ask, and compare before they merge
        GPU     new to some       NaN        all raise  NaN    with None these ask, and the others only merge
        GPU     known to all      NaN        all raise  NaN    with None no CPU waits for the checksum
        any     in a graph        NaN        NaN        NaN    nothing can raise

    A compiled `merge_across` is an operator that compares, as a call outside of graphs does.

    An error of one rank is raised on that rank. The others raise it where the table says "all raise", and get NaN where
    it says NaN.

    *A question*, by `ask_all_ranks` on GPUs: a call is new to rank A, and A does not know if it is new to B.

        rank A                                      rank B, which knows the call
        to compare, A would wait for B              merges at once, and waits for a message of A
        sends its last merge's messages again   ->  receives them in its merge
        with `QUESTION` for a checksum
        the checksum says that B did not ask    <-  sends its own message of the merge
        returns NaN                                 returns NaN, as the checksums differ

        rank A                                      rank B, to which the call is new too
        sends a question                       <->  sends a question
        the checksum says that all asked            the checksum says that all asked
        compares, and raises or merges         <->  compares, and raises or merges

    *Poison*, by `raise_through_merge`: rank A has an error before its merge, on a CPU, with `checked=None`:

        rank A                                      rank B
        a check fails                               merges, and waits for a message of A
        sends an empty partial with `POISON`    ->  receives it in its merge
                                                    the checksum says that calls differ
        compares a text of its error           <->  compares its call
        raises its error                            raises A's error

    Where B reads no checksum, and where nothing is compared, B returns NaN instead. A repeats the messages of its last
    merge in place of the poison where the checksum stays on the device.

    *A collective* hangs or crashes where messages have unequal sizes. Calls that merge by one are compared before, on
    CPUs too. A call uses its agreement so:

        if agreement.compare_before_merge(description):
            try:
                out, checksum = merge(partial, hash_of_call(description.hashed_values))
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
        self.asks_about_new_calls = not cpu_reads_checksums(device) or guard.merges.repeat_last is not None
        """True if no CPU reads the merged checksum, so that a rank has to ask about a call that is new to it.

        After one such call it stays True for all later calls on the object.
        """

    def compare_before_merge(self, description: MergeDescription) -> bool:
        """Compare a call before its merge, if it needs that. Return False if this rank asked and another did not.

        On a CPU only a call that merges by a collective is compared here. On a GPU, with `checked=None`:

            the call is          this rank             others                        returns
            known to this rank   sends nothing         merge, or ask if it is new    True
            new to all           asks, then compares   ask, then compare             True, or all raise
            new to some          asks                  merge, and get NaN            False: this rank has NaN too
        """
        # Where the CPU reads the checksum no call is known: each is compared by its own merge.
        checksum_stays = self.asks_about_new_calls
        can_repeat, values = description.send_question is not None, description.hashed_values
        is_known = checksum_stays and can_repeat and values in self.guard.compared
        if self.is_compared and (not is_known if self.checked is None else self.checked):
            if checksum_stays and not self.ask_all_ranks():
                return False
            if checksum_stays or not detects_mismatch(self.merge_name):
                Agreement(self.guard.mesh, self.name, description.fields).compare()
        return True

    def check_merged(self, description: MergeDescription, checksum: Tensor) -> None:
        """Raise on all ranks if the checksum shows that calls differ.

        Where the checksum stays on the device, nothing is read. The call is known from now on, and its messages are
        those that a later question repeats.
        """
        if not self.asks_about_new_calls:
            if self.is_compared and self.checked is not False and float(checksum.sum()) != 0:
                self.raise_unequal(description.fields)
        elif description.hashed_values != self.guard.merges.last_hashed_values:
            self.guard.merges.add(description.hashed_values, description.send_question)

    def raise_unequal(self, fields: Fields) -> NoReturn:
        """Raise on all ranks. Collective: each of them calls it once a merge has shown that their calls differ."""
        Agreement(self.guard.mesh, self.name, fields).raise_unequal()

    def ask_all_ranks(self) -> bool:
        """Send a question in the messages of the last merge. Return whether all ranks ask.

        Ranks that know their call do not ask: they receive the question in their merge. Before the first merge on the
        object every call is new to all ranks, and nothing is sent.
        """
        repeat = self.guard.merges.repeat_last
        return repeat is None or float(repeat().sum()) == 0

    def raise_through_merge(self, error: Exception) -> NoReturn:
        """Raise an error of this rank. The others raise it too, or get NaN, as the table of the class says.

        No rank waits in a merge if the error is a `RankFailure`, or one that all ranks raise already, as in an append
        within the call. Such an error is raised as it is.
        """
        if isinstance(error, RankFailure) or hasattr(error, RAISED_ON_ALL_RANKS):
            raise error
        is_shared = self.is_compared and self.checked is not False
        if self.is_compared:
            with torch._C._DisableFuncTorch():  # a tensor made inside torch.func.grad has no memory to send from
                is_shared = self._end_merges(is_shared)
        Agreement(self.guard.mesh, self.name, is_compared=is_shared).raise_on_all(error)

    def _end_merges(self, is_shared: bool) -> bool:
        """End the merges of ranks that wait. Return whether they raise the error too, if `is_shared`."""
        if self.asks_about_new_calls:
            if is_shared:
                return self.ask_all_ranks()
            (self.guard.merges.repeat_last or self.poison)()
        elif detects_mismatch(self.merge_name):
            self.poison()
        return is_shared
