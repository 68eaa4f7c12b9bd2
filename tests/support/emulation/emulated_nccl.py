"""An emulated NCCL between ranks that have an emulated GPU each.

    outcome = world(2, my_rank, "an argument")
    assert outcome.results() == [0, 1]          # or look at outcome.answers, .hang and .mismatches

The calling process serves the messages of all ranks (`emulated_switch`). A hang is reported at once, with the operation
that each rank waits in. The function is one that ranks can import by the name of its module. It gets the rank's GPU
first, and returns tensors of the CPU alone.
"""

import os
import pickle
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from attnmesh.cli.launch import Processes
from tests.support.emulation.emulated_gpu import EmulatedGPU, EmulatedTensor, emulated_gpu
from tests.support.emulation.emulated_switch import Communicator, Message, Outcome, Switch
from tests.support.ranks.pool import PRELOADED, check_marked

BACKENDS = {"nccl": "cuda:nccl", "cpu:gloo,cuda:nccl": "cpu:gloo,cuda:nccl"}
"""Backends with which a process group is made, and the configuration that PyTorch then shows."""

TIMEOUT = 20.0
"""Seconds until gloo gives up on a message, unless the package has a deadline of its own."""

PATIENCE = 60.0
"""Seconds without any request after which a rank that waits for NCCL hangs, while others are busy or wait for gloo."""


LINGER = 2.0
"""Seconds that a rank which has answered stays, as others may still make groups with it."""


class Hang(BaseException):
    """This rank would wait for ever. No handler of errors in the package gets to see it, as with a real one."""


def world(
    size: int, function: Callable[..., Any], *arguments: Any, backend: str = "nccl", patience: float = PATIENCE
) -> Outcome:
    """Run a function on `size` ranks, and return the outcome: results, errors and hangs."""
    check_marked(function)
    processes = Processes()
    processes.preload(PRELOADED)
    with tempfile.TemporaryDirectory(prefix="attnmesh-emulated-") as folder:
        for rank in range(size):
            processes.start(_live, rank, size, BACKENDS[backend], Path(folder) / "store", function, arguments)
        try:
            return Switch(processes.pipes, patience).serve()
        finally:
            processes.end()


class Work:
    """Handle of an operation. Its `wait` lasts until the operation is done."""

    def __init__(self, nccl: "NCCL", number: int, finish: Callable[[dict[int, Any]], None]) -> None:
        self.nccl, self.number, self.finish, self.done = nccl, number, finish, False

    def wait(self, *_: Any) -> bool:
        """Wait, and write what arrived."""
        if not self.done:
            self.finish(self.nccl.ask("wait", self.number))
            self.done = True
        return True


