"""Walks of steady calls: the frames, files and lines of attnmesh that one call runs through, by room.

    python -m tools.walk           the table
    python -m tools.walk --draw    the walks, function by function, into docs/walks.md

A call is traced after it has been made a few times. A frame is a call of a Python function of the package. A change of
file is a frame in another file than the one before. Lines are counted as they run, a loop's each time.
What a rank does while it waits for another, and to move messages that wait, is not counted.
"""

import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import attnmesh as am
from attnmesh.cli.launch import run_on_ranks
from attnmesh.comm import mailbox_queue

PACKAGE = Path(am.__file__).parent
WARM, TRACED = 5, 10
"""Calls before those that are traced, and how many of these there are."""

HEADS, KV_HEADS, DIM, TOKENS = 8, 2, 64, 64

PAGE = Path(__file__).parents[1] / "docs" / "walks.md"
FIRST, LAST = "<!-- Walks: python -m tools.walk --draw -->\n", "<!-- The end of the walks -->\n"
DRAWN = {
    "attention, 2 ranks, keys": (
        "Prefill: `attention` on two ranks of a keys axis, with `length=`, without gradients.",
        "`merge_into` of `core/partial.py` merges those of ranks in `_merge_returned`, of steps in `_forward_heads`.\n"
        "`begin_gather` and `begin_return` return a function that waits: `_forward_heads` calls the first,\n"
        "`PendingReturns` the other. `HeadAllToAll` swaps nothing here: there is no heads axis.",
    ),
    "training, 2 ranks, keys": (
        "Training: what the same call with gradients runs through beside these, forward and then backward.",
        "`run_with_grad` is `_run_spec` recorded by autograd. The backward pass runs the same schedule:\n"
        "gradients of keys return to their owners too, and `_add_returned` of the executor sums those of ranks.",
    ),
    "decode, 2 ranks": (
        "Decoding: a step on the CPUs of one host.",
        "`HostMerge.run` is one native call: `merge` of `kernels/native/mailbox.cpp` merges the partials. The\n"
        "kernel writes into the message of the merge: `blank_message` returns views of it, and `query.into` hands\n"
        "them to the kernel.",
    ),
    "decode, 2 ranks, float64": (
        "The same step in float64, which no native merge takes: what it runs through beside these.",
        "`MergeAgreement.raise_through_merge` would raise an error of a part. The record of a merge names a method\n"
        "of the axis's transport, which sends the messages: `tree`, `direct`, `gather` or `all_reduce`.",
    ),
    "append, 2 ranks": (
        "Appending: `cache.append(k, v)`, which `decode(q, cache, k=k, v=v)` calls first.",
        "Ranks compare the first append of a cache. Later ones write, and the next step compares how many tokens\n"
        "there are.",
    ),
}
"""Walks that are drawn: what each is of, and where its partials are merged or its gradients summed."""
LEFT_OUT = "core/", "mesh/", "runtime/", "comm/merges", "kernels/traced", "kernels/rectangles"
"""Files of values and of questions, whose functions a drawing leaves out."""
TRANSPORT = "comm/transport.py"
"""The file whose functions are drawn also where `RequestedMerge.run` of comm calls them."""

MOST = {"attention, 1 rank": 50, "attention, 2 ranks": 200, "decode, 1 rank": 12, "decode, 2 ranks": 30}
"""Frames that calls may take at most, by how their names begin."""

WAITS = {mailbox_queue.finish_pending.__code__, mailbox_queue._move.__code__}
"""Functions whose calls depend on when the other rank sends."""

MOST_OF_GUARD = 0.15
"""Share of the executed lines that the guard may have at most, with the checks."""


@dataclass
class Walk:
    """What one call ran through: the files of its frames in order, and its lines by room."""

    files: list[str] = field(default_factory=list)
    lines: Counter[str] = field(default_factory=Counter)

    @property
    def changes(self) -> int:
        """Frames in another file than the one before."""
        return sum(one != other for one, other in pairwise(self.files))

    def share(self, *rooms: str) -> float:
        """Return the share of the lines that these rooms have."""
        return sum(self.lines[room] for room in rooms) / max(1, self.lines.total())


@dataclass(frozen=True)
class Stop:
    """A function that a call runs through: how deep, its file, its name, and the first sentence of its docstring."""

    depth: int
    file: str
    name: str
    sentence: str

    def line(self, width: int = 138) -> str:
        """Return the line of a drawing, with all of the sentence, or as many of its clauses as fit."""
        start = f"{self.file:<35} {'  ' * self.depth}{self.name}"
        line = f"{start:<76} {self.sentence}"
        if len(line) <= width:
            return line
        clauses = [line[: end.start()] for end in re.finditer("[,;:] ", line) if end.start() <= width]
        return clauses[-1] if clauses else f"{line[: width - 4].rsplit(' ', 1)[0]} ..."


