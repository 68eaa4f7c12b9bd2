"""Checkpoints of a running generation: its tokens, keys, values and random state, in a folder.

The same call of `generate` with the same folder continues from the last checkpoint, on any number of ranks.
"""

import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteria, SynthIDTextWatermarkingConfig

from attnmesh.cache.saved_cache import Saving
from attnmesh.core.digest import DIGEST_VALUES, digest
from attnmesh.errors import ArgumentError, KernelError, StoreError, checked_count, short, type_and_shape
from attnmesh.guard.agreement import Agreement
from attnmesh.hf.cache.sharded_cache import ShardedCache
from attnmesh.hf.options import ASSISTED_OPTIONS, GenerationSettings, describe_value
from attnmesh.hf.random_numbers import random_state, set_random_state
from attnmesh.mesh.axes import RankMesh
from attnmesh.store.manifest import MANIFEST, checked_folder, read_manifest
from attnmesh.store.save_layers import make_writable_folder

SUBJECT = "generate checkpoint"
"""First words of errors about checkpoints."""

FROM_END = "leave it out: it counts from the end of the prompt"
OF_PROMPT = "leave it out: it depends on the prompt alone"

NOT_RESUMABLE = {
    **dict.fromkeys(("stop_strings", "stopping_criteria"), "stop at tokens, with eos_token_id"),
    **dict.fromkeys(("logits_processor", "prefix_allowed_tokens_fn"), "leave it out: its state is not saved"),
    **dict.fromkeys(("exponential_decay_length_penalty", "begin_suppress_tokens"), FROM_END),
    "output_scores": "leave it out: scores of earlier tokens are not saved",
    "output_logits": "leave it out: logits of earlier tokens are not saved",
    "return_dict_in_generate": "leave it out: only tokens are saved",
    **dict.fromkeys(("encoder_repetition_penalty", "encoder_no_repeat_ngram_size", "token_healing"), OF_PROMPT),
    **dict.fromkeys(ASSISTED_OPTIONS, "leave it out: its cache holds tokens that may be rejected"),
}
"""Options that depend on where a call began, each with its fix."""

MAY_DIFFER = {
    *("max_new_tokens", "max_length", "streamer", "checkpoint", "prefill_chunk_size", "attention_mask"),
    *("generation_config", "transformers_version"),  # fields of the configuration are compared one by one
}
"""Options that may differ between a call and its continuation."""

IGNORED_CONFIG = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures"}
"""Fields of a model's configuration that do not identify the model."""

DIFFERENCES = {"model": "another model", "prompt": "another prompt", "options": "other options", "seed": "another seed"}
"""Names of the parts of a call in the error about a folder of another call."""


