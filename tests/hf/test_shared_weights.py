"""Weights that ranks of a host share: tokens are those of stock transformers, bits do not depend on the ranks."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM

import attnmesh as am
import attnmesh.hf as hf
from attnmesh import errors
from attnmesh.comm.host_linear import MAX_SHARED_ROWS, HostLinear
from attnmesh.hf import shared_weights
from attnmesh.hf.shared_weights import SharedConv1D, SharedLinear
from attnmesh.hf.transformers_names import Conv1D
from attnmesh.kernels.native.abi import NO_MEMORY
from attnmesh.kernels.native.build import library
from tests.support import families
from tests.support.families import STOCK, prompt
from tests.support.models.tiny_models import Case, build
from tests.support.pool import Pool, on_each_rank
from tests.support.tolerances import FLOAT32_SUMS

pytestmark = pytest.mark.skipif(library().reason is not None, reason="there is no native library")

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma3", "gpt-oss", "gemma2", "gemma4", "llama4")
SECONDS_TO_NAME = 2.0
"""Seconds of a call in which another rank fails: ranks that wait look twice, half a second apart."""
SIZES = {"num_attention_heads": 6, "hidden_size": 96}


@contextmanager
def counted_calls() -> Iterator[list[int]]:
    """Share small weights too, and note the layers of each call."""
    run, least, calls = HostLinear.run, shared_weights.LEAST_LAYER_BYTES, list[int]()

    def noted(call: HostLinear, x: Tensor) -> Any:
        calls.append(len(call.sizes))
        return run(call, x)

    HostLinear.run, shared_weights.LEAST_LAYER_BYTES = noted, 0  # type: ignore[method-assign]
    try:
        yield calls
    finally:
        HostLinear.run, shared_weights.LEAST_LAYER_BYTES = run, least  # type: ignore[method-assign]


def load(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="attnmesh").eval()


def mesh_of(ranks: int) -> Any:
    return am.init_mesh((1, 1, ranks)) if ranks > 1 else None


def answers(model: Any, call: Any) -> list[list[Any]]:
    """Tokens of one prompt, of a padded batch, sampled ones, and those of beams."""
    ids, mask = prompt(50, batch=2, seed=2), torch.ones(2, 50, dtype=torch.long)
    mask[0, :9] = 0
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
    first = call(model, prompt(70), **options)
    padded = call(model, ids.masked_fill(mask == 0, 0), attention_mask=mask, **options)
    torch.manual_seed(7)
    sampled = call(model, prompt(33), max_new_tokens=5, do_sample=True, top_k=5)
    beams = call(model, prompt(21), num_beams=3, **options)
    return [x.tolist() for x in (first, padded, sampled, beams)]


@on_each_rank
def on_ranks(folder: str, ranks: int) -> tuple[list[list[Any]], set[int]]:
    mesh = mesh_of(ranks)
    with counted_calls() as calls:
        model = hf.share_weights(load(folder), mesh)
        found = answers(model, lambda model, ids, **options: hf.generate(model, ids, mesh=mesh, **options))
    return found, set(calls)


QUICK = {("llama", 2), ("gpt-oss", 3), ("qwen3", 1)}


@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        pytest.param(family, ranks, marks=[] if (family, ranks) in QUICK else pytest.mark.long)
        for family in FAMILIES
        for ranks in (1, 2, 3, 4)
    ],
)
def test_tokens_are_those_of_stock(family: str, ranks: int, pool: Pool, tmp_path: Path) -> None:
    stock = families.model(family, STOCK[family], **SIZES)
    stock.save_pretrained(tmp_path)
    expected = answers(stock, lambda model, ids, **options: model.generate(ids, **options))
    for found, calls in pool.run(ranks, on_ranks, str(tmp_path), ranks):
        assert found == expected
        assert max(calls) == 3  # queries, keys and values are one call
        assert 1 in calls


@pytest.mark.parametrize(
    ("ranks", "variant"),
    [
        (2, {}),
        *(pytest.param(*one, marks=pytest.mark.long) for one in ((1, {}), (3, {"tie_word_embeddings": False}))),
    ],
)
def test_layers_of_gpt2_are_shared(ranks: int, variant: dict[str, Any], pool: Pool, tmp_path: Path) -> None:
    stock = build(Case("gpt2", "gpt2", variant), "eager", torch.float32)
    stock.save_pretrained(tmp_path)
    expected = answers(stock, lambda model, ids, **options: model.generate(ids, **options))
    for found, calls in pool.run(ranks, on_ranks, str(tmp_path), ranks):
        assert found == expected
        assert calls


def test_a_model_of_gpt2_is_restored() -> None:
    model = build(Case("gpt2", "gpt2"), "attnmesh", torch.float32)
    with counted_calls() as calls:
        plain = step_of(model)
        hf.share_weights(model, None)
        shared = [one for one in model.modules() if isinstance(one, SharedConv1D)]
        assert len(shared) == 4 * model.config.n_layer
        torch.testing.assert_close(step_of(model), plain, rtol=0, atol=FLOAT32_SUMS * float(plain.abs().max()))
        count = len(calls)
        assert count == 4 * model.config.n_layer + 1
        hf.restore(model)
        assert all(type(one) is Conv1D for one in shared)
        assert torch.equal(step_of(model), plain)
        assert len(calls) == count


@on_each_rank
def logits_of_steps(folder: str, ranks: int, dtype: torch.dtype, length: int) -> Tensor:
    """Logits of the answer to a prompt, whose tokens all ranks compute."""
    mesh = mesh_of(ranks)
    with counted_calls():
        model = hf.share_weights(load(folder).to(dtype), mesh)
        cache = hf.ShardedCache(model.config, mesh, block=4, reproducible=True)
        options: dict[str, Any] = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
        made = hf.generate(model, prompt(length), cache=cache, max_new_tokens=12, **options)
    return torch.stack(made.logits)


@pytest.mark.parametrize(
    ("family", "dtype", "length"),
    [
        pytest.param("llama", torch.float32, 2, marks=pytest.mark.long),
        ("llama", torch.bfloat16, 66),
        ("gpt-oss", torch.float32, 90),
        pytest.param("gemma3", torch.float32, 200, marks=pytest.mark.long),
        pytest.param("llama4", torch.bfloat16, 131, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_logits_have_the_same_bits_on_any_number_of_ranks(
    family: str, dtype: torch.dtype, length: int, pool: Pool, tmp_path: Path
) -> None:
    families.model(family, STOCK[family], **SIZES).save_pretrained(tmp_path)
    first, *others = (pool.run(ranks, logits_of_steps, str(tmp_path), ranks, dtype, length) for ranks in (1, 2, 4))
    for found in (logits for ranks in others for logits in ranks):
        assert torch.equal(found, first[0])


@on_each_rank
def one_model(folder: str) -> dict[str, bool]:
    """Whether ranks that share weights leave passes as they were: without a cache, with gradients, and alone."""
    ids = prompt(8)
    plain, mesh = load(folder), mesh_of(2)
    with counted_calls() as calls:
        model = hf.share_weights(load(folder), mesh)
        assert isinstance(model.lm_head, SharedLinear)
        same = {"without a cache": torch.equal(model(ids).logits, plain(ids).logits)}
        model(ids, labels=ids).loss.backward()
        plain(ids, labels=ids).loss.backward()
        gradients = [(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True)]
        same["gradients"] = all(torch.equal(a, b) for a, b in gradients if a is not None)
        with torch.no_grad():
            alone = hf.ShardedCache(model.config, None)
            found = model(ids[:, :1], past_key_values=alone).logits
            same["a cache without a mesh"] = torch.equal(found, plain(ids[:, :1]).logits)
        same["no shared calls so far"] = not calls
        hf.generate(model, ids, mesh=mesh, max_new_tokens=2, do_sample=False)
        same["shared calls on the mesh"] = bool(calls)
    return same


def test_other_passes_are_as_without(pool: Pool, tmp_path: Path) -> None:
    families.model("llama", STOCK["llama"], **SIZES).save_pretrained(tmp_path)
    for same in pool.run(2, one_model, str(tmp_path)):
        assert same == dict.fromkeys(same, True)


@on_each_rank
def changed(folder: str, change: str) -> tuple[list[list[int]], int, int]:
    """Tokens after a change of the model that shares, and the calls before it and after."""
    mesh, ids = mesh_of(2), prompt(30)
    with counted_calls() as calls:
        model = hf.share_weights(load(folder), mesh)
        hf.generate(model, ids, mesh=mesh, max_new_tokens=3, do_sample=False)
        before = len(calls)
        if change == "moved weights":
            for weight in model.parameters():
                weight.data = weight.data.flip(0).contiguous().flip(0).clone()
        elif change == "another mesh":
            hf.share_weights(model, mesh := init_device_mesh("cpu", (1, 2), mesh_dim_names=("queries", "keys")))
        elif change == "a copy":
            model = load(folder)
            model.load_state_dict(hf.share_weights(load(folder), mesh).state_dict())
            hf.share_weights(model, mesh)
        tokens = hf.generate(model, ids, mesh=mesh, max_new_tokens=5, do_sample=False)
    return tokens.tolist(), before, len(calls) - before


@pytest.mark.parametrize("change", ["moved weights", "another mesh", "a copy"])
def test_a_model_may_change(change: str, pool: Pool, tmp_path: Path) -> None:
    stock = families.model("llama", STOCK["llama"], **SIZES)
    stock.save_pretrained(tmp_path)
    expected = stock.generate(prompt(30), max_new_tokens=5, do_sample=False).tolist()
    for tokens, before, after in pool.run(2, changed, str(tmp_path), change):
        assert tokens == expected
        assert min(before, after) > 0


def step_of(model: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(prompt(1), past_key_values=hf.ShardedCache(model.config, None)).logits
    return logits


def assert_same_step(shared: Any, plain: Any) -> None:
    """Float32 rounds a sum of another order differently, by little of the largest logit."""
    found, expected = step_of(shared), step_of(plain)
    torch.testing.assert_close(found, expected, rtol=0, atol=FLOAT32_SUMS * float(expected.abs().max()))


def change_layer(layer: Any, change: str) -> None:
    numbers = torch.randn(layer.out_features, generator=torch.Generator().manual_seed(0))
    weight = layer.weight
    if change == "a bias":
        layer.bias = torch.nn.Parameter(numbers)
    elif change == "another bias":
        layer.bias.data = numbers
    elif change == "no bias":
        layer.bias = None
    elif change == "strides":
        weight.data = weight.data.as_strided(weight.shape, (1, len(weight)))
    elif change == "fewer outputs":
        weight.data = weight.data[:48]
    elif change == "a subclass":
        layer.weight = Scaled(2 * weight.data)


class Scaled(torch.nn.Parameter):
    """A weight that only functions of PyTorch may read, as quantized ones are."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear:
            x, weight, bias = args
            return func(x, weight.as_subclass(Tensor) / 2, bias)
        return super().__torch_function__(func, types, args, kwargs or {})


