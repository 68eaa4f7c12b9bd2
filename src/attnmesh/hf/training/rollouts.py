"""Trainers that draw completions of prompts, on a mesh whose ranks all get the same completions.

`hf.generate` draws them, with the weights, kernels and caches of the mesh. What TRL computes of completions comes from
calls of models with whole batches, see `batch_sharder`.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import gcd
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from transformers import LogitsProcessor, ProcessorMixin, set_seed

from attnmesh.errors import KernelError, short
from attnmesh.hf.generate import generate
from attnmesh.hf.models import unwrap
from attnmesh.hf.training.batch_sharder import BatchSharder
from attnmesh.hf.transformers_names import ACCELERATE, ROLLOUTS
from attnmesh.runtime.upstream import Upstream

SUBJECT = "on_mesh"

BY_MESH, ON_ONE_DEVICE = (
    "leave it out: hf.generate draws completions on the mesh",
    "leave it out, or train on one device",
)
"""Fixes in errors about other ways to draw completions, and about options that need one process."""

FIXES_OF_OPTIONS = {
    "num_beams": BY_MESH,
    "num_return_sequences": "leave it out: the trainer counts the completions of a prompt",
    "stop_strings": "leave it out, or name tokens in model.generation_config.eos_token_id",
}
"""Options of `generation_kwargs` that are refused, each with its fix. TRL passes no tokenizer to find strings by."""


def raise_other_shards(given: str) -> NoReturn:
    """Raise for two models whose outputs have other shards, so that ranks cannot compare them."""
    fix = 'leave layout="auto" and shape="auto" out'
    raise KernelError(SUBJECT, "a student and a teacher with the same shards", given, fix)


class MeshRollouts:
    """Base of classes that `on_mesh` returns, before `MeshTrainer`, for trainers that draw completions."""

    accelerator: Any
    args: Any
    sharder: BatchSharder
    model: Any
    model_wrapped: Any
    processing_class: Any
    own_seed = True
    """True if TRL gives each process a seed of its own."""
    hides_padding = False
    """True if TRL computes metrics of tokens after an end."""
    upstream: tuple[Upstream, ...] = (ROLLOUTS,)
    """Names of TRL that are overridden, called or replaced."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        is_text = not isinstance(self.processing_class, ProcessorMixin)
        if not is_text:
            fix = "pass one, and prompts without images"
            raise KernelError(f"{SUBJECT} processing_class", "a tokenizer", "a processor of images", fix)
        if self.own_seed:
            set_seed(self.args.seed + self.accelerator.replicas.mesh_index)  # TRL has taken each rank for a process
        device_mesh, rank = self.sharder.device_mesh, self.accelerator.state.process_index
        first = rank if device_mesh is None else int(device_mesh.mesh.flatten()[0])
        self.is_first = rank == first
        self.firsts: list[int] = self.accelerator.gather(torch.tensor(first, device=self.accelerator.device)).tolist()
        self.logprobs = torch.empty(0, device="cpu")

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, to which the ranks of a mesh are one process."""
        for names in self.upstream:
            names.check()
        self._check_arguments()
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.sharder.pads_left, self.sharder.hides_padding = True, self.hides_padding

    def _check_arguments(self) -> None:
        """Raise unless the trainer's arguments work on a mesh."""
        args = self.args
        for name in ("use_vllm", "cache_implementation"):  # some of these trainers take neither, nor tools
            refuse_argument(name, getattr(args, name, None), BY_MESH)
        options = getattr(args, "generation_kwargs", None) or {}
        for name, fix in FIXES_OF_OPTIONS.items():
            is_one = options.get(name) == 1  # one beam, or one completion, as without the option
            refuse_argument(name, None if is_one else options.get(name), fix)
        refuse_argument("tools", getattr(self, "tools", None), ON_ONE_DEVICE)
        fix = "leave it out: attnmesh brings the kernels of attention"
        refuse_argument("use_liger_kernel", args.use_liger_kernel, fix)

    @contextmanager
    def _drawing(self, model: Any = None) -> Iterator[None]:
        """Draw completions on the mesh, in this context, by the trained model or another."""
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)  # which DDP has not
        weights = whole_weights(self.model_wrapped, plugin is not None and bool(plugin.reshard_after_forward))
        with (
            self.sharder.active(False),
            weights,
            generating_on(self.sharder.device_mesh, unwrap(model or self.model)) as drawn,
        ):
            yield
        self.logprobs = torch.cat(drawn, 1)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        """Draw completions on the mesh."""
        with self._drawing():
            return super()._generate_single_turn(*args, **kwargs)  # type: ignore[misc]

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        """Draw completions and gather what TRL computes of them, of all meshes."""
        gathering = self._replacing(gather=self._gather, gather_object=self._gather_rows)
        with self.accelerator.dealing(), gathering:
            return super()._generate_and_score_completions(inputs)  # type: ignore[misc]

    @contextmanager
    def _replacing(self, **functions: Callable[..., Any]) -> Iterator[None]:
        """Let TRL call these functions in place of those that its trainer's module has by the same names."""
        trl_class = next(base for base in type(self).__mro__ if base.__module__.startswith("trl."))
        names = vars(sys.modules[trl_class.__module__])
        replaced = {name: names[name] for name in names.keys() & functions.keys()}
        names |= {name: functions[name] for name in replaced}
        try:
            yield
        finally:
            names |= replaced

    def _gather(self, x: Tensor) -> Tensor:
        """Return the tensors of the first rank of each mesh."""
        x = x if x.ndim else x[None]
        gathered: Tensor = ACCELERATE.find("accelerate.utils:gather")(x)
        return gathered.view(-1, *x.shape)[self.firsts].flatten(0, 1)

    def _gather_rows(self, rows: list[Any]) -> list[Any]:
        """Return the rows of the first rank of each mesh."""
        parts: list[list[Any]] = ACCELERATE.find("accelerate.utils:gather_object")([rows])
        return [row for rank in self.firsts for row in parts[rank]]


