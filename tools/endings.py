"""Run user scripts that end in many ways on a busy machine, and count the ranks that abort.

    python -m tools.endings --runs 300 --ranks 2,4 --load 6

A script uses the library, runs a last collective, and ends. Ranks are forked from a process that has imported the
scripts' modules. The script then runs as `__main__`, and Python ends the rank as usual. With `--torchrun`, torchrun
starts some further runs.

On some machines a thread of gloo outlives the interpreter once in a dozen runs, on others never. `--late` forces it
in each run: the thread holds the last reference to a tensor and takes long to release it.
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
am.attention(q, q, q, mesh=mesh, layout=am.Contiguous())
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
"""Uses without this library, for `--alone`."""

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

TENSOR_MEMO = """
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
    "a cycle": TENSOR_MEMO,
    "a cycle, destroy": TENSOR_MEMO + "dist.destroy_process_group()",
    "sys.exit(3)": "sys.exit(3)",
    "an error": "raise ValueError('no')",
    "an error of one": "if dist.get_rank() == 1:\n    raise ValueError('no')",
}
"""Ways to end, by their names."""

CODES = {"sys.exit(3)": (3,), "an error": (1,), "an error of one": (0, 1)}
"""Exit codes that ranks may end with, if not 0."""

ABORT_TEXTS = "terminate called", "Fatal Python error", "Segmentation fault", "SIGABRT"
"""Texts on stderr of a rank that aborts."""

TIMEOUT = 180.0
"""Seconds until the ranks of a run are killed."""


class Script(NamedTuple):
    """Use of the library, way to end, and number of ranks."""

    use: str
    end: str
    ranks: int
    torchrun: bool = False
    late: bool = False

    def text(self, uses: dict[str, str]) -> str:
        """Return the source of the script."""
        return START + uses[self.use] + LAST + LATE * self.late + ENDS[self.end]


class Outcome(NamedTuple):
    """Exit codes of a script's ranks, and their text on stderr."""

    codes: list[int]
    stderr: str
    torchrun: bool = False

    def aborted(self) -> bool:
        """Return True if a signal other than SIGKILL ended a rank, or stderr has the text of an abort."""
        by_signal = any(code < 0 and code != -signal.SIGKILL for code in self.codes)
        return by_signal or any(text in self.stderr for text in ABORT_TEXTS)

    def wrong(self, end: str) -> bool:
        """Return True if ranks ended with an unexpected code, or were killed after the timeout."""
        right = CODES.get(end, (0,))
        codes = {0, 1} if self.torchrun and right != (0,) else right  # torchrun exits with its own codes
        return any(code not in codes for code in self.codes)


def main() -> None:
    """Run scripts, and print a table of their outcomes."""
    options = _options()
    uses = ALONE if options.alone else USES
    scripts = list(_scripts(options, uses))
    start = time.monotonic()
    with _busy(options.load), ThreadPoolExecutor(options.at_once) as threads:
        servers: SimpleQueue[ForkServer] = SimpleQueue()
        for _ in range(options.at_once):
            servers.put(ForkServer(options))

        def run(script: Script) -> Outcome:
            server = servers.get()
            try:
                return under_torchrun(script, uses) if script.torchrun else server.run(script, uses)
            finally:
                servers.put(server)

        outcomes = []
        for outcome in threads.map(run, scripts):
            outcomes.append(outcome)
            if len(outcomes) % 20 == 0:
                print(f"{len(outcomes)} runs, {sum(o.aborted() for o in outcomes)} aborted", file=sys.stderr)
    _show(scripts, outcomes, time.monotonic() - start)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fork-server", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--runs", type=int, default=300, help="runs with forked ranks")
    parser.add_argument("--torchrun", type=int, default=6, help="further runs by torchrun")
    parser.add_argument("--ranks", default="2,4", help="ranks of the runs, in turn")
    parser.add_argument("--load", type=int, default=6, help="processes that keep the machine busy")
    parser.add_argument("--at-once", type=int, default=1, help="runs at a time")
    parser.add_argument("--late", action="store_true", help="have gloo's threads outlive the interpreter in each run")
    parser.add_argument("--alone", action="store_true", help="use PyTorch alone, without this library")
    return parser.parse_args()


def _scripts(options: argparse.Namespace, uses: dict[str, str]) -> Iterator[Script]:
    """Yield all uses with all ends in random order, repeated up to the requested number of runs."""
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
    """Print runs, runs with an aborted rank, and runs that ended wrongly otherwise, by use, end and ranks."""
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
        print(f"\n{script}: {outcome.codes}\n{outcome.stderr[-2000:]}")
    sys.exit(bool(bad))


@contextmanager
def _busy(count: int) -> Iterator[None]:
    """Keep `count` processes busy within the block."""
    code = "import os\nos.nice(5)\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(100000))"
    load = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(count)]
    try:
        yield
    finally:
        for process in load:
            process.kill()
            process.wait()


def under_torchrun(script: Script, uses: dict[str, str]) -> Outcome:
    """Run a script from a file by torchrun. Return its outcome."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "script.py"
        file.write_text(script.text(uses))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={script.ranks}"]
        done = subprocess.run([*command, str(file)], capture_output=True, text=True, timeout=2 * TIMEOUT)
    return Outcome([done.returncode], done.stderr, torchrun=True)


class ForkServer:
    """Process from which ranks are forked."""

    def __init__(self, options: argparse.Namespace) -> None:
        alone = ["--alone"] if options.alone else []
        command = [sys.executable, "-m", "tools.endings", "--fork-server", *alone]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, script: Script, uses: dict[str, str]) -> Outcome:
        """Run a script on forked ranks. Return its outcome."""
        request = {"script": script.text(uses), "ranks": script.ranks}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return Outcome(*json.loads(self.process.stdout.readline()))


def serve_forks() -> dict[str, Any] | None:
    """Fork ranks for each request on stdin. Return the request on a forked rank, and None in the server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for line in sys.stdin:
        port = 20000 + (port + 1) % 12000  # below the system's ephemeral ports
        request = json.loads(line)
        with tempfile.TemporaryFile("w+") as stderr:
            processes: list[int] = []
            for rank in range(request["ranks"]):
                process = os.fork()
                if not process:
                    _become_rank(rank, request["ranks"], port, stderr.fileno())
                    return request
                processes.append(process)
            codes = _exit_codes(processes)
            stderr.seek(0)
            print(json.dumps([codes, stderr.read()]), flush=True)
    return None


def _become_rank(rank: int, ranks: int, port: int, stderr: int) -> None:
    """Give a forked process the streams and the environment of one that torchrun starts."""
    devnull = os.open(os.devnull, os.O_RDWR)
    for source, target in ((devnull, 0), (devnull, 1), (stderr, 2)):
        os.dup2(source, target)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in names.items()}
    random.seed()


def _exit_codes(processes: Sequence[int]) -> list[int]:
    """Wait for processes and return their exit codes. Kill them after the timeout."""
    codes: dict[int, int] = {}
    end = time.monotonic() + TIMEOUT
    while len(codes) < len(processes):
        for process in processes:
            if process not in codes:
                ended, status = os.waitpid(process, os.WNOHANG)
                if ended:
                    codes[process] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > end:
                    os.kill(process, signal.SIGKILL)
        time.sleep(0.01)
    return [codes[process] for process in processes]


if __name__ == "__main__":
    if "--fork-server" not in sys.argv:
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
    gc.freeze()  # else garbage collection at exit takes most of a run
    forked = serve_forks()
    if forked is not None:
        exec(forked["script"], globals())
