"""The command `attnmesh generate`: prepare the prompt in one process, start the ranks, show their messages."""

import os
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from attnmesh.cli.generate_prompt import ModelOnMesh, PromptOptions, prepare_prompt
from attnmesh.cli.launch import Send, run_on_machine
from attnmesh.cli.mesh_option import MeshOptions
from attnmesh.cli.output import Status, console, pairs, print_json, print_message
from attnmesh.comm.failures import set_deadline
from attnmesh.errors import MeshError
from attnmesh.runtime.machine import machine
from attnmesh.serve.spelling import Spelling
from attnmesh.serve.text import Piece, SentToken, Text
from attnmesh.setup.rendezvous import enter
from attnmesh_command.messages import is_first_rank, under_torchrun
from attnmesh_command.model_options import GenerateOptions, ServeOptions
from attnmesh_command.option_texts import ranks_of_axes
from attnmesh_command.shared_options import check_reproducible_option, named_shares

ENDED = {"stop": "to the end of the answer", "length": "as many as --max-new-tokens allows"}
"""Words for the reason for which an answer ends."""

GENERATION_COLUMNS = """\
Prefill is the whole prompt but its last token, cut over the ranks. The time per token is that of the whole model, the
first tokens included. Merging counts, for each merge, the shortest time of any rank: the other ranks also wait there
for a slower rank's work. Weights in memory are a rank's share of the file's pages that ranks of a host map together.
Received bytes are those of attention and of shared layers: what tp sends beside it is not counted."""


def generate(options: GenerateOptions) -> None:
    """Generate text, and print what it took."""
    from attnmesh.cli.generate_worker import GenerateRequest

    set_deadline(options.deadline)
    world = enter_world(options.ranks, options.mesh)
    with Status("reading the prompt") as status:
        prompt_options = PromptOptions(options.prompt, options.prompt_file, options.raw, tuple(options.image or ()))
        model, prompt = prepare_prompt(
            options.model,
            prompt_options,
            options.max_new_tokens,
            world,
            mesh_options(options),
            status,
            revision=options.revision,
        )
        request = GenerateRequest(
            model=model if options.stop else model.for_ranks,  # ranks find stop strings with the tokenizer
            prompt=prompt,
            max_new_tokens=options.max_new_tokens,
            dtype=options.dtype,
            weights=options.weights,
            seed=options.seed,
            checkpoint=None if options.checkpoint is None else str(options.checkpoint),
            every=options.every,
            deadline=options.deadline,
            cache={**cache_options(options, model), **_token_places(options)},
            options=_sampling(options.temperature, options.top_k, options.top_p),
            stops=tuple(options.stop or ()),
        )
        spelling = Spelling(model.tokenizer)
        display = Display(status, Text(spelling, request.stops), len(prompt.ids), quiet=options.as_json)
        result = _run(request, world, display)
    if is_first_rank():
        text = display.end()
        if options.as_json:
            model_and_mesh = {"model": model.path, "mesh": str(model.mesh), "why": model.mesh.reason}
            print_json({**asdict(result), "text": text, **model_and_mesh, "machine": machine()})
        else:
            _print_table(result, model, options.verbose)


def mesh_options(options: GenerateOptions | ServeOptions) -> MeshOptions:
    """Return the options by which a mesh is chosen, and who computes the layers."""
    return MeshOptions(options.mesh, options.weights, options.dtype)


def cache_options(options: GenerateOptions | ServeOptions, model: ModelOnMesh) -> dict[str, Any]:
    """Return the options of caches, or raise if the mesh that was chosen cannot be reproducible."""
    shape, reproducible = model.mesh.shape, options.reproducible
    check_reproducible_option(reproducible, shape.queries * shape.keys, options.merge)
    block, storage = 128 if reproducible else None, None if options.kv == "auto" else options.kv
    caches = {"block": block, "storage": storage, "shares": named_shares(options.shares)}
    return {"merge": options.merge, "reproducible": reproducible, **caches}


def _token_places(options: GenerateOptions) -> dict[str, Any]:
    """Return where a cache has its tokens."""
    return {"folder": options.kv_folder and str(options.kv_folder), "hot": options.hot}


