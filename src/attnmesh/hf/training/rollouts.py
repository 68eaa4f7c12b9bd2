"""Trainers that draw completions of prompts, on a mesh: its ranks have the same ones, with the same rewards.

`hf.generate` draws them, with the weights, kernels and caches of the mesh. The first rank of a mesh computes their
rewards. Log-probabilities come from calls of the model with whole batches, see `sharded_calls`.
"""

import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad
from transformers import LogitsProcessor, set_seed

from attnmesh.errors import Check, KernelError, ShapeError, UnforeseenError, require, require_all
from attnmesh.hf.generate import generate, synchronize_generators
from attnmesh.hf.models import unwrap
from attnmesh.hf.training.sharded_calls import ShardedCalls
from attnmesh.hf.transformers_names import ACCELERATE, ROLLOUTS

SUBJECT = "on_mesh"

BY_MESH = "leave it out: hf.generate draws completions on the mesh"

LOGPROBS, STEP = "drawn_logprobs", "drawn_at"
"""Entries of a batch of completions: the log-probabilities with which their tokens were drawn, and the step then."""

DIFFERENCE = "sampling/sampling_logp_difference"
"""Metric of TRL: how far the log-probabilities of a rollout are from those of training."""


class MeshRollouts:
    """Base of classes that `on_mesh` returns, before `MeshTrainer`, for trainers that draw completions."""

    accelerator: Any
    args: Any
    calls: ShardedCalls
    model: Any
    reward_funcs: list[Any]
    state: Any
    _metrics: dict[str, Any]
    _pending_metrics: dict[str, Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        set_seed(self.args.seed + self.accelerator.replicas.own)  # of processes, which to TRL are the ranks
        mesh, rank = self.calls.mesh, self.accelerator.state.process_index
        first = rank if mesh is None else int(mesh.mesh.flatten()[0])
        self.is_first = rank == first
        self.firsts: list[int] = self.accelerator.gather(torch.tensor(first, device=self.accelerator.device)).tolist()
        self.logprobs, self.logprobs_of_training = torch.empty(0), torch.empty(0)

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, to which the ranks of a mesh are one process."""
        ROLLOUTS.check()
        require_all(_checks(self))
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        fits, fix = not self.accelerator.is_fsdp2, "use DDP"
        require(fits, KernelError, SUBJECT, "weights that each rank has whole, to generate", "FSDP2", fix)
        self.calls.pads_left = True
        self._count_generations()

    def _count_generations(self) -> None:
        """Correct the size of a generation batch: TRL has counted each rank as a process. Raise if groups are cut."""
        args, meshes = self.args, self.accelerator.replicas.groups
        args.generation_batch_size = args.per_device_train_batch_size * meshes * args.steps_per_generation
        sizes = {"per_device_train_batch_size": (args.generation_batch_size, args.num_generations)}
        if args.eval_strategy != "no":
            evaluated = args.per_device_eval_batch_size * meshes
            sizes["per_device_eval_batch_size"] = evaluated, args.num_generations_eval or args.num_generations
        for name, (given, group) in sizes.items():
            expected, fix = f"a multiple of the {group} generations of a prompt", f"raise {name}, which is per mesh"
            require(given % group == 0, ShapeError, f"{SUBJECT} {name}", expected, f"{given} completions", fix)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        """Draw completions on the mesh."""
        with self.calls.active(False), generating_on(self.calls.mesh, unwrap(self.model)) as drawn:
            completions = super()._generate_single_turn(*args, **kwargs)  # type: ignore[misc]
        self.logprobs = torch.cat(drawn, 1)
        return completions

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        """Draw completions and compare their rewards, of all meshes."""
        with self.accelerator.dealing(), self._gathering():
            batch = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        logprobs = pad(self.logprobs, (0, batch["completion_ids"].shape[1] - self.logprobs.shape[1]))
        return {**batch, LOGPROBS: logprobs, STEP: torch.tensor(self.state.global_step)}

    @contextmanager
    def _gathering(self) -> Iterator[None]:
        """Let TRL gather from the first rank of each mesh, in this context. It does so by functions of accelerate."""
        of_trl = next(one for one in type(self).__mro__ if one.__module__.startswith("trl."))
        functions = vars(sys.modules[of_trl.__module__])
        before = {name: functions[name] for name in ("gather", "gather_object")}
        functions |= {"gather": self._gather, "gather_object": self._gather_rows}
        try:
            yield
        finally:
            functions |= before

    def _gather(self, x: Tensor) -> Tensor:
        """Return the tensors of the first rank of each mesh."""
        whole: Tensor = ACCELERATE.find("accelerate.utils:gather")(x)
        return whole.view(-1, *x.shape)[self.firsts].flatten(0, 1)

    def _gather_rows(self, rows: list[Any]) -> list[Any]:
        """Return the rows of the first rank of each mesh."""
        parts: list[list[Any]] = ACCELERATE.find("accelerate.utils:gather_object")([rows])
        return [row for rank in self.firsts for row in parts[rank]]

    def _calculate_rewards(self, inputs: Any, prompts: Any, *args: Any) -> Any:
        """Return the rewards of all meshes, computed on the first rank of each. One that fails raises on all ranks."""
        functions, error = self.reward_funcs, None
        self.reward_funcs = functions if self.is_first else [_no_rewards] * len(functions)
        try:
            rewards = super()._calculate_rewards(inputs, prompts, *args)  # type: ignore[misc]
        except Exception as raised:  # before the rewards are gathered, for which the other ranks wait
            error = raised
            rewards = self._gather(torch.zeros(len(prompts), len(functions), device=self.accelerator.device))
        finally:
            self.reward_funcs = functions
        text = "" if error is None else " ".join(f"{type(error).__name__}: {error}".split())
        said = self._gather_rows([(text, dict(self._pending_metrics))])
        if error is not None:
            raise error
        failed, fix = next((text for text, _ in said if text), ""), "see the error of the rank that raised"
        require(not failed, UnforeseenError, "reward function", "a reward for each completion", failed, fix)
        self._pending_metrics = defaultdict(list, said[self.accelerator.replicas.own][1])
        synchronize_generators((self.calls.mesh,), self.accelerator.device)  # a reward may have drawn numbers
        return rewards

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        """Return the log-probabilities of training, and keep them."""
        found = super()._get_per_token_logps_and_entropies(*args, **kwargs)  # type: ignore[misc]
        self.logprobs_of_training = found[0].detach()
        return found

    def _compute_loss(self, model: nn.Module, inputs: Any) -> Tensor:
        """Return the loss. Log how far log-probabilities are from those of the rollout, if weights are the same."""
        loss: Tensor = super()._compute_loss(model, inputs)  # type: ignore[misc]
        if self.state.global_step == inputs[STEP]:
            metrics, mask = self._metrics["train" if self.model.training else "eval"], inputs["completion_mask"]
            away = (self.logprobs_of_training - inputs[LOGPROBS]).abs() * mask
            found = torch.stack((away.sum(), mask.sum(), away.max())).unsqueeze(0)
            total, tokens, most = self.accelerator.gather(found).unbind(1)
            metrics[f"{DIFFERENCE}/mean"].append((total.sum() / tokens.sum().clamp(min=1)).item())
            metrics[f"{DIFFERENCE}/max"].append(most.max().item())
        return loss


class DrawnLogprobs(LogitsProcessor):  # type: ignore[misc]
    """Logits processor that changes nothing, and keeps the log-probability of each token that is drawn."""

    def __init__(self, temperature: float, kept: list[Tensor]) -> None:
        self.temperature, self.kept = temperature, kept
        self.all: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores."""
        self.take(input_ids)
        self.all = (scores / self.temperature).log_softmax(-1)
        return scores

    def take(self, ids: Tensor) -> None:
        """Keep the log-probabilities of the last tokens."""
        if self.all is not None:
            self.kept.append(self.all.gather(1, ids[:, -1:]))


@contextmanager
def generating_on(mesh: DeviceMesh | None, model: Any) -> Iterator[list[Tensor]]:
    """Let a model's next `generate` run on a mesh, in this context. Yield the log-probabilities of drawn tokens."""
    kept: list[Tensor] = []

    def on_mesh(input_ids: Tensor, attention_mask: Tensor, generation_config: Any, **more: Any) -> Any:
        del model.generate  # transformers' own runs inside
        watch, samples = DrawnLogprobs(generation_config.temperature, kept), 1
        if generation_config.do_sample:  # a prompt is computed once for all of its completions
            rows = torch.cat((input_ids, attention_mask), 1)
            samples = gcd(*rows.unique_consecutive(dim=0, return_counts=True)[1].tolist())
        options = {"generation_config": generation_config, "num_return_sequences": samples, **more}
        prompts, mask = input_ids[::samples], attention_mask[::samples]
        ids = generate(model, prompts, mesh=mesh, attention_mask=mask, logits_processor=[watch], **options)
        watch.take(ids)
        return ids

    model.generate = on_mesh
    try:
        yield kept
    finally:
        vars(model).pop("generate", None)


def _no_rewards(prompts: list[Any], **_: Any) -> list[float]:
    """Return zeros, on ranks whose rewards do not count."""
    return [0.0] * len(prompts)


def _checks(trainer: Any) -> Iterator[Check]:
    """Yield what holds of a trainer that is served."""
    args, on_device = trainer.args, "leave it out, or train on one device"
    refused = {
        "use_vllm": (args.use_vllm, BY_MESH),
        "use_transformers_continuous_batching": (args.use_transformers_continuous_batching, BY_MESH),
        "cache_implementation": (args.cache_implementation, BY_MESH),
        "rollout_func": (getattr(trainer, "rollout_func", None), BY_MESH),
        "num_beams": ((args.generation_kwargs or {}).get("num_beams", 1) > 1, BY_MESH),
        "environment_factory": (getattr(trainer, "environment_factories", None), on_device),
        "tools": (getattr(trainer, "tools", None), on_device),
        "use_liger_kernel": (args.use_liger_kernel, "leave it out: attnmesh brings the kernels of attention"),
    }
    for name, (given, fix) in refused.items():
        yield not given, KernelError, f"{SUBJECT} {name}", "a trainer without it", type(given).__name__, fix
    given, fix = "a processor of images", "pass a tokenizer, and prompts without images"
    yield not trainer._is_vlm, KernelError, f"{SUBJECT} processing_class", "a tokenizer", given, fix
    models = [type(each).__name__ for each in trainer.reward_funcs if isinstance(each, nn.Module)]
    fix = "call the model in a function, which the first rank of a mesh runs"
    yield not models, KernelError, f"{SUBJECT} reward_funcs", "functions", ", ".join(models), fix
