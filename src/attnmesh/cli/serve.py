"""The command `attnmesh serve`: check the options, listen, and keep ranks alive behind the front."""

import multiprocessing as mp
import os
from contextlib import closing
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from socket import gethostname
from typing import Annotated, Any

import typer
from rich.markup import escape

from attnmesh.cli.generate import (
    Deadline,
    Dtype,
    Merge,
    MeshOption,
    Model,
    Ranks,
    Reproducible,
    Revision,
    cache_options,
    enter_world,
)
from attnmesh.cli.generate_prompt import prepare_model
from attnmesh.cli.launch import leaving_tidily, run_on_machine, under_torchrun
from attnmesh.cli.mesh_option import KvOption
from attnmesh.cli.output import Status, Verbose, print_message, printable
from attnmesh.cli.serve_hosts import TorchrunRanks, serve_under_torchrun
from attnmesh.comm.failures import set_deadline
from attnmesh.decode.checks import check_reproducible
from attnmesh.errors import ArgumentError, require

Host = Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 is any, and lets other machines in.")]
ServedName = Annotated[str | None, typer.Option(help="Name of the model in requests; that of --model by default.")]
MaxGap = Annotated[float | None, typer.Option(min=0.001, help="Seconds that a prompt may hold up running requests.")]
MaxRestarts = Annotated[int, typer.Option(min=0, help="Times that lost ranks are started again in 10 minutes.")]
ApiKey = Annotated[
    str | None,
    typer.Option(envvar="ATTNMESH_API_KEY", show_envvar=True, help="Key that requests have to show."),
]


@dataclass(frozen=True)
class LocalRanks:
    """Ranks on this machine."""

    count: int
    settings: Any
    others: frozenset[BaseProcess] = field(default_factory=lambda: frozenset(mp.active_children()))
    """Processes that were there before the ranks."""

    def run(self, address: str) -> None:
        """Start the ranks; return when they are done, or raise when one fails."""
        from attnmesh.cli.serve_worker import serve_rank

        run_on_machine(self.count, serve_rank, self.settings, address)

    def kill(self) -> None:
        """End the ranks at once."""
        for process in {*mp.active_children()} - self.others:
            process.kill()


def serve(
    model: Model,
    revision: Revision = None,
    mesh: MeshOption = "auto",
    ranks: Ranks = None,
    host: Host = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0 takes a free one.")] = 8000,
    served_name: ServedName = None,
    api_key: ApiKey = None,
    max_rows: Annotated[int, typer.Option(min=1, help="Requests that decode at a time.")] = 16,
    max_queue: Annotated[int, typer.Option(min=1, help="Requests that wait; further ones get 429.")] = 64,
    cache_memory: Annotated[float | None, typer.Option(min=0.001, help="GB of keys and values on a rank.")] = None,
    max_gap: MaxGap = None,
    max_model_len: Annotated[int | None, typer.Option(min=2, help="Longest context; the model's by default.")] = None,
    max_body: Annotated[int, typer.Option(min=1, help="MB of a request's body.")] = 32,
    max_restarts: MaxRestarts = 3,
    drain: Annotated[float, typer.Option(min=1, help="Seconds that open requests get to end at SIGTERM.")] = 30,
    deadline: Deadline = None,
    merge: Merge = "auto",
    reproducible: Reproducible = False,
    dtype: Dtype = "auto",
    kv: KvOption = "auto",
    verbose: Verbose = False,
) -> None:
    """Serve a language model whose contexts are spread over ranks, over HTTP as OpenAI does."""
    from attnmesh.cli.serve_worker import Settings
    from attnmesh.serve.app import App
    from attnmesh.serve.door import LOCAL, Limits
    from attnmesh.serve.front import Front
    from attnmesh.serve.metrics import Metrics
    from attnmesh.serve.server import listen, run

    cache = cache_options(dtype, merge, reproducible, kv)
    set_deadline(deadline)
    _check_key(api_key)
    hosts = TorchrunRanks.of_front()
    world = hosts.count if hosts is not None else enter_world(ranks, mesh)
    with Status("looking for the model") as status:
        prepared = prepare_model(model, world, mesh, status, images=None, revision=revision)
    check_reproducible("--reproducible", reproducible, prepared.mesh.shape.queries * prepared.mesh.shape.keys, merge)
    longest = _longest(max_model_len, prepared.longest)
    engine: dict[str, Any] = {"max_rows": max_rows, "max_queue": max_queue, "max_model_len": longest}
    engine |= {"max_gap": max_gap, "cache_memory": cache_memory and round(cache_memory * 1e9)}
    settings = Settings(prepared.for_ranks, dtype, deadline, engine | cache)
    if under_torchrun():
        serve_under_torchrun(settings)
        return
    ranks_ = hosts or LocalRanks(world, settings)
    front = Front(ranks_, max_requests=max_rows + max_queue, max_restarts=max_restarts, metrics=Metrics())
    limits = Limits(api_key, host in (*LOCAL, "::1"), max_body << 20)
    with leaving_tidily(), closing(listen(host, port)) as listening:
        if not limits.local and api_key is None:
            print_message("all who reach this machine can ask: --api-key keeps others out")
        app = App(front, prepared.tokenizer, served_name or model, limits, prepared.processor)
        front.on_ready = lambda _: print_message(_ready(app.name, host, listening.getsockname()[1], prepared, hosts))
        run(app, listening, drain)


def _ready(name: str, host: str, port: int, prepared: Any, hosts: TorchrunRanks | None) -> str:
    """Return what the command says when requests are served."""
    from attnmesh.hf.load import pinned

    place = f", front {os.getpid()} on {gethostname()}" if hosts else ""
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    commit = pinned(prepared.place).get("revision")  # that ranks which are started again read, too
    revision = f", revision {printable(commit)}" if commit else ""
    return str(escape(f"serving {printable(name)} on {url}, mesh {prepared.mesh}{revision}{place}"))


def _check_key(api_key: str | None) -> None:
    """Raise on a key that no header can carry."""
    fits = api_key is None or (api_key.isascii() and api_key.isprintable() and " " not in api_key and api_key != "")
    given, fix = "other characters, or none", "take letters and digits"
    require(fits, ArgumentError, "--api-key", "printable ASCII without spaces", given, fix)


def _longest(asked: int | None, of_model: int | None) -> int:
    """Return the longest context, or raise if the model has a shorter one, or none."""
    fix = "name a length that the memory holds"
    require(bool(asked or of_model), ArgumentError, "--max-model-len", "a length: the model has none", "none", fix)
    fits = asked is None or of_model is None or asked <= of_model
    require(fits, ArgumentError, "--max-model-len", f"at most {of_model}", asked, "take a model with a longer context")
    return int(asked or of_model or 0)
