"""The model that a batch of shards was passed to, found while it embeds the batch's tokens.

`shard_batch` is given no model, but the arguments of a model have to be checked, and recurrent layers and indexers to
be prepared for shards. A model embeds its tokens before its layers run, and Python's stack has the modules that are
being called, with their arguments. So a model needs no hook.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnmesh.errors import ArgumentError, InputError, KernelError
from attnmesh.guard.agreement import Agreement, may_compare
from attnmesh.hf.called_modules import CalledModule, called_modules
from attnmesh.hf.family import family_of, prepared_code
from attnmesh.hf.images.cut import prepare_text_model
from attnmesh.hf.layer_checks import compare_weights
from attnmesh.hf.models import SUBJECT, check_adapters, check_implementation, check_tokens
from attnmesh.hf.recurrent.prepare_recurrent import prepare_layers
from attnmesh.hf.shard_tensors import ShardIds, ShardPositions, ShardTensor, WholeIds
from attnmesh.hf.sharded_sequence import FORWARD_ALL, OF_SHARD_BATCH, ShardedSequence
from attnmesh.hf.sparse.prepare_indexer import prepare_indexers
from attnmesh.hf.training.embedding_noise import scale_noise
from attnmesh.hf.training.labels import GuardedLabels, ShardLabels
from attnmesh.mesh.axes import RankMesh


def prepare_caller(sequence: ShardedSequence) -> None:
    """Check the model that is being called, and prepare its recurrent layers and indexers."""
    called = called_modules()
    if sequence.ranks > 1:
        _check_model(called, sequence)
        for module, *_ in called:
            scale_noise(module)
    if any(name in sys.modules for name in prepared_code()):
        prepared_modules: set[nn.Module] = set()
        for module, *_ in called:
            if module not in prepared_modules:
                prepare_indexers(module)
                for hook in prepare_layers(module):  # the model's own hooks run from its next call on
                    hook.sequence = sequence
                prepared_modules.update(module.modules())


def prepare_caller_with_images(sequence: ShardedSequence) -> None:
    """Prepare the modules that are being called, and let the text model cut the merged sequence to its shards."""
    prepare_caller(sequence)
    prepare_text_model([called.module for called in called_modules()])


def _check_model(called: list[CalledModule], sequence: ShardedSequence) -> None:
    """Raise unless the model of transformers is right on shards: on all ranks, if they compare their calls.

    The model is the outermost that was given tensors of a shard. Wrappers around it have arguments of their own.
    """
    models = (each for each in called if isinstance(each.module, PreTrainedModel))
    candidates = ((each.module, each.arguments()) for each in models)
    model, arguments = next((pair for pair in candidates if _has_shard_tensors(pair[1])), (None, {}))
    wrappers = [each.module for each in called if not isinstance(each.module, PreTrainedModel)]
    shards = (x for each in called for x in (*each.args, *each.kwargs.values()) if isinstance(x, ShardTensor))
    device = next((x.device for x in shards), torch.device("cpu"))
    try:
        for wrapper in wrappers:
            check_adapters(SUBJECT, wrapper)
        if model is None:
            return
        _check_kind(model, arguments)
        _check_no_skipped_layers(called)
        _check_arguments(arguments)
        _check_tokens(model, arguments, sequence.forward_pass.token_ranges)
    except InputError as error:
        name = type(called[0].module if model is None else model).__name__
        Agreement(RankMesh.of(sequence.mesh), name, is_compared=may_compare(device)).raise_on_all(error)
    sequence.forward_pass.has_positions = True
    compare_weights(model, sequence, device)


def _has_shard_tensors(arguments: dict[str, Any]) -> bool:
    return any(isinstance(x, ShardTensor) for x in arguments.values())


def _check_kind(model: PreTrainedModel, arguments: dict[str, Any]) -> None:
    """Raise unless attnmesh is the model's attention, its outputs are of tokens, and its loss is of labels alone."""
    family = family_of(model.config)
    if not (family.refused or family.recurrences):
        check_implementation(SUBJECT, model.config)
    name = type(model).__name__
    if "ForSequenceClassification" in name:
        fix = "call hf.on_mesh or hf.prepare, which return whole outputs"
        raise KernelError(SUBJECT, "a model with outputs of tokens", name, fix)
    weight = getattr(model, family.logits_loss, 0) if arguments.get("labels") is not None else 0
    if weight:
        expected, given = "a loss of the labels alone", f"{weight}, the weight of a mean over one rank's logits"
        fix = f"load the model with {family.logits_loss}=0"
        raise KernelError(f"{SUBJECT} {family.logits_loss}", expected, given, fix)


def _check_no_skipped_layers(called: list[CalledModule]) -> None:
    """Raise if a module that is being called skips layers at random: ranks would skip others, and wait for each other.

    The module that has the layers also embeds the tokens.
    """
    for module, *_ in called:
        share = vars(module).get("layerdrop", 0) if module.training else 0
        if share:
            fix = "load the model with layerdrop=0, or call model.eval()"
            raise KernelError(f"{SUBJECT} layerdrop", "a model that skips no layers in training", str(share), fix)


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
