"""The command `attnmesh generate`: check what was asked in one process, start the ranks, show what they say."""

import os
import re
import sys
from collections.abc import Callable
from dataclasses import asdict
from logging import ERROR, getLogger
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
import typer
from rich.markup import escape
from rich.status import Status

from attnmesh.cli.launch import run_on_ranks
from attnmesh.cli.netns import ranks_of, world_of
from attnmesh.cli.output import AsJson, Verbose, console, machine, print_json, printable, progress, telling, titled
from attnmesh.comm.failures import set_deadline
from attnmesh.comm.merge_ranks import HOW
from attnmesh.comm.rendezvous import enter
from attnmesh.core.checks import DTYPES
from attnmesh.decode.step import check_reproducible
from attnmesh.errors import ArgumentError, InputError, MeshError, ModelError, RankFailure
from attnmesh.mesh.shapes import Shape, elements, mesh_shapes


def generate(
    model: Annotated[
        str, typer.Option(help="A folder, a GGUF file, a name on the hub, or smollm2, which a package has.")
    ],
    prompt: Annotated[str, typer.Option(help="What to say; after the file's text, if both are given.")] = "",
    prompt_file: Annotated[
        Path | None, typer.Option(help="A file of text to begin with; - reads standard input.", dir_okay=False)
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1, help="Ranks to start on this machine, 1 unless given. Under torchrun those that it started."
        ),
    ] = None,
    mesh: Annotated[str, typer.Option(help='Ranks along heads x queries x keys, as "1x2x2".')] = "auto",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at the most.")] = 64,
    temperature: Annotated[float | None, typer.Option(min=0, help="Sample, at this temperature; 0 is greedy.")] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample among so many of the likeliest tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(min=0, max=1, help="Sample among the likeliest, of this probability together.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of sampling.")] = 0,
    raw: Annotated[
        bool, typer.Option("--raw", help="Go on with the prompt as it stands, without a chat template.")
    ] = False,
    merge: Annotated[str, typer.Option(help=f"How ranks merge: {', '.join(HOW)}.")] = "auto",
    reproducible: Annotated[
        bool, typer.Option("--reproducible", help="The same bits on 1, 2, 4, 8, ... ranks.")
    ] = False,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Keep what there is in this folder, and go on from what is there.", file_okay=False),
    ] = None,
    every: Annotated[int, typer.Option(min=1, help="New tokens from one checkpoint to the next.")] = 64,
    deadline: Annotated[
        float | None, typer.Option(help="Seconds after which a rank that says nothing is given up.")
    ] = None,
    dtype: Annotated[str, typer.Option(help=f"auto, or one of {', '.join(DTYPES)}.")] = "auto",
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Generate text with a language model whose context is spread over ranks, and tell what it took."""
    from attnmesh.cli.generate_worker import Request

    for name, given, known in (("--dtype", dtype, ("auto", *DTYPES)), ("--merge", merge, HOW)):
        if given not in known:
            raise ArgumentError(name, f"one of {', '.join(known)}", repr(given), "leave it out")
    set_deadline(deadline)
    _check_sampling(temperature, seed)
    world = _world(ranks)
    with progress.status("reading the prompt") as status:
        asked = prepare(model, prompt, prompt_file, raw, max_new_tokens, world, mesh, status)
        options = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        sampled = {name: value for name, value in options.items() if value is not None and temperature != 0}
        check_reproducible("--reproducible", reproducible, asked.shape.queries * asked.shape.keys, merge)
        request = Request(
            model=asked.place,
            ids=asked.ids,
            shape=asked.shape,
            heads=asked.heads,
            max_new_tokens=max_new_tokens,
            dtype=dtype,
            seed=seed,
            checkpoint=None if checkpoint is None else str(checkpoint),
            every=every,
            deadline=deadline,
            cache={"merge": merge, "reproducible": reproducible, "block": 128 if reproducible else 16},
            options={"do_sample": True, **sampled} if sampled else {},
        )
        shown = Shown(status, asked.tokenizer, len(asked.ids), quiet=as_json)
        result = _answered(request, world, shown)
    if not _first():
        return
    if as_json:
        text = asked.tokenizer.decode(result.tokens, skip_special_tokens=True)
        plan = {"mesh": "x".join(map(str, asked.shape)), "why": asked.why}
        print_json({**asdict(result), "text": text, **plan, "machine": machine()})
        return
    console.print(_table(result, asked.shape, asked.why, verbose))


def _check_sampling(temperature: float | None, seed: int) -> None:
    """Raise on what ranks would fail with, once they had loaded the model: logits are divided by the temperature."""
    if temperature and not 1e-6 <= temperature <= 1e6:
        raise ArgumentError("--temperature", "0, or 1e-6 to 1e6", str(temperature), "leave it out, or take about 1")
    if not -(2**63) <= seed < 2**64:
        raise ArgumentError("--seed", "a number of 64 bits", f"one of {seed.bit_length()}", "take a smaller one")


class Prepared(NamedTuple):
    """A prompt for a model, checked before any rank is started."""

    place: str
    tokenizer: Any
    ids: tuple[int, ...]
    heads: tuple[int, int]
    shape: Shape
    why: str


def prepare(
    model: str, prompt: str, file: Path | None, raw: bool, new: int, ranks: int, mesh: str, status: Status
) -> Prepared:
    """Find the model, read the prompt, and choose the mesh."""
    from transformers.utils import logging

    from attnmesh.hf.load import locate, open_config, open_tokenizer

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    getLogger("huggingface_hub").setLevel(ERROR)  # it would tell of each attempt to reach the hub
    text = _text(prompt, file)
    if _under_torchrun() and os.environ.get("LOCAL_RANK") != "0":
        dist.barrier()  # what has to be unpacked or fetched, one rank of a host does
    place = locate(model, telling(status))
    if _under_torchrun() and os.environ.get("LOCAL_RANK") == "0":
        dist.barrier()
    config = open_config(place).get_text_config(decoder=True)
    tokenizer = open_tokenizer(place)
    ids = _ids(tokenizer, text, raw)
    _check_length(len(ids), new, ranks, config)
    heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return Prepared(place, tokenizer, tuple(ids), heads, *choose(mesh, ranks, *heads))


class Shown:
    """What ranks say, as it is shown: progress on standard error, the text on standard output."""

    def __init__(self, status: Status, tokenizer: Any, prompt_tokens: int, *, quiet: bool) -> None:
        from transformers import TextStreamer

        self.status, self.prompt_tokens, self.quiet = status, prompt_tokens, quiet
        self.streamer = TextStreamer(tokenizer, skip_special_tokens=True)
        status.update("loading the model")

    def __call__(self, said: Any) -> None:
        """Show one thing."""
        from attnmesh.cli.generate_worker import Loaded, Prefilled, Resumed

        if isinstance(said, Loaded):
            self.status.update(f"model loaded in {said.seconds:.1f} s; prefilling {self.prompt_tokens:,} tokens")
        elif isinstance(said, Resumed):
            progress.print(f"going on from {said.tokens:,} tokens of the checkpoint")
        elif isinstance(said, Prefilled):
            if said.tokens < self.prompt_tokens:
                self.status.update(f"prefilled {said.tokens:,} of {self.prompt_tokens:,} tokens")
            else:
                self.status.update("decoding")
                if not self.quiet:
                    self.status.stop()  # the text comes now
        elif not self.quiet:
            self.streamer.put(torch.tensor([said.token]))

    def end(self) -> None:
        """Show what of the text is still held back."""
        if not self.quiet:
            self.streamer.end()


def _answered(request: Any, world: int, shown: Shown) -> Any:
    """Rank 0's answer: of ranks started here, or under torchrun of this process as one of them."""
    from attnmesh.cli.generate_worker import answer

    if not _under_torchrun():
        threads = max(1, torch.get_num_threads() // world)
        gpus = torch.cuda.device_count() >= world
        result = run_on_ranks(world, answer, request, seconds=None, threads=threads, gpus=gpus, heard=shown)[0]
    else:
        result = answer(shown if _first() else lambda _: None, request)
        dist.destroy_process_group()
    if _first():
        shown.end()
    return result


def choose(mesh: str, ranks: int, q_heads: int, kv_heads: int) -> tuple[Shape, str]:
    """The shape asked for, or the one that sends least; and why."""
    shapes = mesh_shapes(ranks, q_heads, kv_heads, training=False)
    if mesh != "auto":
        sizes = re.fullmatch("([0-9]{1,9})x([0-9]{1,9})x([0-9]{1,9})", mesh.lower())
        if sizes is None:
            raise MeshError("--mesh", 'three numbers, as "1x2x2", or "auto"', repr(mesh), "leave it out")
        shape = Shape(*map(int, sizes.groups()))
        if shape not in shapes:
            known = ", ".join("x".join(map(str, each)) for each in shapes)
            given = f"{mesh} on {ranks} ranks, with {q_heads}/{kv_heads} heads"
            fix = f"the heads axis has to divide {kv_heads} key heads"
            fix = fix if shape.ranks == ranks else f"the numbers have to multiply to {ranks}"
            raise MeshError("--mesh", f"one of {known}", given, fix)
        return shape, "it was asked for"
    if len(shapes) == 1:
        return shapes[0], "one rank" if ranks == 1 else f"no other shape serves {q_heads}/{kv_heads} heads"
    sent = [sum(elements(shape, q_heads, kv_heads, training=False)) for shape in shapes]
    runner = f"{sent[0]:.0f} elements a token and column of a head, {'x'.join(map(str, shapes[1]))} {sent[1]:.0f}"
    return shapes[0], f"of {len(shapes)} shapes it sends least in prefill: {runner}"


def _world(ranks: int | None) -> int:
    """How many ranks there will be; under torchrun this process becomes one of them now."""
    if not _under_torchrun():
        return ranks_of(world_of(ranks or 1, None))
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    enter("nccl" if cuda else "gloo")
    started = dist.get_world_size()
    if ranks not in (None, started):
        raise MeshError("--ranks", f"the {started} that torchrun started", str(ranks), "leave it out under torchrun")
    return started


def _under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def _first() -> bool:
    return not _under_torchrun() or os.environ.get("RANK") == "0"


def _text(prompt: str, file: Path | None) -> str:
    try:
        begun = "" if file is None else sys.stdin.read() if str(file) == "-" else file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError("--prompt-file", "a file of text", f"{file}: {error}", "name another") from None
    text = "\n\n".join(part for part in (begun, prompt) if part.strip())
    if not text:
        raise ModelError("prompt", "some text", "an empty prompt", "pass --prompt or --prompt-file")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # bytes of a command line that are none come as halves of signs
        raise ModelError("prompt", "text in UTF-8", str(error), "look to the terminal's encoding") from None
    return text


def _ids(tokenizer: Any, text: str, raw: bool) -> list[int]:
    if raw or not tokenizer.chat_template:
        ids: list[int] = tokenizer(text)["input_ids"]
        return ids
    said = [{"role": "user", "content": text}]
    return list(tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=True)["input_ids"])


