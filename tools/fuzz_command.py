"""Hostile command lines: each exits with 0, 1 or 2, prints an error in one line, and does nothing else.

The options are read from the command itself. Stand-ins replace slow parts: ranks, measurements, weights, and the
pricing of large clusters. Everything that parses, checks and prints is the real code.
"""

import argparse
import errno
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import pairwise
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
import typer.main
from huggingface_hub import constants
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from attnmesh import plan as planner
from attnmesh.cli import (
    check_command,
    generate_worker,
    plan_page,
)
from attnmesh.cli import (
    generate_command as generate,
)
from attnmesh.cli import (
    plan_command as plan,
)
from attnmesh.cli import (
    probe_command as probe,
)
from attnmesh.cli import proofs as proof
from attnmesh.cost.cluster import Cluster
from attnmesh.errors import InputError
from attnmesh.hf import load
from attnmesh.planner import schemes
from attnmesh.planner.plan import MAX_PRICED_RANKS, Plan
from attnmesh.planner.workload import Workload
from attnmesh.runtime.machine import machine
from attnmesh.serve import server
from attnmesh_command import app, show_errors
from attnmesh_command.messages import OptionError
from benchmarks import bench, commands, faults, plan_figure
from benchmarks import calls as calls_bench
from benchmarks import decode as decode_bench
from benchmarks import diffusion as diffusion_bench
from benchmarks import folder as folder_bench
from benchmarks import kernel as kernel_bench
from benchmarks import latent as latent_bench
from benchmarks import masks as masks_bench
from benchmarks import model as whole_model
from benchmarks import packed as packed_bench
from benchmarks import plan as plan_bench
from benchmarks import prefill as prefill_bench
from benchmarks import prefixes as prefixes_bench
from benchmarks import recurrent as recurrent_bench
from benchmarks import rollouts as rollouts_bench
from benchmarks import rows as rows_bench
from benchmarks import selected as selected_bench
from benchmarks import serve as serve_bench
from benchmarks import speculate as speculate_bench
from benchmarks import storage as storage_bench
from benchmarks import unequal as unequal_bench
from benchmarks.commands import app as benchmarks_app
from benchmarks.netns import Hosts, World, ranks_of, script
from benchmarks.timing import Comparison, Timing
from tests.support.models import families
from tools.fuzz_store import mutated

# --- command lines ---

CANARY = "canary"
"""Name of a file that exists only after an injected shell command."""

LIKELY: dict[str, tuple[str, ...]] = {
    "model": ("chat", "plain", "bent", "smollm2", "no.gguf", "t5"),
    "prompt": ("What is a mesh?", "a", "word " * 40),
    "prompt_file": ("text", "drawn.txt", "-", "bytes"),
    "ranks": ("1", "2", "4", "8", "3"),
    "mesh": ("auto", "keys=1", "queries=2", "keys=2", "heads=2,keys=2", "tp=2,keys=2", "tp=keys=2", "TP=2", "1x2x2"),
    "merge": ("auto", "tree", "allreduce", "direct"),
    "dtype": ("auto", "bfloat16", "float32", "float64"),
    "cluster": ("local", "dgx-h100", "dgx-h100:2x4", "a100x4:1", "mi300x", "here.json", "here.json:1x2", "drawn.json"),
    "heads": ("32/8", "8", "16/4", "9/3"),
    "workload": ("wan-14b-720p", "flux-1024", "hunyuanvideo-1.5-720p", "sora"),
    "length": ("4096", "128k", "64Ki", "1.5M", "100", "5M"),
    "hosts": ("2x2@250mbit", "8x2@1gbit", "1x2@100kbit", "3x1@1.5gbit"),
    "shape": ("1x4x1", "1x2x2"),
    "phase": ("training", "prefill", "decode"),
    "case": ("causal", "causal, 8/8", "full", ""),
    "out": ("made.json", "made/deep.json"),
    "plot": ("made.png", "made.svg", "[bold]made[/].svg"),
    "report": ("made.html", "made [red].HTM"),
}
"""Typical values of options by name. Other options get values by their type."""