class Checkpoint:
    """Folder in which `generate` saves its state, every few tokens and after every chunk of a prompt.

        generate(model, ids, mesh=mesh, checkpoint=Checkpoint("folder"), max_new_tokens=1000)

    One sequence is supported, greedy or sampled. Files are written while decoding goes on.

    Args:
        folder: A folder that all ranks can read and write.
        every: New tokens between two checkpoints.

    Raises:
        ArgumentError: `every` is not a positive int.

    >>> checkpoint = Checkpoint("folder", every=100)
    >>> checkpoint.every
    100
    """

    def __init__(self, folder: str | Path, *, every: int = 64) -> None:
        self.every = int(checked_count("Checkpoint every", every, "pass 1 or more", error=ArgumentError))
        self.folder = checked_folder("Checkpoint", folder)
        self.note = ""
        self.start_ids: Tensor | None = None
        """The tokens to continue from, after `begin`."""
        self._saving: Saving | None = None
        self._is_first = self._has_warned = False

    def begin(self, model: PreTrainedModel, ids: Tensor, cache: ShardedCache, settings: GenerationSettings) -> Tensor:
        """Fill an empty cache and the random state from the folder. Every rank calls it.

        Return the tokens to continue from: the saved ones, or the prompt. Raise if the folder is of another call, if
        the call cannot be continued, or if ranks differ.
        """
        mesh = RankMesh.of(cache.mesh)
        with Agreement(mesh, SUBJECT) as agreement:
            self._check_call(settings, ids, cache)
            make_writable_folder(self.folder)
            self.note = _identify_call(model, ids, settings)
            saved_length = self._saved_length() if os.path.lexists(self.folder / MANIFEST) else 0
            agreement.compare({"held": saved_length, **json.loads(self.note)})
        self._saving, start_ids = None, ids
        if saved_length:
            capacity = None if cache.capacity is None else max(cache.capacity, saved_length)
            extras, _ = cache.restore(self.folder, device=ids.device, capacity=capacity)
            saved_length = cache.get_seq_length()  # of a newer save, if another process has published one meanwhile
            with Agreement(mesh, "generate checkpoint"):
                start_ids = _restore_state(ids, extras, saved_length)
            cache.tokens = extras["tokens"][:, :saved_length].to(ids.device)
        self.start_ids = start_ids
        return start_ids

    def _saved_length(self) -> int:
        """Return the number of saved tokens. Raise if the folder is of another call."""
        header = read_manifest(self.folder)
        try:
            saved_call, call = json.loads(header.note), json.loads(self.note)
            differences = [DIFFERENCES[name] for name in call if saved_call.get(name) != call[name]]
        except (ValueError, AttributeError):
            differences = ["no checkpoint of generate"]
        if differences:
            expected = "a folder of this model, prompt and options"
            given = f"{' and '.join(differences)} in {self.folder}"
            raise StoreError(SUBJECT, expected, given, "name another folder, or remove this one")
        return header.length

    def _check_call(self, settings: GenerationSettings, ids: Tensor, cache: ShardedCache) -> None:
        """Raise unless the call can be continued from a checkpoint."""
        beams = max(settings["num_beams"] or 1, settings["num_return_sequences"] or 1)
        if len(ids) != 1 or beams != 1:
            given, fix = f"{len(ids)} of {beams} beams or samples", "generate them one by one, each in its own folder"
            raise KernelError(SUBJECT, "one sequence", given, fix)
        for name, fix in NOT_RESUMABLE.items():
            value = settings[name]
            is_neutral = not value or (isinstance(value, float) and value == 1)  # a penalty of 1.0
            if not is_neutral:
                raise KernelError(SUBJECT, "options that can be continued", f"{name}={short(value)}", fix)
        if isinstance(settings["watermarking_config"], SynthIDTextWatermarkingConfig):  # its other class has no state
            given, fix = "one of SynthIDText", "pass a WatermarkingConfig: the state of this watermark is not saved"
            raise KernelError(f"{SUBJECT} watermarking_config", "a watermark that can be continued", given, fix)
        if cache.get_seq_length():
            fix = "leave cache= out: the checkpoint fills one"
            raise KernelError(SUBJECT, "an empty cache", f"{cache.get_seq_length()} tokens", fix)

    def keep(self, cache: ShardedCache, ids: Tensor, *, prompt_tokens: int, ends: Any = None) -> None:
        """Save after every `every` new tokens, but not after an end token. Every rank calls it after each token.

        `ids` are those of all tokens so far, (1, length), and `prompt_tokens` is the length of the prompt.
        """
        new_count = ids.shape[1] - prompt_tokens
        ends = ends if isinstance(ends, (list, tuple)) else [ends]
        if new_count % self.every == 0 and int(ids[0, -1]) not in ends:
            self.save(cache, ids)

    def save(self, cache: ShardedCache, ids: Tensor) -> None:
        """Begin to save all tokens so far, (1, length), after the last save has finished. Every rank calls it."""
        self.wait()
        tensors = {"tokens": ids.cpu(), "random": random_state(ids.device)}
        self._is_first = RankMesh.of(cache.mesh).shard_index == 0
        with self._failures_reported():
            self._saving = cache.save(self.folder, more=tensors, note=self.note, wait=False)

    def wait(self) -> None:
        """Wait until the running save has replaced the checkpoint. Every rank calls it.

        A save that fails, because the disk is full, is tried again at the next checkpoint. The first rank warns once.
        """
        saving, self._saving = self._saving, None
        with self._failures_reported():
            if saving is not None:
                saving.wait()

    @contextmanager
    def _failures_reported(self) -> Iterator[None]:
        """Turn the error of a failed save, which fails on all ranks, into a warning of the first rank.

        Generation goes on: the tokens to come are worth more than the checkpoint.
        """
        try:
            yield
        except StoreError as error:
            if self._is_first and not self._has_warned:
                text = f"generation continues without a new checkpoint, and tries again later. {error}"
                warnings.warn(text, stacklevel=4)
            self._has_warned = True


