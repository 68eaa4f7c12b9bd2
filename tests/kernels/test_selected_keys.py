"""Attention to selected keys: laws on one device, any problem on meshes against float64, and what is refused."""

from dataclasses import replace
from random import Random

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import attnmesh as am
from attnmesh.core import selection as core
from attnmesh.core.scaling import Scaling
from attnmesh.core.selection import NO_INDEX
from attnmesh.errors import DtypeError, InputError, KernelError, LayoutError, ShapeError
from attnmesh.kernels import selected_keys as kernel
from attnmesh.kernels.choice import choose
from attnmesh.kernels.implementations.native import NATIVE
from attnmesh.kernels.kernel import KernelRequest
from attnmesh.kernels.rectangles import TILE_ELEMENTS, BackwardInputs
from attnmesh.mesh.shapes import AXES, Shape
from attnmesh.mesh_attention import latents as latent
from tests.support.emulation.emulated_gpu import EmulatedGPU
from tests.support.emulation.emulated_nccl import world
from tests.support.process.live_tensors import LiveTensors
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth import problems
from tests.support.truth.mesh_problems import SAMPLES, MeshProblem, check, draw_selected, named_mesh, run_problem
from tests.support.truth.seeds import batches_by_ranks, in_turn, seeds


def check_alone(seed: int, longest: int) -> None:
    problem = problems.draw(seed, longest=longest)
    places = range(problem.lengths[1]) if problem.k_positions is None else problem.k_positions.tolist()
    sizes = (problem.batch, problem.heads[1]), problem.lengths[0], max(places, default=-1) + 1
    replace(problem, kernel="auto", selected=problems.selection(Random(seed), *sizes)).check()


@pytest.mark.parametrize("seed", seeds(25, 400))
def test_random_problems_agree_with_float64(seed: int) -> None:
    check_alone(seed, 333)


@pytest.mark.parametrize("seed", seeds(15, 200))
def test_small_tiles_agree_with_float64(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TILE_ELEMENTS, "cpu", 200)  # so few that queries, key heads and selected keys are all cut
    monkeypatch.setattr(core, "INDICES_AT_ONCE", 50)
    check_alone(seed, 33)


# --- laws ---

Drawn = tuple[Tensor, Tensor, Tensor, am.Selection]


@st.composite
def cases(draw: st.DrawFn) -> Drawn:
    """q, k, v in float64, and a selection."""
    random = Random(draw(st.integers(0, 2**30)))
    generator = torch.Generator().manual_seed(random.getrandbits(30))
    n, kv_heads, batch = random.randint(1, 20), random.randint(1, 3), random.randint(1, 2)
    heads = (kv_heads * random.randint(1, 3), kv_heads, kv_heads)
    q, k, v = (torch.randn(batch, h, n, 4, generator=generator, dtype=torch.float64) for h in heads)
    return q, k, v, problems.selection(random, (batch, kv_heads), n, n)


def close(given: am.Partial, expected: am.Partial) -> None:
    for some, other in zip(given, expected, strict=True):
        torch.testing.assert_close(some, other)


@given(cases(), st.integers(1, 4))
def test_parts_of_the_keys_merge(case: Drawn, parts: int) -> None:
    q, k, v, selected = case
    whole = am.attend(q, k, v, mask=am.Causal(), selected=selected)
    some = []
    for places in torch.randperm(k.shape[2]).tensor_split(parts):
        where = {"mask": am.Causal(), "k_positions": places, "selected": selected}
        some.append(am.attend(q, k[:, :, places], v[:, :, places], **where))
    close(am.merge(*some), whole)


@given(cases(), st.integers(0, 20))
def test_disjoint_selections_merge_to_attention_over_their_union(case: Drawn, cut: int) -> None:
    q, k, v, whole = case
    parts = [am.Selection(x, whole.block) for x in whole.indices.tensor_split([cut], -1) if x.shape[-1]]
    close(am.merge(*(am.attend(q, k, v, selected=part) for part in parts)), am.attend(q, k, v, selected=whole))


