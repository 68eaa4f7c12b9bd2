"""A generation that can be gone on with: its tokens, keys and random numbers, in a folder, every so many tokens.

Whoever makes the same call again with the same folder, on any number of ranks, goes on from the last that was written.
"""

import json
import os
from collections.abc import Callable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteria

from attnmesh.comm.consensus import describe_call, run_agreed
from attnmesh.core.digest import digest
from attnmesh.decode.checkpoint import MANIFEST, check_folder, read_manifest
from attnmesh.decode.checkpoint_writer import Saving, check_writable
from attnmesh.errors import ArgumentError, KernelError, StoreError
from attnmesh.hf.cache import ShardedCache
from attnmesh.hf.options import ASSISTED, Settings, value_of
from attnmesh.mesh.axes import Mesh

UNKEPT = {
    "stop_strings": "stop at tokens, by eos_token_id",
    "stopping_criteria": "stop at tokens, by eos_token_id",
    "logits_processor": "leave it out: what it knows of earlier tokens would be lost",
    "prefix_allowed_tokens_fn": "leave it out: what it knows of earlier tokens would be lost",
    "exponential_decay_length_penalty": "leave it out: it counts from the end of the prompt",
    "begin_suppress_tokens": "leave it out: it counts from the end of the prompt",
    "output_scores": "leave it out: those of earlier tokens would be lost",
    "output_logits": "leave it out: those of earlier tokens would be lost",
    "return_dict_in_generate": "leave it out: what comes is the tokens",
    "encoder_repetition_penalty": "leave it out: it goes by the prompt alone",
    "encoder_no_repeat_ngram_size": "leave it out: it goes by the prompt alone",
    "token_healing": "leave it out: it goes by the prompt alone",
    **dict.fromkeys(ASSISTED, "leave it out: its cache holds tokens that may still be rejected"),
}
"""What depends on where a call began, and what to do instead."""

FREE = {
    *("max_new_tokens", "max_length", "streamer", "checkpoint", "prefill_chunk_size", "attention_mask"),
    *("generation_config", "transformers_version"),  # what is in the one is looked at by itself
}
"""Options that may differ when a call is gone on with."""

UNSAID = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures"}
"""Of a model's configuration what does not tell it from others."""

TELLING = 1024
"""Numbers of each parameter by which a model is told from others."""


OTHERS = {"model": "another model", "prompt": "another prompt", "options": "other options", "seed": "another seed"}
"""What a folder may be of, by what tells calls apart."""


