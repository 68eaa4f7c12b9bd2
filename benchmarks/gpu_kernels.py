"""`python -m benchmarks gpu-kernels`: decoding and prefill on one GPU beside its fastest rivals and the read rate."""

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa
from transformers import AutoModelForCausalLM, LlamaConfig

import attnmesh as am
from attnmesh import hf
from attnmesh.core.layout import Layout
from attnmesh.core.scaling import Scaling
from attnmesh.core.storage import STORAGES
from attnmesh.kernels.cache_view import DecodeQuery
from attnmesh.kernels.choice import choose
from attnmesh.kernels.kernel import KernelRequest
from attnmesh.kernels.tiered_attention import TieredAttention
from benchmarks.model import Times
from benchmarks.timing import Call, Comparison, Timing, race

Q_HEADS, KV_HEADS, WIDTH = 32, 8, 128
OURS = "attnmesh"
IN_8_BITS = (100, 65_536)
"""Numbers of keys that are also stored in 8 bits."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the cases: the defaults are for a GPU, smaller ones for tests."""

    decoding: tuple[tuple[int, int], ...] = (  # (batch, keys)
        (1, 8_192), (1, 65_536), (1, 1_048_576), (8, 8_192), (8, 65_536), (64, 8_192),
    )  # fmt: skip
    prefill: tuple[int, ...] = (8_192, 32_768)
    shards: int = 4
    heads: tuple[int, int] = (Q_HEADS, KV_HEADS)
    seconds: float = 0.3
    layers: int = 32
    prompt: int = 16_384
    tiers: tuple[int, int] = (524_288, 32_768)  # keys of a cache, and those on the device
    queries: tuple[int, ...] = (1, 64, 1_024)  # of steps on it


def rows(device: torch.device, sizes: Sizes = Sizes()) -> Iterator[Comparison]:
    """Yield every comparison when it is measured."""
    for batch, keys in sizes.decoding:
        yield from _decoding(device, sizes, batch, keys)
    for length in sizes.prefill:
        yield from _prefill(device, sizes, length)
    yield _overhead(device, sizes)
    if device.type == "cuda":
        yield from _tiers(device, sizes)
    yield from _tokens(device, sizes)


# --- decoding ---


def _decoding(device: torch.device, sizes: Sizes, batch: int, keys: int) -> Iterator[Comparison]:
    """Yield decoding beside each rival, and beside a copy of the keys and values, which reads and writes them."""
    case = f"decode bfloat16: batch {batch}, {sizes.heads[0]}/{sizes.heads[1]} heads of {WIDTH}, {keys:,} keys"
    cache = _filled(device, sizes, batch, keys)
    q = torch.randn(batch, sizes.heads[0], 1, WIDTH, device=device, dtype=torch.bfloat16)
    if keys in IN_8_BITS:
        yield from _in_8_bits(device, sizes, q, cache)
    k, v = (x[:, :, :keys] for x in (cache.keys, cache.values))
    copies = [x.clone() for x in cache.own_shard.kv_tensors]
    calls: dict[str, Call] = {"ours": lambda: am.decode(q, cache)} | _rivals(q, k, v)
    calls["copying"] = lambda: [copy.copy_(x) for copy, x in zip(copies, cache.own_shard.kv_tensors, strict=True)]
    timings = _raced(calls, device, sizes)
    ours, copying = timings.pop("ours"), timings.pop("copying")
    size = 2 * k.numel() * k.element_size()
    reached = size / ours.median / 1e6
    share = copying.median / 2 / ours.median
    half = Timing(*(round(x / 2, 4) for x in (copying.median, copying.low, copying.high)))
    yield Comparison(case, "half of a copy of them", half, ours, 0.85 if keys >= 65_536 else None, reached, share)
    for rival, theirs in timings.items():
        yield Comparison(case, rival, theirs, ours, 1.0, reached, share)


