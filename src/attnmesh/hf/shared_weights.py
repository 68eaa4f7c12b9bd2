"""Weights shared by the ranks of a host: in a step of decoding, each rank computes some outputs of each linear layer.

Ranks along the keys of a mesh would each compute every layer whole. Here each reads its rows of a weight alone, and the
ranks exchange the outputs through shared memory. One rank computes an output whole, by a sum of one order, so the
numbers do not depend on how many ranks there are. A prompt, whose tokens the ranks divide, is computed from whole
weights: ranks of a host that load one file map the same memory.
"""

from collections.abc import Mapping, Sequence
from threading import get_ident
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from transformers import PreTrainedModel

from attnmesh.comm.host_linear import MAX_SHARED_ROWS, HostLinear, LayerBoards, Weights, agreed_layer_boards, memory_of
from attnmesh.comm.mismatch import CallsDifferError
from attnmesh.errors import InputError, KernelError, MeshError, ModelError, RankFailure
from attnmesh.guard.agreement import Agreement
from attnmesh.hf.cache.sharded_cache import ShardedCache
from attnmesh.hf.family import family_of
from attnmesh.hf.host_experts import HostExperts, host_experts_of
from attnmesh.hf.models import check_can_generate, unwrap
from attnmesh.hf.shard_tensors import ShardMask, ShardPositions
from attnmesh.hf.transformers_names import Conv1D
from attnmesh.kernels.native.build import library
from attnmesh.kernels.native.native_digest import digest_on_cpu
from attnmesh.mesh.axes import RankMesh
from attnmesh.runtime.memory import mapped_files

SUBJECT = "share_weights"

LEAST_LAYER_BYTES = 1 << 17
"""Bytes of a weight that is shared: a smaller one is read sooner than its outputs are exchanged."""

MAX_CALL_LAYERS = 8
"""Most layers of one input that one call computes: each layer has as many message numbers."""


def share_weights(model: Any, mesh: DeviceMesh | None) -> Any:
    """Let the ranks of a mesh compute the linear layers of a model together, in the steps of `generate` and `Engine`.

        mesh = am.init_mesh((1, 1, 4))
        model = hf.share_weights(AutoModelForCausalLM.from_pretrained(name, attn_implementation="attnmesh"), mesh)
        tokens = hf.generate(model, ids, mesh=mesh)

    A step of at most 160 tokens, 16 in narrow dtypes, takes as many products in all as on one rank. Of the experts that
    tokens choose each rank computes some. Layers of other kinds and of quantized weights are computed by every rank, as
    without this. So is all that runs without a `ShardedCache` on this mesh, and with gradients. The ranks share along
    the longest axis of the mesh.

    Args:
        model: A causal language model with `attn_implementation="attnmesh"`, with equal weights on all ranks.
        mesh: The mesh of the caches; None for one device, which gets the same numbers as ranks that share.

    Returns:
        The model, changed in place. A second call changes the mesh.

    Raises:
        InputError: The ranks are on several hosts or on GPUs, there is no native library, or the weights are sharded.

    >>> from transformers import AutoModelForCausalLM, LlamaConfig
    >>> sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    >>> model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=97, **sizes), attn_implementation="attnmesh")
    >>> share_weights(model, None) is model
    True
    """
    inner = unwrap(model)
    rank_mesh = RankMesh.of(mesh)
    layers, experts = dict[str, nn.Module](), list[nn.Module]()
    if isinstance(inner, PreTrainedModel):
        restore_shared(inner)
        layers, experts = shared_layers(inner)
    with Agreement(rank_mesh, SUBJECT, lambda: {"layers": _describe_layers(layers), "experts": _sizes(experts)}):
        _check(inner)
    axis = max(rank_mesh.axes, key=lambda mesh_axis: mesh_axis.size)
    boards = agreed_layer_boards(axis)
    with Agreement(rank_mesh, SUBJECT):
        given, fix = f"{axis.size} that share none", "use hf.tensor_parallel, or leave share_weights out"
        if boards is None:
            raise KernelError(SUBJECT, "ranks of one host, which share memory", given, fix)
    SharedSteps(rank_mesh, boards).begin(inner, layers, experts)
    return model


def restore_shared(model: nn.Module) -> None:
    """Let each rank compute the layers of a model on its own again."""
    steps: SharedSteps | None = vars(unwrap(model)).pop("shared_steps", None)
    if steps is not None:
        steps.end()