class Checkpoint:
    """Where `generate` keeps what it has, every `every` new tokens, and after every chunk of a prompt.

        generate(model, ids, mesh=mesh, checkpoint=Checkpoint("folder"), max_new_tokens=1000)

    The folder is one that all ranks see. For one sequence, greedy or sampled; it is written while decoding goes on.
    """

    def __init__(self, folder: str | Path, *, every: int = 64) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ArgumentError("Checkpoint every", "a whole number of tokens", repr(every), "pass 1 or more")
        self.folder, self.every = check_folder("Checkpoint", folder), every
        self.note = ""
        self.reached: Tensor | None = None  # once it has begun
        self._saving: Saving | None = None

    def begin(self, model: PreTrainedModel, ids: Tensor, cache: ShardedCache, settings: Settings) -> Tensor:
        """The tokens to go on from: those that were reached, with `cache` filled by theirs, or else the prompt.

        Random numbers go on as they would have. Every rank calls it, with an empty cache.
        """
        here = Mesh.of(cache.mesh)

        def look() -> int:
            self._check(settings, ids, cache)
            check_writable(self.folder)
            self.note = _note(model, ids, settings)
            return self._held() if os.path.lexists(self.folder / MANIFEST) else 0

        held = run_agreed(
            here, look, lambda held: describe_call("generate checkpoint", held=held, **json.loads(self.note))
        )
        self._saving, self.reached = None, ids
        if held:
            capacity = None if cache.capacity is None else max(cache.capacity, held)
            more, _ = cache.restore(self.folder, device=ids.device, capacity=capacity)
            self.reached = run_agreed(here, lambda: self._reached(ids, more, held), "generate checkpoint")
            cache.tokens = more["tokens"][:, :held].to(ids.device)
        return self.reached

    def _held(self) -> int:
        """How many tokens have been kept, if they are of this call."""
        header = read_manifest(self.folder)
        try:
            theirs, ours = json.loads(header.note), json.loads(self.note)
            others = [OTHERS[name] for name in ours if theirs.get(name) != ours[name]]
        except (ValueError, AttributeError):
            others = ["none of a checkpoint"]
        if others:
            expected, fix = "a folder of this model, prompt and options", "name another folder, or remove this one"
            given = f"{' and '.join(others)} in {self.folder}"
            raise StoreError("generate checkpoint", expected, given, fix)
        return header.length

    def _reached(self, ids: Tensor, more: Mapping[str, Tensor], held: int) -> Tensor:
        """The tokens to go on from, with the random numbers that come next."""
        tokens = more.get("tokens")
        if tokens is None or tokens.dtype != torch.int64 or len(tokens) != 1 or tokens.ndim != 2:
            given = "none" if tokens is None else f"{tokens.dtype} {tuple(tokens.shape)}"
            raise StoreError("generate checkpoint", "the tokens of one sequence", given, "remove the folder")
        if tokens.shape[1] < held:
            given = f"{tokens.shape[1]} of {held}"
            raise StoreError("generate checkpoint", "the tokens of all keys", given, "remove the folder")
        if tokens.shape[1] <= ids.shape[1]:
            return ids
        set_random_state(ids.device, more.get("random"))
        return tokens.to(ids.device)

    def _check(self, settings: Settings, ids: Tensor, cache: ShardedCache) -> None:
        """Raise unless what is asked for can be gone on with."""
        beams = max(settings["num_beams"] or 1, settings["num_return_sequences"] or 1)
        if len(ids) > 1 or beams > 1:
            given, fix = f"{len(ids)} of {beams} beams or samples", "generate them one by one, each in its own folder"
            raise KernelError("generate checkpoint", "one sequence", given, fix)
        for name, fix in UNKEPT.items():
            if settings[name] and not (isinstance(settings[name], float) and settings[name] == 1):  # which does nothing
                raise KernelError("generate checkpoint", "options that can be gone on with", f"{name}=", fix)
        if cache.get_seq_length():
            fix = "leave cache= out: the checkpoint fills one"
            raise KernelError("generate checkpoint", "an empty cache", f"{cache.get_seq_length()} tokens", fix)

    def keep(self, cache: ShardedCache, tokens: Tensor, *, prompt: int, ends: Any = None) -> None:
        """Save if it is time to, and these do not end in one of `ends`. Every rank calls it after each token."""
        done, ends = tokens.shape[1] - prompt, ends if isinstance(ends, (list, tuple)) else [ends]
        if done % self.every == 0 and int(tokens[0, -1]) not in ends:
            self.save(cache, tokens)

    def save(self, cache: ShardedCache, tokens: Tensor) -> None:
        """Begin to write; the last one is waited for. Every rank calls it."""
        self.wait()
        more = {"tokens": tokens.cpu(), "random": random_state(tokens.device)}
        self._saving = cache.save(self.folder, more=more, note=self.note, wait=False)

    def wait(self) -> None:
        """Until what was begun is what is gone on with. Every rank calls it."""
        if self._saving is not None:
            self._saving.wait()
            self._saving = None


class TokenCallback(StoppingCriteria):  # type: ignore[misc]
    """Asked after each token whether to stop, it never wants to: it hands the tokens on."""

    def __init__(self, hand_on: Callable[[Tensor], None]) -> None:
        self.hand_on = hand_on

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        """Of each sequence whether it is done: no."""
        self.hand_on(input_ids)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def _note(model: PreTrainedModel, ids: Tensor, settings: Settings) -> str:
    """What tells a call from others: the model, by its configuration and a little of each parameter, and what it is
    asked."""
    some = {name: [str(x.dtype), list(x.shape), int(digest(_some(x)))] for name, x in model.named_parameters()}
    config = {name: value for name, value in model.config.to_dict().items() if name not in UNSAID}
    names = {name for name in (*vars(GenerationConfig()), *settings.options) if not name.startswith("_")} - FREE
    options = {name: value_of(settings[name]) for name in names}
    random = int(digest(random_state(ids.device))) if settings["do_sample"] else None
    told = {"model": [some, config], "prompt": ids.tolist(), "options": options, "seed": random}
    return json.dumps({name: _hash(value) for name, value in told.items()})


def _hash(value: Any) -> str:
    return blake2b(json.dumps(value, sort_keys=True, default=value_of).encode(), digest_size=16).hexdigest()


def _some(x: Tensor) -> Tensor:
    return x.detach().flatten()[:TELLING].contiguous()


def random_state(device: torch.device) -> Tensor:
    """The state of the random numbers of a device."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_random_state(device: torch.device, state: Any) -> None:
    """Restore it."""
    try:
        if device.type == "cuda":
            torch.cuda.set_rng_state(state, device)
        else:
            torch.set_rng_state(state)
    except (RuntimeError, TypeError) as error:
        given, fix = str(error).splitlines()[0], "go on with it on the kind of device that wrote it"
        raise StoreError("generate checkpoint", "the state of this device's random numbers", given, fix) from error
