"""Train a small byte-level Llama on Python's documentation, with sequences sharded over a mesh, then generate text.

    python examples/train.py                                                     # one device
    torchrun --nproc-per-node 4 examples/train.py --mesh queries=2,keys=2
    torchrun --nproc-per-node 4 examples/train.py --mesh data=2,keys=2 --checkpoint /tmp/run   # stop it, start it again

Ranks along `data` have different sequences, and FSDP2 shards weights and optimizer over them. Ranks along `queries` and
`keys` have different tokens of the same sequences. The loss is that of one device, whatever the mesh.
"""

import argparse
import json
import math
import os
import re
import shutil
import sys
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from pydoc_data.topics import topics
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import attnmesh as am
import attnmesh.hf as hf

CONFIG = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


AXES = ("data", "queries", "keys")


def main() -> None:
    """Train, then generate text."""
    args = parse_arguments()
    world, context = start(args)
    model = build_model(world, args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate, weight_decay=0.1)
    first = resume(args, model, optimizer)
    text = torch.tensor(list("\n".join(topics[name] for name in sorted(topics)).encode()))
    losses = train(model, optimizer, text, first, world, context, args)
    written = write(model, context, text, args)
    if rank() == 0:
        if args.json:
            print(json.dumps({"first_step": first, "losses": losses, "text": written}))
        else:
            print(f"it writes: {written!r}")
    if world is not None:
        dist.barrier()
        dist.destroy_process_group()


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    text: Tensor,
    first: int,
    world: DeviceMesh | None,
    context: DeviceMesh | None,
    args: argparse.Namespace,
) -> list[float]:
    """Run the steps from `first` on, and say how far they are. Return the loss of each."""
    losses = []
    stop = min(args.steps, args.until or args.steps)
    mesh = ",".join(f"{name}={size}" for name, size in args.mesh.items())
    report(f"mesh {mesh}: steps {first + 1} to {stop}, each of {args.batch} sequences of {args.length} bytes")
    start = perf_counter()
    for step in range(first, stop):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        batch = hf.shard_batch(sequences(text, step, world, args), context, args.layout)
        loss = model(**batch).loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean(loss.detach()))
        if step == first or (step + 1) % 10 == 0 or step + 1 == stop:
            seconds = perf_counter() - start
            report(f"step {step + 1}: loss {losses[-1]:.4f}, gradient {float(norm):.2f}, after {seconds:.0f} s")
        if args.checkpoint and ((step + 1) % args.every == 0 or step + 1 in (args.steps, args.until)):
            save(args, model, optimizer, step + 1)
    return losses


def report(line: str) -> None:
    """Print a line on standard error, on the first rank alone."""
    if rank() == 0:
        print(line, file=sys.stderr, flush=True)


def sequences(text: Tensor, step: int, world: DeviceMesh | None, args: argparse.Namespace) -> dict[str, Tensor]:
    """Return this data rank's sequences of the step. The whole batch does not depend on the mesh."""
    generator = torch.Generator().manual_seed(1000 * args.seed + step)
    starts = torch.randint(len(text) - args.length, (args.batch,), generator=generator)
    share = starts if world is None else starts.chunk(world["data"].size())[world["data"].get_local_rank()]
    ids = torch.stack([text[start : start + args.length] for start in share.tolist()]).to(device())
    return {"input_ids": ids, "labels": ids}


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Return a rate that rises over the first tenth, then falls along a cosine."""
    warm = max(1, args.steps // 10)
    if step < warm:
        return float(args.rate * (step + 1) / warm)
    return float(args.rate * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm) / max(1, args.steps - warm)))))


def build_model(world: DeviceMesh | None, args: argparse.Namespace) -> Any:
    """Return the model, with weights sharded along data and replicated along the other axes."""
    torch.manual_seed(args.seed)
    config = LlamaConfig(**CONFIG, attn_implementation="attnmesh")
    model = LlamaForCausalLM(config).to(device())
    if world is not None:
        for layer in model.model.layers:
            fully_shard(layer, mesh=world)
        fully_shard(model, mesh=world)
    return model


def write(model: Any, context: DeviceMesh | None, text: Tensor, args: argparse.Namespace) -> str:
    """Return the text that the model generates."""
    model.eval()
    prompt = text[: args.length // 2][None].to(device())
    made = hf.generate(model, prompt, mesh=context, max_new_tokens=args.write, do_sample=False)
    return bytes(made[0, prompt.shape[1] :].tolist()).decode(errors="replace")


# --- ranks ---


def start(args: argparse.Namespace) -> tuple[DeviceMesh | None, DeviceMesh | None]:
    """Return the mesh of FSDP (replicas x shards) and the mesh of attention, or None twice for one process."""
    data, queries, keys = (args.mesh[name] for name in AXES)
    ranks = data * queries * keys
    if ranks == 1:
        return None, None
    if "RANK" not in os.environ:
        sys.exit(f"--mesh needs torchrun --nproc-per-node {ranks} {sys.argv[0]}")
    if device().type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["LOCAL_WORLD_SIZE"])))
    dist.init_process_group("nccl" if device().type == "cuda" else "gloo", timeout=timedelta(minutes=10))
    whole = init_device_mesh(device().type, (queries, keys, data), mesh_dim_names=("queries", "keys", "data"))
    world = init_device_mesh(device().type, (queries * keys, data), mesh_dim_names=("context", "data"))
    return world, whole["queries", "keys"]


def device() -> torch.device:
    """Return the device type."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def rank() -> int:
    """Return the number of this process."""
    return dist.get_rank() if dist.is_initialized() else 0


