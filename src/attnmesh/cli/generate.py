"""The command `attnmesh generate`: check the options in one process, start the ranks, show their messages."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

from attnmesh.cli.generate_prompt import Prepared, Prompt, prepare
from attnmesh.cli.launch import Send, check_ranks, is_first_rank, run_on_machine, under_torchrun
from attnmesh.cli.mesh_option import KvOption, ranks_of_axes, storage_of
from attnmesh.cli.output import AsJson, Status, Verbose, console, pairs, print_json, print_message
from attnmesh.comm.failures import set_deadline
from attnmesh.core.partial import DTYPES
from attnmesh.decode.checks import check_reproducible
from attnmesh.errors import ArgumentError, MeshError, check_choice, require
from attnmesh.mesh.merges import MERGE_CHOICES
from attnmesh.runtime.machine import machine
from attnmesh.serve.text import Piece, Text, Token
from attnmesh.setup.rendezvous import enter

Model = Annotated[str, typer.Option(help="A folder, a GGUF file, a name on the hub, or smollm2, which a package has.")]
Revision = Annotated[
    str | None, typer.Option(help="Branch, tag or commit of a model on the hub; its main branch by default.")
]
PromptFile = Annotated[
    Path | None, typer.Option(help="A file of text to begin with; - reads standard input.", dir_okay=False)
]
Images = Annotated[
    list[Path] | None, typer.Option("--image", help="A file with an image, before the text; several of them.")
]
Ranks = Annotated[
    int | None,
    typer.Option(min=1, help="Ranks to start on this machine; those of --mesh by default, under torchrun its own."),
]
MeshOption = Annotated[
    str,
    typer.Option(
        help="Ranks along named axes: heads, queries, keys, and tp for ranks that share weights; as queries=2,keys=2 "
        "or tp=2,keys=4. tp=keys=8: the same ranks share both."
    ),
]
TopP = Annotated[
    float | None, typer.Option(min=0, max=1, help="Sample among the likeliest, of this probability together.")
]
Stop = Annotated[
    list[str] | None, typer.Option("--stop", help="End where this text appears, and leave it out; several of them.")
]
Raw = Annotated[bool, typer.Option("--raw", help="Go on with the prompt as it stands, without a chat template.")]
Merge = Annotated[str, typer.Option(help=f"How ranks merge: {', '.join(MERGE_CHOICES)}.")]
Reproducible = Annotated[bool, typer.Option("--reproducible", help="The same bits on 1, 2, 4, 8, ... ranks.")]
CheckpointFolder = Annotated[
    Path | None,
    typer.Option(help="Save the state to this folder, and resume from a state saved there.", file_okay=False),
]
Deadline = Annotated[float | None, typer.Option(help="Seconds of silence after which a rank counts as failed.")]
Dtype = Annotated[str, typer.Option(help=f"auto, or one of {', '.join(DTYPES)}.")]


def generate(
    model: Model,
    revision: Revision = None,
    prompt: Annotated[str, typer.Option(help="What to say; after the file's text, if both are given.")] = "",
    prompt_file: PromptFile = None,
    image: Images = None,
    ranks: Ranks = None,
    mesh: MeshOption = "auto",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at the most.")] = 64,
    temperature: Annotated[float | None, typer.Option(min=0, help="Sample, at this temperature; 0 is greedy.")] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample among so many of the likeliest tokens.")] = None,
    top_p: TopP = None,
    seed: Annotated[int, typer.Option(help="Seed of sampling.")] = 0,
    stop: Stop = None,
    raw: Raw = False,
    merge: Merge = "auto",
    reproducible: Reproducible = False,
    checkpoint: CheckpointFolder = None,
    every: Annotated[int, typer.Option(min=1, help="New tokens from one checkpoint to the next.")] = 64,
    deadline: Deadline = None,
    dtype: Dtype = "auto",
    kv: KvOption = "auto",
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Generate text with a language model whose context is spread over ranks, and print what it took."""
    from attnmesh.cli.generate_worker import Request

    cache = cache_options(dtype, merge, reproducible, kv)
    set_deadline(deadline)
    _check_options(temperature, seed, stop, image, checkpoint)
    world = enter_world(ranks, mesh)
    with Status("reading the prompt") as status:
        asked = Prompt(prompt, prompt_file, raw, tuple(image or ()))
        prepared = prepare(model, asked, max_new_tokens, world, mesh, status, revision=revision)
        shape = prepared.mesh.shape
        check_reproducible("--reproducible", reproducible, shape.queries * shape.keys, merge)
        request = Request(
            prompt=prepared if stop else prepared.for_ranks,  # ranks find stop strings with the tokenizer
            max_new_tokens=max_new_tokens,
            dtype=dtype,
            seed=seed,
            checkpoint=None if checkpoint is None else str(checkpoint),
            every=every,
            deadline=deadline,
            cache=cache,
            options=_sampling(temperature, top_k, top_p),
            stops=tuple(stop or ()),
        )
        display = Display(status, Text(prepared.tokenizer, request.stops), len(prepared.ids), quiet=as_json)
        result = _run(request, world, display)
    if is_first_rank():
        text = display.end()
        if as_json:
            place = {"model": prepared.place, "mesh": str(prepared.mesh), "why": prepared.mesh.reason}
            print_json({**asdict(result), "text": text, **place, "machine": machine()})
        else:
            _print_table(result, prepared, verbose)