class NCCL:
    """The functions of `torch.distributed` that attnmesh calls with tensors on GPUs."""

    def __init__(self, connection: Connection, config: str) -> None:
        self.connection, self.config, self.issued = connection, config, 0
        names = ("batch_isend_irecv", "all_gather", "all_reduce", "broadcast")
        self.gloo = {name: getattr(dist, name) for name in names}
        self.new_group, self.host_groups = dist.new_group, list[Any]()

    def ask(self, *request: Any) -> Any:
        """Send a request to the switch, and return its reply, which may take as long as other ranks do."""
        self.connection.send_bytes(pickle.dumps(request))
        kind, reply = pickle.loads(self.connection.recv_bytes())
        if kind == "hang":
            raise Hang(reply)
        return reply

    def batch_isend_irecv(self, operations: Sequence[dist.P2POp]) -> list[Any]:
        """Issue messages together. One work stands for all of them."""
        if not self._serves(operations[0].tensor, operations[0].group):
            return self.gloo["batch_isend_irecv"](operations)
        ranks = _communicator(operations[0].group)[1]
        messages = []
        for number, each in enumerate(operations):
            kind = "send" if each.op is dist.isend else "recv"
            messages.append(_message(kind, each.tensor, peer=ranks[each.group_peer], number=number))

        def finish(arrived: dict[int, Any]) -> None:
            for number, data in arrived.items():
                _write(operations[number].tensor, data)

        return [self._issue(operations[0].group, messages, finish)]

    def all_gather(self, tables: list[Tensor], x: Tensor, group: Any = None, async_op: bool = False) -> Any:
        """Gather a tensor of each rank."""
        if not self._serves(x, group):
            return self.gloo["all_gather"](tables, x, group=group, async_op=async_op)

        def finish(arrived: dict[int, Any]) -> None:
            for table, data in zip(tables, arrived[0], strict=True):
                _write(table, data)

        return self._collective("all_gather", x, group, finish, async_op)

    def all_reduce(self, x: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        """Sum a tensor over the ranks, or take the maximum."""
        if not self._serves(x, group):
            return self.gloo["all_reduce"](x, op, group=group, async_op=async_op)
        name = "MAX" if op == dist.ReduceOp.MAX else "SUM"
        return self._collective(f"all_reduce {name}", x, group, lambda arrived: _write(x, arrived[0]), async_op)

    def broadcast(
        self, x: Tensor, src: int | None = None, group: Any = None, async_op: bool = False, group_src: int | None = None
    ) -> Any:
        """Send the tensor of one rank to all."""
        if not self._serves(x, group):
            return self.gloo["broadcast"](x, src, group=group, async_op=async_op, group_src=group_src)
        source = _communicator(group)[1].index(src) if group_src is None else group_src
        return self._collective(f"broadcast {source}", x, group, lambda arrived: _write(x, arrived[0]), async_op)

    def make_group(self, *arguments: Any, **named: Any) -> Any:
        """Make a group. One that is made with gloo beside NCCL's serves the host alone."""
        group = self.new_group(*arguments, **named)
        if named.get("backend") == "gloo":
            self.host_groups.append(group)
        return group

    def config_of(self, group: Any) -> str:
        """Return the backends of a group by device."""
        return "cpu:gloo,cuda:gloo" if group in self.host_groups else self.config

    def _serves(self, x: Tensor, group: Any) -> bool:
        """Return whether a tensor is on the GPU. Raise as PyTorch does if nothing serves those of the CPU."""
        if not isinstance(x, EmulatedTensor) and "cpu" not in self.config_of(group):
            raise RuntimeError("No backend type associated with device type cpu")
        return isinstance(x, EmulatedTensor)

    def _collective(self, kind: str, x: Tensor, group: Any, finish: Any, async_op: bool) -> Any:
        work = self._issue(group, [_message(kind, x)], finish)
        return work if async_op else work.wait()

    def _issue(self, group: Any, messages: list[Message], finish: Callable[[dict[int, Any]], None]) -> Work:
        self.issued += 1
        self.ask("issue", self.issued, _communicator(group), messages)
        return Work(self, self.issued, finish)

    def install(self, stack: ExitStack) -> None:
        """Serve this process's groups, of which PyTorch says that they were made with NCCL."""
        stack.enter_context(patch.multiple(dist, **{name: getattr(self, name) for name in self.gloo}))
        stack.enter_context(patch.object(dist, "get_backend", lambda group=None: "nccl"))
        stack.enter_context(patch.object(dist, "new_group", self.make_group))
        stack.enter_context(patch("attnmesh.mesh.axes.get_backend_config", self.config_of))


def _communicator(group: Any) -> Communicator:
    group = distributed_c10d._get_default_group() if group is None else group
    return group.group_name, tuple(dist.get_process_group_ranks(group))


def _message(kind: str, x: Any, **where: int) -> Message:
    """Return the message of a tensor, which NCCL wants in one piece and with an element at least."""
    if not x.values.is_contiguous() or not x.numel():
        raise ValueError(
            f"NCCL {kind}: a tensor in one piece, not empty, given {tuple(x.shape)} of strides {x.stride()}"
        )
    data = None if kind == "recv" else x.detach().values.clone()
    return Message(kind, x.numel(), x.dtype, data, **where)


def _write(x: Any, data: Tensor) -> None:
    x.values.copy_(data.view(x.shape))


def _live(
    rank: int, size: int, config: str, store: Path, function: Callable[..., Any], arguments: Any, connection: Connection
) -> None:
    """Live as a rank: join the world, answer, and end."""
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    file, timeout = dist.FileStore(str(store), size), timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", store=file, rank=rank, world_size=size, timeout=timeout)
    with ExitStack() as stack:
        gpu = stack.enter_context(emulated_gpu())
        NCCL(connection, config).install(stack)
        answer = _answer(rank, gpu, function, arguments)
    connection.send_bytes(answer)
    connection.poll(LINGER)  # ends when the switch does
    os._exit(0)


def _answer(rank: int, gpu: EmulatedGPU, function: Callable[..., Any], arguments: Any) -> bytes:
    """Return the request that carries the function's result, or the exception that it raised."""
    try:
        return pickle.dumps(("answer", function(gpu, *arguments)))
    except BaseException as error:
        note = f"on rank {rank}:\n{traceback.format_exc()}"
        error.add_note(note)
        try:
            pickle.loads(request := pickle.dumps(("answer", error)))
        except Exception:
            request = pickle.dumps(("answer", RuntimeError(note)))
        return request
