"""End users' scripts in all sorts of ways, again and again on a busy machine, and count the ranks that abort.

    python -m tests.tools.endings --runs 300 --ranks 2,4 --load 6

A script is a way to use the library, a last collective, and a way to end. Ranks are forked from a process that has
imported what scripts import, and then live as if they had been started alone: the script's names are those of
`__main__`, and it is Python that ends them. Some runs more are torchrun's (`--torchrun`).

That a thread of gloo is so late that it meets Python's end happens to some machines once in a dozen runs, to others
never. With `--late` it happens in each run: there it is the last to have a tensor, and takes its time to let go of it.
"""

import argparse
import gc
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

START = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
ranks = dist.get_world_size()
"""

OURS = """
import attnmesh as am
mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("queries", "keys"))
"""

MODEL = """
import attnmesh.hf as hf
from transformers import LlamaConfig, LlamaForCausalLM
sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)
config = LlamaConfig(vocab_size=64, max_position_embeddings=128, attn_implementation="attnmesh", **sizes)
model = LlamaForCausalLM(config)
ids = torch.arange(24)[None] % 64
"""

GENERATE = "print(hf.generate(model, ids, mesh=mesh, max_new_tokens=3, do_sample=False).tolist())\n"

TRAIN = """
optimizer = torch.optim.AdamW(model.parameters())
for step in range(2):
    loss = model(**hf.shard_batch({"input_ids": ids, "labels": ids}, mesh)).loss
    loss.backward()
    for weights in model.parameters():
        dist.all_reduce(weights.grad)
    optimizer.step()
    optimizer.zero_grad()
"""

SHARDED = """
from torch.distributed.fsdp import fully_shard
fully_shard(model, mesh=mesh["keys"])
for step in range(2):
    model(**hf.shard_batch({"input_ids": ids, "labels": ids}, mesh)).loss.backward()
"""

DTENSORS = """
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
q, k, v = (distribute_tensor(torch.randn(1, 4, 16, 8), mesh, [Shard(2), Shard(2)]) for _ in range(3))
out = am.attention(q.requires_grad_(), k, v, mesh=mesh, layout=am.Contiguous())
out.redistribute(mesh, [Replicate(), Replicate()]).sum().backward()
"""

DECODE = """
cache = am.KVCache(mesh, batch=1, kv_heads=2, head_dim=8, capacity=32, dtype=torch.float32)
cache.append(*torch.randn(2, 1, 2, 16, 8))
out = am.decode(torch.randn(1, 2, 1, 8), cache)
partial = am.merge_across(am.Partial(torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3)), mesh.get_group("keys"))
"""

ASYNC = """
works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(8)]
works.append(dist.all_reduce(torch.ones(9), group=mesh.get_group("keys"), async_op=True))
q = torch.randn(1, 2, 8, 8)
am.attention(q, q, q, mesh=mesh)
for work in works:
    work.wait()
"""

TORCH = """
mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("all",))
for _ in range(3):
    dist.all_reduce(torch.ones(8), group=mesh.get_group())
"""

USES = {
    "generate": OURS + MODEL + GENERATE,
    "generate, train": OURS + MODEL + GENERATE + TRAIN,
    "FSDP": OURS + MODEL + SHARDED,
    "DTensors": OURS + DTENSORS,
    "decode, merge": OURS + DECODE,
    "async": OURS + ASYNC,
}
"""Ways to use the library, by their names."""

ALONE = {"PyTorch alone": TORCH}
"""What is done without this library, with `--alone`."""

LAST = """
losses = [torch.empty(4) for _ in range(ranks)]
dist.all_gather(losses, torch.ones(4))
print(sum(float(loss.mean()) for loss in losses))
"""

LATE = """
import hashlib, random, threading, time, weakref
begun, much = threading.Event(), bytes(1 << 26)
def late():
    begun.set()
    for _ in range(random.randint(1, 8)):
        hashlib.sha256(much)
late_tensor = torch.ones(4)
weakref.finalize(late_tensor, late).atexit = False
dist.barrier()
time.sleep(0.2 * dist.get_rank())
dist.all_reduce(late_tensor, async_op=True)
del late_tensor
begun.wait(60)
"""

KEPT = """
class Kept:
    pass
