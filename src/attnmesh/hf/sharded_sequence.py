"""Sequence of which a rank holds a shard, and the record of a forward pass over it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import get_ident
from weakref import ref

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.core.layout import Layout
from attnmesh.core.mask import Full, Mask
from attnmesh.decoding.query_shard import QueryShard
from attnmesh.errors import ArgumentError, KernelError
from attnmesh.hf.family import USE_SUPPORTED
from attnmesh.hf.models import SUBJECT
from attnmesh.mesh.axes import RankMesh
from attnmesh.mesh_attention.sharding import unshard

OF_SHARD_BATCH, FORWARD_ALL = "those of shard_batch", "forward all that hf.shard_batch returns to the model"
"""Error about an argument that a caller or a wrapper dropped or changed; and its fix."""


class PassRecord:
    """Record of one forward pass: which layers called attnmesh, and which arguments the model used.

    FSDP copies dataclasses among a layer's arguments. This is a plain class, so that all layers share one record.
    """

    def __init__(self) -> None:
        self.item_count: object = None
        """`num_items_in_batch` that the model was called with, unless it is the batch's `ItemCount`."""
        self.on_begin: Callable[[ShardedSequence], None] = lambda _: None
        """Called when a model embeds the tokens."""
        self.gathers_routers = False
        """True if the logits of routers are gathered, so that a loss of routers counts the tokens of all ranks."""
        self.key_lengths: Tensor | None = None
        """Tokens of each row before its padding, (batch,), to hide padding from padding; None if nothing reads it."""
        self.has_text_types = False
        """True if the batch has types of tokens, and all are 0."""
        self.token_ranges: dict[str, Tensor] = {}
        """Smallest and largest token of all ranks, by argument; none in generation."""
        self.begin()

    def begin(self) -> None:
        """Begin a forward pass."""
        self.attention_calls = 0
        """Layers that have called attnmesh for attention."""
        self.layers = 1
        """Layers of the model, from its config."""
        self.has_positions = False
        """True if the model was called with the batch's positions, or takes none."""
        self.positions_read = False
        """True if the model has read positions, as ropes do."""
        self.whole_mask: Tensor | None = None
        """Padding of the whole sequence, for a loss of routers. It takes the mask's place after the last layer."""


@dataclass(frozen=True)
class ShardedSequence:
    """Description of the sequence that this rank's tokens are a shard of.

    Args:
        mesh: The mesh that shares the sequence; None for one device.
        layout: The tokens that each rank holds.
        length: Tokens of all ranks.
        documents: Mask of packed sequences; `Full()` without packing.
        start: Number of cached tokens before the sequence.
        token_mask: (batch, tokens of all ranks), False for padding; None without padding.
        cached: True in generation, where keys go to a cache.
        label_counts: Labels to learn of each rank; none without labels.
        exchange: What ranks exchange in recurrent layers: "scan" for states, "heads" for tokens of their heads.
        forward_pass: Record that the model's layers share.

    >>> from attnmesh import Zigzag
    >>> ShardedSequence(None, Zigzag(), 8).ranks
    1
    """

    mesh: DeviceMesh | None
    layout: Layout
    length: int
    documents: Mask = Full()
    start: int = 0
    token_mask: Tensor | None = None
    cached: bool = False
    label_counts: tuple[int, ...] = ()
    exchange: str = "scan"
    forward_pass: PassRecord = field(default_factory=PassRecord, compare=False)

    @property
    def ranks(self) -> int:
        """Ranks that share the sequence."""
        return RankMesh.of(self.mesh).ranks

    @property
    def has_even_labels(self) -> bool:
        """True if all ranks have equally many labels to learn."""
        return len({*self.label_counts}) < 2

    @property
    def own_labels(self) -> int:
        """Labels to learn of this rank."""
        return self.label_counts[RankMesh.of(self.mesh).shard_index] if self.label_counts else 0

    @property
    def has_even_tokens(self) -> bool:
        """True if all ranks have equally many tokens."""
        return len({len(self.layout.positions(self.length, self.ranks, index)) for index in range(self.ranks)}) == 1

    def begin(self) -> None:
        """Begin a forward pass of these tokens."""
        self.forward_pass.begin()
        self.forward_pass.on_begin(self)
        BEGUN.sequence_ref, BEGUN.thread = ref(self, BEGUN.forget), get_ident()

    def positions(self) -> Tensor:
        """Return the positions of this rank's tokens in the whole sequence, cached tokens included."""
        return self.start + self.layout.positions(self.length, self.ranks, RankMesh.of(self.mesh).shard_index)

    def gather_tokens(self, x: Tensor) -> Tensor:
        """Return a tensor of this rank's tokens, along dim 1, as one of all ranks' tokens."""
        return unshard(x, self.mesh, layout=self.layout, length=self.length, dim=1)

    def queries(self, q: Tensor) -> QueryShard:
        """Return the queries of this rank's tokens, the last ones of a cache."""
        return QueryShard(q, self.layout, self.length)

    def mask_of(self, mask: Mask) -> Mask:
        """Return a layer's mask inside each document. Chunks begin anew with a document."""
        return mask.in_documents(self.documents)

    @property
    def has_prefix(self) -> bool:
        """True if attention reads the cache, for earlier tokens or for padding."""
        return self.start > 0 or self.token_mask is not None

    def count_layer(self, layer: str, layers: int, *, recurrent: bool = False) -> None:
        """Count one of the model's `layers` calls that mix tokens. Raise if attention counts positions by itself.

        In a model with `recurrent` layers attention may have no positions.
        """
        BEGUN.sequence_ref = None
        self.forward_pass.attention_calls += 1
        self.forward_pass.layers = layers
        fits = self.forward_pass.positions_read or recurrent
        if fits or self.ranks == 1:
            return
        if not (self.cached or self.forward_pass.has_positions):
            raise ArgumentError(f"{SUBJECT} position_ids", OF_SHARD_BATCH, "none or others", FORWARD_ALL)
        expected = "a model that takes positions from position_ids"
        given = f"a {layer} that counts them from 0 on each shard"
        raise KernelError(SUBJECT, expected, given, f"forward position_ids in wrappers, too; or {USE_SUPPORTED}")

    def check_all_layers_counted(self) -> None:
        """Raise if a layer has not called attnmesh: it mixed the tokens of this shard alone, or none."""
        calls, layers = self.forward_pass.attention_calls, self.forward_pass.layers
        if calls < layers and self.ranks > 1:
            expected = "a model whose layers all call attnmesh for attention"
            given = f"one in which {calls} of {layers} layers do" if calls else "one in which no layer does"
            raise KernelError(SUBJECT, expected, f"{given}, as in recurrent models", USE_SUPPORTED)


class BegunPass:
    """The forward pass that was begun last, until it reaches attention: its mask may get lost on the way.

    A compiled model that is given no shard guards on `sequence_ref` alone.
    """

    sequence_ref: Callable[[], ShardedSequence | None] | None = None
    """Return the sequence, while the batch exists; None if no pass waits for its mask."""
    thread = 0
    """Thread that began it."""

    def forget(self, sequence_ref: Callable[[], ShardedSequence | None]) -> None:
        """Drop the pass of a batch that is gone: an error broke it off."""
        if self.sequence_ref is sequence_ref:
            self.sequence_ref = None

    def of_this_thread(self) -> ShardedSequence | None:
        """Return the sequence of the pass, if this thread began it."""
        return self.sequence_ref() if self.sequence_ref is not None and self.thread == get_ident() else None


BEGUN = BegunPass()
