"""Fine-tune a causal language model on long, packed documents: each pack is shared by some ranks, packs by the others.

    python examples/finetune.py                                                  # one process, a tiny model, this text
    torchrun --nproc-per-node 4 examples/finetune.py --context 2                 # 2 packs at once, each on 2 ranks
    torchrun --nproc-per-node 8 examples/finetune.py --model meta-llama/Llama-3.1-8B --data documents.jsonl \\
        --context 8 --length 131072 --bf16 --fsdp --folder run                   # add --lora 16 to train an adapter

The same command continues a run that was stopped. Losses are those of one process, whatever the mesh.
"""

import argparse
import logging
import os
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer

import attnmesh.hf as hf

CONFIGURATION = Path(__file__).parents[1] / "docs" / "configs" / "llama-3.1-8b.json"

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "head_dim": 16}
"""Sizes of the tiny model; the rest of its configuration is the real one."""


def main() -> None:
    """Train, evaluate and save."""
    args = parse_arguments()
    if args.model is None:
        torch.set_num_threads(1)  # threads wait for each other longer than so small a model computes
    logging.basicConfig(format="%(name)s: %(message)s")
    logging.getLogger("attnmesh").setLevel(logging.INFO)  # prints what "auto" chooses
    settings = training_settings(args)  # starts the process group under torchrun
    mesh, packs = None, 1
    if settings.world_size > 1:
        packs = settings.world_size // args.context
        world = init_device_mesh(settings.device.type, (packs, args.context), mesh_dim_names=("data", "context"))
        mesh = world["context"]
    settings.gradient_accumulation_steps = args.packs // packs

    args.folder.mkdir(parents=True, exist_ok=True)
    model, words = model_and_tokenizer(args)
    documents = read(args.data).train_test_split(0.1, seed=0)
    trainer = hf.on_mesh(SFTTrainer, mesh, layout="auto", shape="auto")(
        model=model,
        args=settings,
        train_dataset=documents["train"],
        eval_dataset=documents["test"],
        processing_class=words,
        peft_config=LoraConfig(r=args.lora, target_modules="all-linear", task_type="CAUSAL_LM") if args.lora else None,
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(args.folder))
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model(str(args.folder / "final"))  # for from_pretrained; of an adapter, the adapter alone
    if trainer.is_world_process_zero():
        print(f"evaluation loss {loss:.4f} on {settings.world_size} ranks; saved in {args.folder / 'final'}")
    if dist.is_initialized():
        dist.destroy_process_group()


def training_settings(args: argparse.Namespace) -> SFTConfig:
    """Return the settings of the trainer. Batch sizes are per mesh, not per rank."""
    return SFTConfig(
        str(args.folder),
        use_cpu=not torch.cuda.is_available(),
        packing=True, max_length=args.length, per_device_train_batch_size=1, per_device_eval_batch_size=1,
        max_steps=args.steps, learning_rate=args.rate, lr_scheduler_type="cosine", warmup_steps=args.steps // 10,
        bf16=args.bf16, activation_checkpointing=True, fsdp=args.fsdp, ddp_find_unused_parameters=False,
        eval_strategy="steps", eval_steps=args.save_every, save_steps=args.save_every, save_total_limit=2,
        logging_steps=1, report_to=[], seed=0,
    )  # fmt: skip


def model_and_tokenizer(args: argparse.Namespace) -> tuple[Any, Any]:
    """Return the model of `--model`, or a tiny one with its configuration, and the tokenizer."""
    if args.model is not None:
        kind = torch.float32  # of the weights that the optimizer changes; with --bf16 they are cast where they are used
        model = AutoModelForCausalLM.from_pretrained(args.model, attn_implementation="attnmesh", dtype=kind)
        return model, AutoTokenizer.from_pretrained(args.model)
    alphabet = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    of_bytes = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    of_bytes.pre_tokenizer, of_bytes.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    words = PreTrainedTokenizerFast(tokenizer_object=of_bytes, eos_token="<end>", pad_token="<pad>")
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(CONFIGURATION, vocab_size=len(words), **SMALL)
    return AutoModelForCausalLM.from_config(config, attn_implementation="attnmesh", dtype=torch.float32), words


def read(file: Path | None) -> Dataset:
    """Return documents, of which each line of JSON has "text", "messages", or "prompt" and "completion"."""
    if file is None:
        return Dataset.from_dict({"text": [text[:800] for text in topics.values()]})
    return Dataset.from_json(str(file))


def parse_arguments() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or a name on the hub; without it a tiny model with random weights")
    parser.add_argument("--data", type=Path, help="lines of JSON; without it Python's documentation")
    parser.add_argument("--folder", type=Path, default=Path("finetuned"), help="for checkpoints and the model")
    parser.add_argument("--context", type=int, default=1, help="ranks that share a pack; the others have other packs")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a pack")
    parser.add_argument("--packs", type=int, default=8, help="packs of a step, over all ranks")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--save-every", type=int, default=10, help="steps between checkpoints, and evaluations")
    parser.add_argument("--lora", type=int, default=0, help="rank of an adapter to train; 0: all weights")
    parser.add_argument("--fsdp", action="store_true", help="shard weights and optimizer over all ranks; needs GPUs")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16, with weights in float32")
    args, ranks = parser.parse_args(), int(os.environ.get("WORLD_SIZE", 1))
    if ranks % args.context:
        parser.error(f"--context: expected a divisor of the {ranks} ranks, given {args.context}")
    if args.packs % (ranks // args.context):
        at_once = ranks // args.context
        parser.error(f"--packs: expected a multiple of the {at_once} packs at once, given {args.packs}")
    return args


if __name__ == "__main__":
    main()