kept = Kept()
kept.itself, kept.all = kept, dict(globals())
"""

ENDS = {
    "nothing": "",
    "destroy": "dist.destroy_process_group()",
    "barrier": "dist.barrier()",
    "barrier, destroy": "dist.barrier()\ndist.destroy_process_group()",
    "a cycle": KEPT,
    "a cycle, destroy": KEPT + "dist.destroy_process_group()",
    "sys.exit(3)": "sys.exit(3)",
    "an error": "raise ValueError('no')",
    "an error of one": "if dist.get_rank() == 1:\n    raise ValueError('no')",
}
"""Ways to end, by their names."""

CODES = {"sys.exit(3)": (3,), "an error": (1,), "an error of one": (0, 1)}
"""Exit codes that ranks may end with, if not 0."""

WORDS = "terminate called", "Fatal Python error", "Segmentation fault", "SIGABRT"
"""What is said on stderr where a rank aborts."""

SECONDS = 180.0
"""A run may take so long: its ranks are killed then."""


class Script(NamedTuple):
    """What to run, on how many ranks."""

    use: str
    end: str
    ranks: int
    torchrun: bool = False
    late: bool = False

    def text(self, uses: dict[str, str]) -> str:
        """The script itself."""
        return START + uses[self.use] + LAST + LATE * self.late + ENDS[self.end]


class Outcome(NamedTuple):
    """How a script's ranks ended: 0, or an exit code, for each; and what they said on stderr."""

    codes: list[int]
    said: str
    torchrun: bool = False

    def aborted(self) -> bool:
        """Whether a rank was ended by a signal, or said that it was about to."""
        by_signal = any(code < 0 and code != -signal.SIGKILL for code in self.codes)
        return by_signal or any(word in self.said for word in WORDS)

    def wrong(self, end: str) -> bool:
        """Whether ranks ended as they should not, or had to be killed."""
        right = CODES.get(end, (0,))
        codes = {0, 1} if self.torchrun and right != (0,) else right  # torchrun has codes of its own
        return any(code not in codes for code in self.codes)


def main() -> None:
    """Run scripts, and show a table of how they ended."""
    options = _options()
    uses = ALONE if options.alone else USES
    scripts = list(_scripts(options, uses))
    start = time.monotonic()
    with _busy(options.load), ThreadPoolExecutor(options.at_once) as threads:
        nurseries: SimpleQueue[Nursery] = SimpleQueue()
        for _ in range(options.at_once):
            nurseries.put(Nursery(options))

        def run(script: Script) -> Outcome:
            nursery = nurseries.get()
            try:
                return under_torchrun(script, uses) if script.torchrun else nursery.run(script, uses)
            finally:
                nurseries.put(nursery)

        outcomes = []
        for outcome in threads.map(run, scripts):
            outcomes.append(outcome)
            if len(outcomes) % 20 == 0:
                print(f"{len(outcomes)} runs, {sum(o.aborted() for o in outcomes)} aborted", file=sys.stderr)
    _show(scripts, outcomes, time.monotonic() - start)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nursery", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--runs", type=int, default=300, help="of ranks that are forked")
    parser.add_argument("--torchrun", type=int, default=6, help="runs by torchrun, besides")
    parser.add_argument("--ranks", default="2,4", help="of a run, in turn")
    parser.add_argument("--load", type=int, default=6, help="processes that keep the machine busy")
    parser.add_argument("--at-once", type=int, default=1, help="runs at a time")
    parser.add_argument("--late", action="store_true", help="have gloo's threads meet Python's end in each run")
    parser.add_argument("--alone", action="store_true", help="use PyTorch alone, without this library")
    return parser.parse_args()


def _scripts(options: argparse.Namespace, uses: dict[str, str]) -> Iterator[Script]:
    """All uses with all ends, in an order that is drawn, as often as asked."""
    ranks = [int(n) for n in options.ranks.split(",")]
    drawn = random.Random(0)
    for count, torchrun in ((options.runs, False), (options.torchrun, True)):
        every: list[tuple[str, str]] = []
        for number in range(count):
            if not every:
                every = [(use, end) for use in uses for end in ENDS]
                drawn.shuffle(every)
            use, end = every.pop()
            yield Script(use, end, ranks[number % len(ranks)], torchrun, options.late)