@contextmanager
def whole_weights(model: nn.Module, reshards: bool) -> Iterator[None]:
    """Gather the weights of a model that FSDP2 has sharded, once for all steps in this context.

    `reshards` says whether layers free the whole weights after each forward pass outside of this context.
    """
    parts = [part for part in model.modules() if isinstance(part, FSDPModule)]
    try:
        for part in parts:
            part.unshard()
            part.set_reshard_after_forward(False, recurse=False)
        yield
    finally:
        for part in parts:
            part.set_reshard_after_forward(reshards, recurse=False)
            part.reshard()


def refuse_argument(name: str, given: Any, fix: str) -> None:
    """Raise if an argument of a trainer is given."""
    if given:
        raise KernelError(f"{SUBJECT} {name}", "a trainer without it", short(given), fix)


class DrawnLogprobs(LogitsProcessor):  # type: ignore[misc]
    """Logits processor that changes nothing, and keeps the log-probability of each token that is drawn."""

    def __init__(self, temperature: float, kept: list[Tensor]) -> None:
        self.temperature, self.kept = temperature, kept
        self.all: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores."""
        self.note_drawn(input_ids)
        self.all = (scores / self.temperature).log_softmax(-1)
        return scores

    def note_drawn(self, ids: Tensor) -> None:
        """Keep the log-probabilities of the last tokens of `ids`, which were drawn."""
        if self.all is not None:
            self.kept.append(self.all.gather(1, ids[:, -1:]))


@contextmanager
def generating_on(device_mesh: DeviceMesh | None, model: Any) -> Iterator[list[Tensor]]:
    """Let a model's `generate` run on a mesh, in this context. Yield the log-probabilities of the last drawn tokens."""
    logprobs: list[Tensor] = []
    own_method = vars(model).get("generate")  # FSDP2 gives a model one

    def on_mesh(input_ids: Tensor, attention_mask: Tensor, generation_config: Any, **arguments: Any) -> Any:
        logprobs.clear()
        watch = DrawnLogprobs(generation_config.temperature or 1.0, logprobs)
        samples = 1
        if generation_config.do_sample:  # a prompt is computed once for all of its completions
            rows = torch.cat((input_ids, attention_mask), 1)
            samples = gcd(*rows.unique_consecutive(dim=0, return_counts=True)[1].tolist())
        options = {"generation_config": generation_config, "num_return_sequences": samples, **arguments}
        prompts, mask = input_ids[::samples], attention_mask[::samples]
        del model.generate  # transformers' own runs inside
        try:
            output = generate(
                model, prompts, mesh=device_mesh, attention_mask=mask, logits_processor=[watch], **options
            )
        finally:
            model.generate = on_mesh
        watch.note_drawn(getattr(output, "sequences", output))
        return output

    model.generate = on_mesh
    try:
        yield logprobs
    finally:
        del model.generate
        if own_method is not None:
            model.generate = own_method
