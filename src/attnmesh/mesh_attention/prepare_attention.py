"""Preparation of a call of `attention` on a mesh, once all ranks agree on it: its checks, its spec, its task."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.checks.argument_checks import heads_and_length, with_transpose_hint
from attnmesh.errors import ShapeError, warn_once
from attnmesh.guard.agreement import Agreement, may_compare
from attnmesh.kernels.prepared_local import signature_of
from attnmesh.kernels.traced import needs_grad
from attnmesh.mesh.axes import RankMesh
from attnmesh.mesh.shard_marks import shard_marks
from attnmesh.mesh_attention.attention_arguments import AttentionArguments, CallPayload, check_arguments
from attnmesh.mesh_attention.attention_spec import AttentionSpec, cached_spec, make_spec
from attnmesh.mesh_attention.latents import Latents, LatentWidths
from attnmesh.mesh_attention.task import Task, task_of
from attnmesh.runtime.memo import Memo
from attnmesh.runtime.world import WORLD


class Comparison(NamedTuple):
    """Text and numbers of a call that ranks have compared."""

    text: str
    payload: Sequence[int]
    """Numbers that this rank sends beside the text."""
    payloads_by_shard: Sequence[Sequence[int]]
    """Numbers that all ranks sent. If a later call gathers others, it is prepared anew."""


class PreparedAttention(NamedTuple):
    """Settled parts of calls of one signature: no later call checks, chooses or makes them anew."""

    spec: AttentionSpec
    task: Task | None = None
    """This rank's part. None where autograd or a graph makes it, or where key lengths or a selection change it."""
    comparison: Comparison | None = None
    """None where ranks have not compared the call."""

    def task_for(self, arguments: AttentionArguments, latents: Latents | None) -> Task:
        """Return this rank's task, with the key lengths and the selection of the call. It expands the latents."""
        task = self.task
        if task is None:
            q, k, v = arguments.q, arguments.k, arguments.v
            widths = None if latents is None else latents.widths
            task = task_of(self.spec, q.shape[1], (q, k, v), widths)
            task = task.with_visible_keys(arguments.key_lengths, arguments.indices)
        return task if latents is None else replace(task, projection=latents.projection)


PREPARED_ATTENTIONS = Memo[PreparedAttention](2048)
"""Calls that are prepared on meshes, by signatures with the mesh. Those on one rank are in `PREPARED_LOCAL`."""
WORLD.on_close(PREPARED_ATTENTIONS.clear)


def prepare_attention(
    mesh: RankMesh, arguments: AttentionArguments, checked: bool | None, latent_widths: LatentWidths | None = None
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
    known = PREPARED_ATTENTIONS.find(signature)
    device = q.device if isinstance(q, Tensor) else torch.device(mesh.device_type)
    if options.length is not None and (checked is False or not may_compare(device)):
        prepared = _prepare_uncompared(mesh, arguments, checked, known)
    else:
        prepared = _prepare_compared(mesh, arguments, checked, known, has_signature=signature is not None)
    if prepared is known or signature is None:
        return prepared
    task = None if needs_grad(q, k, v, sinks) else task_of(prepared.spec, q.shape[1], (q, k, v), latent_widths)
    return PREPARED_ATTENTIONS.keep(signature, prepared._replace(task=task))


def _spec_of_assumed_counts(mesh: RankMesh, arguments: AttentionArguments, checked: bool | None) -> AttentionSpec:
    """Return the spec of one rank, or of a graph: ranks are compiled apart, so their shards count as even."""
    check_arguments(mesh, arguments, checked)
    payload, options = arguments.payload, arguments.options
    counts = payload.queries * mesh.ranks, payload.keys * mesh.ranks
    if options.length is not None and payload.queries == payload.keys:  # keys of the queries' sequence
        counts = options.length, options.length
    spec = make_spec(mesh, options, arguments.sizes, counts)._replace(counts_assumed=options.length is None)
    spec.check_highest_selected(payload.highest_selected)
    return spec


def _prepare_uncompared(
    mesh: RankMesh, arguments: AttentionArguments, checked: bool | None, known: PreparedAttention | None
) -> PreparedAttention:
    """Return what is prepared for a call that ranks do not compare. Nothing is counted: other shards are not known."""
    if known is None:
        check_arguments(mesh, arguments, checked)
        length = arguments.options.length
        assert length is not None
        spec = cached_spec(mesh, arguments.options, arguments.sizes, (length, length))
        spec.check_highest_selected(arguments.payload.highest_selected)
        try:
            spec.check_own_shard(*arguments.counts)
        except ShapeError as error:
            raise with_transpose_hint(error, heads_and_length(arguments.q), heads_and_length(arguments.k)) from None
        known = PreparedAttention(spec)
    _check_marks(mesh, arguments)
    return known


def _prepare_compared(
    mesh: RankMesh,
    arguments: AttentionArguments,
    checked: bool | None,
    known: PreparedAttention | None,
    *,
    has_signature: bool,
) -> PreparedAttention:
    """Compare the call, and return what is prepared. Ranks also tell each other how many tokens they have."""
    comparison = None if known is None else known.comparison
    with Agreement(mesh, "attention") as agreement:
        if comparison is not None:
            text, payload, _ = comparison
        else:
            check_arguments(mesh, arguments, checked)
            text = arguments.describe()
            payload = arguments.payload._replace(digest=arguments.digest_of_some_keys() if has_signature else 0)
        _check_marks(mesh, arguments)
        table = agreement.compare(text, payload)
    if known is not None and comparison is not None and comparison.payloads_by_shard == table:
        return known
    payloads = [CallPayload(*numbers) for numbers in table]
    counts_by_shard = tuple((payload.queries, payload.keys) for payload in payloads)
    queries, keys = map(sum, zip(*counts_by_shard, strict=True))
    spec = cached_spec(mesh, arguments.options, arguments.sizes, (queries, keys), counts_by_shard)
    spec.check_highest_selected(max(payload.highest_selected for payload in payloads))
    _warn_of_whole_keys([payload.digest for payload in payloads])
    known_payloads = [[*payload._replace(digest=0)] for payload in payloads]  # a call that is known sends no digest
    return PreparedAttention(spec, comparison=Comparison(text, arguments.payload, known_payloads))


def _check_marks(mesh: RankMesh, arguments: AttentionArguments) -> None:
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
