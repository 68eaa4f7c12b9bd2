"""Generation with a context that is sharded over a mesh.

`prefill` computes all of the prompt but its last token, each rank its share. Then every rank runs transformers'
`generate` from the last token, with a cache that decodes over the mesh. Ranks draw the same random numbers, so they
sample the same tokens.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial as partial_of
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedConfig, PreTrainedModel

from attnmesh.errors import KernelError, MaskError, RankFailure
from attnmesh.hf.cache.sharded_cache import ShardedCache
from attnmesh.hf.chunked_prefill import CHUNK, Prompt
from attnmesh.hf.finite import NanWatch
from attnmesh.hf.generation_checkpoint import SUBJECT as CHECKPOINT
from attnmesh.hf.generation_checkpoint import Checkpoint, TokenCallback
from attnmesh.hf.images.inputs import split_images, without_absent
from attnmesh.hf.models import rope_regime, unwrap
from attnmesh.hf.options import ASSISTED_OPTIONS, CheckpointSpec, GenerationSettings, agree_on_call, check_padding
from attnmesh.hf.prefill import begin_prompt, crop_to_shared_prefix, prefill_rest
from attnmesh.hf.random_numbers import synchronize_generators
from attnmesh.hf.step_graph import steps_as_graphs
from attnmesh.hf.tensor_parallel import tp_mesh
from attnmesh.hf.transformers_names import cache_argument
from attnmesh.mesh.axes import NotGiven, RankMesh, given_mesh

GENERATES_ALONE = (
    "each rank generates alone, with all keys and values. Pass mesh= or a cache to shard them over the ranks"
)


def generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    *,
    mesh: DeviceMesh | NotGiven | None = NotGiven.MESH,
    cache: ShardedCache | None = None,
    attention_mask: Tensor | None = None,
    prefill_chunk_size: int | None = None,
    checkpoint: Checkpoint | None = None,
    **options: Any,
) -> Any:
    """Return what `model.generate(input_ids, **options)` returns, with keys and values sharded over a mesh.

    Every rank makes the same call. Greedy decoding, sampling, beams, assisted decoding and streaming are supported.

    Args:
        model: A causal language model with `attn_implementation="attnmesh"`.
        input_ids: The prompts, (batch, length), the same on every rank.
        mesh: The mesh; None for one device. A cache's own mesh serves instead. Without mesh and cache, a rank generates
            alone and warns once.
        cache: A cache to continue with. The prefix that it shares with the prompt is kept, the rest is cut.
        attention_mask: Padding of the prompts, on the left.
        prefill_chunk_size: Tokens per prefill chunk.
        checkpoint: A folder for checkpoints. The same call continues from the last one.
        options: Options of transformers' `generate`, and images as the model's processor returns them.

    Returns:
        The token ids, or the output object that transformers returns.

    Raises:
        InputError: The model or an option is not supported, or ranks differ in an argument.

    >>> from transformers import AutoModelForCausalLM, LlamaConfig
    >>> sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    >>> config = LlamaConfig(vocab_size=97, eos_token_id=None, **sizes)
    >>> model = AutoModelForCausalLM.from_config(config, attn_implementation="attnmesh").eval()
    >>> generate(model, torch.tensor([[5, 6, 7]]), mesh=None, max_new_tokens=4).shape
    torch.Size([1, 7])
    """
    if isinstance(mesh, NotGiven):
        mesh = given_mesh("generate", mesh, GENERATES_ALONE) if cache is None else None
    rank_mesh = RankMesh.of(cache.mesh if isinstance(cache, ShardedCache) else mesh)
    model = unwrap(model)
    options = without_absent(options)
    settings = GenerationSettings(model, options)
    spec = CheckpointSpec(checkpoint.folder, checkpoint.every) if isinstance(checkpoint, Checkpoint) else checkpoint
    arguments = {"prefill_chunk_size": prefill_chunk_size, "checkpoint": spec}
    agree_on_call(rank_mesh, model, input_ids, attention_mask, cache, {**arguments, **options})
    cache = ShardedCache(model.config, mesh) if cache is None else cache
    mask = _infer_padding(model.config, input_ids, settings) if attention_mask is None else attention_mask
    images, options = split_images(model, options)
    prompt = begin_prompt(rank_mesh, model, input_ids, mask, images)
    chunk_size = prefill_chunk_size or settings["prefill_chunk_size"]
    if checkpoint is None:
        return _generate(model, prompt, cache, chunk_size, options)
    if prompt.token_mask is not None:
        raise MaskError(CHECKPOINT, "a prompt without padding", "padding", "remove the padding")
    return _generate_with_checkpoint(model, input_ids, cache, checkpoint, chunk_size or CHUNK, options)


def _generate(
    model: PreTrainedModel, prompt: Prompt, cache: ShardedCache, chunk_size: int | None, options: dict[str, Any]
) -> Any:
    """Prefill the prompt, then run transformers' `generate`. Keep the cache's `tokens` up to date."""
    settings = GenerationSettings(model, dict(options))
    beams, samples = settings["num_beams"] or 1, settings["num_return_sequences"] or 1
    assisted = any(settings[name] for name in ASSISTED_OPTIONS)
    shared = crop_to_shared_prefix(model, prompt, cache)
    if assisted and shared:  # transformers feeds the whole prompt
        expected = "an empty cache for assisted decoding"
        raise KernelError("generate", expected, f"{shared} tokens in the cache", "pass a new cache, or none")
    if not assisted:
        prefill_rest(model, prompt, cache, chunk_size)
        cache.batch_repeat_interleave(max(beams, samples))
        options["prefill_chunk_size"] = None
    synchronize_generators((cache.mesh, tp_mesh(model)), prompt.ids.device)
    if not assisted and beams == 1:

        def record(ids: Tensor) -> None:
            cache.tokens = prompt.mark(ids)

        options["stopping_criteria"] = [*(options.get("stopping_criteria") or []), TokenCallback(record)]
        if samples == 1:
            cache.tokens = prompt.mark(prompt.ids)  # while the first new token is computed
    options |= {} if prompt.merged is None else prompt.merged.decoding
    is_plain = (
        prompt.token_mask is None and prompt.merged is None and beams == 1 and not assisted and not _runs_code(options)
    )
    with steps_as_graphs(model, cache) if is_plain else nullcontext():
        output = _run_generate(model, prompt.ids, cache, {"attention_mask": prompt.attention_mask, **options})
    sequences = getattr(output, "sequences", output)
    # With several beams, the rows of the cache are in an unknown order.
    cache.tokens = None if beams > 1 else prompt.mark(sequences)[:, : cache.get_seq_length()]
    if cache.folder is not None:
        cache.flush()
    return output


def _runs_code(options: dict[str, Any]) -> bool:
    """Return whether a caller's own code runs between steps, which may change the model. A streamer does not."""
    hooks = [*(options.get("logits_processor") or []), *(options.get("stopping_criteria") or [])]
    return any(type(hook).__module__.split(".")[0] not in ("attnmesh", "transformers") for hook in hooks)