CHANGES = ("a bias", "another bias", "no bias", "strides", "fewer outputs", "a subclass")


@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_may_change_in_place(change: str) -> None:
    """Its weight stays where it was, or is none that a call takes."""
    plain, shared = (families.model("llama", "attnmesh", **SIZES) for _ in range(2))
    if "bias" in change and change != "a bias":
        for model in (plain, shared):
            model.lm_head.bias = torch.nn.Parameter(torch.ones(97))
    with counted_calls() as calls:
        hf.share_weights(shared, None)
        step_of(shared)
        assert calls
        for model in (plain, shared):
            change_layer(model.lm_head, change)
        assert_same_step(shared, plain)


def test_layers_of_one_input_may_change_apart() -> None:
    plain, shared = (families.model("llama", "attnmesh", **SIZES) for _ in range(2))
    with counted_calls() as calls:
        hf.share_weights(shared, None)
        step_of(shared)
        step_of(shared)
        assert max(calls) == 3
        for model in (plain, shared):
            change_layer(model.model.layers[0].self_attn.v_proj, "strides")
        for _ in range(2):
            assert_same_step(shared, plain)


def test_an_input_that_does_not_fit_is_refused_as_without() -> None:
    with counted_calls():
        model = hf.share_weights(families.model("llama", "attnmesh", **SIZES), None)
        model.lm_head.register_forward_pre_hook(lambda _, args: (args[0].flatten()[:, None],))
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            step_of(model)


