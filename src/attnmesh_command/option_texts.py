"""Texts of options to values: the ranks of `--mesh`, `--length`, `--heads`, `--cluster` and others."""

import json
import os
import re
import sys
from fractions import Fraction
from math import prod
from pathlib import Path
from typing import Any

from attnmesh_command.choices import AXES, CLUSTER_SIZES, PACKAGED, TRANSITIONS
from attnmesh_command.messages import OptionError, check_named, check_option, nearest, print_note

TP = "tp"
"""Name of the axis of ranks that share weights and heads."""

MESHES = 'axes by name, as "queries=2,keys=2", "tp=2,keys=4" or "tp=keys=8", or "auto"'

COUNT = "([0-9]{1,15})"

UNITS = {"": 1, "k": 10**3, "m": 10**6, "ki": 2**10, "mi": 2**20}
"""Units of a length: 128k is 128,000 tokens, 128Ki is 131,072."""


# --- meshes ---


def axes_of(text: str) -> dict[str, int]:
    """Return the ranks along each axis that is named; along "tp=keys" for ranks that share both.

    >>> axes_of("tp=2,keys=4"), axes_of("tp=keys=8"), axes_of("auto")
    ({'tp': 2, 'keys': 4}, {'tp=keys': 8}, {})
    """
    axes: dict[str, int] = {}
    for part in text.lower().split(",") if text != "auto" else ():
        name, size = _name_and_size(part.strip())
        is_axis = name in (TP, *AXES, f"{TP}=keys") and name not in axes
        fits = is_axis and re.fullmatch("[0-9]{1,9}", size) and int(size) > 0
        check_option(bool(fits), "--mesh", MESHES, repr(text), _fix_of_mesh(text, part.strip(), axes))
        axes[name] = int(size)
    alone = f"{TP}=keys" not in axes or len(axes) == 1
    fix = "give these ranks to it, or name tp and keys apart"
    check_option(alone, "--mesh", "tp=keys alone", repr(text), fix)
    return axes


def _name_and_size(part: str) -> tuple[str, str]:
    """Return the axis and the size that a part of `--mesh` names: "keys=tp" is "tp=keys"."""
    name, _, size = part.rpartition("=")
    return f"{TP}=keys" if name == f"keys={TP}" else name, size


def _fix_of_mesh(text: str, part: str, axes: dict[str, int]) -> str:
    """Return the fix of a part of `--mesh`: an axis of another name, without ranks, or one that was named before."""
    if sizes := re.fullmatch("([0-9]{1,4})x([0-9]{1,4})x([0-9]{1,4})", text):
        return f"write --mesh {','.join(f'{axis}={n}' for axis, n in zip(AXES, sizes.groups(), strict=True))}"
    if (name := _name_and_size(part)[0]) in axes:
        return f"name {name} once"
    name, _, size = part.partition("=")
    if name in axes:
        return f"name {name} once"
    if near := nearest(name, (TP, *AXES)):
        return f"write {near}={size if re.fullmatch('[1-9][0-9]{0,8}', size) else 2}"
    return f"in place of {part[:40]!r} name one of {', '.join((TP, *AXES))}, and its ranks"


def ranks_of_axes(text: str) -> int:
    """Return the ranks of the axes that are named."""
    return prod(axes_of(text).values())


def check_ranks_of_mesh(text: str, ranks: int) -> None:
    """Raise unless the axes can have `ranks` ranks: axes of attention without a name take those that tp leaves."""
    sizes = axes_of(text)
    count = ranks_of_axes(text)
    fits = ranks == count or not sizes or ([*sizes] == [TP] and ranks % count == 0)
    given, fix = f"{text}, which is {count}", "change --mesh or --ranks, or leave one out"
    check_option(fits, "--mesh", f"{ranks} ranks", given, fix)


# --- models and prompts ---


