"""Calls in which one rank, the odd one, differs from all others: decode steps, attention and merges, as a table.

Each entry has the call of the other ranks and that of the odd rank. `..._outcomes` run all entries on the calling rank.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import attnmesh as am
from attnmesh.comm import mailbox_queue, mailboxes
from attnmesh.errors import InputError
from attnmesh.mesh.shapes import AXES

ODD = 1
"""The rank that differs."""

DIM, HEADS, KV_HEADS, TOKENS = 16, 4, 2, 24
"""Sizes of the calls. A cache has as many key heads as its mesh's heads axis: Triton's interpreter takes its time."""


@contextmanager
def alert() -> Iterator[None]:
    """Let ranks that wait see ten times as often whether another one compares its call: tests wait often for that."""
    often = mailboxes.CHECK_INTERVAL / 10
    with patch.object(mailboxes, "CHECK_INTERVAL", often), patch.object(mailbox_queue, "CHECK_INTERVAL", often):
        yield


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@dataclass
class Decoding:
    """A cache on a mesh, and the calls of this rank on it."""

    cache: am.KVCache
    device: str
    options: dict[str, Any]

    @staticmethod
    def on(mesh: DeviceMesh, device: str, **options: Any) -> "Decoding":
        sizes = {"batch": 1, "kv_heads": mesh["heads"].size(), "head_dim": DIM, "capacity": 48, "block": 4}
        made = Decoding(am.KVCache(mesh, **sizes, dtype=torch.float32), device, options)
        made.append(TOKENS)
        return made

    @property
    def kv_heads(self) -> int:
        """Key heads on all ranks."""
        return self.cache.config.kv_heads

    def append(self, tokens: int = 1) -> None:
        self.cache.append(*(numbers(seed, 1, self.kv_heads, tokens, DIM).to(self.device) for seed in (1, 2)))

    def step(self, rows: int = 1, heads: int = HEADS, dtype: torch.dtype = torch.float32, **options: Any) -> Tensor:
        q = options.pop("of", Tensor.contiguous)(numbers(3, 1, heads, rows, DIM).to(self.device, dtype))
        moved = {name: x.to(self.device) if isinstance(x, Tensor) else x for name, x in options.items()}
        return am.decode(q, self.cache, **{**self.options, **moved})

    def step_with(self, width: int) -> Tensor:
        """Return a step that brings a new token, with keys of this width."""
        k, v = (numbers(seed, 1, self.kv_heads, 1, size).to(self.device) for seed, size in ((1, width), (2, DIM)))
        return self.step(k=k, v=v)

    def error(self) -> str | float:
        """Return the error of an honest step against attention to all tokens, or the step's outcome if it has none."""
        outs = list[Tensor]()

        def step() -> Tensor:
            outs.append(self.step())
            return outs[0]

        text = outcome(step)
        if text != "numbers":
            return text
        more = self.cache.length - TOKENS
        k, v = (
            torch.cat([numbers(seed, 1, self.kv_heads, count, DIM) for count in (TOKENS, *[1] * more)], 2)
            for seed in (1, 2)
        )
        expected = am.attend(numbers(3, 1, HEADS, 1, DIM), k, v, kernel="reference").out
        return float((outs[0].cpu() - expected).abs().max())


Act = Callable[[Decoding], Tensor | None]


@dataclass(frozen=True)
class Difference:
    """Actions of the odd rank and of the others.

    With `lasts` the caches of the odd rank and the others differ afterwards, unless all ranks refuse the action.
    """

    odd: Act
    others: Act = Decoding.step
    lasts: bool = False


def after(act: Callable[[Decoding], object]) -> Act:
    """Return an action: something, then a step."""

    def act_and_step(it: Decoding) -> Tensor:
        act(it)
        return it.step()

    return act_and_step


