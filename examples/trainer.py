"""Train a small byte-level Llama with transformers' `Trainer`, each sequence sharded over all ranks.

python examples/trainer.py                                    # one process
torchrun --nproc-per-node 4 examples/trainer.py               # four ranks: the same losses
"""

from pydoc_data.topics import topics
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import attnmesh as am
import attnmesh.hf as hf

LENGTH, CPU = 253, not torch.cuda.is_available()

text = torch.frombuffer(bytearray(topics["specialnames"].encode()), dtype=torch.uint8).long()
rows = [{"input_ids": row, "labels": row} for row in text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)]

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes, attn_implementation="attnmesh"))

with TemporaryDirectory() as folder:
    args = TrainingArguments(
        folder, max_steps=8, logging_steps=4, learning_rate=3e-3, seed=1, report_to=[], use_cpu=CPU
    )
    ranks = args.world_size  # TrainingArguments has started the process group under torchrun
    mesh = None if ranks == 1 else am.init_mesh(args.device.type, am.mesh_shape(ranks, 4, 4), 4, 4)

    trainer = hf.on_mesh(Trainer, mesh)(model=model, args=args, train_dataset=rows, eval_dataset=rows[:8])
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]

if not dist.is_initialized() or dist.get_rank() == 0:
    print(f"evaluation loss {loss:.4f} on {ranks} ranks")
if dist.is_initialized():
    dist.destroy_process_group()
