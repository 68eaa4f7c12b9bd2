"""Ways to share long sequences and a model's weights over the ranks of a cluster in training: memory and tokens.

Most memory is taken in a rollout, or at one of six moments of a step, each of which has other weights, gradients and
activations beside the states: those of accelerate's autocast with DDP, and of its FSDP2.
"""

from dataclasses import dataclass, replace
from itertools import zip_longest
from math import ceil
from operator import attrgetter
from typing import NamedTuple

from attnmesh.core.digest import SUM_ELEMENTS
from attnmesh.mesh.cluster import Cluster
from attnmesh.mesh.exchange_cost import layer_memory
from attnmesh.mesh.traffic import divisors
from attnmesh.mesh.way import Way
from attnmesh.planner.plan import Plan, plan
from attnmesh.planner.serving import UNLIMITED_MEMORY
from attnmesh.planner.workload import Workload

WEIGHT_BYTES = 4
"""Bytes of a weight, in float32."""

STATE_BYTES = 3 * WEIGHT_BYTES
"""Bytes of a weight that is trained, without its gradient: itself and AdamW's two moments."""

LOGIT_BYTES = 10, 12, 2
"""Bytes of a logit: in the loss in the dtype of the model, in float32, and its log-probability; then that, its
gradient, and the logit's own, in float32; at the gradient of the head the last alone, in the dtype of the model."""

LOSSES = ("full", "fused")
"""Ways to compute a loss: from the logits of all tokens, or tile by tile, as TRL's trainers do."""

TILE = 4096, 32768
"""Tokens and logits of a tile."""

TILE_CPU_BYTES = 13, 29, 0
"""Bytes of a logit of a tile on CPUs at the moments of `LOGIT_BYTES`: there each operation on a tile makes another."""

INNER_VALUES, HIDDEN_VALUES, HIDDEN_BYTES = 6, 4, 24
"""Values of a feed-forward network's inner width; and for each column of a token in norms and residuals, values of a
layer that are as wide as its input, and all bytes where they are of the dtype of the model."""

MOMENTS = ("loss", "gradient of the loss", "gradient of the head", "last layer", "first layer", "embedding", "rollout")
"""Moments of a step: the loss, and in the backward pass that of the loss, of the head, and of layers; and a rollout."""


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
        tied: True if the output head has the weights of the embedding.
    """

    workload: Workload
    layers: int
    hidden: int
    inner: int
    vocabulary: int
    parameters: int
    adapter: int = 0
    tied: bool = False

    @property
    def head(self) -> int:
        """Numbers of the output head, and of the embedding."""
        return self.vocabulary * self.hidden

    @property
    def layer(self) -> float:
        """Numbers of a layer."""
        return (self.parameters - self.head * (1 if self.tied else 2)) / self.layers

    @property
    def trained_parts(self) -> tuple[float, float]:
        """Numbers of the head that are trained, and of a layer."""
        return (0, self.adapter / self.layers) if self.adapter else (self.head, self.layer)

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
    """Loss, offloading, parallelism and rollouts of a trainer."""

    loss: str = "full"
    """One of `LOSSES`."""
    offload: bool = False
    """True if the inputs of layers wait in CPU memory."""
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
    """Bytes a rank of weights and optimizer, and of DDP's buckets for gradients."""
    gradients: float
    """Bytes a rank of the gradients of weights."""
    inputs: float
    """Bytes a rank of the inputs of layers, which gradient checkpointing keeps on the device."""
    layer: float
    """Bytes a rank of the one layer that is computed again for its backward pass, attention included."""
    logits: float
    """Bytes a rank of logits and their gradients."""
    host: float
    """Bytes a rank of the inputs of layers in CPU memory."""
    completions: float
    """Bytes a rank of the keys and values of completions that are drawn."""
    tokens: int
    """Most tokens of a sequence that fit; 0 if the weights alone are too large."""

    moments: dict[str, float]
    """Bytes of a rank at each moment of a step, states included."""

    @property
    def memory(self) -> float:
        """Bytes of a rank at the moment that takes most."""
        return max(self.moments.values())


