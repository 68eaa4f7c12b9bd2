"""Options of `attnmesh generate` and `attnmesh serve`, which check themselves before anything slow is imported."""

import re
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import Annotated

import typer

from attnmesh_command.choices import COLDEST, HOTTEST, MAX_GUESSES, TOOL_FORMATS
from attnmesh_command.messages import OptionError, check_named, check_option, print_note, under_torchrun
from attnmesh_command.option_texts import (
    announce_model,
    check_model,
    check_ranks_of_mesh,
    is_here,
    is_utf8,
    ranks_of_axes,
    read_prompt,
)
from attnmesh_command.shared_options import (
    AsJson,
    Deadline,
    Dtype,
    KvOption,
    Merge,
    MeshOption,
    Model,
    Ranks,
    Reproducible,
    Revision,
    Shares,
    Verbose,
    WeightsOption,
    check_caches,
    check_deadline,
    check_ranks,
    check_weights,
    mesh_of_shares,
)

PromptFile = Annotated[
    Path | None, typer.Option(help="A file of text to begin with; - reads standard input.", dir_okay=False)
]
Images = Annotated[
    list[Path] | None, typer.Option("--image", help="A file with an image, before the text; several of them.")
]
TopP = Annotated[
    float | None, typer.Option(min=0, max=1, help="Sample among the likeliest, of this probability together.")
]
Stop = Annotated[
    list[str] | None, typer.Option("--stop", help="End where this text appears, and leave it out; several of them.")
]
Raw = Annotated[bool, typer.Option("--raw", help="Go on with the prompt as it stands, without a chat template.")]
CheckpointFolder = Annotated[
    Path | None,
    typer.Option(help="Save the state to this folder, and resume from a state saved there.", file_okay=False),
]
KvFolder = Annotated[
    Path | None,
    typer.Option("--kv-folder", help="Hold keys in files of this folder, and go on from those there.", file_okay=False),
]
Hot = Annotated[
    int | None,
    typer.Option(min=1, help="Newest tokens to hold on the device; older ones are in CPU memory, or in --kv-folder."),
]
Host = Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 is any, and lets other machines in.")]
ServedName = Annotated[
    list[str] | None,
    typer.Option(help="Name of the model in requests; again for each further one. That of --model by default."),
]
ToolFormat = Annotated[
    str, typer.Option(help="How the model writes calls of tools; auto looks at the chat template, none leaves text.")
]
Speculate = Annotated[
    str | None,
    typer.Option(help="Guess tokens that an answer copies, and check them in one step: ngram, or ngram:N for N a row."),
]
Draft = Annotated[
    str | None,
    typer.Option(help="Small model of the same tokens that guesses the next ones: a model, or MODEL:N for N a row."),
]
MaxGap = Annotated[
    float | None,
    typer.Option(
        min=0.001, help="Seconds that running answers may pause while a new prompt is read; two steps by default."
    ),
]
MaxRestarts = Annotated[int, typer.Option(min=0, help="Times that lost ranks are started again in 10 minutes.")]
Silence = Annotated[float, typer.Option(help="Seconds without an end of a step after which ranks count as lost.")]
ApiKeys = Annotated[
    list[str] | None,
    typer.Option(envvar="ATTNMESH_API_KEY", show_envvar=True, help="Key of a client; again for each further one."),
]
ApiKeyFile = Annotated[Path | None, typer.Option(help="File with a key on each line.")]
StoreFolder = Annotated[
    Path | None,
    typer.Option(help="Folder that keeps beginnings of prompts, also for a server that comes later.", file_okay=False),
]
StoreMemory = Annotated[
    float | None, typer.Option(min=0.001, help="GB of such beginnings in memory, of all ranks together; 1 by default.")
]
StoreDisk = Annotated[float | None, typer.Option(min=0.001, help="GB of them in the folder; 10 by default.")]
GENERATION_SOURCES = ("auto", "none")
"""Sources of the defaults of requests."""
GenerationSource = Annotated[
    str, typer.Option(help="Defaults of requests: auto takes those of the model's generation_config, none has none.")
]


