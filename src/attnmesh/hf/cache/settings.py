"""Checks of the arguments of a `ShardedCache`."""

from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PreTrainedConfig

from attnmesh.cache.cache_config import check_key_heads, check_ranks_in_folder, check_storage
from attnmesh.cache.local_shards import check_copies, check_even_shares
from attnmesh.decoding.step_checks import check_reproducible
from attnmesh.errors import Check, KernelError, ShapeError, check_count, require_all
from attnmesh.guard.argument_checks import check_compare_option, check_merge
from attnmesh.hf.latent_states import latent_widths
from attnmesh.hf.models import (
    check_keys,
    cross_layer_indices,
    indexed_layer_indices,
    is_compressed,
    is_recurrent,
    key_heads,
)
from attnmesh.kernels.choice import check_kernel
from attnmesh.mesh.schedule import check_exchange
from attnmesh.mesh.shapes import Shape
from attnmesh.mesh.shares import check_shares


def check_settings(config: Any, shape: Shape, options: Mapping[str, Any]) -> None:
    """Raise unless the arguments of `ShardedCache` are valid on a mesh of this shape."""
    require_all(_checks(config, shape, options))


def _checks(config: Any, shape: Shape, options: Mapping[str, Any]) -> Iterator[Check]:
    """Yield the checks of the arguments, each with its error."""
    is_config = isinstance(config, PreTrainedConfig)
    given = type(config).__name__
    yield is_config, KernelError, "ShardedCache config", "a configuration of transformers", given, "pass model.config"
    check_keys(config)
    latents = latent_widths(config) is not None
    entries = is_compressed(config)
    one_head = latents or entries or bool(indexed_layer_indices(config))
    yield (
        *(not one_head or shape.heads == 1, ShapeError, "ShardedCache mesh"),
        "a mesh without a heads axis for latents, index keys or entries, which have one head",
        *(f"a heads axis of {shape.heads}", "give its ranks to the keys axis"),
    )
    if not one_head and (heads := key_heads(config)) is not None:
        check_key_heads("ShardedCache mesh", heads, shape.heads)
    check_merge("ShardedCache", options["merge"], options["output"])
    yield (
        *(options["output"] == "replicated" or not one_head, KernelError, "ShardedCache output"),
        "keys and values with heads",
        f"{'entries' if entries else 'latents' if latents else 'index keys'}, which have none",
        'pass output="replicated"',
    )
    check_kernel(options["kernel"])
    check_exchange("ShardedCache exchange", options["exchange"])
    check_compare_option("ShardedCache", options["checked"])
    windows = options["windows"]
    is_bool = isinstance(windows, bool)
    fix = "leave it at True"
    yield is_bool, KernelError, "ShardedCache windows", "True or False", repr(windows), fix
    check_count("ShardedCache keep", options["keep"], "count the tokens that crop may remove", least=0)
    for name in ("storage", "window_storage"):
        check_storage(f"ShardedCache {name}", options[name])
    if options["folder"] is not None:
        yield _plain_check(config, "ShardedCache folder", "leave folder= out")
        check_ranks_in_folder("ShardedCache folder", options["copies"], options["shares"])
    if options["hot"] is not None:
        yield from _hot_checks(config, options)
    if options["capacity"] is not None:
        check_count("ShardedCache capacity", options["capacity"], "count prompt and new tokens, or leave it out")
    if options["block"] is not None:
        check_count("ShardedCache block", options["block"], "leave it out")
    ranks = shape.queries * shape.keys
    check_copies(options["copies"], ranks)
    for name in ("reproducible", "storage", "window_storage") if entries else ():
        subject, expected = f"ShardedCache {name}", "none for a model that compresses tokens"
        yield not options[name], KernelError, subject, expected, repr(options[name]), "leave it out"
    check_reproducible("ShardedCache reproducible", options["reproducible"], ranks, options["merge"])
    shares = check_shares("ShardedCache", options["shares"], ranks)
    if options["reproducible"]:
        is_even = options["shares"] is None or (shares is not None and len({*shares}) == 1)
        check_even_shares("ShardedCache reproducible", options["shares"], even=is_even)


def _plain_check(config: Any, subject: str, fix: str) -> Check:
    """Return whether a model keeps nothing but keys and values, with the error where it does."""
    is_plain = not (
        is_recurrent(config) or is_compressed(config) or indexed_layer_indices(config) or cross_layer_indices(config)
    )
    return is_plain, KernelError, subject, "a model that keeps keys and values alone", config.model_type, fix


def _hot_checks(config: Any, options: Mapping[str, Any]) -> Iterator[Check]:
    """Yield the checks of a model and of arguments if only the newest tokens are on the device."""
    subject, fix = "ShardedCache hot", "leave hot= out"
    check_count(subject, options["hot"], "count the newest tokens to keep on the device, or leave it out")
    yield _plain_check(config, subject, fix)
    yield options["copies"] == 1, KernelError, subject, "one rank of each token", f"copies={options['copies']}", fix
