"""Ways to share long sequences and a model's weights over the ranks of a cluster in training: memory and tokens.

Most memory is taken in a rollout, or at one of six moments of a step, each of which has other weights, gradients and
activations beside the states: those of accelerate's autocast with DDP, and of its FSDP2.
"""

from dataclasses import dataclass, replace
from math import ceil
from operator import attrgetter
from typing import NamedTuple

from attnmesh.core.digest import SUM_ELEMENTS
from attnmesh.cost.candidate_mesh import CandidateMesh
from attnmesh.cost.cluster import Cluster
from attnmesh.cost.exchange_cost import layer_memory
from attnmesh.cost.traffic import divisors
from attnmesh.planner.plan import Plan, plan
from attnmesh.planner.serving import UNLIMITED_MEMORY
from attnmesh.planner.workload import Workload

WEIGHT_BYTES = 4
"""Bytes of a weight, in float32."""

TRAINED_WEIGHT_BYTES = 3 * WEIGHT_BYTES
"""Bytes of a weight that is trained, without its gradient: itself and AdamW's two moments."""

LOSSES = ("full", "fused")
"""Ways to compute a loss: from the logits of all tokens, or tile by tile, as TRL's trainers do."""


class LossMoments(NamedTuple):
    """Bytes at the three moments of a step at which logits are there."""

    loss: float
    loss_gradient: float
    head_gradient: float


LOGIT_BYTES = LossMoments(loss=10, loss_gradient=12, head_gradient=2)
"""Bytes of a logit at each moment:

    loss           10   the logit in 16 bits and in float32, its log-probability in float32
    loss_gradient  12   its log-probability, the gradient of that, and its own gradient, in float32
    head_gradient   2   its own gradient, in 16 bits
"""

TILE_TOKENS = 4096
"""Tokens of a tile of logits."""

TILE_COLUMNS = 32768
"""Logits of each token of a tile."""

TILE_LOGIT_BYTES_ON_CPUS = LossMoments(loss=13, loss_gradient=29, head_gradient=0)
"""Bytes of a logit on CPUs beside those of its tile: there each operation on a tile makes another tile."""

INTERMEDIATE_VALUES = 6
"""Values of a layer for each token and column of its feed-forward network."""

RESIDUAL_BYTES = 24
"""Bytes of norms and residuals for each token and hidden column, where all are of the dtype of the model."""

INPUT_WIDE_VALUES = 4
"""Values among those of `RESIDUAL_BYTES` that have the dtype of a layer's input."""


@dataclass(frozen=True)
class TrainingSizes:
    """Sizes of a model that is trained.

    Args:
        workload: Training with all of its attention layers.
        layers: All layers.
        hidden_size: Columns of a token between layers.
        intermediate_size: Columns of a token inside a feed-forward network.
        vocab_size: Tokens that the model knows.
        model_parameters: Numbers of all weights, without an adapter.
        adapter_parameters: Numbers of the weights of an adapter, which alone are trained; 0 to train all.
        tied: True if the output head has the weights of the embedding.
    """

    workload: Workload
    layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    model_parameters: int
    adapter_parameters: int = 0
    tied: bool = False

    @property
    def head_parameters(self) -> int:
        """Numbers of the output head, and of the embedding."""
        return self.vocab_size * self.hidden_size

    @property
    def layer_parameters(self) -> float:
        """Numbers of a layer."""
        return (self.model_parameters - self.head_parameters * (1 if self.tied else 2)) / self.layers

    @property
    def trained_head_and_layer(self) -> tuple[float, float]:
        """Numbers of the head that are trained, and of a layer."""
        if self.adapter_parameters:
            return 0, self.adapter_parameters / self.layers
        return self.head_parameters, self.layer_parameters

    @property
    def trained_parameters(self) -> int:
        """Numbers of the weights that are trained and saved."""
        return self.adapter_parameters or self.model_parameters

    @property
    def weight_and_optimizer_bytes(self) -> int:
        """Bytes of all weights, and of the optimizer of those that are trained."""
        frozen = self.model_parameters if self.adapter_parameters else 0
        return WEIGHT_BYTES * frozen + TRAINED_WEIGHT_BYTES * self.trained_parameters

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint: the weights that are trained, and AdamW's moments."""
        return TRAINED_WEIGHT_BYTES * self.trained_parameters