def double_the_input(_: Any, args: Any, __: Any) -> None:
    args[0].mul_(2)


@pytest.mark.parametrize("inference", [False, True])
def test_an_input_that_changes_between_layers_is_read_again(inference: bool) -> None:
    plain, shared = (families.model("llama", "attnmesh", **SIZES) for _ in range(2))
    with counted_calls() as calls, torch.inference_mode(inference):
        hf.share_weights(shared, None)
        step_of(shared)
        step_of(shared)
        for model in (plain, shared):
            first = model.model.layers[0].self_attn.q_proj
            first.register_forward_hook(double_the_input)
        before = len(calls)
        assert_same_step(shared, plain)
    assert len(calls) > before


@on_each_rank
def of_one_in_inference_mode(folder: str) -> tuple[list[list[int]], list[int]]:
    mesh = am.init_mesh((1, 2, 2))
    with counted_calls() as calls, torch.inference_mode(dist.get_rank() == 0):
        model = hf.share_weights(load(folder), mesh)
        tokens = hf.generate(model, prompt(30), mesh=mesh, max_new_tokens=4, do_sample=False)
    return tokens.tolist(), calls


def test_inference_mode_of_one_rank_changes_nothing(pool: Pool, tmp_path: Path) -> None:
    stock = families.model("llama", STOCK["llama"], **SIZES)
    stock.save_pretrained(tmp_path)
    expected = stock.generate(prompt(30), max_new_tokens=4, do_sample=False).tolist()
    (tokens, calls), *others = pool.run(4, of_one_in_inference_mode, str(tmp_path))
    assert tokens == expected
    assert calls
    assert others == [(tokens, calls)] * 3