def _sampling(temperature: float | None, top_k: int | None, top_p: float | None) -> dict[str, Any]:
    """Return the options of transformers' `generate`; none of them is greedy decoding."""
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    settings = {name: value for name, value in options.items() if value is not None}
    return {"do_sample": True, **settings} if settings and temperature != 0 else {}


class Display:
    """Messages of rank 0, as they are shown: progress on standard error, the text on standard output."""

    def __init__(self, status: Status, text: Text, prompt_tokens: int, *, quiet: bool) -> None:
        self.status, self.text, self.prompt_tokens, self.quiet = status, text, prompt_tokens, quiet
        self.pieces: list[str] = []
        status.update("loading the model")

    def __call__(self, message: tuple[str, Any]) -> None:
        """Show one message."""
        match message:
            case "loaded", seconds:
                self.status.update(f"model loaded in {seconds:.1f} s; prefilling {self.prompt_tokens:,} tokens")
            case "resumed", tokens:
                print_message(f"going on from {tokens:,} tokens of the checkpoint")
            case "prefilled", tokens if tokens < self.prompt_tokens:
                self.status.update(f"prefilled {tokens:,} of {self.prompt_tokens:,} tokens")
            case "prefilled", _:
                self.status.update("decoding")
                if not self.quiet and _one_stream():
                    self.status.stop()  # the text is the progress
            case "token", token:
                self.status.update(f"decoding: {self.text.count + 1:,} tokens")
                self._show(self.text.add(SentToken(token)))

    def end(self) -> str:
        """Show the text that was held back, and return all text."""
        self._show(self.text.end())
        if not self.quiet:
            print(flush=True)
        return "".join(self.pieces)

    def _show(self, piece: Piece) -> None:
        self.pieces.append(piece.text)
        if not self.quiet:
            print(piece.text, end="", flush=True)


def _one_stream() -> bool:
    """Return True if standard output and error are shown in one place, where progress would cut the text."""
    try:
        return os.path.sameopenfile(1, 2) or console.is_terminal
    except OSError:
        return True


def _run(request: Any, world: int, display: Send) -> Any:
    """Return rank 0's result: of ranks started now, or under torchrun of this process as one of them."""
    from attnmesh.cli.generate_worker import run_request

    if not under_torchrun():
        return run_on_machine(world, run_request, request, on_message=display)[0]
    result = run_request(display, request)
    dist.destroy_process_group()
    return result


def enter_world(ranks: int | None, mesh: str) -> int:
    """Return the number of ranks, those of the named axes by default; under torchrun, join the process group."""
    named_ranks = ranks_of_axes(mesh)
    if not under_torchrun():
        return ranks or named_ranks
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    enter("nccl" if cuda else "gloo")
    started = dist.get_world_size()
    if ranks not in (None, started):
        raise MeshError("--ranks", f"the {started} that torchrun started", str(ranks), "leave it out under torchrun")
    return started


def _print_table(result: Any, model: ModelOnMesh, verbose: bool) -> None:
    """Print the result as a table below the text."""
    figures = {
        "prompt": f"{result.prompt_tokens:,} tokens",
        "new": f"{len(result.tokens):,} tokens, {ENDED[result.ended]}",
        "model loaded in": f"{result.load_seconds:.1f} s",
        "prefill": f"{result.prefill_seconds:.2f} s",
        "time per token": f"{1e3 * result.seconds_per_token:.1f} ms, of which merging {result.merging_share:.0%}",
        "keys of a layer, by rank": ", ".join(f"{number:,}" for number in result.keys),
        "keys and values, MB by rank": ", ".join(f"{number / 1e6:.1f}" for number in result.cache_bytes),
        "weights": f"{result.weights}, MB by rank: "
        + ", ".join(f"{number / 1e6:.1f}" for number in result.weight_bytes),
        "received per token, kB by rank": ", ".join(f"{number / 1e3:.1f}" for number in result.bytes_per_token),
        "mesh": ": ".join(filter(None, (str(model.mesh), model.mesh.reason))),
    }
    table = pairs("", figures)
    if verbose:
        table.caption, table.caption_justify = GENERATION_COLUMNS, "left"
    console.print(table)