class TrainerOptions(NamedTuple):
    """Loss, offloading, parallelism and rollouts of a trainer."""

    loss: str = "full"
    """One of `LOSSES`."""
    offload: bool = False
    """True if the inputs of layers wait in CPU memory."""
    ddp: bool = False
    """True if each rank holds all weights, False for a share of them with FSDP2."""
    rollout: int = 0
    """Completions of the planned length that the ranks of a sequence draw at once, for each sequence of a batch."""


STOCK = TrainerOptions()
"""A trainer of transformers, with FSDP2."""


class Moment(NamedTuple):
    """The memory of a rank at a moment of a step, or in a rollout."""

    name: str
    fixed_bytes: float
    """Bytes that do not depend on the length: weights, optimizer, gradients, and tiles of logits."""
    growing_bytes: float
    """Bytes that grow with the tokens of a rank: activations, logits, and keys of completions."""

    @property
    def memory(self) -> float:
        """All bytes."""
        return self.fixed_bytes + self.growing_bytes


class TrainingPlan(NamedTuple):
    """One way: some ranks share each sequence, and the others have other sequences."""

    data: int
    """Sequences at once, each on ranks of its own."""
    context: int
    """Ranks that share a sequence."""
    attention_plan: Plan
    """Attention of the ranks that share a sequence."""
    weight_and_optimizer_bytes: float
    """Bytes a rank of weights and optimizer, and of DDP's buckets for gradients."""
    gradient_bytes: float
    """Bytes a rank of the gradients of weights."""
    input_bytes: float
    """Bytes a rank of the inputs of layers, which gradient checkpointing keeps on the device."""
    layer_bytes: float
    """Bytes a rank of the one layer that is computed again for its backward pass, attention included."""
    logit_bytes: float
    """Bytes a rank of logits and their gradients."""
    offloaded_bytes: float
    """Bytes a rank of the inputs of layers in CPU memory."""
    completion_bytes: float
    """Bytes a rank of the keys and values of completions that are drawn."""
    tokens: int
    """Most tokens of a sequence that fit; 0 if the weights alone are too large."""
    moments: tuple[Moment, ...]
    """Moments of a step: the loss, and in the backward pass that of the loss, of the head, and of layers; a rollout."""

    @property
    def memory(self) -> float:
        """Bytes of a rank at the moment that takes most."""
        return max(moment.memory for moment in self.moments)


def training_plans(model: TrainingSizes, cluster: Cluster, trainer: TrainerOptions = STOCK) -> list[TrainingPlan]:
    """Return all ways to train with gradient checkpointing.

    Those that fit the planned length come first, then those whose attention takes least of the ranks' time.

    >>> work = Workload(32, 8, 128, 131_072, layers=32, phase="training")
    >>> model = TrainingSizes(work, 32, 4096, 14336, 128_256, 8_030_261_248)
    >>> plans = training_plans(model, Cluster.preset("dgx-h100", 1))
    >>> [(plan.data, plan.context, plan.tokens > 131_072) for plan in plans]
    [(2, 4, True), (1, 8, True), (8, 1, False), (4, 2, False)]
    """
    contexts = [context for context in divisors(cluster.world) if _fits_hosts(cluster, context)]
    ways = [_training_plan_on(model, cluster, context, trainer) for context in contexts]
    length = model.workload.length
    return sorted(ways, key=lambda way: (way.tokens < length, way.attention_plan.seconds * way.context, way.context))


def _fits_hosts(cluster: Cluster, context: int) -> bool:
    """Return True if `context` ranks are a part of each host, or whole hosts."""
    return cluster.ranks % context == 0 or context % cluster.ranks == 0


