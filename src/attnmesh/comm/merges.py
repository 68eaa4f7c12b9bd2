"""Merges across ranks: a record of each says what ranks send to each other, what that costs, and what it can do.

A merge sends messages of a size that does not depend on the context. A new one is a record in `MERGES`.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor

from attnmesh.core.partial import Partial
from attnmesh.cost.candidate_mesh import Cost
from attnmesh.cost.cluster import Cluster
from attnmesh.cost.merge_cost import (
    CHECKSUM_BYTES,
    TYPICAL_MESSAGE,
    MergeGroup,
    MessageSize,
    add_all_to_all,
    add_collective,
    add_tree,
)
from attnmesh.errors import check_choice
from attnmesh.mesh.axes import Axis

OUTPUTS = ("replicated", "heads")
"""Results of a merge: all heads on every rank, or on each rank its share of the heads."""

PartialWithChecksum = tuple[Tensor, Partial]
"""The maximum of the checksums of all ranks, and the merge of their partials."""

P2PMessage = tuple[Callable[..., Any], int, Tensor]
"""`dist.isend` or `dist.irecv`, the peer, and the tensor."""

Wait = Callable[[], None]
"""Waits until a message has been received or sent. It raises `RankFailure` at the deadline."""


class MergeForm(Protocol):
    """The part of a message's form that `run` of a merge may call: of `MessageForm`."""

    def merge(self, messages: Tensor) -> PartialWithChecksum:
        """Merge several messages."""


Form = TypeVar("Form", bound=MergeForm)
FormOfTransport = TypeVar("FormOfTransport", bound=MergeForm, contravariant=True)


class MergeTransport(Protocol[FormOfTransport]):
    """The part of a transport that `run` of a merge may call. `comm/transport.py` has one for each backend."""

    axis: Axis

    def post(self, posts: Sequence[P2PMessage], activity: str) -> Sequence[Wait]:
        """Begin to send and receive tensors. Return functions that wait for them."""

    def tree(self, message: Tensor, form: FormOfTransport, reproducible: bool) -> PartialWithChecksum:
        """Merge two messages in each round of a tree."""

    def direct(self, message: Tensor, form: FormOfTransport) -> PartialWithChecksum:
        """Send a message to every other rank, and merge all at once."""

    def gather(self, message: Tensor) -> Tensor:
        """Return the messages of all ranks, by a collective."""

    def all_reduce(self, message: Tensor, form: FormOfTransport) -> PartialWithChecksum:
        """Sum numerators and denominators by collectives."""


class RunMerge(Protocol):
    """Merges this rank's message by a transport, in its form."""

    def __call__(
        self, transport: MergeTransport[Form], message: Tensor, form: Form, reproducible: bool, /
    ) -> PartialWithChecksum:
        """Return the merge of all ranks. With `reproducible`, even ranks merge with odd ranks in the last round."""


class Pattern(Enum):
    """Exchanges that one native call of a host, or one launch on GPUs, may do in place of `run`."""

    ROUNDS = "pairs, along a tree"
    ALL_TO_ALL = "each rank to every other"


class Merge(NamedTuple):
    """One way to merge the partials of all ranks of an axis: by `run`, or by what its capabilities allow instead.

    Ranks of one host may do a `pattern` in a native call (`HostMerge`). With `sends_own_heads` they may send each rank
    its own heads alone (`send_heads`). Both give what `run` gives.
    """

    name: str
    run: RunMerge
    """Merges by a transport."""
    price: Callable[[MergeGroup, MessageSize, Cluster, Cost], None]
    """Adds the predicted cost of `run` to a cost."""
    published_as: str = ""
    """Name of the published scheme of decoding with this merge; empty if there is none."""
    pattern: Pattern | None = None
    """Exchanges of `run`, if one native call may do them. A merge without a pattern always runs by `run`."""
    is_canonical: bool = False
    """True if `run` can give the same bits on 1, 2, 4, 8, ... ranks. `reproducible` takes the first of these."""
    sends_own_heads: bool = False
    """True if ranks may send each its own heads alone. "auto" takes the first of these where the output is "heads"."""
    detects_mismatch: bool = False
    """True if the checksum shows that calls differ. False if `run` may hang or crash: ranks compare calls first."""
    is_packed: bool = True
    """True if messages travel as bytes. False if the numbers in them are summed on the way, in the dtype of lse."""

    @property
    def known_as(self) -> str:
        """Name of the scheme of decoding with it."""
        return self.published_as or self.name

    def seconds(self, group: MergeGroup, payload: MessageSize, cluster: Cluster) -> float:
        """Return the predicted seconds of one merge."""
        total = Cost()
        self.price(group, payload, cluster, total)
        return total.seconds