def _in_8_bits(device: torch.device, sizes: Sizes, q: Tensor, cache: am.KVCache) -> Iterator[Comparison]:
    """Yield decoding over keys and values in 8 bits beside bfloat16 ones."""
    batch, keys = len(q), cache.length
    for storage in STORAGES:
        stored = _filled(device, sizes, batch, keys, storage)
        calls: dict[str, Call] = {"ours": partial(am.decode, q, stored), "bfloat16": partial(am.decode, q, cache)}
        timings = _raced(calls, device, sizes)
        case = f"decode {storage}: batch {batch}, {sizes.heads[0]}/{sizes.heads[1]} heads of {WIDTH}, {keys:,} keys"
        yield Comparison(case, "ours in bfloat16", timings["bfloat16"], timings["ours"], 1.0)


def _filled(
    device: torch.device, sizes: Sizes, batch: int, keys: int, storage: str | None = None, **options: Any
) -> am.KVCache:
    shape: dict[str, Any] = {"batch": batch, "kv_heads": sizes.heads[1], "head_dim": WIDTH, "capacity": keys + 1}
    cache = am.KVCache(None, **shape, dtype=torch.bfloat16, device=device, storage=storage, **options)
    step = 8_192
    for start in range(0, keys, step):
        tokens = min(step, keys - start)
        cache.append(*torch.randn(2, batch, sizes.heads[1], tokens, WIDTH, device=device, dtype=torch.bfloat16))
    return cache


def _rivals(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Call]:
    """Return the installed rivals; SDPA is fastest with the query heads of a group as rows."""
    groups = q.reshape(k.shape[0], k.shape[1], -1, q.shape[-1])
    calls: dict[str, Call] = {
        "SDPA": lambda: sdpa(q, k, v, enable_gqa=True),
        "SDPA, groups as rows": lambda: sdpa(groups, k, v),
    }
    if q.device.type == "cuda" and k.shape[2] >= 65_536:  # each shape is compiled, for seconds
        calls["FlexAttention"] = lambda: _flex()(q, k, v, enable_gqa=True)
    if find_spec("flash_attn"):
        turned = [x.transpose(1, 2) for x in (q, k, v)]
        calls["flash-attn"] = lambda: import_module("flash_attn").flash_attn_with_kvcache(*turned)
    if find_spec("flashinfer") and len(q) == 1:
        alone = q[0, :, 0], k[0], v[0]
        decode = partial(import_module("flashinfer").single_decode_with_kv_cache, kv_layout="HND")
        calls["FlashInfer"] = lambda: decode(*alone)
    return calls


@cache
def _flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def _overhead(device: torch.device, sizes: Sizes) -> Comparison:
    """Return a whole step beside its kernel alone, on so few keys that the overhead dominates."""
    cache = _filled(device, sizes, 1, 256)
    q = torch.randn(1, sizes.heads[0], 1, WIDTH, device=device, dtype=torch.bfloat16)
    scaling = Scaling(WIDTH**-0.5)
    kernel = choose(KernelRequest.of_cache(q, cache.own_shard.view, scaling))
    calls: dict[str, Call] = {"step": lambda: am.decode(q, cache)}
    if kernel.reads_cache:
        calls["kernel"] = lambda: kernel.attend_cache(DecodeQuery(q, am.Causal(), scaling, 257), cache.own_shard.view)
    else:
        calls["kernel"] = lambda: am.attend(q, cache.keys[:, :, :256], cache.values[:, :, :256])
    timings = _raced(calls, device, sizes)
    allowed = Timing(*(x + 0.01 for x in (timings["kernel"].median, timings["kernel"].low, timings["kernel"].high)))
    return Comparison("decode step of 256 keys", "its kernel alone, and 10 us", allowed, timings["step"], 1.0)


# --- two memories ---