def _training_plan_on(model: TrainingSizes, cluster: Cluster, context: int, trainer: TrainerOptions) -> TrainingPlan:
    """Return the way in which `context` ranks share each sequence."""
    work = model.workload
    hosts = max(1, context // cluster.ranks)
    roomy = replace(cluster.sized(hosts, context // hosts), device=replace(cluster.device, memory=UNLIMITED_MEMORY))
    attention = plan(work, roomy)[0]
    tokens_of_rank = ceil(work.length / context)
    tokens = work.batch * tokens_of_rank
    casts = _may_cast(cluster, trainer)
    fixed_bytes, gradients = _held_bytes(model, cluster, trainer.ddp)
    width = WEIGHT_BYTES if casts or model.adapter_parameters else work.itemsize  # embeddings, adapters: of float32
    inputs = tokens * model.layers * model.hidden_size * width
    layer_input = inputs / model.layers
    on_device, offloaded = (layer_input, inputs) if trainer.offload else (inputs, 0.0)
    residuals = tokens * RESIDUAL_BYTES * model.hidden_size
    layer = _layer_bytes(model, attention, tokens, width)
    completions = trainer.rollout * replace(work, phase="prefill").kept_bytes / context
    weights = _weights_beside(model, cluster, trainer)
    tiles, logits = _tiles_and_logits(model, cluster, trainer, tokens)
    beside_logits = on_device + residuals
    moments = (
        Moment("loss", fixed_bytes + weights.loss + tiles.loss, beside_logits + logits.loss),
        Moment(
            "gradient of the loss",
            fixed_bytes + weights.loss_gradient + tiles.loss_gradient,
            beside_logits + logits.loss_gradient,
        ),
        Moment(
            "gradient of the head",
            fixed_bytes + weights.head_gradient + tiles.head_gradient,
            beside_logits + logits.head_gradient,
        ),
        Moment("last layer", fixed_bytes + weights.last_layer, on_device + layer),
        Moment("first layer", fixed_bytes + weights.first_layer, layer_input + layer),
        Moment("embedding", fixed_bytes + weights.embedding, residuals),
        Moment("rollout", fixed_bytes, completions),
    )
    memory = cluster.device.memory
    ratio = min((memory - moment.fixed_bytes) / moment.growing_bytes for moment in moments if moment.growing_bytes)
    return TrainingPlan(
        data=cluster.world // context,
        context=context,
        attention_plan=attention,
        weight_and_optimizer_bytes=fixed_bytes,
        gradient_bytes=gradients,
        input_bytes=on_device,
        layer_bytes=layer,
        logit_bytes=tiles.loss_gradient + residuals + logits.loss_gradient,
        offloaded_bytes=offloaded,
        completion_bytes=completions,
        tokens=max(0, int(tokens_of_rank * ratio)) * context,
        moments=moments,
    )


def _may_cast(cluster: Cluster, trainer: TrainerOptions) -> bool:
    """Return whether autocast may cast weights, as it does without FSDP2.

    A world of one rank has FSDP2 if torchrun starts it, and none if python does.
    """
    return trainer.ddp or cluster.world == 1


def _layer_bytes(model: TrainingSizes, attention: Plan, tokens: int, width: int) -> float:
    """Return the bytes of the layer that is computed again, whose input has values of `width` bytes.

    In the backward pass its feed-forward network and the exchange of its attention follow each other.
    """
    work = model.workload
    plans = [way for way in plan(replace(work, layers=1), attention.cluster) if way.shape == attention.shape]
    smallest = min(plans, key=attrgetter("memory"))
    exchange = layer_memory(
        CandidateMesh(smallest.shape, smallest.tile, smallest.layout, smallest.exchange), work.one_layer, 0, 0
    )
    adapter_input = WEIGHT_BYTES if model.adapter_parameters else 0  # an adapter reads float32
    intermediate = tokens * (INTERMEDIATE_VALUES * work.itemsize + adapter_input) * model.intermediate_size
    residuals = tokens * (RESIDUAL_BYTES + INPUT_WIDE_VALUES * (width - work.itemsize)) * model.hidden_size
    return smallest.memory + residuals + max(0.0, intermediate - exchange)


def _held_bytes(model: TrainingSizes, cluster: Cluster, ddp: bool) -> tuple[float, float]:
    """Return a rank's bytes of weights and optimizer, with DDP's buckets for gradients; and of gradients."""
    fixed_bytes, gradients = model.weight_and_optimizer_bytes, WEIGHT_BYTES * model.trained_parameters
    digests = 8 * SUM_ELEMENTS if cluster.on_cpus else 0  # weights of digests
    if ddp:
        return fixed_bytes + (gradients if cluster.world > 1 else 0) + digests, gradients
    return fixed_bytes / cluster.world + digests, gradients / cluster.world


class StepWeights(NamedTuple):
    """Bytes of weights and gradients beside those that a rank always holds, at each moment of a step."""

    loss: float
    loss_gradient: float
    head_gradient: float
    last_layer: float
    first_layer: float
    embedding: float


def _weights_beside(model: TrainingSizes, cluster: Cluster, trainer: TrainerOptions) -> StepWeights:
    """Return the bytes of weights and gradients at each moment; the larger ones where FSDP2 may be there or not."""
    kinds = []
    if not trainer.ddp:
        kinds.append(_weights_beside_fsdp(model, cluster, trainer.loss))
    if _may_cast(cluster, trainer):
        kinds.append(_weights_beside_ddp(model, trainer.loss))
    return StepWeights(*map(max, zip(*kinds, strict=True)))


def _weights_beside_ddp(model: TrainingSizes, loss: str) -> StepWeights:
    """Return the bytes of weights and gradients on a rank that has all weights.

    Autocast casts a weight once in a forward pass, if it is trained, but not that of a fused head. Of layers that are
    computed again it casts one layer's.
    """
    size = model.workload.itemsize % WEIGHT_BYTES  # of what a weight is cast to: 0 in float32, where nothing is cast
    fused = loss == "fused"
    trained_head, trained_layer = model.trained_head_and_layer
    gradient, gradients = WEIGHT_BYTES * trained_head, WEIGHT_BYTES * model.trained_parameters
    head = 0 if fused else size * model.head_parameters
    layer = size * model.layer_parameters
    return StepWeights(
        loss=head + (0 if model.adapter_parameters else layer * model.layers),
        loss_gradient=head + (gradient if fused else 0),
        head_gradient=head + (0 if fused else size * trained_head) + gradient,
        last_layer=gradient + WEIGHT_BYTES * trained_layer + layer,
        first_layer=gradients - (0 if model.tied else gradient) + layer,
        embedding=gradients + (2 * gradient if model.tied else 0),
    )


def _weights_beside_fsdp(model: TrainingSizes, cluster: Cluster, loss: str) -> StepWeights:
    """Return the bytes of weights and gradients on a rank that has a share of all weights.

    FSDP2 gathers the embedding, each layer and the head, in the dtype of the model. What it sends stays until the next
    part is gathered in the forward pass, or is reduced in the backward pass, where the next part is gathered ahead.
    """
    size, world = model.workload.itemsize, cluster.world
    head, layer = size * model.head_parameters, size * model.layer_parameters
    trained_head, trained_layer = model.trained_head_and_layer
    gradients = WEIGHT_BYTES * (model.trained_parameters - trained_head) / world
    sent_head = size * trained_head
    gradient = WEIGHT_BYTES * trained_head if loss == "fused" else 0
    reduced = (2 + cluster.on_cpus) * sent_head + (sent_head + WEIGHT_BYTES * trained_head) / world  # gloo sends a copy
    return StepWeights(
        loss=head * (1 if model.tied or world == 1 else 2),
        loss_gradient=head + layer + gradient,
        head_gradient=layer + max(reduced, head + sent_head + gradient),
        last_layer=WEIGHT_BYTES * trained_head / world + sent_head + 2 * layer + size * trained_layer,
        first_layer=gradients + head + (sent_head if model.tied else 0) + layer + 2 * size * trained_layer,
        embedding=gradients + reduced,
    )


def _tiles_and_logits(
    model: TrainingSizes, cluster: Cluster, trainer: TrainerOptions, tokens: int
) -> tuple[LossMoments, LossMoments]:
    """Return the bytes of a tile of logits, and of the logits of all tokens: a loss takes one or the other."""
    none = LossMoments(0.0, 0.0, 0.0)
    if trainer.loss == "full":
        return none, LossMoments(*(float(tokens * model.vocab_size * size) for size in LOGIT_BYTES))
    casts = _may_cast(cluster, trainer)
    logit_bytes = TILE_LOGIT_BYTES_ON_CPUS if cluster.on_cpus else none
    return LossMoments(*(_tile_bytes(model, tokens, size, casts) for size in logit_bytes)), none


def _tile_bytes(model: TrainingSizes, tokens: float, logit_bytes: float, casts: bool) -> float:
    """Return the bytes of a tile of logits, with `logit_bytes` beside each one in the dtype of the model.

    On CPUs the products with the tile, or those with its weights, are of float32.
    """
    rows = min(tokens, TILE_TOKENS)
    columns = min(model.vocab_size, TILE_COLUMNS)
    itemsize = model.workload.itemsize
    products = max(rows * logit_bytes, WEIGHT_BYTES * (rows + model.hidden_size)) if logit_bytes else 0
    cast = itemsize * model.hidden_size if casts else 0
    return rows * TILE_COLUMNS * itemsize + columns * (cast + products)
