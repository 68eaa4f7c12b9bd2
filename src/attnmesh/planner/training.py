"""Ways to share long sequences and a model's weights over the ranks of a cluster in training: memory and tokens.

A step takes most memory at one of three moments: when the loss has its gradient, in the backward pass of the last
layer, beside the inputs of all layers, and in that of the first one, beside all gradients.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from attnmesh.mesh.cluster import Cluster
from attnmesh.mesh.traffic import divisors
from attnmesh.planner.plan import Plan, plan
from attnmesh.planner.serving import UNLIMITED_MEMORY
from attnmesh.planner.workload import Workload

WEIGHT_BYTES = 4
"""Bytes of a weight, in float32."""

STATE_BYTES = 3 * WEIGHT_BYTES
"""Bytes of a weight that is trained, without its gradient: itself and AdamW's two moments."""

LOGIT_BYTES = 14
"""Bytes of a logit: in the dtype of the model and in float32, its log-probability, and the gradient of that."""

LOSSES = ("full", "fused")
"""How a loss is computed: from the logits of all tokens, or tile by tile, as TRL's trainers do."""

TILE = 4096, 32768
"""Tokens and logits of a tile."""

TILE_HOST_BYTES = 32
"""Bytes of a logit of a tile on CPUs, where each operation on a tile makes another."""

INNER_VALUES, HIDDEN_BYTES = 6, 24
"""Values of a feed-forward network's inner width, and bytes for each column of a token in norms and residuals."""


@dataclass(frozen=True)
class TrainedModel:
    """Sizes of a model that is trained.

    Args:
        workload: Training with all of its attention layers.
        layers: All layers.
        hidden: Columns of a token between layers.
        inner: Columns of a token inside a feed-forward network.
        vocabulary: Tokens that the model knows.
        parameters: Numbers of all weights, without an adapter.
        adapter: Numbers of the weights of an adapter, which alone are trained; 0 to train all.
    """

    workload: Workload
    layers: int
    hidden: int
    inner: int
    vocabulary: int
    parameters: int
    adapter: int = 0

    @property
    def trained(self) -> int:
        """Numbers of the weights that are trained and saved."""
        return self.adapter or self.parameters

    @property
    def state_bytes(self) -> int:
        """Bytes of all weights, and of the optimizer of those that are trained."""
        frozen = self.parameters if self.adapter else 0
        return WEIGHT_BYTES * frozen + STATE_BYTES * self.trained

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint: the weights that are trained, and AdamW's moments."""
        return 3 * WEIGHT_BYTES * self.trained


class Method(NamedTuple):
    """How a trainer trains."""

    loss: str = "full"
    """One of `LOSSES`."""
    offload: bool = False
    """True if the inputs of layers wait in the host's memory."""
    ddp: bool = False
    """True if each rank holds all weights, False for a share of them with FSDP2."""
    rollout: int = 0
    """Completions of the planned length that the ranks of a sequence draw at once, for each sequence of a batch."""


STOCK = Method()
"""A trainer of transformers, with FSDP2."""


class Training(NamedTuple):
    """One way: some ranks share each sequence, and the others have other sequences."""

    data: int
    """Sequences at once, each on ranks of its own."""
    context: int
    """Ranks that share a sequence."""
    plan: Plan
    """Attention of the ranks that share a sequence."""
    states: float
    """Bytes a rank of weights and optimizer, and of weights that are gathered for a moment."""
    gradients: float
    """Bytes a rank of the gradients of weights."""
    inputs: float
    """Bytes a rank of the inputs of layers, which gradient checkpointing keeps on the device."""
    layer: float
    """Bytes a rank of the one layer that is computed again for its backward pass, attention included."""
    logits: float
    """Bytes a rank of logits and their gradients, and of the gradients of the head in one piece."""
    host: float
    """Bytes a rank of the inputs of layers in the host's memory."""
    completions: float
    """Bytes a rank of the keys and values of completions that are drawn."""
    tokens: int
    """Most tokens of a sequence that fit; 0 if the weights alone are too large."""

    @property
    def memory(self) -> float:
        """Bytes of a rank at the moment that takes most."""
        forward, backward = self.inputs + max(self.layer, self.logits), self.gradients + self.layer
        return self.states + max(forward, backward, self.completions)


