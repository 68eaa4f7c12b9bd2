"""The command `attnmesh serve`: check the options, listen, and keep ranks alive behind the front."""

import multiprocessing as mp
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from socket import gethostname, socket
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from attnmesh.cli.generate_command import cache_options, enter_world, mesh_options
from attnmesh.cli.generate_prompt import ModelOnMesh, find_draft, find_model
from attnmesh.cli.launch import leaving_tidily, run_on_machine
from attnmesh.cli.output import Status, print_message
from attnmesh.cli.serve_hosts import TorchrunRanks, serve_under_torchrun
from attnmesh.comm.failures import set_deadline
from attnmesh.errors import ArgumentError
from attnmesh_command.messages import printable, under_torchrun
from attnmesh_command.model_options import ServeOptions, draft_of

if TYPE_CHECKING:
    from attnmesh.cli.serve_worker import ServeSettings


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

        print_message(f"starting {self.count} ranks" if self.count > 1 else "starting 1 rank")
        run_on_machine(self.count, serve_rank, self.settings, address)

    def kill(self, *, will_restart: bool = False) -> None:
        """End the ranks at once."""
        for process in {*mp.active_children()} - self.others:
            process.kill()


def serve(options: ServeOptions) -> None:
    """Serve over HTTP; under torchrun be one of the ranks."""
    from attnmesh.serve.server import listen

    set_deadline(options.deadline)
    hosts = TorchrunRanks.of_front()
    world = hosts.count if hosts is not None else enter_world(options.ranks, options.mesh)
    if under_torchrun():
        _, settings, _ = _serving_setup(options, world)
        serve_under_torchrun(settings)
        return
    with leaving_tidily(), holding(options.store), closing(listen(options.host, options.port)) as listening:
        model, settings, defaults = _serving_setup(options, world)
        _serve(options, listening, model, defaults, hosts or LocalRanks(world, settings))


def _serving_setup(options: ServeOptions, world: int) -> tuple[ModelOnMesh, "ServeSettings", dict[str, Any]]:
    """Return the model's place and mesh, the settings of its ranks, and its defaults of requests."""
    from attnmesh.cli.serve_worker import ServeSettings

    with Status("looking for the model") as status:
        mesh = mesh_options(options)
        model = find_model(options.model, world, mesh, status, images=None, revision=options.revision)
        draft, tokens = (None, None) if options.draft is None else draft_of(options.draft)
        place = None if draft is None else find_draft(draft, model.tokenizer, status)
    max_context = _max_context(options.max_model_len, model.max_context)
    memory = options.cache_memory and round(options.cache_memory * 1e9)
    engine: dict[str, Any] = {
        "max_rows": options.max_rows,
        "max_queue": options.max_queue,
        "max_model_len": max_context,
    }
    engine |= {"max_gap": options.max_gap, "cache_memory": memory, "speculate": options.speculate}
    engine["draft_tokens"] = tokens
    engine |= cache_options(options, model)
    engine["store"] = _store(options, model)
    engine["tokens_end"], defaults = _generation(options.generation_config, model)
    return (
        model,
        ServeSettings(model.for_ranks, options.dtype, options.weights, options.deadline, engine, place),
        defaults,
    )


@contextmanager
def holding(folder: Path | None) -> Iterator[None]:
    """Keep other servers from a folder of prefixes, also while ranks start again."""
    if folder is None:
        yield
        return
    from attnmesh.cli.serve_worker import lock_for_server

    lock = lock_for_server(folder)
    try:
        yield
    finally:
        lock.release()


def _store(options: ServeOptions, model: ModelOnMesh) -> Any:
    """Return where the engine keeps prefixes; None for nowhere."""
    from attnmesh.cli.serve_worker import prefix_store

    sizes = {"memory": options.store_memory, "disk": options.store_disk}
    limits = {name: round(size * 1e9) for name, size in sizes.items() if size is not None}
    return None if options.store is None else prefix_store(options.store.absolute(), model, limits)


def _serve(
    options: ServeOptions,
    listening: socket,
    model: ModelOnMesh,
    defaults: dict[str, Any],
    ranks: LocalRanks | TorchrunRanks,
) -> None:
    """Start the front, and serve with the ranks."""
    from attnmesh.serve.access import LOCAL, Limits
    from attnmesh.serve.metrics import Metrics
    from attnmesh.serve.routes import App
    from attnmesh.serve.server import run
    from attnmesh.serve.supervisor import Supervisor

    counts: dict[str, Any] = {"max_requests": options.max_rows + options.max_queue}
    counts["max_restarts"] = options.max_restarts
    front = Supervisor(ranks, **counts, metrics=Metrics(), deadline=options.deadline)
    front.log = lambda line: print_message(escape(printable(line)))
    limits = Limits(options.api_keys(), options.host in (*LOCAL, "::1"), options.max_body << 20)
    if not limits.local and not limits.api_keys:
        print_message("all who reach this machine can ask: --api-key keeps others out")
    names = options.served_name or [options.model]
    app = App(front, model.tokenizer, names, limits, model.processor, defaults, options.tool_format)
    port = listening.getsockname()[1]
    on_hosts = isinstance(ranks, TorchrunRanks)
    front.on_ready = lambda engine_sizes: print_message(_ready(app, options.host, port, model, on_hosts, engine_sizes))
    run(app, listening, options.drain)


def _generation(source: str, model: ModelOnMesh) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Return the tokens that end answers, and the model's defaults of requests."""
    from attnmesh.hf.load import open_generation_config
    from attnmesh.serve.model_defaults import read_model_defaults, tokens_that_end

    config = open_generation_config(model.path)
    return tokens_that_end(config, model.tokenizer), read_model_defaults(config) if source == "auto" else {}


def _ready(app: Any, host: str, port: int, model: ModelOnMesh, on_hosts: bool, engine_sizes: dict[str, Any]) -> str:
    """Return what the command says when requests are served."""
    from attnmesh.hf.load import split_revision

    commit = split_revision(model.path)[1].get("revision")  # that ranks which are started again read, too
    place = f", revision {printable(commit)}" if commit else ""
    place += f", front {os.getpid()} on {gethostname()}" if on_hosts else ""
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    defaults = ", ".join(f"{name} {value}" for name, value in app.defaults.items())
    place += f", {engine_sizes.get('cache_bytes', 0) / 1e9:.1f} GB of caches a rank"
    place += f"; {app.formats}" if str(app.formats) else ""
    place += f"; defaults of the model: {defaults}" if defaults else ""
    return str(escape(f"serving {printable(', '.join(app.names))} on {url}, mesh {model.mesh}{place}"))


def _max_context(option: int | None, model_limit: int | None) -> int:
    """Return the longest context, or raise if the model has a shorter one, or none."""
    if not (option or model_limit):
        fix = "name a length that the memory holds"
        raise ArgumentError("--max-model-len", "a length: the model has none", "none", fix)
    fits = option is None or model_limit is None or option <= model_limit
    if not fits:
        raise ArgumentError(
            "--max-model-len", f"at most {model_limit}", str(option), "take a model with a longer context"
        )
    return int(option or model_limit or 0)