def _tiers(device: torch.device, sizes: Sizes) -> Iterator[Comparison]:
    """Yield steps over a cache whose older keys are on the host, in each way, beside a copy of these to the device.

    Times are those of a clock: the host works too.
    """
    keys, hot = sizes.tiers
    plain, cache = _filled(device, sizes, 1, keys), _filled(device, sizes, 1, keys, hot=hot)
    older = keys - cache.own_shard.used_slots
    size = cache.nbytes * older // keys
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    here = torch.empty(size, dtype=torch.uint8, device=device)
    for queries in sizes.queries:
        q = torch.randn(1, sizes.heads[0], queries, WIDTH, device=device, dtype=torch.bfloat16)
        calls: dict[str, Call] = {
            "copying the older keys": lambda: here.copy_(pinned, non_blocking=True),
            "all on the device": partial(am.decode, q, plain),
            "older where they lie": _one_way(partial(am.decode, q, cache), uploaded=False),
            "older brought": _one_way(partial(am.decode, q, cache), uploaded=True),
            "chosen": partial(am.decode, q, cache),
        }
        timings = {name: _wall(call, device, sizes.seconds) for name, call in calls.items()}
        copying, chosen = timings.pop("copying the older keys"), timings.pop("chosen")
        case = f"{queries} queries, {keys:,} keys, {older:,} of them on the host"
        reached = size / chosen.median / 1e6
        yield Comparison(case, "copying the older keys", copying, chosen, None, reached)
        for name, timing in timings.items():
            yield Comparison(case, name, timing, chosen, None, reached)


def _one_way(call: Call, *, uploaded: bool) -> Call:
    """Return the call with all older keys attended where they lie, or all uploaded."""

    def called() -> object:
        with patch.object(TieredAttention, "_is_upload_faster", lambda *_: uploaded):
            return call()

    return called


def _wall(call: Call, device: torch.device, seconds: float) -> Timing:
    """Return the time of a call and of what it leaves the device to do, by a clock."""
    times, end = list[float](), time.perf_counter() + seconds
    call()
    while len(times) < 5 or time.perf_counter() < end:
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        call()
        torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return Timing.of(times)


# --- prefill ---


def _prefill(device: torch.device, sizes: Sizes, length: int) -> Iterator[Comparison]:
    """Yield causal attention beside PyTorch's kernels, then shards of it at equal time per query-key pair."""
    heads = _heads(device, sizes, length)
    for gradients, direction in ((False, "forward"), (True, "forward + backward")):
        case = f"causal bfloat16: {length:,} tokens, {sizes.heads[0]}/{sizes.heads[1]} heads of {WIDTH}, {direction}"
        rivals: dict[str, Call] = {
            f"PyTorch's {name}": partial(_sdpa, *heads, backend) for name, backend in _backends(device).items()
        }
        calls = {"ours": lambda: am.attend(*heads, mask=am.Causal()).out} | rivals
        timings = _raced({name: _with(call, heads, gradients) for name, call in calls.items()}, device, sizes)
        ours = timings.pop("ours")
        for rival, theirs in timings.items():
            yield Comparison(case, rival, theirs, ours, 0.95)
        for layout in (am.Zigzag(), am.Striped()):
            yield _shard(device, sizes, length, layout, gradients, ours)


def _shard(
    device: torch.device, sizes: Sizes, length: int, layout: Layout, gradients: bool, plain: Timing
) -> Comparison:
    """Return one rank's queries against all keys, beside the time of plain attention for as many query-key pairs.

    For striped shards the copy of row bounds to the GPU is included.
    """
    positions = layout.positions(length, sizes.shards, 1)
    q, k, v = _heads(device, sizes, length)
    heads = q.detach()[:, :, positions.to(device)].requires_grad_(), k, v
    call = partial(am.attend, *heads, mask=am.Causal(), q_positions=positions)
    ours = _raced({"ours": _with(lambda: call().out, heads, gradients)}, device, sizes)["ours"]
    share = float((positions + 1).sum()) / (length * (length + 1) / 2)
    theirs = Timing(*(round(x * share, 4) for x in (plain.median, plain.low, plain.high)))
    direction = "forward + backward" if gradients else "forward"
    case = f"shard 1 of {sizes.shards}, {layout}: {length:,} tokens, {direction}"
    return Comparison(case, "plain causal, by pairs", theirs, ours, 0.85)