def cache_options(dtype: str, merge: str, reproducible: bool, kv: str) -> dict[str, Any]:
    """Return the options of caches, or raise on a name that is unknown, that of the model's dtype included."""
    check_choice("--dtype", dtype, ("auto", *DTYPES), "leave it out", ArgumentError)
    check_choice("--merge", merge, MERGE_CHOICES, "leave it out", ArgumentError)
    block = 128 if reproducible else None
    return {"merge": merge, "reproducible": reproducible, "block": block, "storage": storage_of(kv)}


def _check_options(
    temperature: float | None, seed: int, stops: list[str] | None, images: list[Path] | None, checkpoint: Path | None
) -> None:
    """Raise before the model is loaded on values of no use: logits are divided by the temperature."""
    if temperature:
        from attnmesh.hf.serving.stream import COLDEST, HOTTEST

        fits, expected = COLDEST <= temperature <= HOTTEST, f"0, or {COLDEST:.5f} to {HOTTEST:,.0f}"
        require(fits, ArgumentError, "--temperature", expected, temperature, "leave it out, or take about 1")
    if not -(2**63) <= seed < 2**64:
        raise ArgumentError("--seed", "-2^63 to 2^64 - 1", f"{seed:.3g}", "take one of these")
    if "" in (stops or ()):
        raise ArgumentError("--stop", "some text", "an empty one", "leave it out")
    if stops and checkpoint is not None:
        raise ArgumentError("--stop", "no --checkpoint beside it", repr(stops[0]), "leave one out")
    if images and checkpoint is not None:  # a saved state holds no images
        raise ArgumentError("--checkpoint", "a prompt without images", str(checkpoint), "leave it out")


def _sampling(temperature: float | None, top_k: int | None, top_p: float | None) -> dict[str, Any]:
    """Return the options of transformers' `generate`; none of them is greedy decoding."""
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    given = {name: value for name, value in options.items() if value is not None}
    return {"do_sample": True, **given} if given and temperature != 0 else {}


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
                self.status.update(f"decoding: {len(self.text.ids) + 1:,} tokens")
                self._show(self.text.add(Token(token)))

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
    named = ranks_of_axes(mesh)
    if not under_torchrun():
        return check_ranks(ranks or named)
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    enter("nccl" if cuda else "gloo")
    started = dist.get_world_size()
    if ranks not in (None, started):
        raise MeshError("--ranks", f"the {started} that torchrun started", str(ranks), "leave it out under torchrun")
    return started


def _print_table(result: Any, prepared: Prepared, verbose: bool) -> None:
    """Print the result as a table below the text."""
    figures = {
        "prompt": f"{result.prompt_tokens:,} tokens",
        "new": f"{len(result.tokens):,} tokens, {ENDED[result.ended]}",
        "model loaded in": f"{result.load_seconds:.1f} s",
        "prefill": f"{result.prefill_seconds:.2f} s",
        "time per token": f"{1e3 * result.seconds_per_token:.1f} ms, of which merging {result.merging_share:.0%}",
        "keys of a layer, by rank": ", ".join(f"{n:,}" for n in result.keys),
        "keys and values, MB by rank": ", ".join(f"{n / 1e6:.1f}" for n in result.cache_bytes),
        "received per token, kB by rank": ", ".join(f"{n / 1e3:.1f}" for n in result.bytes_per_token),
        "mesh": f"{prepared.mesh}: {prepared.mesh.reason}",
    }
    table = pairs("", figures)
    if verbose:
        table.caption, table.caption_justify = EXPLAINED, "left"
    console.print(table)


ENDED = {"stop": "to the end of the answer", "length": "as many as --max-new-tokens allows"}
"""What is said of the reason for which an answer ends."""

EXPLAINED = """\
Prefill is the whole prompt but its last token, cut over the ranks. The time per token is that of the whole model, the
first tokens included. Merging counts, for each merge, the shortest time of any rank: the other ranks also wait there
for a slower rank's work. Received bytes are those of attention: what tp sends beside it is not counted."""