NUMBERS = (
    *("0", "1", "2", "3", "7", "64", "100", "-1", "-0", "+1", " 1 ", "1_0", "0x10", "1e3", "1.5", ".5", "0.9"),
    *("1e-320", "nan", "NaN", "-nan", "inf", "-inf", "Infinity", "1e400", "-1e400", "999999999999999999999"),
    *("9" * 400, "9" * 5000, "2147483648", "9223372036854775807", "9223372036854775808", "18446744073709551616"),
    *("-9223372036854775809", "\u0661\u0662", "\u00b2", "\uff11", "\u2167", "1\u00a0", "one", "", "None", "true"),
    *("1,000", "1/2", "0.0", "1e15"),
)

WORDS = (
    *("", " ", "-", "--", "---", "-v", "--json", "--help", ".", "..", "~", "~nobody/x", "*", "%s%n", "{}", "{0.x}"),
    *("\\", "[bold]x", "[/]", "[/bold]", "[red]a[/blue]", "[link=file:///]x", "\\[", "[[", "]]", "[@click=x]"),
    *(":smile:", "a\\", f"; touch {CANARY}", f"$(touch {CANARY})", f"`touch {CANARY}`", f"| touch {CANARY}"),
    *(f"&& touch {CANARY}", f"x\ntouch {CANARY}\n", f"' ; touch {CANARY} ; '", f'" ; touch {CANARY} ; "', "$HOME"),
    *("| sh", "> " + CANARY, "\x1b[31mred\x1b[0m", "\x1b]0;title\x07", "\x07", "\r", "a\nb", "\t", "\x7f", "\x9b31m"),
    *("\x85", "\u2028", "\ufeff", "\u202e", "\u0301", "\U0001f9ee", "\u4e2d\u6587", "\xff", "\udc80", "\udcff.json"),
    *("e\u0301", "\ud7ff", "\U0010ffff", "{}", "[]", "null", '{"cluster": 1}', '{"a":' * 50, "1" * 300, "x" * 300),
    *("y" * 5000, "a/" * 3000, "[" * 2000, "dgx-h100:", "dgx-h100:0", "dgx-h100:2x9", "local:999999999x9"),
    *("local:" + "9" * 4000 + "x" + "9" * 4000, ":1", "2x2@1tbit", "0x2@1gbit", "251x1@1gbit", "2x2@1e9gbit"),
    *("2x2@" + "9" * 400 + "kbit", "9" * 5000 + "x1@1gbit", "\u0662x2@1gbit", "2x2@1gbit\n", "2x2@1gbit;id"),
    *("\u00b2x1x1", "1x1", "x", "1x1x1x1", "0x0x0", "-1x-1x1", "1x1x", "9" * 5000 + "x1x1", "32/0", "0/8", "8/32"),
    *("32/", "/", "32:8", "9" * 5000 + "/1", "1" * 20, "0.3", "5G", "5M5", "1e9", "a/b", "a/b/c", "../x", "./x"),
    *("org/[/]", "[/]name", "a--b", ".a", "datasets/x", "https://x.invalid/a", "\u0662k"),
)

PATHS = (
    *("", ".", "..", "/", "-", "text", "nowhere", "nowhere/x.json", "folder", "folder.png", "folder.html"),
    *("folder/x.html", "../made.json", "../../made.html", "/nonexistent/x.json", "/made.json", "text/x.json"),
    *("/proc/self/mem", "/dev/null", "n" * 300, "n" * 300 + ".png", "n/" * 3000, "made", "MADE.PNG", ".png", ".html"),
    *("here.json", "chat", "chat/config.json", "[/].png", "[/].html", "[bold].json", "a\nb.png", "\x1b[31m.html"),
    *("\udc80.svg", "\udc80.json", "$x$.png", ":x:.html"),
)

CHARACTERS = "0123456789xX/@:.,-+=~ ;|&$`'\"\\[](){}<>%#*?!\n\r\t\x1b\x07\x85\u00b2\u0663\u2028\udc80\U0001f9eeeEkKmMi"