@given(cases())
def test_a_selection_of_all_keys_is_causal_attention(case: Drawn) -> None:
    q, k, v, _ = case
    every = am.Selection(torch.randperm(k.shape[2]).int().expand(len(q), 1, q.shape[2], -1))
    close(am.attend(q, k, v, mask=am.Causal(), selected=every), am.attend(q, k, v, mask=am.Causal()))


@given(cases())
def test_a_block_is_its_keys(case: Drawn) -> None:
    q, k, v, selected = case
    first = selected.indices.long().unsqueeze(-1) * selected.block
    each = torch.where(first < k.shape[2], first + torch.arange(selected.block), NO_INDEX).flatten(-2)
    keys = am.Selection(each.masked_fill(each >= k.shape[2], NO_INDEX).int())
    close(am.attend(q, k, v, selected=keys), am.attend(q, k, v, selected=selected))


@given(cases())
def test_rows_with_nothing_are_the_identity(case: Drawn) -> None:
    q, k, v, selected = case
    nothing = am.Selection(torch.full_like(selected.indices, NO_INDEX))
    partial = am.attend(q, k, v, selected=nothing)
    assert not partial.out.any()
    assert torch.isneginf(partial.lse).all()


def test_a_graph_gives_the_same_and_nan_where_indices_are_faulty() -> None:
    tensors = [x.requires_grad_() for x in torch.randn(3, 1, 4, 12, 8).unbind()]
    rows = torch.stack([torch.randperm(12)[:5] for _ in range(12)]).int()[None, None]

    def layer(q: Tensor, k: Tensor, v: Tensor, indices: Tensor) -> Tensor:
        return am.attention(q, k, v, selected=am.Selection(indices))

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    given, expected = compiled(*tensors, rows), layer(*tensors, rows)
    torch.testing.assert_close(given, expected)
    for some, other in zip(*(torch.autograd.grad(x.sum(), tensors) for x in (given, expected)), strict=True):
        torch.testing.assert_close(some, other)
    rows[0, 0, 3, 0], rows[0, 0, 5, 2], rows[0, 0, 7, 1] = rows[0, 0, 3, 1], -4, 12
    faulty = compiled(*tensors, rows).isnan()
    assert faulty.all(-1).all(1)[0].nonzero().flatten().tolist() == [3, 5, 7]