DECODING: dict[str, Difference] = {
    "rows": Difference(lambda it: it.step(rows=2)),
    "heads": Difference(lambda it: it.step(heads=8)),
    "mask": Difference(lambda it: it.step(mask=am.Window(3))),
    "scale": Difference(lambda it: it.step(scale=0.5)),
    "a scale seen before": Difference(lambda it: it.step(scale=0.5)),
    "softcap": Difference(lambda it: it.step(softcap=3.0)),
    "sinks": Difference(lambda it: it.step(sinks=numbers(4, HEADS))),
    "output": Difference(lambda it: it.step(output="heads")),
    "key_lengths": Difference(
        lambda it: it.step(key_lengths=torch.tensor([5])), lambda it: it.step(key_lengths=torch.tensor([9]))
    ),
    "a dtype": Difference(lambda it: it.step(dtype=torch.float16)),
    "a bad argument": Difference(lambda it: it.step(scale="big")),  # type: ignore[arg-type]
    "an unknown option": Difference(lambda it: it.step(dropout_p=0.1)),
    "a lazy query": Difference(lambda it: it.step(of=torch._neg_view)),
    "new keys of another width": Difference(
        lambda it: it.step_with(DIM // 2), lambda it: it.step_with(DIM), lasts=True
    ),
    "an extra append": Difference(after(Decoding.append), lasts=True),
    "a longer append": Difference(after(lambda it: it.append(2)), after(Decoding.append), lasts=True),
    "a shorter cache": Difference(after(lambda it: it.cache.truncate(it.cache.length - 1)), lasts=True),
    "a skipped step": Difference(lambda it: None, lasts=True),
}

SEEN = ("a scale seen before",)
"""Differences whose two calls all ranks have made before, if `before` is above 0."""

ON_CPU = ("a lazy query", "a lazy partial")
"""Differences that an emulated GPU cannot have: its tensors hide that those inside are negated lazily."""

BEFORE = (0, 2)
"""Honest steps before the odd one."""


def outcome(act: Callable[[], Tensor | None]) -> str:
    """Return the text of the error, "NaN", "numbers", or "nothing" of a call that is not made."""
    try:
        out = act()
    except InputError as error:
        return f"{type(error).__name__}: {error}"
    if out is None:
        return "nothing"
    nan = out.cpu().isnan()
    return "NaN" if nan.all() else "some NaN" if nan.any() else "numbers"


def mesh_on(device: str, shape: tuple[int, int, int]) -> DeviceMesh:
    return init_device_mesh(device, shape, mesh_dim_names=AXES)


def decoding_outcomes(device: str, shape: tuple[int, int, int], before: int, options: dict[str, Any]) -> dict[str, Any]:
    """Return on a rank, for each difference: the outcome, and what an honest step after it gives."""
    mesh = mesh_on(device, shape)
    odd = dist.get_rank() == ODD
    found = {}
    for name, difference in DECODING.items():
        if device != "cpu" and name in ON_CPU:
            continue
        it = Decoding.on(mesh, device, **options)
        kinds = [difference.others if name == "key_lengths" else Decoding.step]
        kinds += [difference.odd] * (name in SEEN)
        for _ in range(before):
            it.append()
            for call in kinds:
                call(it)
        first = outcome(lambda d=difference, it=it: (d.odd if odd else d.others)(it))
        it.append()
        rest = [it.error()]
        if name == "a skipped step" and odd:  # the other ranks have one more
            rest.append(it.error())
        found[name] = [first, *rest]
    return found


ATTENTION: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mask": ({"mask": am.Window(3)}, {}),
    "a short shard": ({"tokens": -1}, {}),
    "a short shard of a shorter length": ({"tokens": -1, "length": TOKENS - 1}, {}),
    "length": ({"length": TOKENS - 1}, {}),
    "no length": ({"length": None}, {}),
    "heads": ({"heads": 8}, {}),
    "dtype": ({"dtype": torch.float16}, {}),
    "layout": ({"layout": am.Zigzag()}, {}),
    "scale": ({"scale": 0.3}, {}),
    "a scale seen before": ({"scale": 0.4}, {}),
    "sinks": ({"sinks": numbers(4, HEADS)}, {}),
    "exchange": ({"exchange": "ring"}, {}),
    "key_lengths": (
        {"key_lengths": torch.tensor([5]), "mask": am.Full()},
        {"key_lengths": torch.tensor([9]), "mask": am.Full()},
    ),
    "more keys than there are": (
        {"key_lengths": torch.tensor([TOKENS + 1]), "mask": am.Full()},
        {"key_lengths": torch.tensor([TOKENS]), "mask": am.Full()},
    ),
    "a bad argument": ({"scale": "big"}, {}),
    "an unknown option": ({"dropout_p": 0.1}, {}),
}


def attend(mesh: DeviceMesh, device: str, *, tokens: int = 0, heads: int = HEADS, **options: Any) -> Tensor:
    """Return attention of this rank's part of the tokens."""
    dtype, options = options.pop("dtype", torch.float32), {"layout": am.Contiguous(), "length": TOKENS, **options}
    per_rank, rank = TOKENS // mesh.size(), dist.get_rank()
    part = slice(rank * per_rank, (rank + 1) * per_rank + tokens)
    q, k, v = (
        numbers(seed, 1, count, TOKENS, DIM)[:, :, part].to(device, dtype)
        for seed, count in ((1, heads), (2, KV_HEADS), (3, KV_HEADS))
    )
    moved = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in options.items()}
    with torch.no_grad():
        return am.attention(q, k, v, mesh=mesh, **moved)