def _check_length(tokens: int, new: int, ranks: int, config: Any) -> None:
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and tokens + new > longest:
        fix = f"shorten the prompt by {tokens + new - longest} tokens, or use a model with a longer context"
        fix = f"pass --max-new-tokens {longest - tokens} or less" if tokens < longest // 2 else fix
        given = f"{tokens} and {new} new ones"
        raise ModelError("prompt", f"at most {longest} tokens, the model's context", given, fix)
    if not tokens:
        raise ModelError("prompt", "at least one token", "none by this tokenizer", "check the tokenizer's files")
    if tokens < ranks:
        given, fix = f"{tokens} on {ranks} ranks", "use fewer ranks, or a longer prompt"
        raise MeshError("prompt", "at least one token a rank", given, fix)


def _table(result: Any, shape: Shape, why: str, verbose: bool) -> Any:
    """What the run took."""
    name = "x".join(map(str, shape))
    table = titled("", "", "")
    table.show_header = False
    for label, value in {
        "prompt": f"{result.prompt_tokens:,} tokens",
        "new": f"{len(result.tokens):,} tokens",
        "model loaded in": f"{result.load_seconds:.1f} s",
        "prefill": f"{result.prefill_seconds:.2f} s",
        "time per token": f"{1e3 * result.seconds_per_token:.1f} ms, of which merging {result.merging_share:.0%}",
        "keys of a layer, by rank": ", ".join(f"{n:,}" for n in result.keys),
        "keys and values, MB by rank": ", ".join(f"{n / 1e6:.1f}" for n in result.cache_bytes),
        "received per token, kB by rank": ", ".join(f"{n / 1e3:.1f}" for n in result.bytes_per_token),
        "mesh": f"{name} (heads x queries x keys): {why}",
    }.items():
        table.add_row(label, value)
    if verbose:
        table.caption, table.caption_justify = EXPLAINED, "left"
    return table


