"""The model that a batch of shards was passed to, found while it embeds the batch's tokens.

`shard_batch` is given no model, but the arguments of a model have to be checked, and recurrent layers and indexers to
be prepared for shards. A model embeds its tokens before its layers run, and Python's stack has the modules that are
being called, with their arguments. So a model needs no hook.
"""

import sys
from inspect import signature
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel

from attnmesh.errors import ArgumentError, InputError, KernelError
from attnmesh.guard.agreement import Agreement, may_compare
from attnmesh.hf.family import family_of, prepared_code
from attnmesh.hf.images.cut import prepare_text_model
from attnmesh.hf.layer_checks import compare_weights
from attnmesh.hf.models import SUBJECT, check_implementation, check_tokens
from attnmesh.hf.recurrent.prepare_recurrent import prepare_layers
from attnmesh.hf.shard_tensors import ShardIds, ShardPositions, ShardTensor, WholeIds, frame_of_module
from attnmesh.hf.sharded_sequence import FORWARD_ALL, OF_SHARD_BATCH, ShardedSequence
from attnmesh.hf.sparse.prepare_indexer import prepare_indexers
from attnmesh.hf.training.labels import GuardedLabels, ShardLabels
from attnmesh.mesh.axes import RankMesh


class CalledModule(NamedTuple):
    """A module that is being called, and its arguments."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def arguments(self) -> dict[str, Any]:
        """Return the arguments by name, and None for those of its signature that it was not given."""
        names = signature(self.module.forward).parameters
        return {**dict.fromkeys(names), **dict(zip(names, self.args, strict=False)), **self.kwargs}


def prepare_caller(sequence: ShardedSequence) -> None:
    """Check the model that is being called, and prepare its recurrent layers and indexers."""
    called_modules = _called_modules()
    if sequence.ranks > 1:
        _check_model(called_modules, sequence)
    if any(name in sys.modules for name in prepared_code()):
        prepared_modules: set[nn.Module] = set()
        for module, *_ in called_modules:
            if module not in prepared_modules:
                prepare_indexers(module)
                for hook in prepare_layers(module):  # the model's own hooks run from its next call on
                    hook.sequence = sequence
                prepared_modules.update(module.modules())


def prepare_caller_with_images(sequence: ShardedSequence) -> None:
    """Prepare the modules that are being called, and let the text model cut the merged sequence to its shards."""
    prepare_caller(sequence)
    prepare_text_model([called.module for called in _called_modules()])


def _check_model(called_modules: list[CalledModule], sequence: ShardedSequence) -> None:
    """Raise unless the model of transformers is right on shards: on all ranks, if they compare their calls.

    The model is the outermost that was given tensors of a shard. Wrappers around it have arguments of their own.
    """
    models = (called for called in called_modules if isinstance(called.module, PreTrainedModel))
    candidates = ((called.module, called.arguments()) for called in models)
    model, arguments = next((pair for pair in candidates if _has_shard_tensors(pair[1])), (None, {}))
    if model is None:
        return
    device = next(x for x in arguments.values() if isinstance(x, ShardTensor)).device
    try:
        _check_kind(model)
        _check_arguments(arguments)
        _check_tokens(model, arguments, sequence.forward_pass.token_ranges)
    except InputError as error:
        Agreement(RankMesh.of(sequence.mesh), type(model).__name__, is_compared=may_compare(device)).raise_on_all(error)
    sequence.forward_pass.has_positions = True
    compare_weights(model, sequence, device)


def _has_shard_tensors(arguments: dict[str, Any]) -> bool:
    return any(isinstance(x, ShardTensor) for x in arguments.values())


def _check_kind(model: PreTrainedModel) -> None:
    """Raise unless attnmesh is the model's attention, and its outputs are of tokens."""
    family = family_of(model.config)
    if not (family.refused or family.recurrences):
        check_implementation(SUBJECT, model.config)
    name = type(model).__name__
    if "ForSequenceClassification" in name:
        fix = "call hf.on_mesh or hf.prepare, which return whole outputs"
        raise KernelError(SUBJECT, "a model with outputs of tokens", name, fix)


def _check_arguments(arguments: dict[str, Any]) -> None:
    """Raise unless positions and labels are those of the batch."""

    def check(name: str, fits: bool, given: str, fix: str = FORWARD_ALL) -> None:
        if not fits:
            raise ArgumentError(f"{SUBJECT} {name}", OF_SHARD_BATCH, given, fix)

    if "position_ids" in arguments and not isinstance(arguments.get("input_ids"), WholeIds):
        positions = arguments["position_ids"]
        given = "none" if positions is None else "others, which have no place on the mesh"
        check("position_ids", isinstance(positions, ShardPositions), given)
    labels = arguments.get("labels")
    fix = "pass the labels of the whole batch to hf.shard_batch, beside input_ids"
    is_other = isinstance(labels, Tensor) and not isinstance(labels, GuardedLabels)
    check("labels", not is_other, "others, which the model would shift inside of this rank's shard", fix)
    targets = arguments.get("shift_labels")
    is_plain = isinstance(targets, Tensor) and not isinstance(targets, ShardLabels)
    check("shift_labels", not is_plain, "others, which may be unshifted, or shifted inside of this rank's shard", fix)
    cuts = [(x.sequence.layout, x.sequence.length) for x in arguments.values() if isinstance(x, ShardTensor)]
    check("arguments", all(cut == cuts[0] for cut in cuts), "those of several calls")
    is_alone = isinstance(labels, GuardedLabels) and targets is None
    check("shift_labels", not is_alone, "none beside its labels")
    if arguments.get("use_cache"):
        fix = "leave use_cache out; call hf.prefill to fill a cache"
        raise ArgumentError(f"{SUBJECT} use_cache", "use_cache=False, as shard_batch returns it", "True", fix)
    keep = arguments.get("logits_to_keep")
    is_all = keep is None or (isinstance(keep, int) and keep == 0)
    if not is_all:
        fix = "leave it out: the last token of a shard is seldom that of the sequence"
        raise ArgumentError(f"{SUBJECT} logits_to_keep", "logits of all tokens of a shard", str(keep), fix)


def _check_tokens(model: PreTrainedModel, arguments: dict[str, Any], token_ranges: dict[str, Tensor]) -> None:
    """Raise unless the model knows the tokens and labels of all ranks. A rank with an unknown one would fail alone."""
    if isinstance(arguments.get("input_ids"), ShardIds):
        check_tokens(f"{SUBJECT} input_ids", token_ranges["input_ids"], model)
    outputs = getattr(model.get_output_embeddings(), "out_features", None)
    if outputs is None or not isinstance(arguments.get("labels"), GuardedLabels):
        return
    first, last = token_ranges["labels"].tolist()
    if first < 0 or last >= outputs:
        expected = f"tokens from 0 to {outputs - 1}, or -100"
        fix = "use the tokenizer of this model, and -100 for tokens that are not learned"
        raise ArgumentError(f"{SUBJECT} labels", expected, str(first if first < 0 else last), fix)


def _called_modules() -> list[CalledModule]:
    """Return the modules that are being called, from the outermost to the innermost."""
    called_modules: list[CalledModule] = []
    frame = frame_of_module(sys._getframe())
    while frame is not None:
        variables = frame.f_locals  # of no other frame: Python before 3.13 keeps the locals of each one that is read
        args, kwargs = variables.get("args", ()), variables.get("kwargs", {})
        called_modules.append(CalledModule(variables["self"], args, kwargs))
        frame = frame_of_module(frame.f_back)
    return called_modules[::-1]