def check_world(mesh: str, ranks: int | None) -> None:
    """Raise on a mesh that is none, or of other ranks; torchrun's are compared when they have met."""
    named_ranks = ranks_of_axes(mesh)
    if not under_torchrun():
        check_ranks(ranks or named_ranks)
        if ranks is not None:
            check_ranks_of_mesh(mesh, ranks)


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Generate text with a language model whose context is spread over ranks, and print what it took."""

    model: Model
    revision: Revision = None
    prompt: Annotated[str, typer.Option(help="What to say; after the file's text, if both are given.")] = ""
    prompt_file: PromptFile = None
    image: Images = None
    ranks: Ranks = None
    mesh: MeshOption = "auto"
    shares: Shares = None
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at the most.")] = 64
    temperature: Annotated[float | None, typer.Option(min=0, help="Sample, at this temperature; 0 is greedy.")] = None
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample among so many of the likeliest tokens.")] = None
    top_p: TopP = None
    seed: Annotated[int, typer.Option(help="Seed of sampling.")] = 0
    stop: Stop = None
    raw: Raw = False
    merge: Merge = "auto"
    reproducible: Reproducible = False
    checkpoint: CheckpointFolder = None
    every: Annotated[int, typer.Option(min=1, help="New tokens from one checkpoint to the next.")] = 64
    kv_folder: KvFolder = None
    hot: Hot = None
    deadline: Deadline = None
    dtype: Dtype = "auto"
    kv: KvOption = "auto"
    weights: WeightsOption = "auto"
    as_json: AsJson = False
    verbose: Verbose = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "mesh", mesh_of_shares(self.mesh, self.shares, self.ranks))
        check_world(self.mesh, self.ranks)
        check_caches(self.dtype, self.merge, self.reproducible, self.kv, self.mesh, self.shares)
        check_deadline(self.deadline)
        check_weights(self.weights, self.mesh)
        self._check_sampling()
        self._check_stop()
        self._check_checkpoint()
        check_model(self.model, self.revision)
        for file in self.image or ():
            check_option(file.is_file(), "--image", "a file with an image", f"{str(file)!r}", "name another")
        begin = self.prompt_file
        once = begin is not None and (str(begin) == "-" or (begin.exists() and not begin.is_file()))
        if not once:  # as standard input, and what a shell has for <(command)
            read_prompt(self.prompt, begin)
        announce_model(self.model)

    def _check_sampling(self) -> None:
        """Raise on values of no use: logits are divided by the temperature."""
        if self.temperature:
            fits = COLDEST <= self.temperature <= HOTTEST
            expected = f"0, or {COLDEST:.5f} to {HOTTEST:,.0f}"
            check_option(fits, "--temperature", expected, self.temperature, "write 0, or about 1")
        fits = -(2**63) <= self.seed < 2**64
        check_option(fits, "--seed", "-2^63 to 2^64 - 1", f"{self.seed:.3g}", "take one of these")

    def _check_stop(self) -> None:
        """Raise on a text that no answer has."""
        fix = "name the text that ends the answer, or leave --stop out"
        for stop in self.stop or ():
            check_option(bool(stop), "--stop", "some text", "an empty one", fix)
            check_option(is_utf8(stop), "--stop", "text in UTF-8", repr(stop[:60]), fix)

    def _check_checkpoint(self) -> None:
        """Raise on what a saved state does not hold: texts that end an answer, and images."""
        if self.checkpoint is not None:
            given = repr((self.stop or [""])[0])
            check_option(not self.stop, "--stop", "no --checkpoint beside it", given, "leave one out")
            fix = "leave --checkpoint or --image out"
            check_option(not self.image, "--checkpoint", "a prompt without images", str(self.checkpoint), fix)
        if self.kv_folder is not None:
            subject = "--kv-folder"
            given = str(self.kv_folder)
            fix = "leave one of them out"
            check_option(not self.image, subject, "a prompt without images", given, fix)
            check_option(self.checkpoint is None, subject, "no --checkpoint beside it", given, fix)


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Serve a language model whose contexts are spread over ranks, over HTTP as OpenAI does."""

    model: Model
    revision: Revision = None
    mesh: MeshOption = "auto"
    ranks: Ranks = None
    shares: Shares = None
    host: Host = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0 takes a free one.")] = 8000
    served_name: ServedName = None
    api_key: ApiKeys = None
    api_key_file: ApiKeyFile = None
    max_rows: Annotated[int, typer.Option(min=1, help="Requests that decode at a time.")] = 16
    max_queue: Annotated[int, typer.Option(min=1, help="Requests that wait; further ones get 429.")] = 64
    cache_memory: Annotated[float | None, typer.Option(min=0.001, help="GB of keys and values on a rank.")] = None
    store: StoreFolder = None
    store_memory: StoreMemory = None
    store_disk: StoreDisk = None
    max_gap: MaxGap = None
    speculate: Speculate = None
    draft: Draft = None
    max_model_len: Annotated[int | None, typer.Option(min=2, help="Longest context; the model's by default.")] = None
    generation_config: GenerationSource = "auto"
    tool_format: ToolFormat = "auto"
    max_body: Annotated[int, typer.Option(min=1, help="MB of a request's body.")] = 32
    max_restarts: MaxRestarts = 3
    drain: Annotated[float, typer.Option(min=1, help="Seconds that open requests get to end at SIGTERM.")] = 30
    deadline: Silence = 60.0
    merge: Merge = "auto"
    reproducible: Reproducible = False
    dtype: Dtype = "auto"
    kv: KvOption = "auto"
    weights: WeightsOption = "auto"
    verbose: Verbose = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "mesh", mesh_of_shares(self.mesh, self.shares, self.ranks))
        check_world(self.mesh, self.ranks)
        check_caches(self.dtype, self.merge, self.reproducible, self.kv, self.mesh, self.shares)
        check_deadline(self.deadline)
        check_weights(self.weights, self.mesh)
        check_named("--generation-config", self.generation_config, GENERATION_SOURCES)
        check_named("--tool-format", self.tool_format, TOOL_FORMATS)
        self.api_keys()
        check_speculate(self.speculate)
        if self.draft is not None:
            given, fix = f"--speculate {self.speculate}", "leave one of them out"
            check_option(self.speculate is None, "--draft", "no --speculate beside it", given, fix)
            check_model(draft_of(self.draft)[0], subject="--draft")
        sizes = {"--store-memory": self.store_memory, "--store-disk": self.store_disk}
        for name, size in sizes.items():
            fits = self.store is not None or size is None
            fix = "name a folder, or leave this out"
            check_option(fits, name, "a --store beside it", size, fix)
        for name, size in (sizes | {"--cache-memory": self.cache_memory}).items():
            check_option(size is None or isfinite(size), name, "a number of GB", size, "write one, as 100")
        for name in self.served_name or [self.model]:
            fix = "name the model in other letters"
            check_option(bool(name), "--served-name", "some text", "an empty one", fix)
            check_option(is_utf8(name), "--served-name", "text in UTF-8", repr(name[:60]), fix)
        check_model(self.model, self.revision)
        announce_model(self.model)
        print_note(f"importing PyTorch and transformers, to serve {self.model}")

    def api_keys(self) -> tuple[str, ...]:
        """Return the keys of clients, or raise on one that no header can carry."""
        keys_by_option = {"--api-key": self.api_key or []}
        if self.api_key_file is not None:
            keys_by_option["--api-key-file"] = self._keys_of_file
        for name, keys in keys_by_option.items():
            fits = all(key.isascii() and key.isprintable() and " " not in key and key for key in keys)
            fits = fits and bool(keys or name == "--api-key")
            fix = "take letters and digits"
            check_option(fits, name, "printable ASCII without spaces", "other characters, or none", fix)
        return tuple(key for keys in keys_by_option.values() for key in keys)

    @cached_property
    def _keys_of_file(self) -> list[str]:
        """The lines of `--api-key-file`, which may be a pipe that can be read once."""
        return lines_of(self.api_key_file or Path())


