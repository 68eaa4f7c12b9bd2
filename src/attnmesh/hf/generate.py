"""Generation with a context that is spread over a mesh: each rank computes its share of the prompt, and keeps its keys.

All of the prompt but its last token is prefilled, cut over the ranks; then transformers' own `generate` goes on, on
every rank alike, with a cache that decodes over the mesh. Ranks draw the same random numbers, so they sample alike.
"""

from inspect import signature
from itertools import pairwise
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from attnmesh.agree import agree, digest
from attnmesh.errors import ArgumentError, DtypeError, InputError, KernelError, MaskError, MeshError, ShapeError
from attnmesh.exchange import share
from attnmesh.hf.batch import Shards
from attnmesh.hf.cache import NAME, ShardedCache, check_layers
from attnmesh.layout import Striped
from attnmesh.mesh import Mesh

CHUNK = 8192
"""Tokens that are prefilled at once on top of others, or with padding: there every rank holds all of their queries."""


def generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    *,
    mesh: DeviceMesh | None = None,
    cache: ShardedCache | None = None,
    attention_mask: Tensor | None = None,
    prefill_chunk_size: int | None = None,
    **options: Any,
) -> Any:
    """What `model.generate(input_ids, **options)` gives, with keys and values spread over the mesh.

    Every rank makes the same call: greedy, sampling, beams, assisted, streaming (where a streamer is passed), batches
    padded on the left. Pass a `cache` to go on with it: what its tokens share with the prompt is kept, the rest is cut.
    """
    here, settings = Mesh.of(mesh if cache is None else getattr(cache, "mesh", None)), _Settings(model, options)
    _agree(here, model, input_ids, attention_mask, cache, {"prefill_chunk_size": prefill_chunk_size, **options})
    whole = ShardedCache(model.config, mesh) if cache is None else cache
    if attention_mask is None:
        attention_mask = _inferred(input_ids, settings)
    known = _keep_shared(whole, input_ids, attention_mask)
    assisted = any(settings[name] for name in ASSISTED)
    if assisted and known:
        given, fix = f"{known} tokens in the cache", "pass a new cache, or none"
        raise KernelError("generate", "an empty cache for assisted decoding", given, fix)  # it feeds the whole prompt
    if not assisted:
        _prefill(model, input_ids, whole, attention_mask, prefill_chunk_size or settings["prefill_chunk_size"])
        whole.batch_repeat_interleave(max(settings["num_beams"] or 1, settings["num_return_sequences"] or 1))
        options["prefill_chunk_size"] = None
    _draw_alike(here, input_ids.device)
    made = model.generate(
        input_ids, past_key_values=whole, attention_mask=attention_mask, **{**options, "use_cache": True}
    )
    _remember(whole, made if isinstance(made, Tensor) else made.sequences, attention_mask)
    return made


class _Settings:
    """What transformers will go by: options of the call, then those of a configuration, then the model's."""

    def __init__(self, model: Any, options: dict[str, Any]) -> None:
        self.options = options
        self.configs = [options.get("generation_config"), getattr(model, "generation_config", None)]

    def __getitem__(self, name: str) -> Any:
        given = [self.options.get(name), *(getattr(config, name, None) for config in self.configs)]
        return next((value for value in given if value is not None), None)


def _inferred(ids: Tensor, settings: _Settings) -> Tensor | None:
    """The padding of a batch that comes without a mask, where padding can be told from ends, as transformers does."""
    pad, eos = settings["pad_token_id"], settings["eos_token_id"]
    ends = eos if isinstance(eos, (list, tuple)) else [eos]
    if pad is None or pad in ends or not bool((ids == pad).any()):
        return None
    mask: Tensor = (ids != pad).long()
    _check_left(mask)
    return mask


def prefill(
    model: PreTrainedModel,
    input_ids: Tensor,
    cache: ShardedCache,
    *,
    attention_mask: Tensor | None = None,
    chunk_size: int | None = None,
) -> None:
    """Compute the prompt, each rank its share, and keep its keys: all but the last token, with which decoding begins.

    What the cache holds of it already is kept, and what it holds beyond is cut.
    """
    _agree(Mesh.of(getattr(cache, "mesh", None)), model, input_ids, attention_mask, cache, {"chunk_size": chunk_size})
    _keep_shared(cache, input_ids, attention_mask)
    _prefill(model, input_ids, cache, attention_mask, chunk_size)


def _prefill(
    model: PreTrainedModel, ids: Tensor, cache: ShardedCache, attention_mask: Tensor | None, chunk_size: int | None
) -> None:
    """Tokens are dealt as the cache deals them, so the cache stays even; a few that fill no round, all compute."""
    start, stop = cache.get_seq_length(), ids.shape[1] - 1
    real = None if attention_mask is None or bool(attention_mask.all()) else attention_mask.bool()
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    if real is not None:
        positions = (real.long().cumsum(1) - 1).masked_fill(~real, 0)
    if chunk_size is None and (start or real is not None):
        chunk_size = CHUNK
    with torch.no_grad():
        for first, last, sharded in _pieces(start, stop, cache.block * cache.ranks, chunk_size or stop):
            _forward(model, ids[:, first:last], positions[:, first:last], cache, first, real, sharded)
    cache.tokens = _known(ids[:, : cache.get_seq_length()], attention_mask)