@pytest.mark.parametrize("in_place", [True, pytest.param(False, marks=pytest.mark.long)])
def test_memory_does_not_grow_with_queries_times_keys(in_place: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    n, heads, width, most = 512, 2, 16, 1 << 11
    monkeypatch.setitem(TILE_ELEMENTS, "cpu", most)
    monkeypatch.setattr(core, "INDICES_AT_ONCE", most)
    monkeypatch.setattr(NATIVE, "reads_scattered", in_place)
    q, k, v = torch.randn(3, 1, heads, n, width).unbind()
    indices = torch.stack([torch.randperm(n)[:16] for _ in range(n)]).int()[None, None]
    keys = kernel.SelectedKeys.of(am.Selection(indices), am.Causal(), torch.arange(n), None, None)
    outputs, tiles = 4 * heads * n * (width + 1), 12 * 8 * most
    assert tiles < n * n  # bytes of a dense mask
    with LiveTensors() as live:
        assert not keys.selection.faulty(n).any()
    assert live.most < tiles
    with LiveTensors() as live:
        partial = kernel.attend_selected(q, k, v, keys, Scaling(0.25))
    assert live.most < outputs + tiles
    with LiveTensors() as live:
        kernel.backward_selected(q, k, v, BackwardInputs(*partial, torch.randn_like(partial.out)), keys, Scaling(0.25))
    assert live.most < 4 * outputs + tiles


def test_numbers_of_keys_that_are_not_selected_do_not_matter() -> None:
    q, k, v = torch.randn(3, 1, 2, 6, 4).unbind()
    rows = torch.tensor([[1, NO_INDEX], [1, 2], [NO_INDEX, 2], [1, 5], [5, 4], [1, 2]], dtype=torch.int32)
    expected = am.attend(q, k, v, mask=am.Causal(), selected=am.Selection(rows[None, None]))
    k[:, :, [0, 3]], v[:, :, [0, 3]] = torch.nan, torch.inf
    given = am.attend(q, k, v, mask=am.Causal(), selected=am.Selection(rows[None, None]))
    assert torch.equal(given.out[:, :, 1:], expected.out[:, :, 1:])


def test_numbers_of_keys_that_are_not_selected_change_no_gradient() -> None:
    q, k, v, dout = torch.randn(4, 1, 2, 6, 4, dtype=torch.float64).unbind()
    rows = torch.tensor([[1, NO_INDEX], [NO_INDEX, NO_INDEX], [NO_INDEX, 2], [1, 5], [5, 4], [1, 2]], dtype=torch.int32)

    def gradients() -> tuple[Tensor, ...]:
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        out = am.attend(*inputs, mask=am.Causal(), selected=am.Selection(rows[None, None])).out
        return torch.autograd.grad(out, inputs, dout)

    expected = gradients()
    k[:, :, [0, 3]], v[:, :, [0, 3]] = torch.nan, torch.inf
    for found, right in zip(gradients(), expected, strict=True):
        assert torch.equal(found, right)


# --- meshes ---


@on_each_rank
def run_each(drawn: list[MeshProblem]) -> list[list[Tensor]]:
    return [run_problem(problem) for problem in drawn]


@pytest.mark.parametrize(("ranks", "of"), batches_by_ranks({ranks: SAMPLES[ranks] for ranks in (1, 2, 3, 4)}))
def test_random_problems_on_a_mesh_agree_with_float64(pool: Pool, ranks: int, of: list[int]) -> None:
    drawn = [draw_selected(seed * 100 + ranks, ranks) for seed in of]
    for problem, results in zip(drawn, zip(*pool.run(ranks, run_each, drawn), strict=True), strict=True):
        check(problem, list(results))


# --- what is refused ---


def call(mesh: object, shape: Shape, change: object, rank: int | None, **more: object) -> Tensor:
    """Attend with one changed argument, on one rank or on all."""
    q, k, v = torch.randn(3, 1, 4, 5, 8, generator=torch.Generator().manual_seed(0)).unbind()
    selected: object = am.Selection(torch.arange(3).int().expand(1, 1, 5, 3).clone())
    if rank is None or dist.get_rank() == rank:
        selected = change(selected.indices) if callable(change) else change
    where = {"mesh": mesh, "layout": am.Contiguous(), "mask": am.Full()}
    return am.attention(q, k, v, selected=selected, **where, **more)  # type: ignore[arg-type]


CHANGES = {
    "twice": lambda x: am.Selection(x.fill_(1)),
    "negative": lambda x: am.Selection(x - 1),
    "beyond": lambda x: am.Selection(x + 8),
    "beyond in blocks": lambda x: am.Selection(x + 4, 2),
    "dtype": lambda x: am.Selection(x.long()),
    "no keys": lambda x: am.Selection(x[..., :0]),
    "queries": lambda x: am.Selection(x[:, :, :4]),
    "heads": lambda x: am.Selection(x.expand(1, 3, -1, -1)),
    "dims": lambda x: am.Selection(x[0]),
    "no tensor": lambda x: am.Selection(x.tolist()),
    "no selection": lambda x: x,
    "none": None,
    "fewer": lambda x: am.Selection(x[..., :2]),
    "blocks": lambda x: am.Selection(x, 2),
}


@on_each_rank
def catch_errors_of(shape: Shape) -> list[str]:
    """Return what each wrong argument of the last rank raises, and the fixed call after it."""
    mesh = named_mesh(shape, AXES)
    found = []
    for name, change in CHANGES.items():
        with pytest.raises(InputError) as raised:
            call(mesh, shape, change, rank=shape.ranks - 1, length=in_turn((None, 10), len(name)))
        found.append(f"{name}: {raised.value}")
    call(mesh, shape, lambda x: am.Selection(x + 7), rank=None)
    return found


@pytest.mark.parametrize("shape", [Shape(1, 2, 1), Shape(2, 1, 1)])
def test_wrong_selections_of_one_rank_raise_the_same_on_all(pool: Pool, shape: Shape) -> None:
    first, second = pool.run(2, catch_errors_of, shape)
    assert first == second
    assert len(first) == len(CHANGES)


def test_each_wrong_selection_has_an_error_of_its_kind() -> None:
    kinds = {"dtype": DtypeError, "no tensor": DtypeError, "no selection": DtypeError}
    for name, change in CHANGES.items():
        if name not in ("none", "fewer", "blocks", "beyond", "beyond in blocks"):
            with pytest.raises(kinds.get(name, ShapeError), match=r"attention selected.*Fix: "):
                call(None, Shape(1, 1, 1), change, rank=None)
    for name in ("beyond", "beyond in blocks"):
        with pytest.raises(ShapeError, match=r"expected indices below \d, of 5 keys"):
            call(None, Shape(1, 1, 1), CHANGES[name], rank=None)
    with pytest.raises(KernelError, match="auto or reference, given triton"):
        call(None, Shape(1, 1, 1), am.Selection(torch.zeros(1, 1, 5, 1).int()), rank=None, kernel="triton")
    with pytest.raises(ShapeError, match="Selection block: expected a whole number, 1 or more, given 0"):
        am.Selection(torch.zeros(1, 1, 5, 1).int(), block=0)
    with pytest.raises(ShapeError, match="Selection block: expected at most 65536 keys an index, given 268435456"):
        am.Selection(torch.zeros(1, 1, 5, 1).int(), block=2**28)
    q, places = torch.randn(1, 4, 5, 8), torch.zeros(5, dtype=torch.int64)
    with pytest.raises(LayoutError, match="each position once"):
        am.attend(q, q, q, k_positions=places, selected=am.Selection(torch.zeros(1, 1, 5, 1).int()))


@on_each_rank
def attend_compiled(shape: Shape) -> str:
    mesh, q = named_mesh(shape, AXES), torch.randn(1, 4, 5, 8)
    selected = am.Selection(torch.arange(3).int().expand(1, 1, 5, 3).clone())

    def layer(q: Tensor) -> Tensor:
        return am.attention(q, q, q, mesh=mesh, layout=am.Contiguous(), mask=am.Full(), selected=selected, length=10)

    with pytest.raises(KernelError) as raised:
        torch.compile(layer, backend="aot_eager")(q)
    return str(raised.value)


def test_a_graph_on_several_ranks_is_refused(pool: Pool) -> None:
    for text in pool.run(2, attend_compiled, Shape(1, 2, 1)):
        assert "outside of compiled graphs" in text


@on_each_rank
def find_faulty_on_a_gpu(gpu: EmulatedGPU, shape: Shape) -> list[int]:
    """Return the rows of this rank that are NaN."""
    mesh = init_device_mesh("cuda", tuple(shape), mesh_dim_names=AXES)
    q = torch.randn(1, 4, 5, 8, generator=torch.Generator().manual_seed(0)).cuda()
    rows = torch.tensor([[0, 1], [1, 1], [-1, 2], [NO_INDEX, NO_INDEX], [3, 10]], dtype=torch.int32)
    where = {"mesh": mesh, "layout": am.Contiguous(), "mask": am.Full(), "length": 10}
    with torch.no_grad():
        out = am.attention(q, q, q, selected=am.Selection(rows[None, None].cuda()), **where)
    return [int(row) for row in out.cpu().isnan().all(-1).all(1)[0].nonzero().flatten()]


def test_faulty_rows_are_nan_on_gpus() -> None:
    assert world(2, find_faulty_on_a_gpu, Shape(1, 2, 1)).results() == [[1, 2, 4]] * 2


# --- latents ---


@pytest.mark.parametrize("size", [1, 1 << 28])
def test_absorbed_queries_attend_selected_latents(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent, "EXPANDED_BYTES", size)
    q, tokens = torch.randn(2, 6, 11, 7).double(), torch.randn(2, 1, 11, 9).double()
    projection = latent.Projection(torch.randn(6, 5, 7), torch.randn(6, 3, 7)).to(torch.float64)
    selected = problems.selection(Random(0), (2, 1), 11, 11)
    k, v = projection.expand(tokens)
    expected = am.attend(q, k, v, mask=am.Causal(), scale=0.3, selected=selected)
    keys = kernel.SelectedKeys.of(selected, am.Causal(), torch.arange(11), None, None)
    close(projection.attend(choose(KernelRequest.of(q, k, v, Scaling(0.3))), q, tokens, keys, Scaling(0.3)), expected)
