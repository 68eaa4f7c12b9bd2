"""Preparation of a call of `attention` on a mesh, once all ranks agree on it: its checks, its spec, its task."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attnmesh.comm.gather import all_gather_ints
from attnmesh.core.mask import FAR, check_mask
from attnmesh.errors import MaskError, ShapeError, warn_once
from attnmesh.guard.agreement import Agreement, may_compare
from attnmesh.guard.argument_checks import heads_and_length, with_transpose_hint
from attnmesh.guard.shard_marks import shard_marks
from attnmesh.kernels.prepared_local import signature_of
from attnmesh.kernels.traced import needs_grad
from attnmesh.mesh.axes import Axis, Mesh, flat_axis
from attnmesh.mesh.schedule import Problem
from attnmesh.mesh.shapes import AXES
from attnmesh.mesh_attention.attention_arguments import (
    AttentionArguments,
    AttentionOptions,
    CallPayload,
    HeadSizes,
    QueryKeyCounts,
    check_arguments,
)
from attnmesh.mesh_attention.attention_spec import AttentionSpec, PreparedAttention, prepared_attentions
from attnmesh.mesh_attention.latents import LatentWidths
from attnmesh.runtime.world import cached_per_world, collective_once


def prepare_attention(
    mesh: Mesh, arguments: AttentionArguments, checked: bool | None, latent_widths: LatentWidths | None = None
) -> PreparedAttention:
    """Return what is prepared for a call, checked and compared. Errors are the same on all ranks.

    `latent_widths` are the columns of latents that travel instead of keys and values.
    """
    if mesh.ranks == 1 or torch.compiler.is_compiling():
        return PreparedAttention(_spec_of_assumed_counts(mesh, arguments, checked))
    q, k, v, sinks = arguments.q, arguments.k, arguments.v, arguments.sinks
    options = arguments.options
    signature = None
    if arguments.has_signature:
        signature = signature_of(q, k, v, sinks, (mesh, latent_widths, *options, checked))
    known = prepared_attentions().find(signature)
    device = q.device if isinstance(q, Tensor) else torch.device(mesh.device_type)
    if options.length is not None and (checked is False or not may_compare(device)):
        prepared = _prepare_uncompared(mesh, arguments, checked, known)
    else:
        prepared = _prepare_compared(mesh, arguments, checked, known, has_signature=signature is not None)
    if prepared is known or signature is None:
        return prepared
    task = None if needs_grad(q, k, v, sinks) else prepared.spec.task(q.shape[1], (q, k, v), latent_widths)
    return prepared_attentions().keep(signature, prepared._replace(task=task))


def _spec_of_assumed_counts(mesh: Mesh, arguments: AttentionArguments, checked: bool | None) -> AttentionSpec:
    """Return the spec of one rank, or of a graph: ranks are compiled apart, so their shards count as even."""
    check_arguments(mesh, arguments, checked)
    payload, options = arguments.payload, arguments.options
    tokens = payload.queries * mesh.ranks, payload.keys * mesh.ranks
    if options.length is not None and payload.queries == payload.keys:  # keys of the queries' sequence
        tokens = options.length, options.length
    spec = _make_spec(mesh, options, arguments.sizes, tokens)._replace(counts_assumed=options.length is None)
    _check_highest_selected(payload.highest_selected, spec)
    return spec


def _prepare_uncompared(
    mesh: Mesh, arguments: AttentionArguments, checked: bool | None, known: PreparedAttention | None
) -> PreparedAttention:
    """Return what is prepared for a call that ranks do not compare. Nothing is counted: other shards are not known."""
    prepared = known or _prepare_new_uncompared(mesh, arguments, checked)
    _check_marks(mesh, arguments)
    return prepared


def _prepare_compared(
    mesh: Mesh,
    arguments: AttentionArguments,
    checked: bool | None,
    known: PreparedAttention | None,
    *,
    has_signature: bool,
) -> PreparedAttention:
    """Return what is prepared, once all ranks make the call. They say how many tokens they have, too."""
    with Agreement(mesh, "attention") as agreement:
        if known:
            text, payload = known.text, known.payload
        else:
            text, payload = _check_new(mesh, arguments, checked, has_signature=has_signature)
        _check_marks(mesh, arguments)
        table = agreement.compare(text, payload)
    if known and known.payloads_by_shard == table:
        return known
    return _prepare_from_table(mesh, arguments, text, table)


def _check_new(
    mesh: Mesh, arguments: AttentionArguments, checked: bool | None, *, has_signature: bool
) -> tuple[str, CallPayload]:
    """Return what ranks compare of a call that this rank does not know, or raise unless this mesh can serve it."""
    text = arguments.check_and_describe(mesh, checked)
    digest = arguments.digest_of_some_keys() if has_signature else 0
    return text, arguments.payload._replace(digest=digest)


def _prepare_from_table(
    mesh: Mesh, arguments: AttentionArguments, text: str, table: Sequence[Sequence[int]]
) -> PreparedAttention:
    """Return what is prepared for a call that ranks have compared, with this text and a table of their payloads."""
    payloads = [CallPayload(*row) for row in table]
    tokens = tuple((payload.queries, payload.keys) for payload in payloads)
    queries, keys = map(sum, zip(*tokens, strict=True))
    spec = _cached_spec(mesh, arguments.options, arguments.sizes, (queries, keys), tokens)
    _check_highest_selected(max(payload.highest_selected for payload in payloads), spec)
    _warn_of_whole_keys([payload.digest for payload in payloads])
    known_payloads = [[*payload._replace(digest=0)] for payload in payloads]  # a call that is known sends no digest
    return PreparedAttention(spec, None, text, arguments.payload, known_payloads)


def _prepare_new_uncompared(mesh: Mesh, arguments: AttentionArguments, checked: bool | None) -> PreparedAttention:
    """Check a call that ranks do not compare, and return what is prepared for it."""
    check_arguments(mesh, arguments, checked)
    length = arguments.options.length
    assert length is not None
    spec = _cached_spec(mesh, arguments.options, arguments.sizes, (length, length))
    _check_highest_selected(arguments.payload.highest_selected, spec)
    try:
        spec.check_own_shard(*arguments.tokens)
    except ShapeError as error:
        raise with_transpose_hint(error, heads_and_length(arguments.q), heads_and_length(arguments.k)) from None
    # The text would have the numbers of `key_lengths`, which a device may hold.
    return PreparedAttention(
        spec, None, "" if arguments.key_lengths is not None else arguments.describe(), arguments.payload
    )


def _check_marks(mesh: Mesh, arguments: AttentionArguments) -> None:
    """Raise for a shard that `shard` cut by another layout than the one named, for another mesh, or by another dim."""
    options = arguments.options
    marks = shard_marks()
    if not marks or not (id(arguments.q) in marks or id(arguments.k) in marks or id(arguments.v) in marks):
        return
    qkv = arguments.q, arguments.k, arguments.v
    layouts = options.layout, options.key_layout, options.key_layout
    for name, x, layout in zip("qkv", qkv, layouts, strict=True):
        if (mark := marks.get(id(x))) is None or layout is None:
            continue
        if mark.layout is not layout or mark.mesh is not mesh or mark.dim != 2:
            mark.check(f"attention {name}", layout, options.applied_mask, mesh, 2)


def _warn_of_whole_keys(digests: Sequence[int]) -> None:
    """Warn once if all ranks passed the same keys, by their digests: shards of one sequence differ."""
    if digests[0] and len({*digests}) == 1:
        fix = "pass this rank's shard, as am.shard(k, mesh, layout=layout), if this is the whole sequence"
        warn_once(f"attention: k is the same on all {len(digests)} ranks, and counts as {len(digests)} shards; {fix}.")


def _make_spec(
    mesh: Mesh,
    options: AttentionOptions,
    sizes: HeadSizes,
    tokens: QueryKeyCounts,
    tokens_by_shard: tuple[QueryKeyCounts, ...] = (),
) -> AttentionSpec:
    """Return the spec, or raise where its mask, lengths and shards do not fit. All ranks pass the same values.

    `tokens` are those of all ranks, and `tokens_by_shard` has each rank's by shard, where they were counted.

    Where keys are selected, in blocks, queries stay on their rank: all ranks lie along one axis, queries.
    """
    q_heads, k_heads, dim, index_block = sizes
    problem = options.problem(mesh, tokens)
    try:
        _check_shards(problem, tokens_by_shard)
        check_mask("attention mask", problem.mask, problem.length, problem.key_length)
        check_cross(options, problem.length, problem.key_length, mesh.ranks)
    except (MaskError, ShapeError) as error:
        raise with_transpose_hint(error, (q_heads, tokens[0]), (k_heads, tokens[1]), hint_first=True) from None
    exchange = "bulk" if index_block and options.exchange == "auto" else options.exchange
    if index_block and mesh.ranks > 1:
        mesh, shard_of_rank = _flatten_to_one_axis(mesh)
        problem = replace(problem, shape=mesh.shape, shard_of_rank=shard_of_rank)
    return AttentionSpec(mesh, problem, exchange, options.kernel, options.scaling(dim), index_block)


_cached_spec = cached_per_world(2048)(_make_spec)
"""Returns the spec, made once: a graph traces `_make_spec` itself."""


@collective_once
def _flatten_to_one_axis(mesh: Mesh) -> tuple[Mesh, tuple[int, ...]]:
    """Return a mesh of all ranks along one axis, and the shard of each. All ranks make the first call at once."""
    long = [axis for axis in mesh.axes if axis.size > 1]
    axis = long[0] if len(long) == 1 else flat_axis(mesh.device_mesh, AXES)
    indices = [index for (index,) in all_gather_ints([axis.index], mesh)]  # one for each shard
    return Mesh(Axis(), axis, Axis()), tuple(sorted(range(len(indices)), key=indices.__getitem__))


def _check_highest_selected(highest: int, spec: AttentionSpec) -> None:
    """Raise if a query selects a key beyond the sequence; -1 for none."""
    if highest < 0:
        return
    keys, block = spec.problem.key_length, spec.index_block
    blocks = -(-keys // block)
    if highest >= blocks:
        expected = f"indices below {blocks}, of {keys} keys in blocks of {block}"
        fix = "count keys of the whole sequence, or blocks of them, and fill rows up with 2**31 - 1, for none"
        raise ShapeError("attention selected indices", expected, str(highest), fix)


def check_cross(options: AttentionOptions, length: int, key_length: int, ranks: int) -> None:
    """Raise where the keys that a query sees cannot be known.

    Queries and keys of unequal lengths may belong to two sequences, or the queries may be the last tokens of the keys.
    `key_length` alone does not select the causal mask, which is rarely meant over another sequence.
    """
    mask = options.applied_mask
    explicit = options.key_length is not None and options.mask is not None
    if length == key_length or explicit or min(mask.left, mask.right) >= FAR:
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


def _check_shards(problem: Problem, tokens_by_shard: Sequence[Sequence[int]]) -> None:
    """Raise unless every rank holds as many tokens as its layout gives it."""
    sequences = (("length", problem.layout, problem.length), ("key_length", problem.key_layout, problem.key_length))
    for index, (name, layout, length) in enumerate(sequences):
        expected = [len(layout.positions(length, len(tokens_by_shard), shard)) for shard in range(len(tokens_by_shard))]
        counts = [tokens[index] for tokens in tokens_by_shard]
        if counts != expected:
            fix = f"shard with am.shard and this layout, or correct {name}"
            given = f"{counts}, {sum(counts)} in all"
            raise ShapeError(
                "attention", f"shards of {layout} of {name} {length}: {expected} tokens by shard", given, fix
            )
