"""A problem on a mesh and how it is solved: made of a call's arguments where these fit, and written as a code."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from attnmesh.checks.argument_checks import with_transpose_hint
from attnmesh.comm.gather import agreed_flat_mesh
from attnmesh.core.mask import check_mask
from attnmesh.core.scaling import Scaling
from attnmesh.errors import MaskError, ShapeError
from attnmesh.mesh.axes import RankMesh
from attnmesh.mesh.schedule import Problem
from attnmesh.mesh_attention.attention_arguments import AttentionOptions, QueryKeyCounts, TensorSizes
from attnmesh.runtime.world import cached_from_code, cached_per_world


class AttentionSpec(NamedTuple):
    """A problem on a mesh and how it is solved, the same on all ranks, with this rank's axes."""

    mesh: RankMesh
    problem: Problem
    exchange: str
    kernel: str
    scaling: Scaling
    index_block: int = 0
    """Keys per index of a selection; 0 if there is none."""
    counts_assumed: bool = False
    """True where nobody counted the tokens of other shards, so that they count as even: in a graph without `length`."""

    def check_own_shard(self, queries: int, keys: int) -> None:
        """Raise unless this rank holds as many tokens as its layout gives it."""
        problem = self.problem
        own = _shard_sizes(problem, problem.shard_at(self.mesh.shard_index))
        if (queries, keys) != own:
            given = f"{queries} queries and {keys} keys"
            shape = f"a shard of {own[0]} queries of {problem.length} and {own[1]} keys of {problem.key_length}"
            fix = "shard with am.shard and this layout, or correct length and key_length"
            raise ShapeError("attention", shape, given, fix)

    def check_highest_selected(self, highest: int) -> None:
        """Raise if a query selects a key beyond the sequence; -1 for none."""
        if highest < 0:
            return
        keys, block = self.problem.key_length, self.index_block
        blocks = -(-keys // block)
        if highest >= blocks:
            expected = f"indices below {blocks}, of {keys} keys in blocks of {block}"
            fix = "count keys of the whole sequence, or blocks of them, and fill rows up with 2**31 - 1, for none"
            raise ShapeError("attention selected indices", expected, str(highest), fix)

    def to_code(self) -> tuple[str, list[int]]:
        """Return the spec as names and numbers, which compiled graphs keep as constants."""
        names = [
            *self.mesh.group_names,
            self.exchange,
            self.kernel,
            *map(repr, (*self.scaling, self.index_block, int(self.counts_assumed))),
        ]
        sizes_and_indices = [*self.mesh.shape, *(axis.index for axis in self.mesh.axes)]
        return ",".join(names), [*sizes_and_indices, *self.problem.to_code()]

    @staticmethod
    def from_code(names: str, numbers: Sequence[int]) -> "AttentionSpec":
        """Return the spec that `to_code` wrote."""
        return cached_from_code(_spec_of_code, names, numbers)


def make_spec(
    mesh: RankMesh,
    options: AttentionOptions,
    sizes: TensorSizes,
    counts: QueryKeyCounts,
    counts_by_shard: tuple[QueryKeyCounts, ...] = (),
) -> AttentionSpec:
    """Return the spec, or raise where its mask, lengths and shards do not fit. All ranks pass the same values.

    `counts` are the queries and keys of all ranks together, and `counts_by_shard` those of each shard; it is empty
    where ranks have not exchanged their counts.

    Where keys are selected, queries stay on their rank: the spec's mesh has all ranks along one axis, queries. Ranks
    agree on that axis, and on a layout "auto", in the first call.
    """
    index_block = sizes.index_block
    problem = options.problem(mesh, counts)
    try:
        _check_shards(problem, counts_by_shard)
        check_mask("attention mask", problem.mask, problem.length, problem.key_length)
        check_cross(options, problem.length, problem.key_length, mesh.ranks)
    except (MaskError, ShapeError) as error:
        raise with_transpose_hint(
            error, (sizes.q_heads, counts[0]), (sizes.k_heads, counts[1]), hint_first=True
        ) from None
    exchange = "bulk" if index_block and options.exchange == "auto" else options.exchange
    if index_block and mesh.ranks > 1:
        mesh, shard_by_place = agreed_flat_mesh(mesh)
        problem = replace(problem, shape=mesh.shape, shard_by_place=shard_by_place)
    scaling = options.scaling(sizes.dim)
    return AttentionSpec(
        mesh, problem, exchange=exchange, kernel=options.kernel, scaling=scaling, index_block=index_block
    )


cached_spec = cached_per_world(2048)(make_spec)
"""Returns the spec, made once: a graph traces `make_spec` itself."""


def check_cross(options: AttentionOptions, length: int, key_length: int, ranks: int) -> None:
    """Raise where the keys that a query sees cannot be known.

    Queries and keys of unequal lengths may belong to two sequences, or the queries may be the last tokens of the keys.
    `key_length` alone does not select the causal mask, which is rarely meant over another sequence.
    """
    mask = options.applied_mask
    explicit = options.key_length is not None and options.mask is not None
    if length == key_length or explicit or mask.is_at_any_distance:
        return
    given = f"{length} queries, {key_length} keys and the {'default ' * (options.mask is None)}mask {mask}"
    fixes = ["pass mask=am.Full() for cross-attention"]
    if ranks > 1 and key_length == ranks * length:
        fixes.insert(0, "shard k and v as q, if they are the whole sequence")
    if length < key_length:
        positions = f"torch.arange({key_length - length}, {key_length})"
        in_cache = "append the keys to an am.KVCache of the mesh and call am.decode"
        same_mask = f"am.{mask}".replace(" & ", " & am.")
        in_place = f"call am.attend with mask={same_mask} and q_positions={positions}"
        how = in_place if ranks == 1 else in_cache
        fixes.append(f"{how} for the last queries of a longer sequence")
    mask_argument = "mask=am.Causal(), " * (options.mask is None)
    fixes.append(f"pass {mask_argument}key_length={key_length} for {mask} over another sequence")
    raise ShapeError("attention", "as many queries as keys under a mask of positions", given, "; ".join(fixes))


def _check_shards(problem: Problem, counts_by_shard: Sequence[Sequence[int]]) -> None:
    """Raise unless every rank holds as many tokens as its layout gives it."""
    sequences = (("length", problem.layout, problem.length), ("key_length", problem.key_layout, problem.key_length))
    for index, (name, layout, length) in enumerate(sequences):
        expected = [len(layout.positions(length, len(counts_by_shard), shard)) for shard in range(len(counts_by_shard))]
        counts = [shard_counts[index] for shard_counts in counts_by_shard]
        if counts != expected:
            fix = f"shard with am.shard and this layout, or correct {name}"
            given = f"{counts}, {sum(counts)} in all"
            raise ShapeError(
                "attention", f"shards of {layout} of {name} {length}: {expected} tokens by shard", given, fix
            )


@cached_per_world(1024)
def _spec_of_code(names: str, numbers: tuple[int, ...]) -> AttentionSpec:
    *groups, exchange, kernel, scale, softcap, index_block, counts_assumed = names.split(",")
    mesh = RankMesh.named(numbers[:3], numbers[3:6], groups)
    problem = Problem.from_code(mesh.shape, numbers[6:])
    return AttentionSpec(
        mesh,
        problem,
        exchange=exchange,
        kernel=kernel,
        scaling=Scaling(float(scale), float(softcap)),
        index_block=int(index_block),
        counts_assumed=counts_assumed == "1",
    )


@lru_cache(maxsize=1024)
def _shard_sizes(problem: Problem, index: int) -> tuple[int, int]:
    ranks = problem.shape.ranks
    queries = problem.layout.positions(problem.length, ranks, index)
    return len(queries), len(problem.key_layout.positions(problem.key_length, ranks, index))