@dataclass(frozen=True)
class Command:
    """Command of the tree: its words and options."""

    words: tuple[str, ...]
    options: tuple[Any, ...]


def commands_of(group: Any, words: tuple[str, ...] = ()) -> Iterator[Command]:
    """Yield all commands of the tree."""
    if hasattr(group, "commands"):
        for name, inner in group.commands.items():
            yield from commands_of(inner, (*words, name))
    else:
        yield Command(words, tuple(group.params))


def bent(text: str, random: Random) -> str:
    """Return the text with one or two characters inserted, removed or replaced."""
    for _ in range(random.choice((1, 1, 2))):
        place, sign = random.randrange(len(text) + 1), random.choice(CHARACTERS)
        text = text[:place] + random.choice(("", sign, sign)) + text[place + random.choice((0, 1)) :]
    return text


def value_of(option: Any, wild: float, random: Random) -> str:
    """Return a typical value of an option, an altered one, or with probability `wild` a hostile one."""
    kind = option.type_descriptor.annotation
    pool = {int: NUMBERS, float: NUMBERS, Path: PATHS}.get(kind, WORDS)
    least = 1 if option.min is None else int(option.min)
    typical = LIKELY.get(option.name, (str(least), str(least + 1), str(least + 40), "0.5")) if pool is NUMBERS else ()
    typical = typical or LIKELY.get(option.name, pool)
    if random.random() >= wild:
        return random.choice(typical)
    if random.random() < 0.35:
        return bent(random.choice(typical), random)
    return random.choice(pool if random.random() < 0.7 else random.choice((NUMBERS, WORDS, PATHS)))


def arguments(commands: list[Command], random: Random) -> list[str]:
    """Return a random command line."""
    command = random.choices(commands, [2 + len(command.options) for command in commands])[0]
    words: list[list[str]] = []
    rare, wild = random.choice((0.05, 0.2, 0.6)), random.choice((0.05, 0.15, 0.5))
    for option in command.options:
        while random.random() < (0.97 if option.required or option.name == "prompt" else rare):
            name = random.choice(option.opts)
            if option.is_flag:
                words.append([name])
            else:
                given = value_of(option, wild, random)
                words.append([f"{name}={given}"] if random.random() < 0.2 else [name, given])
            if random.random() < 0.9:
                break
    random.shuffle(words)
    line = [*command.words, *(word for each in words for word in each)]
    if random.random() < 0.1:
        place = random.randrange(len(line) + 1)
        match random.randrange(5):
            case 0:
                line[place:] = []
            case 1:
                line[place : place + 1] = []
            case 2:
                line.insert(
                    place, random.choice((*WORDS, *PATHS, "--help", "--version", "--", "-", "-vv", "--nothing"))
                )
            case 3 if line:
                place = random.randrange(len(line))
                line[place] = bent(line[place], random)
            case _:
                random.shuffle(line)
    return [word.replace("\0", "") for word in line]  # the system ends an argument at a null byte


# --- sandbox ---


class Sandbox:
    """Folder in which commands run, with models and files that they may name."""

    def __init__(self, top: Path) -> None:
        self.top, self.folder = top, top / "a" / "b" / "here"
        self.folder.mkdir(parents=True)
        for name in ("folder", "folder.png", "folder.html", "made", "bent", "["):
            (self.folder / name).mkdir()
        for name in ("chat", "plain"):
            families.CONFIGS["llama"].save_pretrained(self.folder / name)
            _tokenizer(chat=name == "chat").save_pretrained(self.folder / name)
        (self.folder / "t5").mkdir()
        (self.folder / "t5" / "config.json").write_text('{"model_type": "t5"}')
        for file in (self.folder / "plain").iterdir():
            (self.folder / "bent" / file.name).write_bytes(file.read_bytes())
        record = {"cluster": Cluster.preset("a100x4", 2).record()}
        self.files = {
            "text": b"Some text to begin with.",
            "bytes": bytes(range(128, 256)),
            "no.gguf": b"GGUF but not really",
            "here.json": json.dumps(record).encode(),
            "drawn.json": json.dumps(record).encode(),
            "drawn.txt": "Some text: \u00fc, \U0001f9ee.\0\r\n".encode(),
            "bent/config.json": (self.folder / "bent" / "config.json").read_bytes(),
        }
        self.drawn = ("drawn.json", "drawn.txt", "bent/config.json")
        for name, content in self.files.items():
            (self.folder / name).write_bytes(content)
        self.kept = {file: file.read_bytes() for file in top.rglob("*") if file.is_file()}

    def draw(self, random: Random) -> bytes:
        """Write new contents of the untrusted files. Return the standard input."""
        for name in self.drawn:
            content = self.files[name]
            (self.folder / name).write_bytes(mutated(content, random) if random.random() < 0.7 else content)
        return mutated(self.files["drawn.txt"], random)

    def tidy(self, written: set[Path]) -> None:
        """Restore the folder. Raise if files exist that no option named."""
        for path in written:
            if path in self.kept:
                path.write_bytes(self.kept[path])
            elif os.path.lexists(path):
                path.unlink()
        left = {file for file in self.top.rglob("*") if not file.is_dir()} - self.kept.keys()
        assert not left, f"new files: {left}"


