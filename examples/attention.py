"""Attention and decoding on all ranks, compared with one device.

    python examples/attention.py                                  # one process
    torchrun --nproc-per-node 4 examples/attention.py             # four ranks on one machine
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HEAD:29500 examples/attention.py

Rank 0 prints the mesh and the largest errors.
"""

import os

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

import attnmesh as am

Q_HEADS, KV_HEADS, DIM, LENGTH = 8, 2, 64, 1000

device = "cuda" if torch.cuda.is_available() else "cpu"
mesh, shape = None, am.Shape(1, 1, 1)
if "RANK" in os.environ:  # started by torchrun
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    shape = am.mesh_shape(dist.get_world_size(), Q_HEADS, KV_HEADS)
    mesh = am.init_mesh(device, shape, Q_HEADS, KV_HEADS)

# The whole sequence, the same on every rank, for the comparison alone. A model makes its own shard only.
torch.manual_seed(0)
q = torch.randn(1, Q_HEADS, LENGTH, DIM).to(device)
k, v = (torch.randn(1, KV_HEADS, LENGTH, DIM).to(device) for _ in range(2))

# Attention: shards in, the same shard out, with gradients.
layout = am.Zigzag()
shards = [am.shard(x, mesh, layout=layout).requires_grad_() for x in (q, k, v)]
out = am.attention(*shards, mesh=mesh, layout=layout)
out.sum().backward()

# Decoding: the keys stay on the ranks. `append` takes a new token, the same on every rank.
cache = am.KVCache(mesh, batch=1, kv_heads=KV_HEADS, head_dim=DIM, capacity=LENGTH, dtype=q.dtype)
prompt = [x[:, :, :-1] for x in (k, v)]
positions = am.shard(torch.arange(LENGTH - 1), mesh, layout=layout, dim=0)
cache.append_shard(*(am.shard(x, mesh, layout=layout) for x in prompt), positions)
cache.append(k[:, :, -1:], v[:, :, -1:])
last = am.decode(q[:, :, -1:], cache)

# One device.
whole = [x.clone().requires_grad_() for x in (q, k, v)]
expected = scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
expected.sum().backward()


def error(given: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the largest difference."""
    return float((given - wanted).abs().max())


found = am.unshard(out.detach(), mesh, layout=layout)
gradients = [am.unshard(x.grad, mesh, layout=layout) for x in shards]
errors = {
    "attention": error(found, expected.detach()),
    **{f"gradient of {name}": error(x, y.grad) for name, x, y in zip("qkv", gradients, whole, strict=True)},
    "decode": error(last, expected[:, :, -1:].detach()),
}
if not dist.is_initialized() or dist.get_rank() == 0:
    print("mesh", "x".join(map(str, shape)), *(f"{name} {value:.0e}" for name, value in errors.items()))
    assert all(value < 1e-3 for value in errors.values()), errors  # a NaN is not
if dist.is_initialized():
    dist.destroy_process_group()
