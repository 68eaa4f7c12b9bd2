"""Random problems for one device: any shape, mask, layout, dtype and kernel, told by a seed alone."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

import torch
from torch import Tensor

import attnmesh as am
from attnmesh.core.layout import Layout
from attnmesh.core.mask import FAR, Mask
from attnmesh.core.selection import NO_INDEX
from tests.support.truth.dense import truth

LENGTHS = (0, 1, 2, 3, 7, 31, 33, 64, 65, 127, 130, 200, 257, 333)
WIDTHS = (1, 3, 8, 16, 20)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
CAPS = (None, None, None, 50.0, 2.0, 0.3)
LAYOUTS: tuple[Layout, ...] = (am.Contiguous(), am.Zigzag(), am.Striped(), am.Striped(5))


@dataclass(frozen=True)
class LocalProblem:
    """One call of `attend` or `attention`, and what it is to be held against."""

    seed: int
    dtype: torch.dtype
    kernel: str
    mask: Mask
    heads: tuple[int, int]
    widths: tuple[int, int]
    batch: int
    q_positions: Tensor | None
    k_positions: Tensor | None
    lengths: tuple[int, int]
    scale: float | None
    sinks: bool
    lse_matters: bool
    memory: str
    softcap: float | None = None
    key_lengths: Tensor | None = None
    selected: am.Selection | None = None

    def tensors(self, device: str = "cpu") -> list[Tensor]:
        """q, k, v and the sinks if any."""
        generator = torch.Generator().manual_seed(self.seed)
        shapes = [
            (self.heads[0], self.lengths[0], self.widths[0]),
            (self.heads[1], self.lengths[1], self.widths[0]),
            (self.heads[1], self.lengths[1], self.widths[1]),
        ]
        tensors = [self._laid(torch.randn(self.batch, *shape, generator=generator)) for shape in shapes]
        if self.sinks:
            tensors.append(torch.randn(self.heads[0], generator=generator))
        return [x.to(device, self.dtype).requires_grad_() for x in tensors]

    def _laid(self, x: Tensor) -> Tensor:
        """The same values in another memory order: operators that trust strides must not be fooled."""
        if self.memory == "heads inside":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if self.memory == "columns first":
            return x.transpose(-1, -2).contiguous().transpose(-1, -2)
        return x

    def check(self, device: str = "cpu") -> dict[str, float]:
        """Hold forward and gradients against float64; say by name what share of its allowance each used."""
        tensors = self.tensors(device)
        given = self._attend(tensors)
        generator = torch.Generator().manual_seed(self.seed + 1)
        dout = torch.randn(given["out"].shape, generator=generator).to(device)
        dlse = dout.sum(-1) if self.lse_matters else None
        given_positions = zip((self.q_positions, self.k_positions), self.lengths, strict=True)
        positions = [torch.arange(n) if p is None else p for p, n in given_positions]
        visible = self.mask.visible(*positions)
        if self.key_lengths is not None:
            visible = visible & (positions[1] < self.key_lengths[:, None, None, None])
        if self.selected is not None:
            visible = visible & selected_pairs(self.selected, positions[1], self.heads[0])
        scale = self.widths[0] ** -0.5 if self.scale is None else self.scale
        loss = (given["out"] * dout.to(self.dtype)).sum()
        if dlse is not None:
            loss = loss + torch.where(torch.isinf(given["lse"]), 0.0, given["lse"] * dlse).sum()
        gradients = torch.autograd.grad(loss, tensors)
        given |= dict(zip(("dq", "dk", "dv", "dsinks"), gradients, strict=False))
        expected = truth(tensors, visible, scale, dout, dlse, self.softcap)
        return {name: expected.check(name, x, self) for name, x in given.items()}

    def _attend(self, tensors: list[Tensor]) -> dict[str, Tensor]:
        q, k, v, *sinks = tensors
        options = {"mask": self.mask, "scale": self.scale, "kernel": self.kernel, "softcap": self.softcap}
        options |= {"key_lengths": self.key_lengths, "selected": self.selected}
        if sinks:
            return {"out": am.attention(q, k, v, sinks=sinks[0], **options)}
        return am.attend(q, k, v, q_positions=self.q_positions, k_positions=self.k_positions, **options)._asdict()


def draw(
    seed: int,
    kernels: tuple[str, ...] = ("cpu", "reference"),
    dtypes: tuple[torch.dtype, ...] = DTYPES,
    longest: int = max(LENGTHS),
    kinds: tuple[tuple[torch.dtype, int, int], ...] = (),
) -> LocalProblem:
    """The problem of that seed; `kinds` are dtypes with widths of keys and values, where each has to be compiled."""
    random = Random(seed)
    sinks = random.random() < 0.2
    total = random.choice([length for length in LENGTHS if length <= longest])
    q_positions, k_positions = (None if sinks else _positions(random, total) for _ in "qk")
    lengths = tuple(total if p is None else len(p) for p in (q_positions, k_positions))
    kv_heads = random.randint(1, 3)
    width = random.choice(WIDTHS)
    dtype, *widths = random.choice(kinds or ((random.choice(dtypes), width, random.choice((width, width, *WIDTHS))),))
    problem = LocalProblem(
        seed=seed,
        dtype=dtype,
        kernel=random.choice(kernels),
        mask=draw_mask(random, total),
        heads=(kv_heads * random.choice((1, 1, 2, 3, 4)), kv_heads),
        widths=(widths[0], widths[1]),
        batch=random.choice((0, 1, 1, 2, 3)),
        q_positions=q_positions,
        k_positions=k_positions,
        lengths=lengths,
        scale=random.choice((None, None, None, 0.3, 0, -1.0)),
        sinks=sinks,
        lse_matters=not sinks and random.random() < 0.5,
        memory=random.choice(("plain", "heads inside", "columns first")),
        softcap=random.choice(CAPS),
    )
    few = draw_key_lengths(random, problem.batch, lengths[1])
    return replace(problem, key_lengths=few) if random.random() < 0.3 else problem


def selection(random: Random, sizes: tuple[int, int], queries: int, keys: int) -> am.Selection:
    """Some keys for each query, in any order, for all key heads alike or not; `sizes` are batch and key heads."""
    generator = torch.Generator().manual_seed(random.getrandbits(30))
    block = random.choice((1, 1, 2, 7))
    shape = sizes[0], random.choice((1, sizes[1])), queries
    k, blocks = random.randint(1, max(1, keys) + 2), -(-keys // block)
    drawn = torch.full((*shape, k), NO_INDEX)
    some = torch.rand(*shape, blocks, generator=generator).argsort(-1)[..., :k]
    drawn[..., : some.shape[-1]] = some.masked_fill(torch.rand(some.shape, generator=generator) < 0.2, NO_INDEX)
    return am.Selection(drawn[..., torch.randperm(k, generator=generator)].int(), block)


def selected_pairs(selected: am.Selection, positions: Tensor, heads: int) -> Tensor:
    """Return which keys are selected for each query and query head."""
    found = (selected.indices.unsqueeze(-2) == (positions // selected.block)[:, None]).any(-1)
    return found.repeat_interleave(heads // found.shape[1], 1)


def draw_key_lengths(random: Random, batch: int, keys: int) -> Tensor:
    """Real keys of each sequence: none, some or all."""
    return torch.tensor([random.choice((0, random.randint(0, keys), keys)) for _ in range(batch)], dtype=torch.int64)


def _positions(random: Random, total: int) -> Tensor | None:
    """Where one side's tokens stand: everywhere, on one shard, on a few of a mesh's shards, or shuffled."""
    if random.random() < 0.3:
        return None
    layout, shards = random.choice(LAYOUTS), random.randint(1, 6)
    held = random.sample(range(shards), random.randint(1, shards))
    positions = torch.cat([layout.positions(total, shards, index) for index in held])
    if random.random() < 0.2:
        positions = positions[
            torch.randperm(len(positions), generator=torch.Generator().manual_seed(random.getrandbits(30)))
        ]
    return positions


def draw_mask(random: Random, total: int) -> Mask:
    """An intersection of up to three masks."""
    mask = am.Full()
    if random.random() < 0.5:
        mask = mask & am.Causal()
    if random.random() < 0.4:
        mask = mask & am.Window(random.choice((0, 1, 5, 40, 200)), random.choice((0, 0, 3, 70)))
    if total and random.random() < 0.4:
        cuts = sorted(random.randint(0, total) for _ in range(random.choice((0, 1, 3, 20))))
        mask = mask & am.Documents(b - a for a, b in zip((0, *cuts), (*cuts, total), strict=True))
    if random.random() < 0.2:
        mask = mask & am.Chunks(random.choice((1, 3, 16, 40, 200)))
    if total > 1 and mask.right in (0, FAR) and random.random() < 0.25:
        edges = sorted(random.randint(0, total) for _ in range(random.choice((2, 2, 4, 12))))
        spans = [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
        mask = replace(mask, right=FAR) & am.Spans(spans)
    return mask


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return normal random numbers of a seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def float64_numbers(*shape: int, seed: int = 0) -> Tensor:
    """Return normal random numbers of a seed, in float64."""
    return numbers(*shape, seed=seed, dtype=torch.float64)


def indexer_scores(keys: Tensor, operands: Sequence[Tensor]) -> Tensor:
    """Return the sum over heads of w * relu(q.k), as an indexer of DeepSeek-V3.2 scores keys."""
    q, weights = operands
    return torch.einsum("bqh,bqhn->bqn", weights, (q @ keys[:, None].mT).relu())