def _tokenizer(*, chat: bool) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={character: n for n, character in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    if chat:
        tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}:"
    return tokenizer


class Escaped(BaseException):
    """Raised when a command starts a process, connects, or writes to a file that no option named."""


STARTS = {
    *("os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "pty.spawn", "subprocess.Popen"),
    *("socket.connect", "socket.bind", "socket.getaddrinfo", "socket.sendto"),
}
WRITES = {
    *("os.chmod", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.truncate", "os.utime"),
    *("os.chown", "shutil.copyfile", "shutil.move", "shutil.rmtree", "tempfile.mkdtemp", "tempfile.mkstemp"),
}
MOVES = {"os.rename", "os.link", "os.symlink", "shutil.copyfile", "shutil.move"}
"""Audit events of Python: starts of processes and connections, writes, and writes with two paths."""


class Watch:
    """Audit hook that forbids starts, and writes to files that no option named, while a command runs."""

    def __init__(self, sandbox: Sandbox, commands: list[Command]) -> None:
        self.sandbox, self.active = sandbox, False
        self.named, self.stores, self.written = set[Path](), set[Path](), set[Path]()
        options = [option for command in commands for option in command.options]
        files = [option for option in options if option.type_descriptor.annotation is Path]
        self.options = {name for option in files for name in option.opts}
        sys.addaudithook(self._audit)

    @contextmanager
    def over(self, line: list[str]) -> Iterator[None]:
        """Watch within the block, in which this command line runs."""
        pairs = [*pairwise(line), *(word.partition("=")[::2] for word in line)]
        self.named, self.written = {self._place(value) for name, value in pairs if name in self.options}, set()
        self.stores = {self._place(value) for name, value in pairs if name == "--store"}
        self.active = True
        try:
            yield
        finally:
            self.active = False

    def _place(self, path: Any) -> Path:
        return Path(os.path.normpath(self.sandbox.folder / os.fsdecode(path)))

    def _audit(self, event: str, details: tuple[Any, ...]) -> None:
        if not self.active:
            return
        if event in STARTS:
            raise Escaped(f"{event}: {details!r:.500}")
        wanted = os.O_WRONLY | os.O_RDWR | os.O_CREAT
        if event in WRITES or (event == "open" and not isinstance(details[0], int) and details[2] & wanted):
            for path in details[: 2 if event in MOVES else 1]:
                self._write(event, path)

    def _write(self, event: str, path: Any) -> None:
        place = self._place(path)
        if place.name == f".attnmesh-{os.getpid()}.json":  # becomes the named file in one step
            return
        if place not in self.named and not self.stores & {*place.parents}:
            raise Escaped(f"{event}: {place} was not named")
        if place.is_relative_to(self.sandbox.top):
            self.written.add(place)
        elif place != Path("/dev/null"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))


# --- stand-ins ---

TIME = Timing(10.0, 9.0, 11.0)
LOCAL = Cluster.preset("local")

SCRIPT = re.compile(
    r"set -e\nmkdir -p /run/netns && mount -t tmpfs tmpfs /run/netns\nip link set lo up\n"
    r"(?:(?:ip|tc|export) (?:[A-Za-z0-9 .:/=_@-]|&&)+\n)*"
    r"(?:taskset -c [0-9,]+ ip netns exec h\d+ \S+ -m torch\.distributed\.run [a-z0-9 .-]+"
    r" -m benchmarks\.netns /door/door &\n)+wait\n"
)
"""Form of every script that makes emulated hosts."""


def on(world: World, result: Any) -> Any:
    """Return the result of ranks. Raise if the script that makes their hosts has words of the user."""
    assert ranks_of(world) <= 16_000, world
    if isinstance(world, Hosts) and not SCRIPT.fullmatch(script(world, Path("/door"))):
        raise Escaped(f"a script for {world}")
    return result


def generate_on_machine(world: int, _: Any, request: Any, *, on_message: Callable[[Any], None]) -> list[Any]:
    """Return an answer as the ranks would. Raise if they could not take the request."""
    assert min(world, len(request.prompt.ids)) >= 1
    assert request.model.mesh.shape.ranks * request.model.mesh.tp == world
    GenerationConfig(max_new_tokens=request.max_new_tokens, **request.options).validate(strict=True)
    temperature = request.options.get("temperature", 1.0)
    assert torch.isfinite(torch.tensor([1e4]) / temperature).all(), f"a temperature of {temperature}"
    torch.Generator().manual_seed(request.seed)
    on_message(("loaded", 0.1))
    on_message(("prefilled", len(request.prompt.ids)))
    ids = list(request.prompt.ids[-4:])
    for token in ids:
        on_message(("token", token))
    ones = [1] * world
    figures = (len(request.prompt.ids), 0.1, 0.2, 0.01, 0.5, ones, ones, "whole", ones, ones)
    return [generate_worker.GenerateResult(ids, "length", *figures)]


def measured_plans(world: World, length: int, most: int, rounds: int, show: Any) -> plan_bench.Report:
    """Return a report of one row."""
    row = plan_bench.Ran("decode", "1x1x4 tree", "Tree Attention", "Striped(16)", True, 9.0, TIME, 1.0)
    report = plan_bench.Report(str(world), LOCAL, [row])
    show(report)
    return on(world, report)


@lru_cache(maxsize=10_000)
def _small(workload: Workload, cluster: Cluster) -> list[Plan] | InputError:
    try:
        return planner(workload, cluster)
    except InputError as error:
        return error


def priced(workload: Workload, cluster: Cluster, *, progress: Any = None) -> list[Plan]:
    """Return plans for a small part of the cluster, which the planner prices in milliseconds."""
    small = cluster if cluster.world > MAX_PRICED_RANKS else cluster.sized(min(2, cluster.hosts), min(2, cluster.ranks))
    found = _small(workload, small)
    if isinstance(found, InputError):
        raise found
    if progress is not None:
        progress(1, 1)
    return found


def replace(module: Any, **replacements: Any) -> None:
    """Replace names of a module. Raise if one does not exist."""
    assert replacements.keys() <= vars(module).keys(), replacements.keys() - vars(module).keys()
    vars(module).update(replacements)


def stand_in(sandbox: Sandbox) -> None:
    """Replace the slow parts of the command in this process."""
    import matplotlib.font_manager  # noqa: F401 (writes its file of fonts before the watch begins)

    constants.HF_HUB_OFFLINE = True  # names of models cause no network access
    here = machine()
    for module in (generate, probe, bench, commands, check_command):
        replace(module, machine=lambda: here)
    proofs = [proof.Proof("cpu", "cpu", "float32", None, 1e-7, 1e-7, 1e-6), proof.Proof("cuda", "cpu", "float32", "no")]
    choices = list(proof.choices())
    locate, config, tokenizer = load.locate, load.open_config, cache(load.open_tokenizer)
    cached_config = cache(config)
    replace(
        load,
        locate=lambda name, *say: str(sandbox.folder / "chat") if name == load.PACKAGED else locate(name, *say),
        open_config=lambda place, **more: (config if place == "bent" else cached_config)(place, **more),
        open_tokenizer=tokenizer,
        _unpack_gguf=lambda file, report: report(f"unpacking {file.name} (once)") or sandbox.folder / "chat",
    )
    replace(generate, run_on_machine=generate_on_machine)
    replace(proof, proofs=lambda: iter(proofs), law_error=lambda: 1e-16, choices=lambda: iter(choices))
    compared = Comparison("decode", "SDPA", TIME, TIME, 2.5, 20.0, 0.5)
    held = kernel_bench.Memory("window", (10, 20), (1.0, None))
    replace(calls_bench, rows=lambda rounds, add: add(on(2, calls_bench.Row("1x1x2, forward", TIME, 1.0, 6.0))))
    replace(kernel_bench, rows=lambda device: iter([compared]), memory=lambda device: iter([held]))
    rows = [
        prefill_bench.Row("causal", "ring", TIME, 1.0, 12, 12, 1.0),
        prefill_bench.Row("causal", "peer", note="no such mask"),
    ]
    replace(
        prefill_bench,
        rows=lambda world, length, selection, add: [add(row) for row in on(world, rows)],
        memory=lambda ranks, length, add: add(prefill_bench.Memory("full", "ring", 3.5, 3.0)),
    )
    counted = packed_bench.Count("pile", "1x8x1", "Packed", 1.02, 0.3, 1.0, 0.5)
    replace(
        packed_bench,
        counts=lambda files, batches, add: add(counted),
        rows=lambda request, world, add: add(on(world, packed_bench.Row("pile", "packed, 2D 1x4x4", TIME, 1.0))),
    )
    merge = decode_bench.Row("merge", "tree", TIME, 1.0)
    replace(
        decode_bench,
        parts=lambda world: {"merges": lambda add: add(on(world, merge))},
        memory=lambda ranks, add: add(decode_bench.Memory("step", "tree", 1.0)),
    )
    row = whole_model.Row("tree", [1, 2], TIME, 1.0, 1.0, 1.0)
    replace(
        whole_model,
        rows=lambda request, threads, world, add, rounds, alone: [add(each) for each in on(world, [row] * 2)] and LOCAL,
    )
    replace(faults, rows=lambda request, threads, add: add(on(request.shape.ranks, compared)))
    step = latent_bench.Row("stock", TIME, 1.0, 1)
    replace(latent_bench, rows=lambda request, ranks, threads, add: add(on(ranks, step)))
    chosen = selected_bench.Row(64, "1 rank", TIME, 1.0, 1.0, None)
    replace(selected_bench, rows=lambda request, tokens, ranks, threads, add: add(on(max(ranks), chosen)))
    layer = recurrent_bench.Row("forward", "1 rank", TIME, 1.0)
    replace(recurrent_bench, rows=lambda request, world, add: add(on(world, layer)))
    shape = diffusion_bench.Row("flux", "ring", TIME, 1.0, 1.0, 1, 1.0, 1e-7)
    replace(diffusion_bench, rows=lambda request, world, add: add(on(world, shape)))
    listening = SimpleNamespace(getsockname=lambda: ("127.0.0.1", 8000), close=lambda: None)
    replace(server, listen=lambda host, port: listening, run=lambda app, socket, drain: app.supervisor.on_ready({}))
    together = rows_bench.Row(2, TIME, TIME, (1.0, 1.0), True)
    replace(rows_bench, rows=lambda request, threads, add: add(on(request.shape.ranks, together)))
    guessed = speculate_bench.Row("a story", 1, 1.0, 1.0, 1.0, 1, 1, 1.0)
    replace(speculate_bench, rows=lambda request, threads, add: add(on(request.shape.ranks, guessed)))
    masked = masks_bench.MaskRow("an object", TIME, TIME, TIME, TIME)
    replace(masks_bench, rows=lambda name, tokens, rounds: [masked])
    filed = folder_bench.Row("a step", 1, TIME, TIME, 1.0, 1.2)
    replace(folder_bench, rows=lambda sizes, parent, rounds, add: add(filed))
    drawn = rollouts_bench.Speed("transformers", 256, 1024, TIME)
    replace(
        rollouts_bench,
        speed=lambda request, add: add(on(request.ranks[1], drawn)),
        memory=lambda request, add: add(on(request.ranks[0], rollouts_bench.Memory(1, 500.0, 500.0, 9.0))),
    )
    found = prefixes_bench.PrefixRow("computed", 4, 1, 0, 1.0, 0.0, True)
    replace(prefixes_bench, rows=lambda request, add, step: add(on(max(request.ranks), found)))
    divided = unequal_bench.Row("cores", "even", [1, 1], TIME, [1.0, 1.0], 1.0)
    replace(unequal_bench, rows=lambda tokens, part, rounds, add: add(on(2, divided)))
    replace(storage_bench, rows=lambda request, add: add(storage_bench.Row("bfloat16", 16.0, 1.0, 0.0)))
    seen = serve_bench.Row("transformers", 384, 1, 1.0, TIME, TIME, 1.0, 1.0, 1.0)
    replace(serve_bench, rows=lambda request, add, step: add(on(request.ranks, seen)))
    replace(plan_bench, report=measured_plans)
    replace(probe, run_on_ranks=lambda ranks, function: on(ranks, [LOCAL]), keep_machine=lambda cluster, kind: None)
    replace(commands, run_on_hosts=lambda hosts, function: on(hosts, [LOCAL]))
    replace(plan, plans_for=priced)
    replace(plan_figure, plan=priced, sizes=lambda c: [(c.hosts, c.ranks)], curve_lengths=lambda n: [n])
    replace(schemes, plan=priced)
    replace(
        plan_page,
        grid_of=lambda work, c: plan_page.PagePoints((work.kv_heads,), (c.ranks,), (c.hosts,), (work.length,)),
    )


# --- runs and their rules ---


class Stream(io.TextIOWrapper):
    """Standard output or standard error."""

    terminal = False

    def isatty(self) -> bool:
        """Return True if the stream poses as a terminal."""
        return self.terminal


@dataclass
class Result:
    """Exit code, error and output of a command line, and the options that its command received."""

    code: int = 0
    error: BaseException | None = None
    out: str = ""
    err: str = ""
    options: dict[str, Any] = field(default_factory=dict)


class Fuzz:
    """Command with recorded options, and a sandbox to run it in."""

    def __init__(self, folder: Path) -> None:
        self.sandbox = Sandbox(folder)
        stand_in(self.sandbox)
        app.add_typer(benchmarks_app, name="benchmarks")  # one tree for both commands
        self.command: Any = typer.main.get_command(app)
        self.commands = list(commands_of(self.command))
        self.options: dict[str, Any] = {}
        self._record_options(self.command)
        os.chdir(self.sandbox.folder)
        os.environ["HOME"] = str(folder / "home")
        self.watch = Watch(self.sandbox, self.commands)

    def _record_options(self, group: Any) -> None:
        """Wrap each command so that its options are recorded."""
        for inner in getattr(group, "commands", {}).values():
            self._record_options(inner)
        if not hasattr(group, "commands"):
            callback = group.callback

            def recorded(**options: Any) -> Any:
                self.options = options
                return callback(**options)

            group.callback = recorded

    def prove(self) -> None:
        """Raise unless the watch detects shells and files that no option named."""
        for forbidden in (
            lambda: os.system(f"touch {CANARY}"),
            lambda: subprocess.run(f"touch {CANARY}", shell=True, check=False),
            lambda: Path(CANARY).touch(),
            lambda: Path("made", CANARY).write_text(""),
            lambda: os.rename("text", CANARY),
        ):
            with suppress(Escaped), self.watch.over(["--out=text"]):
                forbidden()
                raise AssertionError("the watch has missed it")
        self.sandbox.tidy(set())

    def run(self, line: list[str], stdin: bytes, *, terminal: bool = False) -> Result:
        """Run a command line in this process, with its own streams. Return the result."""
        result, self.options = Result(), {}

        def run() -> None:
            try:
                self.command(prog_name="attnmesh")
            except BaseException as error:
                result.error = error
                raise

        streams = [Stream(io.BytesIO(), "utf-8", errors) for errors in ("strict", "backslashreplace")]
        for stream in streams:
            stream.terminal = terminal
        old = sys.argv, sys.stdin, sys.stdout, sys.stderr
        try:
            sys.argv, sys.stdin = ["attnmesh", *line], io.TextIOWrapper(io.BytesIO(stdin), "utf-8")
            sys.stdout, sys.stderr = streams
            with self.watch.over(line):
                result.code = show_errors(run, verbose=bool({"-v", "--verbose"} & {*line}))
        except SystemExit as error:
            result.code = error.code  # type: ignore[assignment]
        except InputError:
            if not {"-v", "--verbose"} & {*line}:  # verbose runs print the traceback
                raise
            result.code = 1
        finally:
            sys.argv, sys.stdin, sys.stdout, sys.stderr = old
        for stream in streams:
            stream.flush()
        result.out, result.err = (stream.buffer.getvalue().decode() for stream in streams)  # type: ignore[attr-defined]
        result.options = self.options
        return result

    def check(self, seed: int) -> str:
        """Return the exit code of an input as text. Raise if the run breaks a rule."""
        random = Random(seed)
        line, stdin = arguments(self.commands, random), self.sandbox.draw(random)
        os.environ["COLUMNS"] = random.choice(("80", "80", "200", "30", "1", "0", "x"))
        terminal = random.random() < 0.1
        try:
            result = self.run(line, stdin, terminal=terminal)
            check_result(result, one_line=not terminal and not {"-v", "--verbose"} & {*line})
            self.sandbox.tidy(self.watch.written)
        except BaseException:
            print(f"\nseed {seed}: {line!r:.3000}", file=sys.stderr)
            raise
        return f"code {result.code}"


def check_result(result: Result, *, one_line: bool) -> None:
    """Raise if a result breaks a rule. An error is one line, the last, except on a terminal or in verbose runs."""
    assert result.code in (0, 1, 2), result
    if result.code == 0 and result.options.get("as_json"):
        record = json.loads(result.out, parse_constant=_no_number)
        assert isinstance(record, dict)
        command = record.get("command", "")
        assert shlex.join(shlex.split(command)) == command, f"not a command line: {command!r:.500}"
    if result.code == 0 and (out := result.options.get("out")) is not None and out.is_file():
        assert isinstance(json.loads(out.read_text(), parse_constant=_no_number), dict)
    if result.code == 1:
        assert isinstance(result.error, (InputError, OptionError)), repr(result.error)
        assert result.out == "", result
        *notes, message = result.err.removesuffix("\n").split("\n")
        assert all(note.endswith(": asking the hub for it") or note.startswith("importing ") for note in notes), result
        valid = message.isprintable() and re.fullmatch(r"error: .+: expected .+, given .*\. Fix: .+\.", message)
        assert valid or not one_line, result
    if result.code == 2:
        assert "Traceback" not in result.err
        assert result.out or result.err


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def main() -> None:
    """Run many inputs. Stop at the first that breaks a rule."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--out", type=Path, help="also write a JSON")
    options = parser.parse_args()
    out = options.out and options.out.resolve()
    torch.set_num_threads(1)
    sys.dont_write_bytecode = True
    counter = Counter[str]()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        fuzz, start = Fuzz(Path(folder).resolve() / "top"), time.monotonic()
        fuzz.prove()
        for seed in range(options.first, options.first + options.inputs):
            counter[fuzz.check(seed)] += 1
            if seed % 10_000 == 0:
                print(f"\r{seed:,} inputs", end="", file=sys.stderr, flush=True)
        os.chdir("/")
    seconds = round(time.monotonic() - start)
    counts = dict(sorted(counter.items()))
    print(f"\n{options.inputs:,} inputs in {seconds} s: {counts}")
    if out:
        command = f"python -m tools.fuzz_command --inputs {options.inputs} --first {options.first}"
        record = {"command": command, "machine": machine(), "seconds": seconds, "came": counts}
        out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