def end_step(model: nn.Module) -> None:
    """End a step that an interrupt has broken off: PyTorch calls no hook then."""
    steps: SharedSteps | None = vars(model).get("shared_steps")
    if steps is not None:
        steps.leave()


def weights_in_memory(model: nn.Module) -> int:
    """Return the bytes of a model's weights that this rank holds: its share of pages of a file that ranks map."""
    sizes: dict[int, int] = {}
    for weight in model.parameters():
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        storage = local.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
    mapped = mapped_files(sizes)
    return sum(mapped.get(address, size) for address, size in sizes.items())


def shared_layers(model: PreTrainedModel) -> tuple[dict[str, Any], list[nn.Module]]:
    """Return what ranks can share of a model: layers of its decoder, and its head, by name, and its experts.

    Weights on the meta device count as weights on a CPU.
    """
    head = model.get_output_embeddings()
    subclassed = family_of(model.config).subclassed
    kind_names = {name for name, record in subclassed.items() if record.is_alone}
    excluded = [
        module for module in model.modules() if kind_names.intersection(kind.__name__ for kind in type(module).__mro__)
    ]
    excluded_ids = {id(inner) for module in excluded for inner in module.modules()}
    modules = {name: module for name, module in model.get_decoder().named_modules() if id(module) not in excluded_ids}
    layers = {name: module for name, module in modules.items() if _is_shared(module)}
    if _is_shared(head) and all(layer is not head for layer in layers.values()):  # some decoders have it
        layers["head"] = head
    return layers, host_experts_of(modules.values())


def weights_of(layer: Any) -> Weights:
    """Return the weight, (outputs, columns), and bias of a layer."""
    weight = layer.weight
    is_turned = isinstance(layer, Conv1D) and type(weight) in (Tensor, Parameter)  # a call refuses others
    return (weight.t() if is_turned else weight), layer.bias


def _is_shared(module: Any) -> bool:
    is_plain = type(module) in SHARED and "forward" not in vars(module)
    if not is_plain or module.weight.nbytes < LEAST_LAYER_BYTES:
        return False
    takes = HostLinear.would_take if module.weight.is_meta else HostLinear.takes
    return takes(*weights_of(module))


def _describe_layers(layers: Mapping[str, Any]) -> str:
    """Return what ranks compare of layers: their sizes, their dtypes, and a digest of the first row of each."""
    weights = [layer.weight.detach() for layer in layers.values()]
    first_rows = sum(index * digest_on_cpu(weight[0]) for index, weight in enumerate(weights, 1)) % 2**64
    dtypes = sorted({str(weight.dtype) for weight in weights})
    return f"{len(weights)} of {sum(map(torch.numel, weights))} weights in {', '.join(dtypes)}, of digest {first_rows}"


def _sizes(experts: Sequence[nn.Module]) -> list[int]:
    """Return what ranks compare of experts: the number of weights of each layer."""
    return [sum(weight.numel() for weight in layer.parameters()) for layer in experts]


def _check(model: Any) -> None:
    """Raise unless the model decodes over a mesh, and has whole weights on the CPU."""
    check_can_generate(model)
    if any(isinstance(weight, DTensor) for weight in model.parameters()):
        raise ModelError(SUBJECT, "whole weights", "sharded ones", "load the model without sharding it")
    device = next(model.parameters()).device.type
    if device != "cpu":
        raise KernelError(SUBJECT, "a model on CPUs", f"one on {device}", "use hf.tensor_parallel")
    if (reason := library().reason) is not None:
        fix = "install a C++ compiler, or leave share_weights out"
        raise KernelError(SUBJECT, "the native library", reason, fix)


class SharedLayer(nn.Module):
    """A linear layer that ranks share in steps of decoding."""

    steps: "SharedSteps"

    def forward(self, x: Tensor) -> Tensor:
        """Return what the layer returns on one rank."""
        if not self.steps.is_within() or torch.compiler.is_compiling():
            return self.alone(x)
        return self.steps.run(self, x)

    def alone(self, x: Tensor) -> Tensor:
        """Return the outputs, computed by this rank."""
        out: Tensor = super().forward(x)
        return out


class SharedLinear(SharedLayer, nn.Linear):
    """A layer of PyTorch that ranks share."""


class SharedConv1D(SharedLayer, Conv1D):  # type: ignore[misc]
    """A layer of GPT-2 that ranks share, whose weight is (columns, outputs)."""