def _heads(device: torch.device, sizes: Sizes, length: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (
        torch.randn(1, heads, length, WIDTH, device=device, dtype=torch.bfloat16, requires_grad=True)
        for heads in (sizes.heads[0], sizes.heads[1], sizes.heads[1])
    )
    return q, k, v


def _backends(device: torch.device) -> Mapping[str, SDPBackend]:
    if device.type != "cuda":
        return {"flash": SDPBackend.FLASH_ATTENTION}
    return {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}


def _sdpa(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend) -> Tensor:
    with sdpa_kernel(backend):
        return sdpa(q, k, v, is_causal=True, enable_gqa=True)


def _with(call: Callable[[], Tensor], heads: tuple[Tensor, Tensor, Tensor], gradients: bool) -> Call:
    """Return the call without gradients, or followed by its backward pass."""
    if not gradients:
        return torch.no_grad()(call)
    dout = torch.randn(*heads[0].shape, device=heads[0].device, dtype=heads[0].dtype)
    return lambda: torch.autograd.grad(call(), heads, dout)


# --- a token of a model ---


def _tokens(device: torch.device, sizes: Sizes) -> Iterator[Comparison]:
    """Yield a token and a prompt of a Llama with random weights in bfloat16, beside stock transformers with SDPA."""
    heads = {"num_attention_heads": sizes.heads[0], "num_key_value_heads": sizes.heads[1], "head_dim": WIDTH}
    width = sizes.heads[0] * WIDTH
    shape = {"hidden_size": width, "intermediate_size": 7 * width // 2, "num_hidden_layers": sizes.layers, **heads}
    config = LlamaConfig(vocab_size=32_000, max_position_embeddings=1 << 17, eos_token_id=None, **shape)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        ids = torch.randint(3, config.vocab_size, (1, sizes.prompt))
    rivals = {
        "transformers with SDPA": {},
        "the same, compiled, with a static cache": {"cache_implementation": "static"},
    }
    names = [*rivals, OURS] if device.type == "cuda" else [next(iter(rivals)), OURS]
    steps: dict[str, list[float]] = {name: [] for name in names}
    prompts: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(4):
        for name in names:
            model.set_attn_implementation("attnmesh" if name == OURS else "sdpa")
            times = Times()
            options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "streamer": times}
            began = time.perf_counter()
            if name == OURS:
                hf.generate(model, ids, mesh=None, **options)
            else:
                model.generate(ids, **options, **rivals[name])
            if turn:  # the first one compiles
                steps[name] += times.seconds[8:]  # which captures a graph
                prompts[name].append(times.times[1] - began)
    size = f"a Llama of {sizes.layers} layers of {width}, {sizes.prompt:,} tokens"
    for unit, seconds in (("token", steps), ("prompt", prompts)):
        for rival in names[:-1]:
            yield Comparison(f"{unit} of {size}", rival, Timing.of(seconds[rival]), Timing.of(seconds[OURS]), 0.95)


# --- how it is measured ---


def _raced(calls: Mapping[str, Call], device: torch.device, sizes: Sizes) -> dict[str, Timing]:
    """Time the calls that this GPU supports, each as a CUDA graph if it can be captured, as in a server."""
    ready = {}
    for name, call in calls.items():
        try:
            ready[name] = graphed(call, device)
        except RuntimeError as error:  # a kernel that this GPU does not support
            warnings.warn(f"{name} does not run here: {str(error).splitlines()[0]}", stacklevel=2)
    return race(ready, device, seconds=sizes.seconds * len(ready))


def graphed(call: Call, device: torch.device) -> Call:
    """Return the call as a CUDA graph, or itself if it waits for the device, which a graph cannot."""
    call()
    if device.type != "cuda":
        return call
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        waits = _waits(call)
    torch.cuda.current_stream(device).wait_stream(side)
    if waits:
        return call
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _waits(call: Call) -> bool:
    """Return True if a call, made once before, waits for the device."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode")
        try:
            torch.cuda.set_sync_debug_mode("error")
            call()
        except RuntimeError:
            return True
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return False
