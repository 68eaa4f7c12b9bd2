"""Attention over a mesh of devices: a rank passes its shards of q, k and v, and gets its shard of the output.

attention                    any call
  _attend_without_mesh       of this rank's tokens alone, prepared once
  attend_shards              of a shard
    run_on_one_rank          where the mesh has one rank
    _run_on_mesh             where it has more
      run_with_grad          recorded by autograd; in a graph `mesh_op`
      run_task               not recorded
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.checks.argument_checks import check_lengths_within, warn_if_transposed, without_redundant
from attnmesh.core.layout import Layout
from attnmesh.core.mask import CAUSAL, FULL, Mask
from attnmesh.core.partial import Partial
from attnmesh.core.selection import Selection, Visible
from attnmesh.kernels.prepared_local import PREPARED_LOCAL, PreparedLocal, signature_of
from attnmesh.kernels.selected_keys import without_faulty
from attnmesh.kernels.traced import cast_for_autocast, needs_grad, needs_operator, without_autocast
from attnmesh.mesh.axes import NotGiven, RankMesh, given_mesh
from attnmesh.mesh_attention.attention_arguments import AttentionArguments, AttentionOptions
from attnmesh.mesh_attention.executor import run_task
from attnmesh.mesh_attention.latents import Latents
from attnmesh.mesh_attention.mesh_runs import mesh_op, run_on_one_rank, run_with_grad
from attnmesh.mesh_attention.prepare_attention import PreparedAttention, prepare_attention

ATTENDS_ALONE = "each rank attends to its own tokens only. Pass mesh= for attention over the tokens of all ranks"


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: DeviceMesh | NotGiven | None = NotGiven.MESH,
    mask: Mask | None = None,
    layout: Layout | str | None = None,
    exchange: str = "auto",
    scale: float | None = None,
    softcap: float | None = None,
    key_lengths: Tensor | None = None,
    kernel: str = "auto",
    sinks: Tensor | None = None,
    length: int | None = None,
    key_layout: Layout | str | None = None,
    key_length: int | None = None,
    checked: bool | None = None,
    selected: Selection | None = None,
    distance_bias: Tensor | None = None,
    **sdpa_options: Any,
) -> Tensor:
    """Return attention of this rank's queries over all keys. Keys are those of all ranks. The output has gradients.

    The result does not depend on the mesh, the layout or the exchange. Each rank passes its own shard, and gets the
    shard of the output. Dropout and other departures from exact softmax raise an error.

    Args:
        q: Queries of this rank, (batch, heads, tokens, dim).
        k: Keys of this rank, (batch, key heads, tokens, dim). Key heads divide the query heads.
        v: Values of this rank, (batch, key heads, tokens, value dim).
        mesh: A `DeviceMesh` with axes named heads, queries, keys, or some of them. None: this rank's own tokens alone.
            If it is left out on several ranks, it is None with a warning.
        mask: Which keys a query sees: `Causal()` unless it is given. Cross-attention takes `Full()`. Other masks over
            the keys of another sequence need `key_length`. The last queries of a longer sequence take `attend`, and on
            several ranks `decode` with a `KVCache`.
        layout: Which tokens each rank holds, or "auto" for the choice of `shard(layout="auto", mask=mask)`. Required
            on several ranks: shards of another layout would give a wrong result without an error.
        exchange: How keys travel: "bulk" (at once), "pipelined" (a group of heads at a time), "ring" (one chunk under
            way while the last is attended), or "auto".
        scale: Factor of the logits; 1/sqrt(dim) unless it is given.
        softcap: Bound of the logits: each becomes `softcap * tanh(logit / softcap)`. None for no bound.
        key_lengths: Real keys of each sequence, int64, (batch,), equal on all ranks: keys at this position or later are
            invisible, as padding on the right under `Full()`.
        kernel: Kernel of one device: "auto", or the name of one of `attnmesh.kernels.choice.KERNELS`.
        sinks: One learned logit per query head. It takes a share of the softmax and adds nothing. Its gradient is that
            of this rank's tokens, as for any parameter.
        length: Tokens of the whole sequence. Ranks count them if it is left out, which compares every call.
        key_layout: Layout of the keys, if it is not that of the queries.
        key_length: Tokens of the keys' sequence, if it is another one.
        checked: None or True: ranks compare every call, on their CPUs, so that all raise the same error. False leaves
            the comparison out for calls with `length`. A graph always leaves it out. Ranks whose calls differ then get
            wrong results, or wait for each other.
        selected: The keys that each of this rank's queries attends, of those that it sees under the mask, by index in
            the whole sequence: `Selection(indices)`. On any mesh queries then stay on their rank, and the keys of all
            ranks travel. None for all keys.
        distance_bias: Numbers to add to the logits of near keys, (batch, heads, tokens, distances), for this rank's
            queries, with gradients. Column d is for the key d positions before the query. Keys farther away, or after
            it, have none.
        **sdpa_options: `is_causal`, `enable_gqa`, `dropout_p` and `attn_mask` of PyTorch's attention, where they say
            what is done anyway. Other options of other functions raise an error that names a substitute.

    Returns:
        The output for this rank's queries, (batch, heads, tokens, value dim). A `DTensor` if q, k and v are DTensors
        whose tokens are sharded along the mesh's axes; their layout is `Contiguous()`.

    Raises:
        InputError: An argument cannot be served. It names what was expected and a fix, on all ranks alike.
        RankFailure: A rank is lost.

    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 2, 8, 4).unbind()
    >>> expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> torch.allclose(attention(q, k, v), expected, atol=1e-6)
    True
    """
    if sdpa_options:
        sdpa_options = without_redundant(sdpa_options, CAUSAL if mask is None else mask)
    key_layout = layout if key_layout is None else key_layout
    options = AttentionOptions(  # by position: keywords take longer, in each known call
        mask, layout, key_layout, exchange, kernel, scale, softcap, length, key_length, unsupported=sdpa_options or None
    )
    arguments = AttentionArguments(q, k, v, sinks, key_lengths, options, selected, distance_bias)
    if "DTensor" in (type(q).__name__, type(k).__name__, type(v).__name__):  # `is_dtensor` of each: hot path
        from attnmesh.mesh_attention.dtensor import attend_dtensors  # DTensor is slow to import, and seldom used

        out = attend_dtensors(arguments, None if isinstance(mesh, NotGiven) else mesh, checked, attend_shards)
    elif (mesh := given_mesh("attention", mesh, ATTENDS_ALONE)) is None:
        return _attend_without_mesh(arguments, checked)
    else:
        out = attend_shards(arguments, RankMesh.of(mesh), checked)
    warn_if_transposed("attention", q, k.shape[2])  # at the end, as it raises where warnings are errors
    return out


def _attend_without_mesh(arguments: AttentionArguments, checked: bool | None) -> Tensor:
    """Return attention on one device, prepared once for calls of one signature."""
    q, k, v, sinks = arguments.q, arguments.k, arguments.v, arguments.sinks
    options = arguments.options
    signature = prepared = None  # none for a call that is checked each time
    if arguments.has_signature:
        any_keys = options.mask is FULL and options.length is None and options.key_length is None
        signature = signature_of(q, k, v, sinks, (*options, checked), any_keys=any_keys, with_grad=False)
        if (known := PREPARED_LOCAL.find(signature)) is not None:
            return known.attend(q, k, v, sinks).out
    if signature is None:
        out = attend_shards(arguments, RankMesh.of(None), checked)
    else:
        spec = prepare_attention(RankMesh.of(None), arguments, checked).spec
        prepared = PreparedLocal.of(q, k, v, spec.problem.mask, spec.scaling, options.kernel)
        out = prepared.attend(q, k, v, sinks).out
    # Warn before the call is known: where warnings are errors, each one raises.
    warn_if_transposed("attention", q, k.shape[2])
    if prepared is not None:
        PREPARED_LOCAL.keep(signature, prepared)
    return out


def attend_shards(
    arguments: AttentionArguments,
    mesh: RankMesh,
    checked: bool | None,
    latents: Latents | None = None,
    other_partial: Partial | None = None,
) -> Tensor:
    """Return attention of a rank's shards, which are cast for autocast and prepared here.

    With `latents`, these travel instead of the keys and values that are expanded from them. `other_partial` is of this
    rank's queries over keys that do not travel. With either there are no gradients.
    """
    q, k, v = cast_for_autocast(arguments.q, arguments.k, arguments.v)
    arguments = arguments._replace(q=q, k=k, v=v)
    prepared = prepare_attention(mesh, arguments, checked, None if latents is None else latents.widths)
    spec, selected = prepared.spec, arguments.selected
    if arguments.key_lengths is not None:
        check_lengths_within("attention key_lengths", arguments.key_lengths, spec.problem.key_length)
    if arguments.distance_bias is not None:
        arguments = arguments.with_wide_queries()
    with without_autocast(q):
        if mesh.ranks == 1:
            visible = Visible(spec.problem.mask, key_lengths=arguments.key_lengths, selected=selected)
            out = run_on_one_rank((arguments.q, k, v), arguments.sinks, visible, spec, other_partial)
        else:
            out = _run_on_mesh(arguments, prepared, latents, other_partial)
    return out if selected is None else without_faulty(out, selected, spec.problem.key_length)


def _run_on_mesh(
    arguments: AttentionArguments, prepared: PreparedAttention, latents: Latents | None, other_partial: Partial | None
) -> Tensor:
    """Return attention over the keys of all ranks.

    The call is an operator where PyTorch traces or transforms calls. Elsewhere it is a plain run, which autograd may
    record. Calls with latents or another partial are never recorded.
    """
    q, k, v, sinks = arguments.q, arguments.k, arguments.v, arguments.sinks
    spec = prepared.spec
    if prepared.task is None and latents is None and other_partial is None:
        key_lengths, indices = arguments.key_lengths, arguments.indices
        if needs_operator(q, k, v, sinks):
            out: Tensor = mesh_op(q, k, v, sinks, key_lengths, indices, *spec.to_code())[0]
            return out
        if needs_grad(q, k, v, sinks):
            out, *_ = run_with_grad(q, k, v, sinks, key_lengths, indices, spec)
            return out
    with torch.no_grad():
        task = prepared.task_for(arguments, latents)
        return run_task(q, (k, v) if latents is None else (latents.rows,), task, sinks, other_partial)
