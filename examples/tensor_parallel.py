"""Generate text with weights and heads shared by some ranks, and the context shared by the others, or by the same.

    torchrun --nproc-per-node 4 examples/tensor_parallel.py MODEL FILE --tp 2       # keys x tp = 2 x 2
    torchrun --nproc-per-node 4 examples/tensor_parallel.py MODEL FILE --shared     # the same four ranks share both

MODEL is a folder or a name on the hub. FILE is the text to continue.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, AutoTokenizer

import attnmesh.hf as hf

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model")
parser.add_argument("file", type=Path)
parser.add_argument("--tp", type=int, default=2, help="ranks that share the weights")
parser.add_argument("--shared", action="store_true", help="all ranks share the weights, and the context too")
parser.add_argument("--new", type=int, default=30, help="tokens to generate")
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if device == "cuda" else "gloo")
if device == "cuda":
    torch.cuda.set_device(dist.get_node_local_rank())
ranks = dist.get_world_size()
model = AutoModelForCausalLM.from_pretrained(args.model, attn_implementation="attnmesh").eval()
if args.shared:
    mesh = init_device_mesh(device, (ranks,), mesh_dim_names=("keys",))
    model, output = hf.tensor_parallel(model, mesh, output="heads"), "heads"
else:
    whole = init_device_mesh(device, (ranks // args.tp, args.tp), mesh_dim_names=("keys", "tp"))  # tp inside a host
    model, mesh, output = hf.tensor_parallel(model, whole["tp"]), whole["keys"], "replicated"
model = model.to(device)
cache = hf.ShardedCache(model.config, mesh, output=output)
tokenizer = AutoTokenizer.from_pretrained(args.model)
ids = tokenizer(args.file.read_text(), return_tensors="pt")["input_ids"].to(device)
tokens = hf.generate(model, ids, cache=cache, max_new_tokens=args.new, do_sample=False)
if dist.get_rank() == 0:
    print(tokenizer.decode(tokens[0, ids.shape[1] :]))
dist.destroy_process_group()