def mean(loss: Tensor) -> float:
    """Return the mean over all ranks: the loss of the whole batch."""
    if dist.is_initialized():
        dist.all_reduce(loss)
        loss = loss / dist.get_world_size()
    return float(loss)


# --- checkpoints ---


def settings(args: argparse.Namespace) -> dict[str, int]:
    """Return the options that a resumed run has to keep."""
    return {name: getattr(args, name) for name in ("steps", "batch", "length", "seed")}


def save(args: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write a checkpoint. Remove the old one when the new one is complete."""
    weights, state = get_state_dict(model, optimizer)
    scratch = args.checkpoint / f"{step}.part"
    with quiet():
        dcp.save(
            {"model": weights, "optimizer": state, "step": step, "settings": settings(args)}, checkpoint_id=scratch
        )
    if rank() == 0:
        old = [path for path in args.checkpoint.iterdir() if path.name.isdigit()]
        scratch.rename(args.checkpoint / str(step))
        for path in old:
            shutil.rmtree(path)
    if dist.is_initialized():
        dist.barrier()


def resume(args: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the last checkpoint, if any, also of another mesh. Return the step to continue with."""
    folder = args.checkpoint
    steps = [int(path.name) for path in folder.iterdir() if path.name.isdigit()] if folder else []
    if not steps:
        return 0
    weights, state = get_state_dict(model, optimizer)
    kept: dict[str, Any] = {"model": weights, "optimizer": state, "step": 0, "settings": settings(args)}
    with quiet():
        dcp.load(kept, checkpoint_id=folder / str(max(steps)))
    if kept["settings"] != settings(args):
        sys.exit(
            f"--checkpoint: the run in {folder} has {kept['settings']}, given {settings(args)}: use another folder"
        )
    set_state_dict(model, optimizer, model_state_dict=kept["model"], optim_state_dict=kept["optimizer"])
    return int(kept["step"])


def quiet() -> Any:
    """Silence a warning that PyTorch gives in one process at each save."""
    import warnings

    return nullcontext() if dist.is_initialized() else warnings.catch_warnings(action="ignore")


def axes(text: str) -> dict[str, int]:
    """Return the ranks along each axis; 1 for one that is not named."""
    named = dict(re.findall(r"([a-z]+)=([1-9][0-9]{0,3})(?:,|$)", text))
    if ",".join(f"{name}={size}" for name, size in named.items()) != text or not named.keys() <= set(AXES):
        raise argparse.ArgumentTypeError(f"expected axes by name, as data=2,queries=1,keys=2, given {text!r}")
    return {name: int(named.get(name, 1)) for name in AXES}


def parse_arguments() -> argparse.Namespace:
    """Return the checked arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", type=axes, default="data=1", help="ranks by axis, as data=2,queries=1,keys=2")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=4, help="sequences of a step, over all data ranks")
    parser.add_argument("--length", type=int, default=512, help="bytes of a sequence")
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--layout", default="zigzag", choices=["contiguous", "zigzag", "striped"])
    parser.add_argument("--checkpoint", type=Path, help="a folder to save to, and to resume from")
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--until", type=int, help="a step to stop at, as if interrupted")
    parser.add_argument("--write", type=int, default=120, help="bytes to generate at the end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one JSON object with the losses on standard output")
    args = parser.parse_args()
    if args.batch % args.mesh["data"]:
        parser.error(f"--batch: expected a multiple of the {args.mesh['data']} data ranks, given {args.batch}")
    named = math.prod(args.mesh.values())
    ranks = int(os.environ.get("WORLD_SIZE", named))
    if ranks != named:
        parser.error(f"--mesh: expected {ranks} ranks, as torchrun started, given {named}")
    longest = CONFIG["max_position_embeddings"]
    if not 2 <= args.length <= longest:
        parser.error(f"--length: expected 2 to {longest} bytes, the model's context, given {args.length}")
    args.layout = {"contiguous": am.Contiguous, "zigzag": am.Zigzag, "striped": am.Striped}[args.layout]()
    if args.checkpoint:
        args.checkpoint.mkdir(parents=True, exist_ok=True)
    return args


if __name__ == "__main__":
    main()