class TokenCallback(StoppingCriteria):  # type: ignore[misc]
    """Stopping criterion that passes all tokens to a function after each step, and never stops."""

    def __init__(self, function: Callable[[Tensor], None]) -> None:
        self.function = function

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        """Return False for each sequence."""
        self.function(input_ids)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def _facts_of(model: PreTrainedModel) -> list[dict[str, Any]]:
    """Return what identifies a model: digests of the first values of its weights, and its configuration."""
    heads = {name: x.detach().flatten()[:DIGEST_VALUES] for name, x in model.named_parameters()}
    weights = {name: [str(x.dtype), list(x.shape), int(digest(heads[name]))] for name, x in model.named_parameters()}
    config = {name: value for name, value in model.config.to_dict().items() if name not in IGNORED_CONFIG}
    return [weights, config]


def identify_model(model: PreTrainedModel) -> str:
    """Return a hash of a model's configuration and of some weights."""
    text = json.dumps(_facts_of(model), sort_keys=True, default=describe_value)
    return blake2b(text.encode(), digest_size=16).hexdigest()


def _identify_call(model: PreTrainedModel, ids: Tensor, settings: GenerationSettings) -> str:
    """Return hashes of the model, prompt, options and seed as JSON."""
    names = {name for name in (*vars(GenerationConfig()), *settings.options) if not name.startswith("_")} - MAY_DIFFER
    options = {name: describe_value(settings[name]) for name in names}
    seed = int(digest(random_state(ids.device))) if settings["do_sample"] else None
    call = {"model": _facts_of(model), "prompt": ids.tolist(), "options": options, "seed": seed}
    texts = {name: json.dumps(value, sort_keys=True, default=describe_value) for name, value in call.items()}
    return json.dumps({name: blake2b(text.encode(), digest_size=16).hexdigest() for name, text in texts.items()})


def _restore_state(ids: Tensor, extras: Mapping[str, Tensor], saved_length: int) -> Tensor:
    """Return the saved tokens and set the random state; return the prompt if no new token was saved."""
    saved_ids = extras.get("tokens", torch.empty(0, device="cpu"))
    valid = saved_ids.dtype == torch.int64 and saved_ids.ndim == 2 and len(saved_ids) == 1
    if not valid:
        raise StoreError(SUBJECT, "the tokens of one sequence", type_and_shape(saved_ids), "remove the folder")
    if saved_ids.shape[1] < saved_length:
        raise StoreError(
            SUBJECT, "the tokens of all keys", f"{saved_ids.shape[1]} of {saved_length}", "remove the folder"
        )
    if saved_ids.shape[1] <= ids.shape[1]:
        return ids
    try:
        set_random_state(ids.device, extras["random"])
    except (RuntimeError, TypeError, KeyError) as error:
        given = str(error).splitlines()[0] if "random" in extras else "none"
        fix = "continue on the type of device that wrote it"
        raise StoreError(SUBJECT, "the state of this device's random generator", given, fix) from error
    return saved_ids.to(ids.device)