def test_autocast_is_as_without() -> None:
    plain, shared = (families.model("llama", "attnmesh", **SIZES) for _ in range(2))
    with counted_calls(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(step_of(hf.share_weights(shared, None)), step_of(plain))


@on_each_rank
def beside_a_thread(folder: str) -> list[list[int]]:
    """Tokens of ranks of which one calls the model in another thread, without a cache, within each step."""
    mesh = mesh_of(2)
    with counted_calls():
        model = hf.share_weights(load(folder), mesh)
        expected = torch.equal(model(prompt(2)).logits, load(folder)(prompt(2)).logits)
        layer, alike = model.model.layers[0].mlp, [expected]

        def call() -> None:
            with torch.no_grad():
                alike.append(torch.equal(model(prompt(2)).logits, load(folder)(prompt(2)).logits))

        def hook(_: Any, args: Any) -> None:
            if main == threading.get_ident() and args[0].shape[1] == 1 and dist.get_rank():
                thread = threading.Thread(target=call)
                thread.start()
                thread.join()

        main = threading.get_ident()
        layer.register_forward_pre_hook(hook)
        tokens = hf.generate(model, prompt(30), mesh=mesh, max_new_tokens=3, do_sample=False)
    assert all(alike)
    return tokens.tolist()


def test_another_thread_computes_alone(pool: Pool, tmp_path: Path) -> None:
    stock = families.model("llama", STOCK["llama"], **SIZES)
    stock.save_pretrained(tmp_path)
    expected = stock.generate(prompt(30), max_new_tokens=3, do_sample=False).tolist()
    assert pool.run(2, beside_a_thread, str(tmp_path)) == [expected] * 2


@on_each_rank
def beside_a_thread_with_a_cache(folder: str) -> tuple[list[list[int]], set[str]]:
    """Tokens of a rank, and what a thread is told that calls the model with a cache on the mesh within each step."""
    mesh, told, main = mesh_of(2), set[str](), threading.get_ident()
    with counted_calls():
        model = hf.share_weights(load(folder), mesh)
        cache = hf.ShardedCache(model.config, mesh)

        def call() -> None:
            try:
                with torch.no_grad():
                    model(prompt(1), past_key_values=cache)
            except errors.InputError as error:
                told.add(f"{type(error).__name__}: {error}")

        def hook(_: Any, args: Any) -> None:
            if main == threading.get_ident() and args[0].shape[1] == 1:
                thread = threading.Thread(target=call)
                thread.start()
                thread.join()

        model.model.layers[0].mlp.register_forward_pre_hook(hook)
        tokens = hf.generate(model, prompt(30), mesh=mesh, max_new_tokens=3, do_sample=False)
        alone = threading.Thread(target=call)  # which shares the next step
        alone.start()
        alone.join()
    assert cache.get_seq_length() == 1
    return tokens.tolist(), told


def test_a_second_thread_with_a_cache_is_refused(pool: Pool, tmp_path: Path) -> None:
    stock = families.model("llama", STOCK["llama"], **SIZES)
    stock.save_pretrained(tmp_path)
    expected = stock.generate(prompt(30), max_new_tokens=3, do_sample=False).tolist()
    for tokens, told in pool.run(2, beside_a_thread_with_a_cache, str(tmp_path)):
        assert tokens == expected
        assert len(told) == 1
        assert told.pop().startswith("MeshError: share_weights: expected steps of one thread at a time")


@on_each_rank
def without_memory(folder: str, where: str) -> tuple[str, float, list[list[int]]]:
    """What a rank is told when the last one gets no memory in a shared layer, the seconds to it, and later tokens."""
    mesh, run, left = mesh_of(dist.get_world_size()), HostLinear.run, [5]

    def fail(call: HostLinear, x: Tensor) -> Any:
        left[0] -= 1
        if left[0] == 0 and where == "native":
            call.function = lambda *_: NO_MEMORY
        if left[0] == 0 and where == "PyTorch":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return run(call, x)

    said, began = "nothing", 0.0
    with counted_calls():
        model = hf.share_weights(load(folder), mesh)
        hf.generate(model, prompt(30), mesh=mesh, max_new_tokens=2, do_sample=False)
        if dist.get_rank() == dist.get_world_size() - 1:
            HostLinear.run = fail  # type: ignore[method-assign]
        began = time.monotonic()
        try:
            hf.generate(model, prompt(30), mesh=mesh, max_new_tokens=3, do_sample=False)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        seconds = time.monotonic() - began
        HostLinear.run = run  # type: ignore[method-assign]
        tokens = hf.generate(model, prompt(30), mesh=mesh, max_new_tokens=3, do_sample=False)
    return said, seconds, tokens.tolist()


@pytest.mark.parametrize(("ranks", "where"), [(2, "native"), (3, "PyTorch")])
def test_a_rank_without_memory_is_named_by_all(ranks: int, where: str, pool: Pool, tmp_path: Path) -> None:
    stock = families.model("llama", STOCK["llama"], **SIZES)
    stock.save_pretrained(tmp_path)
    expected = stock.generate(prompt(30), max_new_tokens=3, do_sample=False).tolist()
    own = {"native": "MemoryError: ", "PyTorch": "RuntimeError: DefaultCPUAllocator"}[where]
    *others, (last, _, _) = found = pool.run(ranks, without_memory, str(tmp_path), where)
    assert last.startswith(own)
    assert len({said for said, _, _ in others}) == 1
    assert others[0][0].startswith("UnforeseenError: a layer of shared weights: expected what each rank can do, given")
    assert own.partition(":")[0] in others[0][0]
    for _, seconds, tokens in found:
        assert seconds < SECONDS_TO_NAME
        assert tokens == expected


@on_each_rank
def compiled_tokens(folder: str, ranks: int, how: str) -> list[list[int]]:
    """Tokens of a model that is compiled after its weights are shared."""
    mesh = mesh_of(ranks)
    with counted_calls():
        model = hf.share_weights(load(folder), mesh)
        if how == "forward":
            model.forward = torch.compile(model.forward, backend="eager")
        else:
            {"model": model, "decoder": model.model, "layer": model.model.layers[0]}[how].compile(backend="eager")
        tokens: list[list[int]] = hf.generate(model, prompt(20), mesh=mesh, max_new_tokens=3, do_sample=False).tolist()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # else a later failure of this rank is blamed on its compiler
    return tokens


@pytest.mark.long
@pytest.mark.parametrize("how", ["forward", "model", "decoder", "layer"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_that_is_compiled_has_the_tokens_of_stock(ranks: int, how: str, pool: Pool, tmp_path: Path) -> None:
    stock = families.model("llama", STOCK["llama"], **SIZES)
    stock.save_pretrained(tmp_path)
    expected = stock.generate(prompt(20), max_new_tokens=3, do_sample=False).tolist()
    assert pool.run(ranks, compiled_tokens, str(tmp_path), ranks, how) == [expected] * ranks


@on_each_rank
def rows_of(folder: str) -> list[int]:
    """The next token of three requests of unlike lengths, which are rows of one pass."""
    mesh, lengths = mesh_of(2), (9, 30, 44)
    with counted_calls() as calls:
        model = hf.share_weights(load(folder), mesh)
        caches = [hf.ShardedCache(model.config, mesh) for _ in lengths]
        for n, cache in zip(lengths, caches, strict=True):
            hf.prefill(model, prompt(n, seed=n), cache)
        calls.clear()
        logits = hf.decode_rows(model, [int(prompt(n, seed=n)[0, -1]) for n in lengths], caches)
        assert calls
    return logits.argmax(-1).tolist()


def test_rows_of_an_engine_are_shared(pool: Pool, tmp_path: Path) -> None:
    stock = families.model("llama", STOCK["llama"], **SIZES)
    stock.save_pretrained(tmp_path)
    expected = [int(stock(prompt(n, seed=n)).logits[0, -1].argmax()) for n in (9, 30, 44)]
    assert pool.run(2, rows_of, str(tmp_path)) == [expected] * 2


@on_each_rank
def refusal(folder: str, how: str) -> str:
    mesh = mesh_of(2)
    model = load(folder)
    if how == "another model" and dist.get_rank():
        model.lm_head = torch.nn.Linear(96, 33, bias=False)
    if how == "other weights" and dist.get_rank():
        model.lm_head.weight.data.neg_()
    if how == "sharded":
        hf.tensor_parallel(model, mesh["keys"])
    if how == "no library":
        shared_weights.library = lambda: library()._replace(reason="there is no C++ compiler")  # type: ignore[assignment]
    try:
        with counted_calls():
            hf.share_weights(model, mesh)
    except errors.InputError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        shared_weights.library = library
    return "shared"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("another model", "MeshError: share_weights: expected the same call on every rank"),
        ("other weights", "MeshError: share_weights: expected the same call on every rank"),
        ("sharded", "ModelError: share_weights: expected whole weights"),
        ("no library", "KernelError: share_weights: expected the native library, given there is no C++ compiler"),
    ],
)
def test_what_cannot_be_shared_is_refused_on_all_ranks(how: str, said: str, pool: Pool, tmp_path: Path) -> None:
    families.model("llama", STOCK["llama"], **SIZES).save_pretrained(tmp_path)
    found = pool.run(2, refusal, str(tmp_path), how)
    assert found[0] == found[1]
    assert found[0].startswith(said)


def test_a_model_is_restored_before_it_is_copied() -> None:
    plain = families.model("llama", "attnmesh", **SIZES)
    with counted_calls() as calls, torch.no_grad():
        model = hf.share_weights(plain, None)
        with pytest.raises(errors.ModelError, match=r"call hf\.restore"):
            deepcopy(model)
        hf.restore(model)
        assert not any(isinstance(module, SharedLinear) for module in model.modules())
        model(prompt(1), past_key_values=hf.ShardedCache(model.config, None))
        deepcopy(model)
        hf.restore(model)
        assert not calls


def test_more_rows_than_a_call_takes_are_computed_by_each_rank() -> None:
    with counted_calls() as calls, torch.no_grad():
        model = hf.share_weights(families.model("llama", "attnmesh", **SIZES), None)
        cache = hf.ShardedCache(model.config, None)
        model(prompt(MAX_SHARED_ROWS[torch.float32] + 1), past_key_values=cache)
        assert not calls
        model(prompt(MAX_SHARED_ROWS[torch.float32]), past_key_values=cache)
        assert set(calls) == {1}  # which layers share an input is not known yet
        calls.clear()
        model(prompt(1), past_key_values=cache)
        assert set(calls) == {1, 2, 3}
