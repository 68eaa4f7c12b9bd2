"""Generate text with weights and heads sharded by tensor parallelism, and the context sharded over the other ranks.

    torchrun --nproc-per-node 4 examples/tensor_parallel.py MODEL FILE --tp 2

MODEL is a folder or a name on the hub. FILE is the text to continue. Four ranks with --tp 2 are keys x tp = 2 x 2.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.distributed import DistributedConfig

import attnmesh.hf as hf

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model")
parser.add_argument("file", type=Path)
parser.add_argument("--tp", type=int, default=2, help="ranks that share the heads; they divide the key heads")
parser.add_argument("--new", type=int, default=30, help="tokens to generate")
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if device == "cuda" else "gloo")
if device == "cuda":
    torch.cuda.set_device(dist.get_node_local_rank())
keys = dist.get_world_size() // args.tp
whole = init_device_mesh(device, (keys, args.tp), mesh_dim_names=("keys", "tp"))  # the last axis is inside a host

model = AutoModelForCausalLM.from_pretrained(
    args.model,
    attn_implementation="attnmesh",
    distributed_config=DistributedConfig(tp_size=args.tp, dp_replicate_size=keys),  # the same weights along keys
).eval()
tokenizer = AutoTokenizer.from_pretrained(args.model)
ids = tokenizer(args.file.read_text(), return_tensors="pt")["input_ids"].to(device)
tokens = hf.generate(model, ids, mesh=whole["keys"], max_new_tokens=args.new, do_sample=False)
if dist.get_rank() == 0:
    print(tokenizer.decode(tokens[0, ids.shape[1] :]))
dist.destroy_process_group()
