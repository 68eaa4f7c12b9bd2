"""Work of `attnmesh serve` on each rank: load the model, and run the engine."""

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from time import perf_counter
from typing import Any

import torch.distributed as dist

from attnmesh import hf
from attnmesh.cli.generate_prompt import ModelOnMesh
from attnmesh.cli.output import print_message
from attnmesh.cli.rank_model import load_draft, load_model
from attnmesh.comm.failures import set_deadline
from attnmesh.errors import GrammarError
from attnmesh.hf.load import open_tokenizer, split_revision, tokenizer_text
from attnmesh.hf.models import rope_switches
from attnmesh.hf.serving.grammar_masks import has_grammars
from attnmesh.serve.rank_requests import serve_rank_0
from attnmesh.store.block_folder import FolderLock, make_private_folder

LOADING_SECONDS = 1800.0
"""Seconds that one rank may take longer than another to load the model."""


@dataclass(frozen=True)
class ServeSettings:
    """The model, and the options of its engine, the same on all ranks."""

    model: ModelOnMesh
    dtype: str
    weights: str
    deadline: float
    engine: dict[str, Any]
    """Options of `hf.Engine`."""
    draft: str | None = None
    """Place of the draft model; None without one."""


def prefix_store(folder: Path, model: ModelOnMesh, sizes: dict[str, int]) -> hf.PrefixStore:
    """Return a store of prefixes of this tokenizer and this commit of the model."""
    tokenizer = sha256(tokenizer_text(model.tokenizer).encode()).hexdigest()
    return hf.PrefixStore(folder, source=f"{tokenizer} {split_revision(model.path)[1]}", **sizes)


def lock_for_server(folder: Path) -> FolderLock:
    """Return a lock on a folder of prefixes that the front holds, also while ranks start again."""
    return FolderLock(make_private_folder(folder), "server")


def read_grammars(path: str) -> hf.GrammarTokens | None:
    """Return what follows grammars of answers; None if the front refuses them, too."""
    if not has_grammars():
        return None
    try:
        return hf.GrammarTokens(open_tokenizer(path))
    except GrammarError:
        return None


def serve_rank(settings: ServeSettings, address: str) -> None:
    """Serve as one of several ranks; rank 0 connects to the front at the address, and says what it does."""
    set_deadline(max(settings.deadline, LOADING_SECONDS))
    is_first = dist.get_rank() == 0
    start = perf_counter()
    if is_first:
        print_message("loading weights")
    reproducible = bool(settings.engine.get("reproducible"))
    loaded = load_model(settings.model, settings.dtype, settings.weights, reproducible=reproducible)
    model, device_mesh, weights = loaded
    options: dict[str, Any] = {"output": settings.model.mesh.output, **settings.engine}
    options["draft"] = None if settings.draft is None else load_draft(settings.draft, settings.dtype, loaded)
    grammars = read_grammars(settings.model.path) if is_first else None
    engine = hf.Engine(model, device_mesh, grammars=grammars, **options)
    set_deadline(settings.deadline)
    if is_first:
        print_message(f"weights loaded in {perf_counter() - start:.1f} s, layers {weights}")
        engine_sizes = {"max_model_len": engine.max_context, "cache_bytes": engine.scheduler.memory.limit}
        try:
            serve_rank_0(engine, address, engine_sizes | {"rope_switches": rope_switches(model.config)})
        finally:
            if grammars is not None:
                grammars.close()
    else:
        engine.follow()
