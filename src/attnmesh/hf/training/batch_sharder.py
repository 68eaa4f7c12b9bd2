"""Calls of a model with whole batches, which it computes in shards: arguments are sharded, outputs are gathered.

A trainer passes a whole batch and reads whole outputs, so what it computes from them is what it computes on one device.
Tensors of many tokens, such as logits, are gathered when they are first read.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from inspect import signature
from logging import getLogger
from typing import Any, NoReturn, cast
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from attnmesh.core.layout import Layout, Zigzag
from attnmesh.errors import ArgumentError, KernelError, short
from attnmesh.hf.images.inputs import IMAGE_INPUTS
from attnmesh.hf.models import check_implementation, check_tokens, is_recurrent, unwrap
from attnmesh.hf.random_numbers import own_random_numbers
from attnmesh.hf.shard_tensors import ShardTensor
from attnmesh.hf.sharded_sequence import ShardedSequence
from attnmesh.hf.training.batch import PACKING_ARGUMENTS, TOKEN_ARGUMENTS, AgreedBatch, agree_on_batch, shard_agreed
from attnmesh.hf.training.left_padding import MovedRows
from attnmesh.hf.training.mean_over_mesh import mean_over_ranks
from attnmesh.hf.training.mesh_shapes import MeshShapes
from attnmesh.mesh.axes import RankMesh
from attnmesh.mesh_attention.sharding import shard

BATCH_ARGUMENTS = (*TOKEN_ARGUMENTS, *PACKING_ARGUMENTS, *IMAGE_INPUTS, "num_items_in_batch")
"""Arguments that `shard_batch` takes."""

WHOLE = ("image_", "video_", "vision_", "audio_", "rope_deltas")
"""First letters of outputs that all ranks have as a whole: features of images, and shifts of positions."""

SUBJECT = "attnmesh.hf on_mesh"
"""First words of errors of a call with a whole batch."""


@dataclass(frozen=True)
class ShardedCall:
    """A call of a model with a whole batch, which it computes in shards."""

    module: nn.Module
    """The outermost module that was called."""
    sequence: ShardedSequence
    whole_mask: Tensor
    """Padding of the whole batch."""
    token_slice: slice
    """The tokens along dim 1 whose outputs the model returns on one device."""
    moved: MovedRows | None
    """Rows that were moved for the call, and move back."""


class BatchSharder:
    """Hooks that shard batches of models. While `active`, a model computes this rank's tokens of a whole batch.

    The gradients of a call are those of `shard_batch`: their mean over the ranks is the gradient on one device.
    """

    def __init__(
        self, device_mesh: DeviceMesh | None, layout: Layout | str, exchange: str = "scan", shape: str | None = None
    ) -> None:
        self.device_mesh, self.layout, self.exchange = device_mesh, layout, exchange
        self.shapes = MeshShapes(device_mesh, shape)
        self.chosen: set[tuple[object, type[Layout]]] = set()
        """Shapes and layouts that were logged."""
        self.is_active = False
        self.pads_left = False
        """True to take rows that begin with padding."""
        self.hides_padding = False
        """True if outputs of padding are read. Queries then see no padding."""
        self.under_classes: WeakSet[nn.Module] = WeakSet()
        """Models under a head of classes, which reads a padded token if its id is not that of the configuration."""
        self.call: ShardedCall | None = None
        """The present call; None outside of calls."""
        self.own_numbers = ExitStack()
        """Closed after a call, in which each rank draws random numbers of its own."""
        self.models: WeakSet[nn.Module] = WeakSet()
        self.layers: WeakSet[nn.Module] = WeakSet()
        """Layers of models, whose routers are gathered."""
        self.last_hooks: WeakKeyDictionary[nn.Module, RemovableHandle] = WeakKeyDictionary()

    @contextmanager
    def active(self, is_active: bool = True, *models: nn.Module) -> Iterator[None]:
        """Shard the calls of installed models in this context, or do not if not `is_active`. Install `models` first."""
        for model in models:
            self.install(model)
        was_active, self.is_active = self.is_active, is_active
        try:
            yield
        finally:
            self.is_active, self.call = was_active, None
            self.own_numbers.close()

    def install(self, model: nn.Module) -> None:
        """Install hooks on a model and on the model inside its wrappers. The outermost that is called shards."""
        inner: Any = unwrap(model, "on_mesh")
        is_known = isinstance(inner, PreTrainedModel)
        if not is_known:
            expected = "a model of transformers, or one in PEFT, DDP or a compiler"
            fix = "pass the model inside, or call it with hf.shard_batch(batch, mesh) in a loop of your own"
            raise KernelError("on_mesh", expected, type(inner).__name__, fix)
        check_implementation("on_mesh", inner.config)
        self.shapes.set_up(inner.config)
        devices = {*(getattr(inner, "hf_device_map", None) or {}).values()}
        if len(devices) >= 2:
            given = f"a device_map of {len(devices)} devices"
            raise KernelError("on_mesh", "a model on one device per rank", given, "load it without device_map")
        # A head of classes picks tokens by input_ids, so only the layers below it run on shards.
        classifies = getattr(inner, "score", None) is not None and inner.get_output_embeddings() is None
        if classifies:
            self.under_classes.add(inner.base_model)
        for module in (inner.base_model,) if classifies else (model, inner):
            if module not in self.models:
                self.models.add(module)
                module.register_forward_pre_hook(self._begin, with_kwargs=True)
            self._return_last(module)
        if not classifies and inner.base_model not in self.layers and inner.base_model is not inner:
            self.layers.add(inner.base_model)
            inner.base_model.register_forward_hook(self._gather_routers)

    def __deepcopy__(self, memo: dict[int, Any]) -> "BatchSharder":
        copied = memo[id(self)] = type(self).__new__(type(self))
        vars(copied).update({name: deepcopy(value, memo) for name, value in vars(self).items()})
        return copied

    def __reduce__(self) -> NoReturn:
        """Raise. A pickled model has its hooks in it, whose mesh another process does not have."""
        fix = "save model.state_dict(), or call model.save_pretrained(folder)"
        raise KernelError("on_mesh", "a model that is not pickled as a whole", "torch.save(model)", fix)

    def _return_last(self, module: nn.Module) -> None:
        """Return whole outputs after all other hooks. FSDP2's hooks read each output, which would gather the logits."""
        hook = self.last_hooks.get(module)
        if hook is not None and hook.id == next(reversed(module._forward_hooks), None):
            return
        if hook is not None:
            hook.remove()
        self.last_hooks[module] = module.register_forward_hook(self._end, with_kwargs=True, always_call=True)

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments with this rank's tokens, unless a module around this one has done so."""
        if not self.is_active or (self.call is not None and module is not self.call.module):
            return None  # the outermost has a call already only after an interrupt: PyTorch calls no hook then
        arguments = {**dict(zip(signature(unwrap(module).forward).parameters, args, strict=False)), **kwargs}
        if arguments.get("past_key_values") is not None:
            return None  # generation, which every rank does alone
        arguments.pop("past_key_values", None)
        batch = {name: arguments.pop(name) for name in BATCH_ARGUMENTS if arguments.get(name) is not None}
        moved = MovedRows.of(batch) if self.pads_left else None
        batch = batch if moved is None else moved.batch(batch)
        for name, value in arguments.items():
            if isinstance(value, Tensor):
                fix = "leave it out, or shard it yourself and call the model with shard_batch"
                raise ArgumentError(f"{SUBJECT} {name}", "text and images", short(value), fix)
        layout = self.layout
        if isinstance(layout, str) and is_recurrent(unwrap(module).config):
            layout = Zigzag()  # a state passes through runs of tokens
        agreed = agree_on_batch(batch, self.device_mesh, layout, self.exchange, {})
        check_tokens(f"{SUBJECT} input_ids", agreed.entries["input_ids"], unwrap(module))
        if module in self.under_classes and is_recurrent(unwrap(module).config):
            _check_padding_tokens(agreed.entries, unwrap(module).config)
        device_mesh, layout = self.shapes.choose(agreed, layout, unwrap(module).config)
        self._log_choice(agreed, device_mesh, layout)
        part = shard_agreed(agreed, device_mesh, layout, self.exchange)
        mask = batch.get("attention_mask")
        mask = torch.ones_like(batch["input_ids"]) if mask is None else mask
        token_slice = slice(None) if "shift_labels" in batch or not arguments.get("fused_lm_head") else slice(-1)
        self.call = ShardedCall(module, part["input_ids"].sequence, mask, token_slice, moved)
        record = self.call.sequence.forward_pass
        if (self.hides_padding or module in self.under_classes) and not bool(mask.all()):
            record.key_lengths = mask.sum(1).cpu()  # which each layer reads
        record.gathers_routers = unwrap(module).base_model is not module
        self._draw_own_numbers(batch)
        return (), {**{name: None for name in BATCH_ARGUMENTS if name in arguments}, **arguments, **part}

    def _draw_own_numbers(self, batch: Mapping[str, Any]) -> None:
        """Let this rank drop at other tokens than the others until the call ends, and then draw what they draw.

        Shards may have unequally many tokens, so ranks that drew from one generator would go on with other batches.
        """
        self.own_numbers.close()  # of a call that was interrupted
        mesh = RankMesh.of(self.device_mesh)
        # Each rank computes all images, so their features are to be the same.
        rank = 0 if any(name in IMAGE_INPUTS for name in batch) else mesh.shard_index
        if mesh.ranks > 1:
            self.own_numbers.enter_context(own_random_numbers(rank, batch["input_ids"].device))

    def _log_choice(self, batch: AgreedBatch, device_mesh: DeviceMesh | None, layout: Layout) -> None:
        """Log on the first rank the shape and the layout that "auto" has chosen, once each."""
        shape = RankMesh.of(device_mesh).shape
        chosen = (shape, type(layout))
        is_auto = isinstance(self.layout, str) or self.shapes.shape is not None
        if not is_auto or chosen in self.chosen or shape.ranks == 1 or dist.get_rank():
            return
        self.chosen.add(chosen)
        length = batch.positions.shape[1]
        documents = max(1, len(batch.documents.documents))
        size = f"{length:,} tokens in {documents} document{'s' * (documents > 1)}"
        place = f"{type(layout).__name__} on {'x'.join(map(str, shape))} ranks (heads x queries x keys)"
        getLogger(__name__).info("%s: %s", size, place)

    def _gather_routers(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return the outputs of the layers with the routers' logits of all tokens, for a loss that balances experts."""
        routers, call = getattr(output, "router_logits", None), self.call
        if call is None or not routers:
            return None

        def whole(x: Tensor) -> Tensor:
            return apply(_Gather, x.reshape(len(call.whole_mask), -1, x.shape[-1]), call.sequence).flatten(0, 1)

        output["router_logits"] = tuple(whole(x) for x in routers)
        call.sequence.forward_pass.whole_mask = call.whole_mask
        return output

    def _end(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Return the outputs for the whole batch, after the outermost call. A call that raised has no outputs."""
        call = self.call
        if call is None or module is not call.module:
            return None
        self.call = None
        self.own_numbers.close()
        if output is None:
            return None
        sequence = call.sequence
        shape = len(kwargs["input_ids"]), len(sequence.positions())
        sequence.check_all_layers_counted()

        def gathered(name: object, value: Any) -> Any:
            value = value.plain() if isinstance(value, ShardTensor) else value
            if str(name).startswith(WHOLE):
                return value
            if isinstance(value, (tuple, list)):
                return type(value)(gathered(None, item) for item in value)
            if isinstance(value, Tensor) and value.ndim > 1 and value.shape[:2] == shape:
                return ShardedOutput.of(value, sequence=sequence, token_slice=call.token_slice, moved=call.moved)
            is_loss = isinstance(value, Tensor) and not value.ndim
            return mean_over_ranks(value, sequence.mesh) if is_loss else value

        if isinstance(output, Mapping):
            return cast(Any, type(output))(**{name: gathered(name, value) for name, value in output.items()})
        return gathered(None, output)


def _check_padding_tokens(batch: Mapping[str, Any], config: Any) -> None:
    """Raise if a head of classes would read a padded token, which recurrent layers compute as they do any other."""
    mask, token = batch.get("attention_mask"), config.get_text_config(decoder=True).pad_token_id
    is_other = mask is not None and bool(((mask == 0) & (batch["input_ids"] != token)).any())
    if is_other:
        fix = "set model.config.pad_token_id to that of the tokenizer"
        raise ArgumentError(f"{SUBJECT} input_ids", f"padding of token {token}", "other tokens", fix)


class ShardedOutput(ShardTensor):
    """Output of this rank's tokens. The first function of PyTorch that reads it gathers the tokens of all ranks."""

    token_slice: slice
    """The tokens along dim 1 that the model returns on one device."""
    moved: MovedRows | None
    """Rows that were moved for the call, and move back."""
    gathered: Tensor | None = None

    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator] # compiled graphs take plain tensors only
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return the result of the function on the outputs of all tokens."""
        return func(*map(_gather_outputs, args), **{name: _gather_outputs(x) for name, x in (kwargs or {}).items()})

    def share(self, x: Tensor) -> Tensor:
        """Return this rank's share of a tensor of the whole batch, (batch, length)."""
        x = x if self.moved is None else self.moved.batch({"x": x})["x"]
        return shard(x, self.sequence.mesh, layout=self.sequence.layout, dim=1)

    def gather_tokens(self) -> Tensor:
        """Return the outputs of all tokens, with gradients."""
        if self.gathered is None:
            outputs = apply(_Gather, self.plain(), self.sequence)
            self.gathered = (outputs if self.moved is None else self.moved.back(outputs))[:, self.token_slice]
        return self.gathered


def _gather_outputs(value: Any) -> Any:
    """Return a value with whole tensors in place of `ShardedOutput`."""
    if isinstance(value, ShardedOutput):
        return value.gather_tokens()
    return type(value)(map(_gather_outputs, value)) if type(value) in (tuple, list) else value


def apply(function: Any, *arguments: Any) -> Tensor:
    """Return the result of an autograd function."""
    result: Tensor = function.apply(*arguments)
    return result


class _Gather(torch.autograd.Function):
    """Tokens of all ranks, from which all ranks compute the same loss.

    Backward, each rank takes its tokens' gradients times the number of ranks, as gradients are averaged over ranks.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, sequence: ShardedSequence) -> Tensor:
        ctx.sequence = sequence
        return sequence.gather_tokens(x.detach())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        sequence = ctx.sequence
        return shard(grad, sequence.mesh, layout=sequence.layout, dim=1) * sequence.ranks, None
