"""Train a Llama in plain PyTorch with FSDP2, tensor parallelism and context parallelism.

    python examples/plain.py                                                     # one process
    torchrun --nproc-per-node 8 examples/plain.py --dp 2 --tp 2 --cp 2

Ranks along `dp` have other sequences, ranks along `tp` other heads, ranks along `cp` other tokens. The losses are those
of one process, whatever the mesh.
"""

import argparse
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

import attnmesh as am

HEADS, KV_HEADS, DIM, LAYERS, LENGTH, BATCH = 8, 4, 16, 2, 253, 4
WIDTH = HEADS * DIM


class Attention(nn.Module):
    """Causal attention of grouped heads with rotary embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, n * DIM, bias=False) for n in (HEADS, KV_HEADS, KV_HEADS))
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        """Return the output of these tokens, (batch, tokens, width)."""
        q, k, v = (f(x).unflatten(-1, (-1, DIM)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = rotate(q, rope), rotate(k, rope)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(out.transpose(1, 2).flatten(-2))


class Layer(nn.Module):
    """Attention and a gated feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norms = Attention(), nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        """Return the layer's output."""
        x = x + self.attention(self.norms[0](x), rope)
        y = self.norms[1](x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """A byte-level language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(256, WIDTH), nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Return the logits of tokens at these positions of the sequence."""
        angles = positions[:, None] / 10000 ** (torch.arange(0, DIM, 2, device=ids.device) / DIM)
        x, rope = self.embed(ids), torch.polar(torch.ones_like(angles), angles)
        for layer in self.layers:
            x = layer(x, rope)
        return self.head(self.norm(x))


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Return queries or keys with rotary embeddings."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * rope).flatten(-2)


TENSOR_PLAN = {
    **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
    **{name: ColwiseParallel() for name in ("gate", "up")},
    **{name: RowwiseParallel() for name in ("attention.o", "down")},
}


def parallelize(model: Llama, world: DeviceMesh, style: am.ContextParallel) -> None:
    """Shard heads along tp, tokens along cp, and weights along dp and cp."""
    weights = world["dp", "cp"]._flatten() if world.ndim > 2 else world
    for layer in model.layers:
        parallelize_module(layer, world["tp"], TENSOR_PLAN)
        parallelize_module(layer, world["cp"], {"attention": style})
        fully_shard(layer, mesh=weights)
    fully_shard(model, mesh=weights)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--dp", type=int, default=1, help="ranks with other sequences")
parser.add_argument("--tp", type=int, default=1, help="ranks with other heads")
parser.add_argument("--cp", type=int, default=1, help="ranks with other tokens")
parser.add_argument("--steps", type=int, default=10)
args = parser.parse_args()
sizes = args.dp, args.tp, args.cp

torch.manual_seed(0)
model, world, context = Llama(), None, None
if sizes != (1, 1, 1):
    world = init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", sizes, mesh_dim_names=("dp", "tp", "cp"))
    context = world["cp"]
    heads = {"q_heads": HEADS // args.tp, "kv_heads": KV_HEADS // args.tp}
    parallelize(model, world, am.ContextParallel(**heads, length=LENGTH))

layout = am.Zigzag()
text = torch.frombuffer(bytearray(topics["specialnames"].encode()), dtype=torch.uint8).long()
positions = am.shard(torch.arange(LENGTH), context, layout=layout, dim=0)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(args.steps):
    starts = torch.arange(BATCH) * LENGTH + step * 1000
    mine = starts if world is None else starts.chunk(args.dp)[world["dp"].get_local_rank()]
    rows = torch.stack([text[start : start + LENGTH + 1] for start in mine.tolist()])
    ids, targets = (am.shard(x, context, layout=layout, dim=1) for x in (rows[:, :-1], rows[:, 1:]))
    losses = functional.cross_entropy(model(ids, positions).flatten(0, 1), targets.flatten(), reduction="sum")
    loss = losses / (len(mine) * LENGTH) * args.cp  # its mean over dp and cp is that of the batch
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    loss = loss.detach()
    if world is not None:
        dist.all_reduce(loss)
        loss /= dist.get_world_size()

if world is None or dist.get_rank() == 0:
    print(f"training loss {float(loss):.4f} on {args.dp * args.tp * args.cp} ranks")
if world is not None:
    dist.destroy_process_group()