def _pieces(start: int, stop: int, unit: int, size: int) -> list[tuple[int, int, bool]]:
    """From where to where to compute at once, and whether cut over the ranks, as from a round of dealing's start on.

    >>> _pieces(0, 100, 32, 64), _pieces(20, 100, 32, 100)
    ([(0, 64, True), (64, 100, True)], [(20, 32, False), (32, 100, True)])
    """
    aligned, size = -(-start // unit) * unit, max(size // unit, 1) * unit
    if stop - aligned < unit:
        return [(start, stop, False)] if stop > start else []
    edges = [*range(aligned, stop - unit + 1, size), stop]
    head = [(start, aligned, False)] if aligned > start else []
    return head + [(first, last, True) for first, last in pairwise(edges)]


def _forward(
    model: PreTrainedModel,
    ids: Tensor,
    positions: Tensor,
    cache: ShardedCache,
    start: int,
    real: Tensor | None,
    sharded: bool,
) -> None:
    """The model on tokens from `start` on, with as few logits as it can be asked for."""
    seen, length = None if real is None else real[:, : start + ids.shape[1]].long(), ids.shape[1]
    more: dict[str, Any] = {"attention_mask": seen}
    if sharded:
        layout, here = Striped(cache.block), Mesh.of(cache.mesh)
        own = layout.positions(length, cache.ranks, here.shard).to(ids.device)
        ids, positions = ids[:, own], positions[:, own]
        fresh = None if seen is None else seen[:, start:].bool()
        shape = tuple(ids.shape)
        more = {"attention_mask": Shards(cache.mesh, layout, length, shape, start=start, real=fresh)}
    if "logits_to_keep" in signature(model.forward).parameters:
        more["logits_to_keep"] = 1
    model(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True, **more)


def check_model(model: PreTrainedModel) -> None:
    """Raise unless it is a causal language model that asks attnmesh for its attention."""
    if not isinstance(model, PreTrainedModel) or not model.can_generate() or model.config.is_encoder_decoder:
        fix = "load it with AutoModelForCausalLM"
        raise KernelError("generate", "a causal language model of transformers", type(model).__name__, fix)
    check_layers(model.config)
    if not model.is_backend_compatible():
        given, fix = (
            f"{type(model).__name__}, which computes its own",
            "use a family like Llama, Qwen, Mistral or Gemma 3",
        )
        raise KernelError("generate", "a model that lets attention be chosen", given, fix)
    if model.training and getattr(model, "is_gradient_checkpointing", False):
        given = "one in training with gradient checkpointing, which drops the cache"
        raise KernelError("generate", "a model that uses its cache", given, "call model.eval()")
    if model.config._attn_implementation != NAME:
        fix = f'call model.set_attn_implementation("{NAME}")'
        raise KernelError("generate", f"attn_implementation {NAME!r}", repr(model.config._attn_implementation), fix)


def _agree(
    here: Mesh,
    model: PreTrainedModel,
    ids: Tensor,
    attention_mask: Tensor | None,
    cache: ShardedCache | None,
    options: dict[str, Any],
) -> None:
    """All ranks were given the same, or all raise the same error."""
    call: str | InputError
    try:
        check_model(model)
        _check_prompt(model.config.get_text_config(decoder=True), ids, attention_mask, here.shape.ranks)
        _check_options(model, options)
        if cache is not None:
            _check_cache(cache, ids)
        numbers = [int(digest(x)) for x in (ids, attention_mask) if x is not None]
        held = 0 if cache is None else cache.get_seq_length()
        told = ", ".join(f"{name}={_told(given)}" for name, given in sorted(options.items()) if name != "streamer")
        call = f"generate from {list(ids.shape)} tokens of digest {numbers}, after {held} in the cache, with {told}"
    except InputError as error:
        call = error
    agree(here, ids.device if isinstance(ids, Tensor) else torch.device("cpu"), call)


def _told(given: object) -> str:
    """An option as ranks tell each other of it: by its value if it is one, else by its kind."""
    if isinstance(given, GenerationConfig):
        return repr(sorted(given.to_diff_dict().items(), key=str))
    return (
        repr(given) if isinstance(given, (bool, int, float, str, list, tuple, dict, NoneType)) else type(given).__name__
    )


REFUSED = {
    "past_key_values": "pass a ShardedCache as cache=",
    "cache_implementation": "leave it out, or pass a ShardedCache as cache=",
    "use_cache": "leave it out",
    "custom_generate": "call it yourself with past_key_values=ShardedCache(model.config, mesh)",
    "max_time": "pass max_new_tokens: ranks have clocks of their own, and would stop at different tokens",
    "guidance_scale": "leave it out: it runs the model on another prompt beside",
    "output_attentions": "leave it out: weights are nowhere as a whole",
    "output_hidden_states": "leave it out: those of the prompt are spread over ranks",
}
"""What `generate` of transformers takes and this one does not, and what to do instead."""

ASSISTED = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit")

TAKEN = {
    *vars(GenerationConfig()),
    *("generation_config", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "synced_gpus"),
    *("assistant_model", "streamer", "tokenizer", "assistant_tokenizer"),
}


def _check_options(model: PreTrainedModel, options: dict[str, Any]) -> None:
    settings = _Settings(model, options)
    refused = {name: settings[name] for name in REFUSED} | {"use_cache": options.get("use_cache", True)}
    harmless = {"use_cache": True, "guidance_scale": 1.0}
    for name, given in refused.items():
        if given not in (None, harmless.get(name, False)):
            expected, given = "options that can be served over a mesh", f"{name}={_told(given)}"
            raise ArgumentError("generate", expected, given, REFUSED[name])
    for name in options:
        if name not in TAKEN and name != "chunk_size":
            fix = "leave it out: prompts are prefilled from their ids and their attention_mask alone"
            raise ArgumentError("generate", "options of transformers' generation", f"{name}=", fix)


def _check_left(attention_mask: Tensor) -> None:
    if not bool(attention_mask[:, -1].all()):
        fix = "set the tokenizer's padding_side to 'left'"
        raise MaskError("generate attention_mask", "real tokens at the end of each sequence", "padding", fix)


def _check_cache(cache: ShardedCache, ids: Tensor) -> None:
    if not isinstance(cache, ShardedCache):
        fix = "pass attnmesh.hf.ShardedCache(model.config, mesh)"
        raise KernelError("generate cache", "a ShardedCache", type(cache).__name__, fix)
    if cache.get_seq_length() and cache.layers[0].kv.sizes.batch != ids.shape[0]:
        given, fix = f"{ids.shape[0]} and {cache.layers[0].kv.sizes.batch} in the cache", "pass a new cache"
        raise ShapeError("generate", "as many sequences as the cache holds", given, fix)


def _check_prompt(config: PreTrainedConfig, ids: Tensor, attention_mask: Tensor | None, ranks: int) -> None:
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.dtype != torch.int64:
        given = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise DtypeError("generate input_ids", "int64 token ids (batch, length)", given, "tokenize with return_tensors")
    if not ids.numel():
        raise ShapeError("generate input_ids", "at least one token", "an empty prompt", "begin with a token")
    if ids.shape[1] < ranks:
        fix = "use fewer ranks, or a longer prompt"
        raise MeshError("generate", "at least one token a rank", f"{ids.shape[1]} on {ranks} ranks", fix)
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and ids.shape[1] > longest:
        fix = "shorten the prompt, or use a model with a longer context"
        raise ShapeError("generate input_ids", f"at most {longest} tokens, the model's context", f"{ids.shape[1]}", fix)
    if attention_mask is not None and tuple(getattr(attention_mask, "shape", ())) != tuple(ids.shape):
        given = str(tuple(getattr(attention_mask, "shape", ())))
        fix = "pass the tokenizer's; a 4D or additive mask cannot be served"
        raise ShapeError("generate attention_mask", f"2D, {tuple(ids.shape)}", given, fix)
    if attention_mask is not None:
        _check_left(attention_mask)


def _keep_shared(cache: ShardedCache, ids: Tensor, attention_mask: Tensor | None) -> int:
    """Cut from the cache what is not a beginning of the prompt, or its last token; how many tokens are left."""
    length: int = cache.get_seq_length()
    shared = 0 if cache.tokens is None else min(length, ids.shape[1] - 1, cache.tokens.shape[1])
    if cache.tokens is not None and shared:
        same = (_known(ids, attention_mask)[:, :shared] == cache.tokens[:, :shared].to(ids.device)).all(0)
        shared = int(same.long().cumprod(0).sum())
    cache.crop(shared - length)
    return shared


def _known(ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    return ids.clone() if attention_mask is None else ids.masked_fill(attention_mask[:, : ids.shape[1]] == 0, -1)


def _remember(cache: ShardedCache, sequences: Tensor, attention_mask: Tensor | None) -> None:
    """Which tokens the cache holds now; of several beams nobody knows which are left."""
    known, length = cache.tokens, cache.get_seq_length()
    if (known is not None and len(known) != len(sequences)) or cache.layers[0].kv.sizes.batch != len(sequences):
        cache.tokens = sequences.new_full((cache.layers[0].kv.sizes.batch, length), -2)
        return
    if attention_mask is not None:
        more = sequences.shape[1] - attention_mask.shape[1]
        attention_mask = torch.nn.functional.pad(attention_mask, (0, more), value=1)
    cache.tokens = _known(sequences[:, :length], attention_mask)


def _draw_alike(here: Mesh, device: torch.device) -> None:
    """Every rank's generators as those of the first shard: all are to sample the same tokens."""
    if here.shape.ranks == 1:
        return
    state = share(torch.get_rng_state().tolist(), here.axes, device)[0]
    torch.set_rng_state(torch.tensor(state, dtype=torch.uint8))
    if device.type == "cuda":
        state = share(torch.cuda.get_rng_state(device).tolist(), here.axes, device)[0]
        torch.cuda.set_rng_state(torch.tensor(state, dtype=torch.uint8), device)