def _generate_with_checkpoint(
    model: PreTrainedModel,
    prompt: Tensor,
    cache: ShardedCache,
    checkpoint: Checkpoint,
    chunk_size: int,
    options: dict[str, Any],
) -> Any:
    """Generate from the last checkpoint on, and save checkpoints."""
    settings = GenerationSettings(model, options)
    synchronize_generators((cache.mesh, tp_mesh(model)), prompt.device)
    start_ids = checkpoint.start_ids
    ids = checkpoint.begin(model, prompt, cache, settings) if start_ids is None else start_ids
    checkpoint.start_ids = None  # the next call reads the folder again
    length = prompt.shape[1]
    total = settings.total(prompt.shape[1])
    constant = rope_regime(model.config, length) == rope_regime(model.config, total)
    if not constant:
        fix = "leave checkpoint= out, or generate fewer tokens"
        raise KernelError(CHECKPOINT, "a rope that stays the same", "one that the length of the text changes", fix)
    if ids.shape[1] >= total:
        if (streamer := options.get("streamer")) is not None:
            streamer.put(ids[:, :total])
            streamer.end()
        return ids[:, :total]
    prefill_rest(model, Prompt(ids), cache, chunk_size, lambda stop: checkpoint.save(cache, ids[:, :stop]))
    keep = TokenCallback(partial_of(checkpoint.keep, cache, prompt_tokens=length, ends=settings["eos_token_id"]))
    minimum = settings["min_new_tokens"]
    remaining = {name: value for name, value in options.items() if name != "max_length"}
    remaining |= {
        "stopping_criteria": [keep],
        "max_new_tokens": total - ids.shape[1],
        "min_new_tokens": None if minimum is None else max(0, minimum - (ids.shape[1] - length)),
        "attention_mask": torch.ones_like(ids),
        "prefill_chunk_size": None,
    }
    output = _run_generate(model, ids, cache, remaining)
    checkpoint.wait()
    cache.tokens = output[:, : cache.get_seq_length()].clone()
    return output


