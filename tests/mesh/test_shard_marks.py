"""Shards that `shard` cut are checked where a call names another layout, mesh or dim; others are as they were."""

import copy
import gc
import io
import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import attnmesh as am
from attnmesh import errors
from attnmesh.errors import LayoutError, MeshError
from attnmesh.mesh.shard_marks import shard_marks
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.tolerances import FLOAT32_SUMS

LAYOUT, DOCUMENTS = am.Zigzag(), am.Causal() & am.Documents([20, 12])


def parts(mesh: Any, layout: Any = LAYOUT, **options: Any) -> list[Tensor]:
    whole = torch.randn(3, 1, 4, 32, 8, generator=torch.Generator().manual_seed(0))
    return [am.shard(x, mesh, layout=layout, **options) for x in whole]


def attend(mesh: Any, shards: list[Tensor], layout: Any = LAYOUT, **options: Any) -> Tensor:
    return am.attention(*shards, mesh=mesh, layout=layout, **options)


CALLS: list[tuple[Callable[[Any], Any], str]] = [
    (
        lambda mesh: attend(mesh, parts(mesh), am.Contiguous()),
        r"attention q: expected a shard of Contiguous\(\), given",
    ),
    (lambda mesh: attend(mesh, [*parts(mesh)[:2], parts(mesh, am.Striped())[2]]), r"attention v: .* given one of Str"),
    (lambda mesh: attend(mesh, parts(mesh), key_layout=am.Striped()), r"attention k: expected a shard of Striped\(bl"),
    (lambda mesh: attend(mesh, parts(mesh, am.Contiguous()), length=32, checked=False), "one of Contiguous"),
    (lambda mesh: attend(mesh, parts(mesh, dim=1)), "attention q: expected a shard cut along dim 2, given one cut"),
    (lambda mesh: attend(mesh, parts(None)), "attention q: expected shard . of 2, given shard 0 of 1"),
    (lambda mesh: attend(mesh, parts(mesh, am.Striped()), "auto", mask=am.Causal()), r"a shard of Zigzag\(\), given"),
    (
        lambda mesh: attend(
            mesh, parts(mesh, "auto", mask=DOCUMENTS), "auto", mask=am.Window(3) & am.Documents([20, 12])
        ),
        r"""expected a shard of layout="auto" for Window\(3\) & Documents\(\[20, 12\]\), given one for Causal""",
    ),
    (lambda mesh: parts(mesh, "auto"), 'shard layout: expected mask= beside layout="auto", given no mask'),
    (lambda mesh: attend(mesh, parts(mesh), "auto"), 'attention layout: expected mask= beside layout="auto"'),
    (
        lambda mesh: am.unshard(parts(mesh)[0], mesh, layout="auto"),
        'unshard layout: expected mask= beside layout="auto',
    ),
    (lambda mesh: am.unshard(parts(mesh)[0], mesh, layout=am.Striped()), "unshard: expected a shard of Striped"),
    (lambda mesh: am.shard(parts(mesh)[0], mesh, layout=LAYOUT), "shard: expected a whole tensor, given a shard of"),
]


@on_each_rank
def catch_errors_of_other_layouts() -> list[str]:
    mesh = am.init_mesh((1, 1, 2))
    found = []
    for call, _ in CALLS:
        try:
            call(mesh)
            found.append("")
        except LayoutError as error:
            found.append(str(error))
    return found


def test_shards_of_another_layout_mesh_or_dim_raise_on_all_ranks(pool: Pool) -> None:
    for (_, says), *given in zip(CALLS, *pool.run(2, catch_errors_of_other_layouts), strict=True):
        assert all(re.search(says, error) for error in given), given


@on_each_rank
def catch_error_of_lone_auto() -> str:
    mesh = am.init_mesh((1, 1, 2))
    layout = LAYOUT if dist.get_rank() else "auto"
    try:
        attend(mesh, parts(mesh, layout, mask=am.Causal()))
    except MeshError as error:
        return str(error)
    return ""


def test_auto_on_one_rank_alone_raises_on_all_where_the_others_compare_next(pool: Pool) -> None:
    first, second = pool.run(2, catch_error_of_lone_auto)
    assert first == second
    assert re.search(r"ranks  call .*\n +0 +shard .*\n +1 +attention ", first)


@on_each_rank
def attend_shards_of_equal_layouts() -> dict[str, bool]:
    """Equal layouts are equal by value, and what was cut by "auto" is attended by "auto" or by its layout."""
    mesh = am.init_mesh((1, 1, 2))
    right = {}
    for layout, mask in ((am.Striped(2), am.Causal()), ("auto", am.Causal()), ("auto", DOCUMENTS)):
        out = attend(mesh, parts(mesh, layout, mask=mask), copy.copy(layout), mask=mask)
        whole = am.attention(*parts(None, am.Zigzag()), mesh=None, mask=mask)
        found = am.unshard(out, mesh, layout=layout, mask=mask)
        right[f"{layout}, {mask}"] = torch.allclose(found, whole, atol=FLOAT32_SUMS)
    by_hand = [x.clone() for x in parts(mesh)]  # tensors that shard did not make are not checked
    attend(mesh, by_hand, am.Contiguous())
    return right


def test_what_fits_is_served(pool: Pool) -> None:
    for right in pool.run(2, attend_shards_of_equal_layouts):
        assert right == dict.fromkeys(right, True)


def test_a_mark_goes_with_its_tensor_and_is_no_part_of_it() -> None:
    before = len(shard_marks())
    part = am.shard(torch.randn(1, 2, 4, 3), None, layout=LAYOUT).requires_grad_()
    assert id(part) in shard_marks()
    assert id(part.clone()) not in shard_marks()
    file = io.BytesIO()
    torch.save(part, file)
    file.seek(0)
    assert torch.equal(torch.load(file), copy.deepcopy(part))
    assert not part.__dict__
    del part
    gc.collect()
    assert len(shard_marks()) == before


@on_each_rank
def record_warnings() -> list[list[str]]:
    """Calls of kinds that no other test makes: a known kind is not looked at again."""
    mesh = am.init_mesh((1, 1, 2))
    said = []
    whole = [*torch.randn(3, 1, 4, 38, 5, generator=torch.Generator().manual_seed(0))]
    shards = [am.shard(x, mesh, layout=LAYOUT) for x in whole]
    alike = [torch.arange(4.0)[:, None, None].expand(1, 4, 7, 5)] * 3  # each head's keys are all alike, as of padding
    for qkv in (whole, [shards[0], *whole[1:]], shards, alike):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            errors._warned.clear()
            for _ in range(2):
                am.attention(*qkv, mesh=mesh, layout=LAYOUT, mask=am.Full())
        said.append([str(each.message) for each in caught])
    return said


def test_whole_tensors_on_all_ranks_warn_once(pool: Pool) -> None:
    for whole, whole_keys, *fine in pool.run(2, record_warnings):
        for (message,) in (whole, whole_keys):
            assert re.search(r"k is the same on all 2 ranks, and counts as 2 shards; pass .* as am\.shard", message)
        assert fine == [[], []]