def training(model: TrainedModel, cluster: Cluster, method: Method = STOCK) -> list[Training]:
    """Return all ways to train with gradient checkpointing.

    Those that fit the planned length come first, then those whose attention takes least of the ranks' time.

    >>> work = Workload(32, 8, 128, 131_072, layers=32, phase="training")
    >>> model = TrainedModel(work, 32, 4096, 14336, 128_256, 8_030_261_248)
    >>> [(way.data, way.context, way.tokens > 131_072) for way in training(model, Cluster.preset("dgx-h100", 1))]
    [(2, 4, True), (1, 8, True), (8, 1, False), (4, 2, False)]
    """
    contexts = [context for context in divisors(cluster.world) if _fits_hosts(cluster, context)]
    ways = [_training_on(model, cluster, context, method) for context in contexts]
    length = model.workload.length
    return sorted(ways, key=lambda way: (way.tokens < length, way.plan.seconds * way.context, way.context))


def _fits_hosts(cluster: Cluster, context: int) -> bool:
    """Return True if so many ranks are a part of each host, or whole hosts."""
    return cluster.ranks % context == 0 or context % cluster.ranks == 0


def _training_on(model: TrainedModel, cluster: Cluster, context: int, method: Method) -> Training:
    """Return the way in which so many ranks share each sequence."""
    work = model.workload
    hosts = max(1, context // cluster.ranks)
    machines = replace(cluster.sized(hosts, context // hosts), device=replace(cluster.device, memory=UNLIMITED_MEMORY))
    attention = plan(work, machines)[0]
    tokens_of_rank = ceil(work.length / context)
    tokens = work.batch * tokens_of_rank
    kinds = [_beside_ddp] if method.ddp else [_beside_fsdp]
    if cluster.world == 1 and not method.ddp:  # FSDP2 of torchrun's one rank; python's one process goes without
        kinds.append(_beside_ddp)
    casts = _beside_ddp in kinds
    states, gradients = _state_bytes(model, cluster, method.ddp)
    width = WEIGHT_BYTES if casts or model.adapter else work.itemsize  # embeddings, or adapters, are of float32
    inputs = tokens * model.layers * model.hidden * width
    layer_input = inputs / model.layers
    on_device, host = (layer_input, inputs) if method.offload else (inputs, 0.0)
    hidden = tokens * HIDDEN_BYTES * model.hidden
    layer = _layer_bytes(model, attention, tokens, width)
    keys = method.rollout * replace(work, phase="prefill").kept_bytes / context
    logits = [float(tokens * model.vocabulary * size) for size in LOGIT_BYTES]
    tiles = [0.0] * len(LOGIT_BYTES)
    if method.loss == "fused":
        on_cpu = cluster.on_cpus
        logits = tiles
        tiles = [_tile_bytes(model, tokens, size * on_cpu, casts) for size in TILE_CPU_BYTES]
    beside = [max(sizes) for sizes in zip(*(kind(model, cluster, method.loss) for kind in kinds), strict=True)]
    fixed = [states + size + tile for size, tile in zip_longest((*beside, 0.0), tiles, fillvalue=0.0)]
    growing = *(on_device + hidden + size for size in logits), on_device + layer, layer_input + layer, hidden, keys
    ratio = min(
        (cluster.device.memory - fixed_bytes) / size for fixed_bytes, size in zip(fixed, growing, strict=True) if size
    )
    moments = dict(zip(MOMENTS, map(sum, zip(fixed, growing, strict=True)), strict=True))
    sizes = states, gradients, on_device, layer, tiles[1] + hidden + logits[1], host, keys
    fitting = max(0, int(tokens_of_rank * ratio)) * context
    return Training(cluster.world // context, context, attention, *sizes, fitting, moments)


def _layer_bytes(model: TrainedModel, attention: Plan, tokens: int, width: int) -> float:
    """Return the bytes of the layer that is computed again, whose input has values of `width` bytes.

    In the backward pass its feed-forward network and the exchange of its attention follow each other.
    """
    work = model.workload
    plans = [way for way in plan(replace(work, layers=1), attention.cluster) if way.shape == attention.shape]
    smallest = min(plans, key=attrgetter("memory"))
    exchange = layer_memory(
        Way(smallest.shape, smallest.tile, smallest.layout, smallest.exchange), work.one_layer, 0, 0
    )
    inner = INNER_VALUES * work.itemsize + (WEIGHT_BYTES if model.adapter else 0)  # an adapter reads float32
    hidden = HIDDEN_BYTES + HIDDEN_VALUES * (width - work.itemsize)
    return smallest.memory + tokens * hidden * model.hidden + max(0.0, tokens * inner * model.inner - exchange)


def _state_bytes(model: TrainedModel, cluster: Cluster, ddp: bool) -> tuple[float, float]:
    """Return a rank's bytes of weights and optimizer, with DDP's buckets for gradients; and of gradients."""
    gradients = WEIGHT_BYTES * model.trained
    digests = 8 * SUM_ELEMENTS if cluster.on_cpus else 0  # weights of digests
    if ddp:
        return model.state_bytes + (gradients if cluster.world > 1 else 0) + digests, gradients
    return model.state_bytes / cluster.world + digests, gradients / cluster.world


def _beside_ddp(model: TrainedModel, cluster: Cluster, loss: str) -> tuple[float, ...]:
    """Return the bytes of weights and gradients beside a rank's states at each of `MOMENTS`, where it has all of them.

    Autocast casts a weight once in a forward pass, if it is trained, but not that of a fused head. Of layers that are
    computed again it casts one layer's.
    """
    size = model.workload.itemsize % WEIGHT_BYTES  # of what a weight is cast to: 0 in float32, where nothing is cast
    fused = loss == "fused"
    trained_head, trained_layer = model.trained_parts
    gradient, gradients = WEIGHT_BYTES * trained_head, WEIGHT_BYTES * model.trained
    head = 0 if fused else size * model.head
    layer = size * model.layer
    return (
        head + (0 if model.adapter else layer * model.layers),
        head + (gradient if fused else 0),
        head + (0 if fused else size * trained_head) + gradient,
        gradient + WEIGHT_BYTES * trained_layer + layer,
        gradients - (0 if model.tied else gradient) + layer,
        gradients + (2 * gradient if model.tied else 0),
    )


def _beside_fsdp(model: TrainedModel, cluster: Cluster, loss: str) -> tuple[float, ...]:
    """Return the bytes of weights and gradients beside a rank's states at each of `MOMENTS`, where it has a share.

    FSDP2 gathers the embedding, each layer and the head, in the dtype of the model. What it sends stays until the next
    part is gathered in the forward pass, or is reduced in the backward pass, where the next part is gathered ahead.
    """
    size, world = model.workload.itemsize, cluster.world
    head, layer = size * model.head, size * model.layer
    trained_head, trained_layer = model.trained_parts
    gradients = WEIGHT_BYTES * (model.trained - trained_head) / world
    sent_head = size * trained_head
    gradient = WEIGHT_BYTES * trained_head if loss == "fused" else 0
    reduced = (2 + cluster.on_cpus) * sent_head + (sent_head + WEIGHT_BYTES * trained_head) / world  # gloo sends a copy
    return (
        head * (1 if model.tied or world == 1 else 2),
        head + layer + gradient,
        layer + max(reduced, head + sent_head + gradient),
        WEIGHT_BYTES * trained_head / world + sent_head + 2 * layer + size * trained_layer,
        gradients + head + (sent_head if model.tied else 0) + layer + 2 * size * trained_layer,
        gradients + reduced,
    )


def _tile_bytes(model: TrainedModel, tokens: float, size: float, casts: bool) -> float:
    """Return the bytes of a tile of logits, of `size` bytes each on a host beside that in the dtype of the model.

    There the products with the tile, or those with its weights, are of float32.
    """
    rows = min(tokens, TILE[0])
    columns = min(model.vocabulary, TILE[1])
    itemsize = model.workload.itemsize
    products = max(rows * size, WEIGHT_BYTES * (rows + model.hidden)) if size else 0
    cast = itemsize * model.hidden if casts else 0
    return rows * TILE[1] * itemsize + columns * (cast + products)