def _run_generate(model: PreTrainedModel, ids: Tensor, cache: ShardedCache, options: dict[str, Any]) -> Any:
    """Run transformers' `generate`. The last token is not cached."""
    watch = NanWatch()
    name = cache_argument(signature(model.forward).parameters)
    first = RankMesh.of(cache.mesh).shard_index == 0
    cache.history.is_consistent = False
    processors = [*(options.get("logits_processor") or []), watch]
    options = {**options, "logits_processor": processors, "cache_implementation": None, "use_cache": True}
    try:
        with _continuing(model, cache) if name == "cache_params" else nullcontext():
            output = model.generate(ids, **{name: cache}, **options)
    except RankFailure:  # to look for a layer would wait for the lost rank
        raise
    except Exception:  # NaN may be why
        with suppress(Exception):
            watch.report(model, ids, first=first)
        raise
    watch.report(model, ids, first=first)
    cache.history.is_consistent = True
    cache.set_length(getattr(output, "sequences", output).shape[1] - 1)
    return output


@contextmanager
def _continuing(model: PreTrainedModel, cache: ShardedCache) -> Iterator[None]:
    """Feed the model only the tokens after the cached ones. transformers feeds models without attention all tokens."""
    prepare: Any = model.prepare_inputs_for_generation
    own_method = vars(model).get("prepare_inputs_for_generation")

    def after_cached(ids: Tensor, *args: Any, is_first_iteration: bool = False, **kwargs: Any) -> Any:
        inputs = prepare(ids, *args, is_first_iteration=is_first_iteration, **kwargs)
        if is_first_iteration:
            tensors = {name: inputs[name] for name in ("input_ids", "attention_mask") if inputs.get(name) is not None}
            inputs |= {name: x[:, cache.get_seq_length() :] for name, x in tensors.items()}
        return inputs

    model.prepare_inputs_for_generation = after_cached
    try:
        yield
    finally:
        del model.prepare_inputs_for_generation
        if own_method is not None:
            model.prepare_inputs_for_generation = own_method


def _infer_padding(config: PreTrainedConfig, ids: Tensor, settings: GenerationSettings) -> Tensor | None:
    """Return the mask of padding tokens, as transformers does; None without padding, or if it may be end tokens."""
    padding, eos = settings["pad_token_id"], settings["eos_token_id"]
    ends = eos if isinstance(eos, (list, tuple)) else [eos]
    if padding is None or padding in ends or not bool((ids == padding).any()):
        return None
    mask: Tensor = (ids != padding).long()
    check_padding(config, mask)
    return mask
