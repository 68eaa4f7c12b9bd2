"""Trainers that compare two completions of each prompt, on a mesh: their log-probabilities are computed on shards."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnmesh.hf.training.batch_sharder import ShardedOutput
from attnmesh.hf.training.rewards import RewardFunctions
from attnmesh.hf.transformers_names import ONLINE_DPO, ROLLOUTS


class MeshOnlineDPO(RewardFunctions):
    """Base of classes that `on_mesh` returns, before `MeshTrainer`, for trainers that compare two completions."""

    max_length: int
    own_seed = False
    hides_padding = True
    upstream = (ROLLOUTS, ONLINE_DPO)

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        """Draw two completions of each prompt on the mesh."""
        with self._drawing():
            return super()._generate(*args, **kwargs)  # type: ignore[misc]

    def _calculate_rewards_from_functions(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the rewards, computed on the first rank of the mesh. A function that fails raises on all ranks."""
        rewards, error = None, None
        if self.is_first:
            try:
                rewards = super()._calculate_rewards_from_functions(*args, **kwargs).cpu()  # type: ignore[misc]
            except Exception as raised:  # the other ranks wait
                error = raised
        mesh_rewards: Tensor = self._broadcast_first(rewards, error).to(self.accelerator.device)
        return mesh_rewards

    def _forward(
        self,
        model: Any,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        completion_ids: Tensor,
        completion_mask: Tensor,
        *_: Any,
    ) -> Tensor:
        """Return the log-probabilities of the completions. Each rank has the logits of its tokens alone."""
        count = completion_ids.shape[1]
        cut = max(prompt_ids.shape[1] + count - self.max_length, 0)
        ids = torch.cat((prompt_ids[:, cut:], completion_ids), 1)
        mask = torch.cat((prompt_mask[:, cut:], completion_mask), 1)
        logits: ShardedOutput = model(ids, attention_mask=mask).logits
        first = max(ids.shape[1] - count - 1, 0)  # a token is predicted from the one before it
        targets = pad(completion_ids, (first, ids.shape[1] - first - count))
        logprobs = logits.plain().log_softmax(-1).gather(2, logits.share(targets)[..., None])
        token_logprobs = ShardedOutput.of(
            logprobs, sequence=logits.sequence, moved=logits.moved, token_slice=logits.token_slice
        )
        gathered = token_logprobs.gather_tokens()
        return gathered[:, first : first + count, 0]
