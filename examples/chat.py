"""Ask a chat model about long texts. Ranks share its weights, and the context.

    torchrun --nproc-per-node 4 examples/chat.py MODEL FILE --tp 2 --ask "What is it about?" --ask "In one word?"
    torchrun --nproc-per-node 4 examples/chat.py MODEL FILE --shared --kv int8 --stop "\\n\\n" --ask "Who wrote it?"

MODEL is a folder or a name on the hub. Each --ask is a turn. Several FILEs are a batch: all are asked the same.
"""

import argparse
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import attnmesh.hf as hf

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model")
parser.add_argument("files", type=Path, nargs="+")
parser.add_argument("--ask", action="append", required=True, help="a question; give it once for each turn")
parser.add_argument("--tp", type=int, help="ranks that share the weights; all by default")
parser.add_argument("--shared", action="store_true", help="all ranks share the weights, and the context too")
parser.add_argument("--kv", choices=("int8", "fp8_e4m3"), help="store keys and values in 8 bits")
parser.add_argument("--stop", action="append", help="end an answer at this text")
parser.add_argument("--new", type=int, default=200, help="tokens of an answer at most")
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if device == "cuda" else "gloo")
if device == "cuda":
    torch.cuda.set_device(dist.get_node_local_rank())
ranks, first = dist.get_world_size(), dist.get_rank() == 0
logging.disable_progress_bar()  # each rank would show one
model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto", attn_implementation="attnmesh").eval()
if args.shared:
    mesh = init_device_mesh(device, (ranks,), mesh_dim_names=("keys",))
    model, output = hf.tensor_parallel(model, mesh, output="heads"), "heads"
else:
    tp = args.tp or ranks
    whole = init_device_mesh(device, (ranks // tp, tp), mesh_dim_names=("keys", "tp"))  # tp inside a host
    model, mesh, output = hf.tensor_parallel(model, whole["tp"]), whole["keys"], "replicated"
model = model.to(device)
tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
cache = hf.ShardedCache(model.config, mesh, output=output, storage=args.kv)  # one for all turns: it keeps the context

chats = [[{"role": "user", "content": f"{file.read_text()}\n\n{args.ask[0]}"}] for file in args.files]
for turn, question in enumerate(args.ask):
    if turn:
        for chat in chats:
            chat.append({"role": "user", "content": question})
    options = {"add_generation_prompt": True, "padding": True, "return_dict": True, "return_tensors": "pt"}
    inputs = tokenizer.apply_chat_template(chats, **options).to(device)
    start = perf_counter()
    tokens = hf.generate(
        model,
        **{name: inputs[name] for name in ("input_ids", "attention_mask")},
        cache=cache,
        max_new_tokens=args.new,
        stop_strings=args.stop,
        tokenizer=tokenizer,
    )
    new = tokens[:, inputs["input_ids"].shape[1] :]
    for chat, answer in zip(chats, tokenizer.batch_decode(new, skip_special_tokens=True), strict=True):
        chat.append({"role": "assistant", "content": answer})
        if first:
            print(answer)
    if first:
        read, seconds = inputs["input_ids"].shape[1], perf_counter() - start
        print(f"[{read:,} tokens and {new.shape[1]:,} new ones: {seconds:.1f} s]")
dist.destroy_process_group()