def check_speculate(given: str | None) -> None:
    """Raise unless the option names a way to guess, and a possible number."""
    match = re.fullmatch("ngram(?::([1-9][0-9]?))?", given or "ngram")
    fits = match is not None and int(match[1] or 1) <= MAX_GUESSES
    expected, fix = f"ngram, or ngram:N with N from 1 to {MAX_GUESSES}", "write one of these, or leave it out"
    check_option(fits, "--speculate", expected, repr(given), fix)


def draft_of(given: str) -> tuple[str, int | None]:
    """Return the model of `--draft`, and the most guesses of a row if it names them.

    >>> draft_of("org/small:4"), draft_of("smollm2")
    (('org/small', 4), ('smollm2', None))
    """
    name, colon, count = given.rpartition(":")
    if not colon or is_here(given):
        return given, None
    fits = bool(name) and re.fullmatch("[1-9][0-9]?", count) and int(count) <= MAX_GUESSES
    expected, fix = f"MODEL, or MODEL:N with N from 1 to {MAX_GUESSES}", "write one of these"
    check_option(bool(fits), "--draft", expected, repr(given), fix)
    return name, int(count)


def lines_of(file: Path) -> list[str]:
    """Return the lines of `--api-key-file` that are not empty."""
    try:
        return [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        given, fix = f"{file}: {getattr(error, 'strerror', None) or 'no text'}", "name a file that can be read"
        raise OptionError("--api-key-file", "a file with a key on each line", given, fix) from None
