"""Train a causal language model by rewards, with GRPO: each completion is drawn and learned by the ranks of a mesh.

    python examples/grpo.py                                                      # one process, a tiny model, sums
    torchrun --nproc-per-node 2 examples/grpo.py --context 2                     # the same, on one mesh of 2 ranks
    torchrun --nproc-per-node 4 examples/grpo.py --context 2                     # 2 meshes, with other prompts
    torchrun --nproc-per-node 8 examples/grpo.py --model Qwen/Qwen3-8B --context 8 --tokens 8192 --rate 1e-6 --lora 16

Replace `prompts` and `reward` by your own. On one mesh the rewards are those of one process.
"""

import argparse
import os
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

import attnmesh.hf as hf

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 16}
"""Sizes of the tiny model."""


def main() -> None:
    """Train, and save the model."""
    args = parse_arguments()
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    meshes = ranks // args.context
    settings = training_settings(args, meshes)  # starts the process group under torchrun
    mesh = None
    if ranks > 1:
        names = ("data", "context")
        mesh = init_device_mesh(settings.device.type, (meshes, args.context), mesh_dim_names=names)["context"]
    model, words = model_and_tokenizer(args.model)
    trainer = hf.on_mesh(GRPOTrainer, mesh)(
        model=model,
        args=settings,
        reward_funcs=reward,
        train_dataset=prompts(),
        processing_class=words,
        peft_config=LoraConfig(r=args.lora, target_modules="all-linear", task_type="CAUSAL_LM") if args.lora else None,
    )
    trainer.train()
    trainer.save_model(str(args.folder / "final"))
    if trainer.is_world_process_zero():
        rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
        print(f"reward {rewards[0]:.4f}, then {rewards[-1]:.4f} on {ranks} ranks; saved in {args.folder / 'final'}")
    if dist.is_initialized():
        dist.destroy_process_group()


def prompts() -> Dataset:
    """Return sums of two digits, with their results for `reward`."""
    pairs = [(a, b) for a in range(10) for b in range(10) if a + b < 10]
    return Dataset.from_list([{"prompt": f"{a}+{b}=", "result": a + b} for a, b in pairs])


def reward(completions: list[str], result: list[int], **_: Any) -> list[float]:
    """Return 1 for a completion whose first number is the sum, and less the further it is away."""
    numbers = [re.match(r"\s*(\d{1,3})", text) for text in completions]
    away = [99 if found is None else abs(int(found[1]) - right) for found, right in zip(numbers, result, strict=True)]
    return [1 / (1 + distance) for distance in away]


def training_settings(args: argparse.Namespace, meshes: int) -> GRPOConfig:
    """Return the settings of the trainer. Batch sizes are per mesh, not per rank."""
    return GRPOConfig(
        str(args.folder),
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=args.completions // meshes, num_generations=args.group,
        max_completion_length=args.tokens, max_steps=args.steps, learning_rate=args.rate, lr_scheduler_type="constant",
        bf16=args.bf16, gradient_checkpointing=args.model is not None, ddp_find_unused_parameters=False,
        logging_steps=1, report_to=[], seed=0, save_strategy="no",
    )  # fmt: skip


def model_and_tokenizer(name: str | None) -> tuple[Any, Any]:
    """Return the model of `--model`, or a tiny one, and the tokenizer."""
    if name is not None:
        model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="attnmesh", dtype=torch.float32)
        return model, AutoTokenizer.from_pretrained(name)
    letters = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate("0123456789+=")}, merges=[]))
    letters.pre_tokenizer, letters.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    words = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="<end>", pad_token="<pad>")
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(words), eos_token_id=words.eos_token_id, bos_token_id=None, **SIZES)
    return AutoModelForCausalLM.from_config(config, attn_implementation="attnmesh", dtype=torch.float32), words


def parse_arguments() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or a name on the hub; without it a tiny model with random weights")
    parser.add_argument("--folder", type=Path, default=Path("rewarded"), help="for the model")
    parser.add_argument("--context", type=int, default=1, help="ranks that share a completion; the others have others")
    parser.add_argument("--tokens", type=int, default=2, help="tokens of a completion at most")
    parser.add_argument("--completions", type=int, default=96, help="completions of a step, over all ranks")
    parser.add_argument("--group", type=int, default=8, help="completions of a prompt")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--lora", type=int, default=0, help="rank of an adapter to train; 0: all weights")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16, with weights in float32")
    args, ranks = parser.parse_args(), int(os.environ.get("WORLD_SIZE", 1))
    if ranks % args.context:
        parser.error(f"--context: expected a divisor of the {ranks} ranks, given {args.context}")
    if args.completions % (args.group * (ranks // args.context)):
        expected = f"a multiple of the {ranks // args.context} meshes x {args.group} completions of a prompt"
        parser.error(f"--completions: expected {expected}, given {args.completions}")
    return args


if __name__ == "__main__":
    main()