def training(model: TrainedModel, cluster: Cluster, method: Method = STOCK) -> list[Training]:
    """Return all ways to train with gradient checkpointing.

    Those that fit the planned length come first, then those whose attention takes least of the ranks' time.

    >>> work = Workload(32, 8, 128, 131_072, layers=32, phase="training")
    >>> model = TrainedModel(work, 32, 4096, 14336, 128_256, 8_030_261_248)
    >>> [(one.data, one.context, one.tokens > 131_072) for one in training(model, Cluster.preset("dgx-h100", 1))]
    [(1, 8, True), (8, 1, False), (4, 2, False), (2, 4, False)]
    """
    contexts = [context for context in divisors(cluster.world) if _fits_hosts(cluster, context)]
    ways = [_way(model, cluster, context, method) for context in contexts]
    length = model.workload.length
    return sorted(ways, key=lambda one: (one.tokens < length, one.plan.seconds * one.context, one.context))


def _fits_hosts(cluster: Cluster, context: int) -> bool:
    """Return True if so many ranks are a part of each host, or whole hosts."""
    return cluster.ranks % context == 0 or context % cluster.ranks == 0


def _way(model: TrainedModel, cluster: Cluster, context: int, method: Method) -> Training:
    work, itemsize = model.workload, model.workload.itemsize
    hosts = max(1, context // cluster.ranks)
    part = replace(cluster.sized(hosts, context // hosts), device=replace(cluster.device, memory=UNLIMITED_MEMORY))
    best = plan(work, part)[0]
    again = min(one.memory for one in plan(replace(work, layers=1), part) if one.shape == best.shape)
    tokens = work.batch * work.length / context
    states, gradients = _state_bytes(model, cluster, method.ddp)
    inputs = tokens * model.layers * model.hidden * itemsize
    here, host = (inputs / model.layers, inputs) if method.offload else (inputs, 0.0)
    inner = INNER_VALUES * itemsize + (WEIGHT_BYTES if model.adapter else 0)  # an adapter reads its input in float32
    layer = again + tokens * (inner * model.inner + HIDDEN_BYTES * model.hidden)
    logits, fixed = tokens * model.vocabulary * LOGIT_BYTES, 0.0
    if method.loss == "fused":
        logits, fixed = tokens * HIDDEN_BYTES * model.hidden, _tile_bytes(model, cluster, tokens)
    keys = method.rollout * replace(work, phase="prefill").kept_bytes / context
    sizes = states, gradients, here, layer, fixed + logits, host, keys
    free = cluster.device.memory - states
    rooms = (free - fixed, here + logits), (free, here + layer), (free - gradients, layer), (free, keys)
    most = min(room / size for room, size in rooms if size)
    return Training(cluster.world // context, context, best, *sizes, max(0, int(work.length * most)))


def _state_bytes(model: TrainedModel, cluster: Cluster, ddp: bool) -> tuple[float, float]:
    """Return a rank's bytes of weights and optimizer, with weights that are cast or gathered; and of gradients."""
    itemsize, gradients = model.workload.itemsize, WEIGHT_BYTES * model.trained
    if ddp:  # autocast casts weights; DDP has buckets for gradients
        cast = itemsize * model.parameters if itemsize < WEIGHT_BYTES else 0
        return model.state_bytes + cast + (gradients if cluster.world > 1 else 0), gradients
    gathered = itemsize * (2 * model.parameters / model.layers + 2 * model.vocabulary * model.hidden)
    return model.state_bytes / cluster.world + gathered, gradients / cluster.world


def _tile_bytes(model: TrainedModel, cluster: Cluster, tokens: float) -> float:
    """Return the bytes of a tile of logits, and of the head and its gradient in one piece, in float32."""
    on_host = cluster.short_collectives == "ring"
    columns = TILE[1] * model.workload.itemsize + on_host * TILE_HOST_BYTES * min(model.vocabulary, TILE[1])
    return min(tokens, TILE[0]) * columns + (1 if model.adapter else 2) * WEIGHT_BYTES * model.vocabulary * model.hidden
