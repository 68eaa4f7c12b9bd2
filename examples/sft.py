"""Fine-tune a small byte-level Llama with TRL's `SFTTrainer`: packed documents, each pack sharded over all ranks.

python examples/sft.py                                        # one process
torchrun --nproc-per-node 4 examples/sft.py                   # four ranks: the same losses
"""

from pydoc_data.topics import topics
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import attnmesh as am
import attnmesh.hf as hf

CPU = not torch.cuda.is_available()

# A tokenizer of bytes, so that the example needs no download.
alphabet = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
words = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")

documents = Dataset.from_dict({"text": [text[:400] for text in topics.values()][:64]})

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(words), **sizes, attn_implementation="attnmesh"))

with TemporaryDirectory() as folder:
    args = SFTConfig(
        folder, max_steps=8, logging_steps=4, learning_rate=3e-3, seed=1, report_to=[], use_cpu=CPU,
        packing=True, max_length=500,
        gradient_checkpointing=False, bf16=not CPU,
    )  # fmt: skip
    ranks = args.world_size
    mesh = None if ranks == 1 else am.init_mesh(args.device.type, am.mesh_shape(ranks, 4, 4), 4, 4)

    trainer = hf.on_mesh(SFTTrainer, mesh)(model=model, args=args, train_dataset=documents, processing_class=words)
    loss = trainer.train().training_loss

if not dist.is_initialized() or dist.get_rank() == 0:
    print(f"training loss {loss:.4f} on {ranks} ranks")
if dist.is_initialized():
    dist.destroy_process_group()