SHARED = {nn.Linear: SharedLinear, Conv1D: SharedConv1D}
"""Layers that ranks can share, and what they are while they do."""


class ComputedGroup(NamedTuple):
    """Layers of one input that a step has computed in one call."""

    first_layer: SharedLayer
    input: Tensor
    version: int | Tensor
    """Number of changes of the input in place, or the input itself: changes of inference tensors are not counted."""
    ahead: dict[SharedLayer, Tensor]
    """Outputs of the call's further layers, until these are called."""

    def is_of(self, x: Tensor) -> bool:
        """Return whether the call had this input, of the same numbers."""
        if x is not self.input:
            return False
        if not isinstance(self.version, Tensor):
            return x._version == self.version
        return torch.equal(x, self.version) or torch.allclose(x, self.version, 0, 0, equal_nan=True)


class SharedSteps:
    """The steps of decoding in which the ranks of an axis share the layers of one model.

    Layers that are called one after the other with one input, as those of queries, keys and values, are one call: the
    first of them computes the outputs of all. These groups are learned from the order of the calls, which is the same
    on all ranks.
    """

    thread: int | None = None
    """The thread that runs a shared step, in which all ranks compute the same tokens; None between steps."""
    outermost: nn.Module | None = None
    """The module whose forward pass is the step: the model, or its decoder if that is called alone."""
    last_group: ComputedGroup | None = None

    def __init__(self, mesh: RankMesh, boards: LayerBoards) -> None:
        self.mesh, self.boards, self.drops = mesh, boards, boards.drops
        self.hooks: list[Any] = []
        self.experts: Sequence[nn.Module] = ()
        self.message_numbers: dict[SharedLayer, int] = {}
        self.groups: dict[SharedLayer, list[SharedLayer]] = {}
        """The layers that a call computes, by the first of them."""
        self.calls: dict[tuple[SharedLayer, int], HostLinear] = {}
        """Calls by the first layer of a group and the number of its layers that are computed."""

    def begin(self, model: PreTrainedModel, layers: Mapping[str, nn.Module], experts: Sequence[nn.Module]) -> None:
        """Share these layers and experts of a model from its next forward pass on."""
        start = self.boards.reserve_numbers(MAX_CALL_LAYERS * len(layers))
        for index, layer in enumerate(layers.values()):
            layer.__class__ = SHARED[type(layer)]
            shared: Any = layer
            shared.steps, self.message_numbers[shared], self.groups[shared] = (
                self,
                start + index * MAX_CALL_LAYERS,
                [shared],
            )
        self.experts = experts
        for expert_layer in experts:
            vars(expert_layer)["forward"] = HostExperts(expert_layer.forward, self.boards.axis, self.is_within)
        for module in {model, model.get_decoder()}:  # of a prompt with images the decoder alone is called
            self.hooks.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            self.hooks.append(module.register_forward_hook(self._exit, always_call=True))
        vars(model)["shared_steps"] = self

    def end(self) -> None:
        """Share no longer."""
        self.leave()
        for hook in self.hooks:
            hook.remove()
        for layer in self.message_numbers:
            if isinstance(layer, SharedLayer) and layer.steps is self:  # not another model's
                layer.__class__ = type(layer).__mro__[2]
                del vars(layer)["steps"]
        for expert_layer in self.experts:
            forward = vars(expert_layer).get("forward")
            if isinstance(forward, HostExperts) and forward.shares_step == self.is_within:
                del vars(expert_layer)["forward"]

    def __reduce__(self) -> NoReturn:
        expected, given = "a model that shares no weights", "one that does"
        raise ModelError("copying or pickling a model", expected, given, "call hf.restore(model) before")

    def is_within(self) -> bool:
        """Return whether this thread runs a step that the ranks share."""
        return self.thread == get_ident()

    def run(self, layer: SharedLayer, x: Tensor) -> Tensor:
        """Return the outputs of a layer, from all ranks if the rows are few. All ranks raise an error of one rank."""
        if torch.is_autocast_enabled("cpu"):
            return layer.alone(x)
        last_group = self.last_group if self.last_group is not None and self.last_group.is_of(x) else None
        if last_group is not None and (output := last_group.ahead.pop(layer, None)) is not None:
            return output
        weight, _ = weights_of(layer)
        if not self._takes(weight, x):
            return layer.alone(x)
        try:
            return self._run(layer, x, last_group)
        except CallsDifferError:
            self._agreement(layer, x).raise_unequal()
        except (InputError, RankFailure):
            raise
        except Exception as error:
            self._agreement(layer, x).raise_on_all(error)

    def _agreement(self, layer: SharedLayer, x: Tensor) -> Agreement:
        names = {"layer": self.message_numbers[layer], "layers": len(self.groups[layer]), "input": tuple(x.shape)}
        return Agreement(self.mesh, "a layer of shared weights", names)

    @staticmethod
    def _takes(weight: Tensor, x: Tensor) -> bool:
        """Return whether a call takes this input."""
        columns = weight.shape[1]
        has_few_rows = 0 < x.numel() <= MAX_SHARED_ROWS.get(x.dtype, 0) * columns and x.shape[-1] == columns
        return has_few_rows and type(x) is Tensor and x.is_cpu and x.dtype == weight.dtype

    def _run(self, layer: SharedLayer, x: Tensor, last_group: ComputedGroup | None) -> Tensor:
        """Return the outputs of a layer. `last_group` is the group that was computed last, if it had this input."""
        if last_group is None:
            version = x.clone() if x.is_inference() else x._version
            out, *ahead = self._compute(self.groups[layer], x)
            self.last_group = ComputedGroup(layer, x, version, dict(zip(self.groups[layer][1:], ahead, strict=True)))
            return out
        group = self.groups[last_group.first_layer]
        if layer not in group and len(group) < MAX_CALL_LAYERS:
            group.append(layer)  # from the next step on
        return self._compute([layer], x)[0]

    def _compute(self, layers: Sequence[SharedLayer], x: Tensor) -> Sequence[Tensor]:
        """Return the outputs of layers, each from one rank."""
        key = (layers[0], len(layers))
        weights = [weights_of(layer) for layer in layers]
        call = self.calls.get(key)
        if call is not None and call.memories != [memory_of(*pair) for pair in weights]:
            self.calls.clear()  # weights have changed, and calls would keep the former ones
            call = None
        if call is None:
            if not all(self._fits(*pair, x) for pair in weights):
                self.groups[layers[0]] = [layers[0]]
                return [layers[0].alone(x)] if len(layers) == 1 else self._compute(layers[:1], x)
            number = self.message_numbers[layers[0]] + len(layers) - 1
            detached = [(weight.detach(), None if bias is None else bias.detach()) for weight, bias in weights]
            call = self.calls[key] = HostLinear(number, detached, self.boards.axis, self.boards.mailboxes)
        return call.run(x.contiguous())

    @staticmethod
    def _fits(weight: Tensor, bias: Tensor | None, x: Tensor) -> bool:
        """Return whether a call takes the weights that a layer has now, for this input."""
        return HostLinear.takes(weight, bias) and weight.dtype == x.dtype and weight.shape[1] == x.shape[-1]

    def _enter(self, module: nn.Module, args: tuple[Any, ...], arguments: dict[str, Any]) -> None:
        """Begin a shared step, if the ranks compute the same tokens with a cache on this mesh.

        While thread 1 is in a shared step, thread 2 computes without the other ranks. With a cache on this mesh it
        raises: on another rank thread 2 might begin first, and the ranks would exchange outputs of different steps.
        """
        inputs = [*args, *arguments.values()]
        cache = next((x for x in inputs if isinstance(x, ShardedCache)), None)
        in_parts = any(isinstance(x, ShardMask) or (isinstance(x, ShardPositions) and not x.whole) for x in inputs)
        is_shared = cache is not None and RankMesh.of(cache.mesh) == self.mesh and not in_parts
        if not is_shared or torch.is_grad_enabled():
            self.leave()
        elif not self.is_within():
            if not self.boards.lock.acquire(blocking=False):
                expected, given = "steps of one thread at a time", "one of a second thread within another"
                raise MeshError(SUBJECT, expected, given, "wait for the first, or give each thread a mesh of its own")
            self.thread, self.outermost = get_ident(), module
            if self.drops != self.boards.drops:  # ranks whose calls have differed may have learned different groups
                self.drops, self.groups = self.boards.drops, {layer: [layer] for layer in self.message_numbers}
                self.calls.clear()

    def _exit(self, module: nn.Module, *_: Any) -> None:
        if module is self.outermost:
            self.leave()

    def leave(self) -> None:
        """End the step of this thread, if there is one."""
        if self.is_within():
            self.thread = self.last_group = None
            self.boards.lock.release()