def check_model(name: str, revision: str | None = None, *, subject: str = "--model") -> None:
    """Raise for the path of a model that does not exist, and for a revision of one that is not on the hub."""
    path = os.path.expanduser(name)  # Path.expanduser raises on an unknown user, and Path on a long name
    is_path = os.path.isabs(path) or name.startswith(("./", "../", "~")) or name.count("/") > 1
    names_file = name.endswith((".json", ".gguf"))
    is_file = os.path.isfile(path) and not names_file
    fix = f"pass a folder that save_pretrained wrote, a GGUF file, a name on the hub, or {PACKAGED!r}"
    fits = not is_file and (os.path.exists(path) or not (is_path or names_file))
    check_option(fits, subject, "a model", f"{name!r}, where there is none", fix)
    fits = is_here(name) or "/" in name or not nearest(name, (PACKAGED,))
    fix = f"write {PACKAGED}, which is packaged; a model on the hub has an owner, as owner/{name}"
    check_option(fits, subject, "a folder, a file, or a packaged model", repr(name), fix)
    fits = revision is None or not is_here(name)
    fix = "leave --revision out, or pass a name on the hub"
    check_option(fits, "--revision", "a model on the hub", f"{name!r}, which is on this machine", fix)


def is_here(name: str) -> bool:
    """Return whether a model is on this machine, and not on the hub."""
    return name == PACKAGED or os.path.exists(os.path.expanduser(name))


def announce_model(name: str) -> None:
    """Say at once where a model will be looked for, if that takes the network."""
    if not is_here(name):
        print_note(f"{name[:100]} is no folder or file here: asking the hub for it")


def is_utf8(text: str) -> bool:
    """Return whether a text is one in UTF-8: invalid bytes of a command line arrive as lone surrogates."""
    return not any("\ud800" <= sign <= "\udfff" for sign in text)


def read_prompt(prompt: str, file: Path | None) -> str:
    """Return the text of a file, then the given one."""
    try:
        begin = "" if file is None else sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError("--prompt-file", "a file of text", f"{file}: {error}", "name another") from None
    text = "\n\n".join(part for part in (begin, prompt) if part.strip())
    given = "an empty one" if prompt or file else "none"
    check_option(bool(text), "prompt", "some text", given, "pass --prompt TEXT or --prompt-file FILE")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # invalid bytes of a command line arrive as lone surrogates
        raise OptionError("prompt", "text in UTF-8", str(error), "look to the terminal's encoding") from None
    return text


# --- plans ---


def cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cluster_size_of(text: str) -> tuple[str, int | None, int | None]:
    """Return the name or file of `--cluster`, its hosts and ranks a host; None are those of the name.

    >>> cluster_size_of("dgx-h100:2x4"), cluster_size_of("mi300x")
    (('dgx-h100', 2, 4), ('mi300x', None, None))
    """
    name, colon, size = (text, "", "") if os.path.isfile(text) else text.partition(":")
    match = re.fullmatch(f"{COUNT}(?:x{COUNT})?", size)
    fix = "write dgx-h100:16 for 16 hosts, dgx-h100:16x4 for 4 ranks on each"
    expected = "NAME, NAME:HOSTS or NAME:HOSTSxRANKS"
    check_option(not colon or match is not None, "--cluster", expected, repr(text[:60]), fix)
    hosts, ranks = (None if n is None else int(n) for n in (match.groups() if match else (None, None)))
    check_option(0 not in (hosts, ranks), "--cluster", "1 host or more of 1 rank or more", repr(text), fix)
    if os.path.isfile(name) or name.endswith(".json"):
        read_cluster(name)
        return name, hosts, ranks
    check_named("--cluster", name, ("local", *CLUSTER_SIZES), ", or a file of attnmesh probe")
    most_ranks = CLUSTER_SIZES[name][1] if name in CLUSTER_SIZES else sys.maxsize
    given, expected = f"{ranks} ranks a host", f"at most {most_ranks} ranks a host"
    check_option(ranks is None or ranks <= most_ranks, f"--cluster {name}", expected, given, "take more hosts")
    return name, hosts, cores() if name == "local" and ranks is None else ranks


