"""Calls whose CPU waits are pinned: each is made once before, so that what a first call of a kind does is done."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import AutoModelForCausalLM, LlamaConfig

import attnmesh as am
import attnmesh.hf as hf
from attnmesh.core.partial import Partial
from attnmesh.decoding.index_search import top_k_tokens
from attnmesh.mesh.axes import agreed_flat_axis
from attnmesh.mesh.shapes import AXES
from tests.support.emulation.emulated_gpu import EmulatedGPU
from tests.support.ranks.pool import on_each_rank

Call = Callable[[], object]
LENGTH = 32


@on_each_rank
def record_waits(gpu: EmulatedGPU, which: str, shape: tuple[int, int, int]) -> dict[str, list[str]]:
    """Return the waits of each call of a table on one rank."""
    mesh = init_device_mesh("cuda", shape, mesh_dim_names=AXES)
    table: Callable[[DeviceMesh], dict[str, Call]] = globals()[f"{which}_calls"]
    with torch.no_grad():
        return {name: waits_of(gpu, call) for name, call in table(mesh).items()}


def waits_of(gpu: EmulatedGPU, call: Call) -> list[str]:
    """Return the waits of the second call."""
    call()
    with gpu.recording() as waits:
        call()
    return [f"{wait.kind} {wait.operator} at {wait.place}" for wait in waits]


def random(seed: int, *sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return numbers on the GPU, the same on every rank."""
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).to(dtype).cuda()


def filled_cache(mesh: DeviceMesh, dtype: torch.dtype = torch.float32, **options: Any) -> am.KVCache:
    """Return a cache of two sequences with twenty tokens."""
    cache = am.KVCache(mesh, batch=2, kv_heads=2, head_dim=16, capacity=100, dtype=dtype, block=4, **options)
    cache.append(*(random(seed, 2, 2, 20, 16, dtype=dtype) for seed in (1, 2)))
    return cache


def decode_calls(mesh: DeviceMesh) -> dict[str, Call]:
    """Return calls on caches, and merges."""
    cache, other, window = filled_cache(mesh), filled_cache(mesh), filled_cache(mesh, mask=am.Window(9))
    half, forked, padded = filled_cache(mesh, torch.bfloat16), filled_cache(mesh), filled_cache(mesh)
    padded.append(random(3, 2, 2, 1, 16), random(4, 2, 2, 1, 16), token_mask=torch.tensor([[True], [False]]))
    fork = forked.fork()
    q, k, v = (random(seed, 2, heads, 1, 16) for seed, heads in ((3, 4), (4, 2), (5, 2)))
    sinks, few, real = random(6, 4), torch.tensor([7, 9]).cuda(), torch.ones(2, 1, dtype=torch.bool).cuda()

    def documents() -> object:
        return am.decode(q, other, mask=am.Causal() & am.Documents([20]))

    tokens = torch.arange(16).cuda()
    chosen = am.Selection(torch.tensor([3, 19, 7]).int().expand(2, 1, 1, -1).cuda())
    index = am.KVCache(
        mesh[("queries", "keys")], batch=2, kv_heads=1, head_dim=16, capacity=100, dtype=q.dtype, values="none"
    )
    index.append(random(1, 2, 1, 20, 16))

    def best() -> object:
        return top_k_tokens(index, lambda keys, given: given[0] @ keys.mT, [q[:, 0]], 5)

    options: dict[str, dict[str, Any]] = {
        "decode": {},
        "decode, selected": {"selected": chosen},
        "decode, window": {"mask": am.Window(5)},
        "decode, softcap and sinks": {"softcap": 3.0, "sinks": sinks},
        "decode, key_lengths on the GPU": {"key_lengths": few},
        "decode, key_lengths on the CPU": {"key_lengths": few.cpu()},
        "decode, reproducible": {"reproducible": True},
        "decode, tree": {"merge": "tree"},
        "decode, direct": {"merge": "direct"},
        "decode, heads": {"output": "heads"},
        "decode, checked=False": {"checked": False},
        "decode, checked=True": {"checked": True},
        "decode, gather": {"merge": "gather"},
    }
    calls: dict[str, Call] = {name: (lambda o=o: am.decode(q, cache, **o)) for name, o in options.items()}
    partial = Partial(random(7, 1, 4, 1, 16), random(8, 1, 4, 1))
    group = agreed_flat_axis(mesh, ("queries", "keys")).group
    return calls | {
        "append": lambda: cache.append(k, v),
        "append and decode": lambda: am.decode(q, cache, k=k, v=v),
        "append, half precision": lambda: half.append(k.bfloat16(), v.bfloat16()),
        "decode, half precision": lambda: am.decode(q.bfloat16(), half),
        "decode, documents": documents,
        "append to a window": lambda: window.append(k, v),
        "decode of a window": lambda: am.decode(q, window, mask=am.Window(9)),
        "append to a fork": lambda: fork.append(k, v),
        "decode of a fork, selected": lambda: am.decode(q, fork, selected=chosen),
        "decode of a padded batch, selected": lambda: am.decode(q, padded, selected=chosen),
        "append index keys": lambda: index.append(k[:, :1]),
        "top_k_tokens": best,
        "top_k_across": lambda: am.top_k_across(q[:, 0, 0], tokens, 3, group),
        "decode of a fork": lambda: am.decode(q, fork),
        "append to a padded batch": lambda: padded.append(k, v),
        "append with token_mask": lambda: padded.append(k, v, token_mask=real),
        "decode of a padded batch": lambda: am.decode(q, padded),
        "length": lambda: cache.length,
        "merge_across": lambda: am.merge_across(partial, group),
    }