EXPLAINED = """\
Prefill is all of the prompt but its last token, cut over the ranks. A token's time is that of the whole model, also of
the first tokens. Of merging only what it takes by itself is counted: of each merge across ranks the shortest time that
a rank spent in it, since the others also waited there for each other's work."""


def show_errors(run: Callable[[], None], verbose: bool) -> int:
    """Run the command; what went wrong is one line, and with `verbose` a traceback. The exit code."""
    from attnmesh.cli.launch import RankError

    try:
        run()
    except (ValueError, RankError, RankFailure, OSError) as error:
        if verbose:
            raise
        if _first() or not isinstance(error, InputError):  # what all ranks raise alike is said once
            progress.print(f"[bold red]error:[/] {escape(_brief(error))}", highlight=False, soft_wrap=True)
        return 1
    except ModuleNotFoundError as missing:
        extra = "plot" if missing.name == "matplotlib" else "hf"
        told = f"[bold red]error:[/] this needs {missing.name}: pip install 'attnmesh\\[{extra}]'"
        progress.print(told, highlight=False)
        return 1
    except SystemExit as left:
        if left.code == 130:
            progress.print("interrupted: all ranks have ended")
        raise
    return 0


def _brief(error: BaseException) -> str:
    said = str(error).strip() or type(error).__name__
    lines = [said] if isinstance(error, InputError) else said.splitlines()
    return printable(lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]} (-v shows more)")