def read_cluster(file: str) -> Any:
    """Return the record of a cluster in a file of `attnmesh probe`."""
    fix = "write one with attnmesh probe --out"
    try:
        record = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise OptionError("--cluster", "a JSON file that probe wrote", f"{file}: {error}", fix) from None
    fits = isinstance(record, dict) and "cluster" in record
    check_option(fits, "--cluster", 'a JSON object with a "cluster"', f"{file} without one", fix)
    return record["cluster"]


def heads_of(text: str) -> tuple[int, int]:
    """Return the query heads and key heads of `--heads`.

    >>> heads_of("32/8"), heads_of("16")
    ((32, 8), (16, 16))
    """
    pair = f"{text}/{text}" if re.fullmatch(COUNT, text) else text
    q_heads, kv_heads = pair_of("--heads", "query heads / key heads", "32/8, or 32 for 32/32", pair)
    fits = q_heads > 0 and kv_heads > 0 and q_heads % kv_heads == 0
    fix = "pass the model's head counts"
    check_option(fits, "--heads", "whole groups of query heads / key heads", repr(text), fix)
    return q_heads, kv_heads


def pair_of(option: str, expected: str, example: str, text: str) -> tuple[int, int]:
    """Return the two numbers of an option."""
    match = re.fullmatch(f"{COUNT}/{COUNT}", text)
    if match is None:
        raise OptionError(option, expected, repr(text[:60]), f"write {example}")
    return int(match[1]), int(match[2])


def latent_of(text: str) -> tuple[int, int]:
    """Return the columns of `--latent`, those that are projected and those that are rotated."""
    return pair_of("--latent", "projected / rotated columns", "512/64", text)


def length_of(text: str) -> int:
    """Return the tokens of `--length`.

    >>> [length_of(text) for text in ("4096", "128k", "128Ki", "1.5M", "1e6")]
    [4096, 128000, 131072, 1500000, 1000000]
    """
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,15})?(?:e[0-9]{1,2})?)(|k|m|ki|mi)", text.lower())
    tokens = Fraction(match[1]) * UNITS[match[2]] if match else Fraction(0)  # 16.1 * 1000 is no integer as a float
    fix = "write 128k: k and M count in thousands, Ki and Mi in 1,024s"
    fits = tokens.denominator == 1 and tokens > 0
    check_option(fits, "--length", "tokens, as 4096, 128k, 5M, 128Ki or 1Mi", repr(text[:60]), fix)
    return int(tokens)


def recurrent_of(text: str) -> dict[str, Any]:
    """Return the fields of the recurrent layers of one `--recurrent`.

    >>> recurrent_of("32x128x128:scalar:layers=36")
    {'heads': 32, 'key_dim': 128, 'value_dim': 128, 'transition': 'scalar', 'layers': 36}
    """
    sizes, *settings = text.split(":")
    state_sizes = re.fullmatch(f"{COUNT}x{COUNT}x{COUNT}", sizes)
    if state_sizes is None:
        raise OptionError("--recurrent", "HEADSxROWSxCOLUMNS of a state", repr(text[:60]), "write 32x128x128:matrix")
    options: dict[str, Any] = dict(zip(("heads", "key_dim", "value_dim"), map(int, state_sizes.groups()), strict=True))
    for setting in settings:
        if setting in TRANSITIONS:
            fields: dict[str, Any] = {"transition": setting}
        elif match := re.fullmatch(f"layers={COUNT}", setting):
            fields = {"layers": int(match[1])}
        elif match := re.fullmatch(f"conv={COUNT}x{COUNT}", setting):
            fields = {"conv_channels": int(match[1]), "conv_width": int(match[2])}
        else:
            expected = f"{', '.join(TRANSITIONS)}, layers=N or conv=CHANNELSxWIDTH after each colon"
            fix = "write 32x128x128:matrix:layers=36:conv=8192x4"
            raise OptionError("--recurrent", expected, repr(setting[:60]), fix)
        fix = "leave one out, or give another kind a --recurrent of its own"
        check_option(not options.keys() & fields.keys(), "--recurrent", "each setting once", repr(text[:60]), fix)
        options |= fields
    return options