def attention_calls(mesh: DeviceMesh) -> dict[str, Call]:
    """Return calls of `attention` on shards."""
    ranks = mesh.size()
    sinks, rows = random(9, 4), torch.tensor([2, 7, 30], dtype=torch.int32)
    zigzag = {"layout": am.Zigzag(), "length": LENGTH}
    options: dict[str, dict[str, Any]] = {
        "causal": zigzag,
        "window": zigzag | {"mask": am.Window(5)},
        "full": zigzag | {"mask": am.Full()},
        "documents": zigzag | {"mask": am.Causal() & am.Documents([LENGTH // 2, LENGTH // 2])},
        "striped": zigzag | {"layout": am.Striped(2)},
        "ring": zigzag | {"exchange": "ring"},
        "pipelined": zigzag | {"exchange": "pipelined"},
        "triton": zigzag | {"kernel": "triton"},
        "sinks": zigzag | {"sinks": sinks},
        "softcap": zigzag | {"softcap": 3.0},
        "selected": zigzag | {"selected": am.Selection(rows.expand(1, 1, LENGTH // ranks, 3).cuda())},
    }
    calls: dict[str, Call] = {}
    for dtype, names in ((torch.float32, [*options]), (torch.bfloat16, ["causal", "striped", "ring"])):
        shards = [random(11 + heads, 1, heads, LENGTH // ranks, 16, dtype=dtype) for heads in (4, 2, 2)]
        for name in names:
            given = options[name]
            calls[f"{name}, {dtype}"] = lambda shards=shards, given=given: am.attention(*shards, mesh=mesh, **given)
    return calls


@on_each_rank
def record_waits_of_model(gpu: EmulatedGPU, capacity: int | None) -> dict[str, list[str]]:
    """Return the waits of a token of a model of three layers."""
    mesh = init_device_mesh("cuda", (1, 1, 2), mesh_dim_names=AXES)
    model = on_gpu(tiny_model())
    cache = hf.ShardedCache(model.config, mesh, capacity=capacity, block=4)
    ids = torch.randint(64, (1, 40), generator=torch.Generator().manual_seed(1)).cuda()
    starts = iter(range(20, 40))

    def token() -> object:
        place = next(starts)
        return model(ids[:, place : place + 1], past_key_values=cache, position_ids=positions[:, place : place + 1])

    positions = torch.arange(40).cuda()[None]
    with torch.no_grad():
        model(ids[:, :20], past_key_values=cache)
        return {"token": waits_of(gpu, token)}


def tiny_model() -> Any:
    """Return a Llama of three layers, on the CPU."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "vocab_size": 64}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512)
    return AutoModelForCausalLM.from_config(config, attn_implementation="attnmesh").eval()


def on_gpu(model: Any) -> Any:
    """Return the model with its weights on the GPU. `Module.to` would look for a storage there."""
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            tensors.update({name: x.detach().cuda() for name, x in tensors.items() if x is not None})
    return model
