"""Trainers that learn from rewards of completions, on a mesh. The first rank of a mesh computes the rewards."""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from attnmesh.errors import KernelError, ShapeError, UnforeseenError
from attnmesh.hf.random_numbers import synchronize_all_generators
from attnmesh.hf.training.rollouts import BY_MESH, ON_ONE_DEVICE, SUBJECT, MeshRollouts, refuse_argument

LOGPROBS, STEP = "drawn_logprobs", "drawn_at"
"""Entries of a batch of completions: the log-probabilities of their tokens as drawn, and the step of the draw."""

DIFFERENCE = "sampling/sampling_logp_difference"
"""Metric of TRL: how far the log-probabilities of a rollout are from those of training."""


class RewardFunctions(MeshRollouts):
    """Base of classes that `on_mesh` returns, before `MeshTrainer`, for trainers with functions that return rewards."""

    ref_model: Any
    reward_funcs: list[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.ref_model is not None:
            self.sharder.install(self.ref_model)  # FSDP2 shards its weights without `accelerator.prepare`

    def _check_arguments(self) -> None:
        models = [type(function).__name__ for function in self.reward_funcs if isinstance(function, nn.Module)]
        if models:
            fix = "call the model in a function, which the first rank of a mesh runs"
            raise KernelError(f"{SUBJECT} reward_funcs", "functions", ", ".join(models), fix)
        super()._check_arguments()

    def _broadcast_first(self, value: Any, error: Exception | None) -> Any:
        """Return `value` of the first rank of this mesh. Raise on all ranks if one has an error.

        Collective over the world.
        """
        text = "" if error is None else " ".join(f"{type(error).__name__}: {error}".split())
        reports = self._gather_rows([(text, value)])
        if error is not None:
            raise error
        failure = next((text for text, _ in reports if text), "")
        if failure:
            fix = "see the error of the rank that raised"
            raise UnforeseenError("reward function", "a reward for each completion", failure, fix)
        synchronize_all_generators(self.sharder.device_mesh, self.accelerator.device)  # a reward may have drawn numbers
        return reports[self.accelerator.replicas.mesh_index][1]


class MeshRewards(RewardFunctions):
    """Base of classes that `on_mesh` returns, before `MeshTrainer`, for trainers that compare groups of completions."""

    state: Any
    _metrics: dict[str, Any]
    _pending_metrics: dict[str, Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logprobs_of_training = torch.empty(0, device="cpu")

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, to which the ranks of a mesh are one process."""
        super().create_accelerator_and_postprocess()
        self._count_generations()

    def _check_arguments(self) -> None:
        batching = "use_transformers_continuous_batching"
        refuse_argument(batching, getattr(self.args, batching), BY_MESH)
        refuse_argument("rollout_func", getattr(self, "rollout_func", None), BY_MESH)  # which GRPO alone takes
        refuse_argument("environment_factory", getattr(self, "environment_factories", None), ON_ONE_DEVICE)
        super()._check_arguments()  # an environment brings tools

    def _count_generations(self) -> None:
        """Correct the size of a generation batch: TRL has counted each rank as a process. Raise if groups are cut."""
        args, meshes = self.args, self.accelerator.replicas.num_meshes
        args.generation_batch_size = args.per_device_train_batch_size * meshes * args.steps_per_generation
        sizes = {"per_device_train_batch_size": (args.generation_batch_size, args.num_generations)}
        if args.eval_strategy != "no":
            eval_completions = args.per_device_eval_batch_size * meshes
            sizes["per_device_eval_batch_size"] = eval_completions, args.num_generations_eval or args.num_generations
        for name, (size, group) in sizes.items():
            if size % group:
                expected, fix = f"a multiple of the {group} generations of a prompt", f"raise {name}, which is per mesh"
                raise ShapeError(f"{SUBJECT} {name}", expected, f"{size} completions", fix)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        """Draw completions and compare their rewards, of all meshes."""
        batch = super()._generate_and_score_completions(inputs)
        rows, length = batch["completion_ids"].shape
        if len(self.logprobs) != rows:
            expected, given = f"{rows} completions of one call of generate", f"{len(self.logprobs)} in the last one"
            raise ShapeError(f"{SUBJECT} generate", expected, given, "draw all completions in one call")
        logprobs = pad(self.logprobs, (0, length - self.logprobs.shape[1]))
        return {**batch, LOGPROBS: logprobs, STEP: torch.tensor(self.state.global_step, device="cpu")}

    def _calculate_rewards(self, inputs: Any, prompts: Any, *args: Any) -> Any:
        """Return the rewards of all meshes, from the first rank of each. A function that fails raises on all ranks."""
        functions, error = self.reward_funcs, None
        self.reward_funcs = functions if self.is_first else [_no_rewards] * len(functions)
        try:
            rewards = super()._calculate_rewards(inputs, prompts, *args)  # type: ignore[misc]
        except Exception as raised:  # before the rewards are gathered, for which the other ranks wait
            error = raised
            rewards = self._gather(
                torch.zeros(len(prompts), len(functions), device=self.accelerator.device, dtype=torch.float32)
            )
        finally:
            self.reward_funcs = functions
        self._pending_metrics = defaultdict(list, self._broadcast_first(dict(self._pending_metrics), error))
        return rewards

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        """Return the log-probabilities of training, and keep them."""
        outputs = super()._get_per_token_logps_and_entropies(*args, **kwargs)  # type: ignore[misc]
        self.logprobs_of_training = outputs[0].detach()
        return outputs

    def _compute_loss(self, model: nn.Module, inputs: Any) -> Tensor:
        """Return the loss. Log how far log-probabilities are from those of the rollout, if weights are the same."""
        loss: Tensor = super()._compute_loss(model, inputs)  # type: ignore[misc]
        if self.state.global_step == inputs[STEP]:
            metrics, mask = self._metrics["train" if self.model.training else "eval"], inputs["completion_mask"]
            distances = (self.logprobs_of_training - inputs[LOGPROBS]).abs()
            distances = distances.where(mask.bool(), 0)  # padding may be suppressed: it was drawn with -inf
            sums = torch.stack((distances.sum(), mask.sum(), distances.max())).unsqueeze(0)
            total, tokens, largest = self.accelerator.gather(sums).unbind(1)
            metrics[f"{DIFFERENCE}/mean"].append((total.sum() / tokens.sum().clamp(min=1)).item())
            metrics[f"{DIFFERENCE}/max"].append(largest.max().item())
        return loss


def _no_rewards(prompts: list[Any], **_: Any) -> list[float]:
    """Return zeros, on ranks whose rewards do not count."""
    return [0.0] * len(prompts)