def _price_allreduce(group: MergeGroup, payload: MessageSize, cluster: Cluster, total: Cost) -> None:
    """Add the maximum, numerator and denominator, each a reduce-scatter and an all-gather."""
    column = payload.column_bytes
    for part in (column + CHECKSUM_BYTES, column * payload.columns, column):
        add_collective("merge", group, part / group.ranks, 2, cluster, total)


MERGES = {
    merge.name: merge
    for merge in (
        Merge(  # halves exchange what they hold, inside hosts first: ceil(log2 p) exchanges
            "tree",
            lambda transport, message, form, reproducible: transport.tree(message, form, reproducible),
            lambda group, payload, cluster, total: add_tree("merge", group, payload.size, cluster, total),
            "Tree Attention",
            pattern=Pattern.ROUNDS,
            is_canonical=True,
            detects_mismatch=True,
        ),
        Merge(  # one exchange and one merge; one launch on GPUs of one host
            "direct",
            lambda transport, message, form, _: transport.direct(message, form),
            lambda group, payload, cluster, total: add_all_to_all("merge", group, payload.size, cluster, total),
            "Helix, DCP",
            pattern=Pattern.ALL_TO_ALL,
            sends_own_heads=True,
            detects_mismatch=True,
        ),
        Merge(  # the same by an all-gather
            "gather",
            lambda transport, message, form, _: form.merge(transport.gather(message)),
            lambda group, payload, cluster, total: add_collective("merge", group, payload.size, 1, cluster, total),
            "gathered partials",
        ),
        Merge(  # maximum, numerator and denominator: the paper's Algorithm 3, a baseline
            "allreduce",
            lambda transport, message, form, _: transport.all_reduce(message, form),
            _price_allreduce,
            "Tree Attention by all-reduces",
            is_packed=False,
        ),
    )
}
"""All merges by name."""


def check_merge(subject: str, merge_name: str, output: str) -> None:
    """Raise unless `merge_name` names a merge and `output` an output."""
    option = "how" if subject == "merge_across" else "merge"
    check_choice(f"{subject} {option}", merge_name, ("auto", *MERGES), 'use "auto"')
    check_choice(f"{subject} output", output, OUTPUTS, 'use "replicated"')


def detects_mismatch(name: object) -> bool:
    """Return whether the merge of this name shows that calls differ, as "auto" and the name of no merge do."""
    return all(merge.detects_mismatch for merge in MERGES.values() if merge.name == name)


def canonical_merge() -> Merge:
    """Return the first merge that can give the same bits on 1, 2, 4, 8, ... ranks."""
    return next(merge for merge in MERGES.values() if merge.is_canonical)


def merge_of_own_heads() -> Merge:
    """Return the first merge in which each rank may get its own heads alone."""
    return next(merge for merge in MERGES.values() if merge.sends_own_heads)


def merges_of_auto() -> list[Merge]:
    """Return the merges among which "auto" takes the fastest."""
    return [merge for merge in MERGES.values() if merge.pattern is not None]


def fastest_merge(group: MergeGroup, cluster: Cluster) -> Merge:
    """Return the merge of "auto" with the lowest predicted cost for short messages, of equal ones the last record."""
    return min(merges_of_auto()[::-1], key=lambda merge: merge.seconds(group, TYPICAL_MESSAGE, cluster))