def walk(call: Callable[[], object]) -> Walk:
    """Return the walk of a call that was made before: the shortest of some, as a rank that waits long looks around."""
    for _ in range(WARM):
        call()
    return min((_traced(call) for _ in range(TRACED)), key=lambda found: len(found.files))


def _traced(call: Callable[[], object]) -> Walk:
    found = Walk()

    def on_line(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            found.lines[_room(frame.f_code.co_filename)] += 1
        return on_line

    def on_call(frame: FrameType, event: str, _: Any) -> Any:
        if event != "call" or not frame.f_code.co_filename.startswith(str(PACKAGE)) or _is_waiting(frame):
            return None
        found.files.append(frame.f_code.co_filename)
        return on_line

    sys.settrace(on_call)
    try:
        call()
    finally:
        sys.settrace(None)
    return found


def _is_waiting(frame: FrameType) -> bool:
    """Return True for frames that wait for messages or move them: their number depends on when other ranks send."""
    above = frame.f_back
    while above is not None and above.f_code not in WAITS:
        above = above.f_back
    return above is not None


def stops(call: Callable[[], object]) -> list[Stop]:
    """Return what a call runs through, each function once: public ones, and private ones that lead to others.

    What rooms do for themselves is left out: values (core, mesh, runtime, merges), and what a function of comm calls in
    turn, but for the transport of a merge.
    """
    for _ in range(WARM):
        call()
    entered: list[tuple[str, str]] = []
    found: dict[tuple[str, str], Stop] = {}
    parents: dict[tuple[str, str], tuple[str, str] | None] = {}

    def on_frame(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "return" and entered and entered[-1] == (code.co_filename, code.co_qualname):
            entered.pop()
        if event != "call" or not code.co_filename.startswith(str(PACKAGE)):
            return
        key, above = (code.co_filename, code.co_qualname), entered[-1] if entered else None
        entered.append(key)
        file, docstring = str(Path(code.co_filename).relative_to(PACKAGE)), next(iter(code.co_consts), None)
        hidden = (
            file.startswith(LEFT_OUT) or "<" in code.co_qualname or code.co_qualname.startswith("AttentionArguments.")
        )
        inside = above is not None and _room(above[0]) == "comm" == _room(code.co_filename)
        inside = inside and not (file == TRANSPORT and any(name == "RequestedMerge.run" for _, name in entered))
        if key not in parents and isinstance(docstring, str) and not hidden and not inside:
            parents[key] = next((other for other in reversed(entered[:-1]) if other in parents), None)
            depth = sum(other in parents for other in entered[:-1])
            found[key] = Stop(depth, file, code.co_qualname, docstring.split(". ")[0].splitlines()[0])

    call_watched(call, on_frame)
    leading = set(parents.values())
    private = {key for key in found if key[1].split(".")[-1].startswith("_")}
    return [stop for key, stop in found.items() if key not in private or key in leading]


def call_watched(call: Callable[[], object], on_frame: Callable[[FrameType, str, Any], None]) -> None:
    """Call a function, and another one at each event of a frame meanwhile."""
    sys.setprofile(on_frame)
    try:
        call()
    finally:
        sys.setprofile(None)


def most_frames(name: str) -> int:
    """Return how many frames a call may take."""
    return next(most for start, most in MOST.items() if name.startswith(start))


def _room(file: str) -> str:
    """Return the room of a file: its folder, or its own name at the top."""
    parts = Path(file).relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else Path(file).stem


def attention_call(shape: tuple[int, int, int] | None, *, with_grad: bool = False) -> Callable[[], object]:
    """Return a causal call of 64 tokens on a mesh, or on one rank, and of its gradients."""
    q = torch.randn(1, HEADS, TOKENS, DIM)
    k, v = torch.randn(2, 1, KV_HEADS, TOKENS, DIM).unbind()
    if shape is None:
        return lambda: am.attention(q, k, v, mesh=None)
    mesh, layout = am.init_mesh(shape), am.Zigzag()
    parts = [am.shard(x, mesh, layout=layout).requires_grad_(with_grad) for x in (q, k, v)]

    def call() -> object:
        out = am.attention(*parts, mesh=mesh, layout=layout, length=TOKENS)
        return torch.autograd.grad(out.sum(), parts) if with_grad else out

    return call


def decode_call(shape: tuple[int, int, int] | None, kind: str = "") -> Callable[[], object]:
    """Return a step of one token of a kind on a cache of 64, on a mesh or on one rank."""
    mesh, options = None if shape is None else am.init_mesh(shape), dict[str, Any]()
    sizes: dict[str, Any] = {"batch": 1, "kv_heads": KV_HEADS, "head_dim": DIM, "capacity": 256}
    if kind == "window":
        sizes["mask"] = options["mask"] = am.Window(20)
    dtype = torch.float64 if kind == "float64" else torch.float32
    torch.manual_seed(0)
    cache = am.KVCache(mesh, **sizes, dtype=dtype)
    real = torch.arange(TOKENS)[None] > 2 if kind == "padding" else None
    cache.append(*torch.randn(2, 1, KV_HEADS, TOKENS, DIM, dtype=dtype).unbind(), token_mask=real)
    if kind == "sinks":
        options["sinks"] = torch.zeros(HEADS)
    if kind == "heads":
        options["output"] = "heads"
    if kind == "float64":
        options["merge"] = "tree"  # "auto" is the faster one of each day
    q = torch.randn(1, HEADS, 1, DIM, dtype=dtype)
    return lambda: am.decode(q, cache, **options)


def append_call(shape: tuple[int, int, int]) -> Callable[[], object]:
    """Return an append of one token to a cache on a mesh."""
    sizes: dict[str, Any] = {"batch": 1, "kv_heads": KV_HEADS, "head_dim": DIM, "capacity": 256}
    cache = am.KVCache(am.init_mesh(shape), **sizes, dtype=torch.float32)
    k, v = torch.randn(2, 1, KV_HEADS, 1, DIM).unbind()
    return lambda: cache.append(k, v)


ALONE: dict[str, Callable[[], Callable[[], object]]] = {
    "attention, 1 rank": lambda: attention_call(None),
    "decode, 1 rank": lambda: decode_call(None),
}
ON_TWO: dict[str, Callable[[], Callable[[], object]]] = {
    "attention, 2 ranks, keys": lambda: attention_call((1, 1, 2)),
    "attention, 2 ranks, queries": lambda: attention_call((1, 2, 1)),
    "attention, 2 ranks, heads": lambda: attention_call((2, 1, 1)),
    "decode, 2 ranks": lambda: decode_call((1, 1, 2)),
    "decode, 2 ranks, sinks": lambda: decode_call((1, 1, 2), "sinks"),
    "decode, 2 ranks, window": lambda: decode_call((1, 1, 2), "window"),
    "decode, 2 ranks, heads": lambda: decode_call((1, 1, 2), "heads"),
    "decode, 2 ranks, padding": lambda: decode_call((1, 1, 2), "padding"),
}
ALL_DRAWN = ON_TWO | {
    "training, 2 ranks, keys": lambda: attention_call((1, 1, 2), with_grad=True),
    "decode, 2 ranks, float64": lambda: decode_call((1, 1, 2), "float64"),
    "append, 2 ranks": lambda: append_call((1, 1, 2)),
}


def walks_on_two() -> dict[str, Walk]:
    """Return on a rank of two the walk of each call."""
    return {name: walk(make()) for name, make in ON_TWO.items()}


def _show(walks: dict[str, Walk]) -> None:
    for name, found in walks.items():
        frames, files = len(found.files), len(set(found.files))
        most = ", ".join(f"{room} {count}" for room, count in found.lines.most_common(5))
        guard = f"{found.share('guard', 'checks'):.0%}"
        print(f"{name:<28} {frames:>6} {most_frames(name):>5} {files:>5} {found.changes:>7} {guard:>6}  {most}")


def drawings() -> str:
    """Return on a rank of two the drawing of walks, each function in one of them."""
    parts, drawn = [], set[tuple[str, str]]()
    for name, (title, merge) in DRAWN.items():
        new = [stop for stop in stops(ALL_DRAWN[name]()) if (stop.file, stop.name) not in drawn]
        drawn |= {(stop.file, stop.name) for stop in new}
        lines = "\n".join(stop.line() for stop in new)
        parts.append(f"\n*{title}*\n\n```\n{lines}\n```\n\n{merge}\n")
    return "".join(parts) + "\n"


def main() -> None:
    """Print the table of walks, or draw two of them into the page."""
    if sys.argv[1:] == ["--draw"]:
        before, rest = PAGE.read_text().split(FIRST)
        PAGE.write_text(before + FIRST + run_on_ranks(2, drawings)[0] + LAST + rest.split(LAST)[1])
        return
    print(f"{'':<28} frames   max files changes  guard  lines by room")
    torch.set_num_threads(1)
    _show({name: walk(make()) for name, make in ALONE.items()})
    _show(run_on_ranks(2, walks_on_two)[0])


if __name__ == "__main__":
    main()
