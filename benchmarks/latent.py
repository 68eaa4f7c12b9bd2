"""`python -m benchmarks latent`: a decode step of one layer with multi-head latent attention, stock and over ranks.

The layer has DeepSeek-V3's shape and random weights. Stock transformers expands all cached latents for the new token.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor
from transformers import DeepseekV3Config, DynamicCache
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from attnmesh import hf
from attnmesh.cache.cache import KVCache
from attnmesh.cli.launch import Send, run_on_ranks
from attnmesh.comm.topology import dist_all_gather_ints
from attnmesh.core.mask import Causal
from attnmesh.hf.layer_mask import RecognisedMask
from attnmesh.mesh.axes import RankMesh
from attnmesh.setup.init_mesh import init_mesh
from benchmarks.netns import send_rows
from benchmarks.timing import Timing


@dataclass(frozen=True)
class Request:
    """Tokens of the cache, the dtype by name, and steps to time."""

    tokens: int
    dtype: str
    steps: int


@dataclass(frozen=True)
class Row:
    """One way to decode."""

    contender: str
    timing: Timing
    """Milliseconds of a step."""
    cached_megabytes: float
    """Cached bytes of all ranks."""
    expanded_rows: int
    """Rows that `kv_b_proj` projects in a step."""


def rows(request: Request, ranks: int, threads: int, add: Send) -> None:
    """Measure one process with all threads, stock and ours, then ranks that share them."""
    run_on_ranks(1, send_rows, _one_process, request, threads=threads, on_message=add)
    run_on_ranks(ranks, send_rows, _ranks, request, threads=max(1, threads // ranks), on_message=add)


class _Layer:
    """One attention layer, and what its `kv_b_proj` projects."""

    def __init__(self, request: Request, attention: str) -> None:
        self.config = DeepseekV3Config(num_hidden_layers=1, max_position_embeddings=request.tokens + 1)
        self.config._attn_implementation = attention
        self.dtype = getattr(torch, request.dtype)
        torch.manual_seed(0)
        self.layer = DeepseekV3Attention(self.config, 0).to(self.dtype).eval()
        self.rope = DeepseekV3RotaryEmbedding(self.config)
        self.hidden = torch.randn(1, 1, self.config.hidden_size).to(self.dtype)
        self.latents = torch.randn(1, 1, request.tokens, self.config.kv_lora_rank).to(self.dtype)
        self.rotated = torch.randn(1, 1, request.tokens, self.config.qk_rope_head_dim).to(self.dtype)
        self.request, self.expanded = request, 0
        self.layer.kv_b_proj.register_forward_hook(self._count)

    def _count(self, _: object, inputs: tuple[Tensor], __: object) -> None:
        self.expanded += inputs[0].numel() // inputs[0].shape[-1]

    def step(self, cache: object, mask: object) -> float:
        """Return the seconds of a step."""
        position = torch.tensor([[self.request.tokens]])
        start = perf_counter()
        self.layer(self.hidden, self.rope(self.hidden, position), mask, past_key_values=cache)
        return perf_counter() - start


@torch.no_grad()
def _stock(request: Request) -> Row:
    layer, seconds = _Layer(request, "sdpa"), []
    size = (layer.latents.numel() + layer.rotated.numel()) * layer.dtype.itemsize
    for _ in range(2):
        cache = DynamicCache(config=layer.config)
        cache.update(layer.latents, layer.rotated, 0)
        seconds.append(layer.step(cache, None))
    return Row("1 process, stock transformers", Timing.of(seconds), size / 1e6, layer.expanded // 2)


@torch.no_grad()
def _ours(request: Request, ranks: int) -> Row:
    layer = _Layer(request, "attnmesh")
    mesh = init_mesh("cpu", (1, 1, ranks)) if ranks > 1 else None
    cache, mask = hf.ShardedCache(layer.config, mesh), RecognisedMask(Causal(), 1, request.tokens, 0)
    sizes = {"batch": 1, "kv_heads": 1, "head_dim": 576, "value_dim": 512, "capacity": request.tokens + 16}
    kv_cache = KVCache(mesh, dtype=layer.dtype, values="prefix", **sizes)  # type: ignore[arg-type]
    cache.layers[0].set_kv_caches([kv_cache])
    kv_cache.append(torch.cat((layer.latents, layer.rotated), -1))
    held_bytes = sum(size for (size,) in dist_all_gather_ints([cache.held_bytes], RankMesh.of(mesh).axes))
    layer.step(cache, mask)
    seconds, layer.expanded = [], 0
    for _ in range(request.steps):
        kv_cache.truncate(request.tokens)
        seconds.append(layer.step(cache, mask))
    name = f"{ranks} rank{'s' * (ranks > 1)}, latents in place"
    return Row(name, Timing.of(seconds), held_bytes / 1e6, layer.expanded // request.steps)


def _one_process(request: Request) -> Iterator[Row]:
    yield _ours(request, 1)
    yield _stock(request)


def _ranks(request: Request) -> Iterator[Row]:
    yield _ours(request, torch.distributed.get_world_size())