def attention_outcomes(device: str, shape: tuple[int, int, int], before: int) -> dict[str, Any]:
    """Return on a rank, for each difference: the outcome, and how far an honest call after it is off."""
    mesh = mesh_on(device, shape)
    odd = dist.get_rank() == ODD
    found = {}
    whole = [numbers(seed, 1, heads, TOKENS, DIM) for seed, heads in ((1, HEADS), (2, KV_HEADS), (3, KV_HEADS))]
    expected = am.attend(*whole, mask=am.Causal(), kernel="reference").out
    for name, (given, others) in ATTENTION.items():
        for _ in range(before):
            for seen in ({}, given) if name in SEEN else ({},):
                attend(mesh, device, **seen)
        first = outcome(lambda o=given if odd else others: attend(mesh, device, **o))
        per_rank = TOKENS // mesh.size()
        mine = expected[:, :, dist.get_rank() * per_rank :][:, :, :per_rank]
        found[name] = [first, float((attend(mesh, device).cpu() - mine).abs().max())]
    return found


MERGES: dict[str, dict[str, Any]] = {
    "lse of another dtype": {"lse": torch.float16},
    "rows": {"rows": 2},
    "heads": {"heads": 8},
    "dtype": {"dtype": torch.float16},
    "base": {"base": "2"},
    "wire": {"wire": torch.float16},
    "how": {"how": "direct"},
    "another how": {"how": "tree"},
    "output": {"output": "heads"},
    "a lazy partial": {"of": torch._neg_view},
    "a partial on the CPU": {"of": Tensor.cpu},
    "a bad argument": {"base": "x"},
}


def merge(group: Any, device: str, *, rows: int = 1, heads: int = HEADS, **options: Any) -> Tensor:
    out = torch.full((1, heads, rows, DIM), float(dist.get_rank())).to(device, options.pop("dtype", torch.float32))
    lse = torch.zeros(1, heads, rows).to(device, options.pop("lse", torch.float32))
    changed = map(options.pop("of", Tensor.contiguous), (out, lse))
    return am.merge_across(am.Partial(*changed), group, **options).out


def merge_outcomes(device: str, ranks: int, before: int, how: str) -> dict[str, Any]:
    """Return on a rank, for each difference: the outcome, and how far an honest merge after it is off."""
    odd = dist.get_rank() == ODD
    found = {}
    for name, given in MERGES.items():
        if given.get("how") == how or name in (ON_CPU if device != "cpu" else ("a partial on the CPU",)):
            continue
        group = dist.new_group()  # on which nothing was merged yet
        for _ in range(before):
            merge(group, device, how=how)
        first = outcome(lambda o=given, group=group: merge(group, device, **({"how": how} | (o if odd else {}))))
        mean = merge(group, device, how=how).cpu()
        found[name] = [first, float((mean - (ranks - 1) / 2).abs().max())]
    return found


BAD = (
    "a bad argument",
    "an unknown option",
    "a lazy query",
    "a lazy partial",
    "a dtype",
    "lse of another dtype",
    "new keys of another width",
)
"""Differences that are an invalid argument of the odd rank."""


def check(answers: list[dict[str, Any]], before: int, *, compares_all: bool) -> None:
    """Raise unless all ranks raise the same error or get NaN, and honest calls afterwards are right.

    A bad argument after the first call raises on its own rank alone where no host compares; the others get NaN.
    """
    for name in answers[0]:
        rows = [answer[name] for answer in answers]
        if name == "a skipped step":
            rows[ODD] = rows[ODD][1:]  # its first step meets the step of the others that it has skipped
        firsts = [row[0] for row in rows]
        alike = len(set(firsts)) == 1 and (firsts[0] == "NaN" or "Error: " in str(firsts[0]))
        others = {first for rank, first in enumerate(firsts) if rank != ODD}
        alone = before > 0 and name in BAD and "Error: " in firsts[ODD] and others == {"NaN"}
        assert alike or (alone and not compares_all), (name, firsts)
        assert "Error: " in firsts[0] or not compares_all, (name, firsts)
        lasts = name in DECODING and DECODING[name].lasts
        for later in zip(*(row[1:] for row in rows), strict=True):
            right = all(isinstance(each, float) and each < 1e-5 for each in later)  # float32 sums of 24 products
            wrong = lasts and all(isinstance(each, str) for each in later)
            assert right or wrong, (name, later)