def _show(scripts: Sequence[Script], outcomes: Sequence[Outcome], seconds: float) -> None:
    """A row for each use and each end: runs, runs in which a rank aborted, and runs that ended wrongly otherwise."""
    runs, aborts, wrongs = Counter[str](), Counter[str](), Counter[str]()
    for script, outcome in zip(scripts, outcomes, strict=True):
        launch = "torchrun" if script.torchrun else "forked"
        for row in (script.use, f"ends by {script.end}", f"{script.ranks} ranks, {launch}", "all"):
            runs[row] += 1
            aborts[row] += outcome.aborted()
            wrongs[row] += outcome.wrong(script.end) and not outcome.aborted()
    print(f"{'':32}{'runs':>6}{'aborts':>8}{'wrong':>7}")
    for row in [*sorted(row for row in runs if row != "all"), "all"]:
        print(f"{row:32}{runs[row]:6}{aborts[row]:8}{wrongs[row]:7}")
    print(f"{seconds:.0f} s")
    bad = [(s, o) for s, o in zip(scripts, outcomes, strict=True) if o.aborted() or o.wrong(s.end)]
    for script, outcome in bad[:3]:
        print(f"\n{script}: {outcome.codes}\n{outcome.said[-2000:]}")
    sys.exit(bool(bad))


@contextmanager
def _busy(count: int) -> Iterator[None]:
    """So many processes that compute for nothing, as long as this one lives."""
    code = "import os\nos.nice(5)\nstarter = os.getppid()\nwhile os.getppid() == starter:\n    sum(range(100000))"
    load = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(count)]
    try:
        yield
    finally:
        for process in load:
            process.kill()
            process.wait()


def under_torchrun(script: Script, uses: dict[str, str]) -> Outcome:
    """A script, as a file that torchrun starts."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "script.py"
        file.write_text(script.text(uses))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={script.ranks}"]
        done = subprocess.run([*command, str(file)], capture_output=True, text=True, timeout=2 * SECONDS)
    return Outcome([done.returncode], done.stderr, torchrun=True)


class Nursery:
    """A process from which ranks are forked."""

    def __init__(self, options: argparse.Namespace) -> None:
        alone = ["--alone"] if options.alone else []
        command = [sys.executable, "-m", "tests.tools.endings", "--nursery", *alone]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, script: Script, uses: dict[str, str]) -> Outcome:
        """A script's ranks, from the first to the last."""
        asked = {"script": script.text(uses), "ranks": script.ranks}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        return Outcome(*json.loads(self.process.stdout.readline()))


def nursery() -> dict[str, Any] | None:
    """Start and end ranks as asked; on a rank that has just been forked, what to do."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for line in sys.stdin:
        port = 20000 + (port + 1) % 12000  # below those that the system gives to connections
        asked = json.loads(line)
        with tempfile.TemporaryFile("w+") as said:
            born: list[int] = []
            for rank in range(asked["ranks"]):
                process = os.fork()
                if not process:
                    _be_a_rank(rank, asked["ranks"], port, said.fileno())
                    return asked
                born.append(process)
            codes = _ends(born)
            said.seek(0)
            print(json.dumps([codes, said.read()]), flush=True)
    return None


def _be_a_rank(rank: int, ranks: int, port: int, said: int) -> None:
    """What distinguishes one that was forked from one that was started."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for ours, its in ((nothing, 0), (nothing, 1), (said, 2)):
        os.dup2(ours, its)
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in places.items()}
    random.seed()


def _ends(born: Sequence[int]) -> list[int]:
    """The exit codes of processes, which are killed if they take too long."""
    codes: dict[int, int] = {}
    end = time.monotonic() + SECONDS
    while len(codes) < len(born):
        for process in born:
            if process not in codes:
                ended, status = os.waitpid(process, os.WNOHANG)
                if ended:
                    codes[process] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > end:
                    os.kill(process, signal.SIGKILL)
        time.sleep(0.01)
    return [codes[process] for process in born]


if __name__ == "__main__":
    if "--nursery" not in sys.argv:
        main()
        sys.exit()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    import torch
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.tensor

    torch.set_num_threads(1)  # no threads: ranks are forked
    if "--alone" not in sys.argv:
        from transformers import LlamaForCausalLM  # noqa: F401

        import attnmesh.hf  # noqa: F401
    gc.freeze()  # or most of a run would be Python's own cleaning up
    told = nursery()
    if told is not None:
        exec(told["script"], globals())
