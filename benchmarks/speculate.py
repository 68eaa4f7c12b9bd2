"""`python -m benchmarks speculate`: answers of an engine that guesses tokens and checks them, beside one that does not.

Both engines run on the same ranks with the same model, in turns, and answer the same prompts, which they have read.
For a draft model the model is made larger by layers that change nothing: nearly every guess of the small one stands,
and the ratio is the most that a pair of such sizes can have.
"""

import inspect
import textwrap
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from statistics import median
from threading import Thread
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from transformers.utils import logging

from attnmesh import hf
from attnmesh.cli.launch import Send, run_on_ranks
from attnmesh.hf.load import open_model, open_tokenizer
from attnmesh.hf.serving.engine_request import EngineRequest
from attnmesh.mesh.shapes import Shape
from attnmesh.setup.init_mesh import init_mesh
from benchmarks.netns import send_rows
from benchmarks.serve import Answer, rate

SUBJECTS = ("a lighthouse", "two brothers", "the last train", "a lost letter", "an old clock", "a storm", "the river")
"""Subjects of stories."""


@dataclass(frozen=True)
class Request:
    """A model, its mesh, and what is asked of it."""

    model: str
    shape: Shape
    heads: tuple[int, int]
    clients: tuple[int, ...]
    new: int
    rounds: int
    speculate: str
    draft: int = 0
    """Times of its layers that the model is made larger, to be guessed for by itself; 0 for a look-up."""


@dataclass(frozen=True)
class Row:
    """Answers to so many prompts at once, without guesses and with them."""

    case: str
    clients: int
    plain: float
    """Tokens in a second of all clients, the median of the rounds."""
    guessed: float
    ratio: float
    """The median of the rounds' ratios."""
    drafted: int
    """Guesses that were checked for 100 tokens."""
    accepted: int
    """Guesses that stood for 100 tokens."""
    same_texts: float
    """Share of the answers that are equal."""


@dataclass(frozen=True)
class Prompt:
    """The tokens of a prompt, and how its answer is drawn."""

    ids: tuple[int, ...]
    options: tuple[tuple[str, Any], ...]


def rows(request: Request, threads: int, add: Send) -> None:
    """Measure each case with each number of clients, on ranks that share the threads."""
    share = max(1, threads // request.shape.ranks)
    run_on_ranks(request.shape.ranks, send_rows, _ranks, request, threads=share, on_message=add)


def prompts(tokenizer: Any, case: str, count: int, turn: int) -> list[Prompt]:
    """Return prompts whose answers copy a file, quote it, or are stories, drawn at a temperature or the likeliest."""
    drawn = []
    for row in range(count):
        number = 7 * turn + row
        if case in DRAFTED:
            text = f"Story {turn}.{row}\n\nThis is a long story about {SUBJECTS[number % len(SUBJECTS)]}. It was"
            options: dict[str, Any] = {"temperature": 0.8, "seed": number} if case == DRAFTED[0] else {}
        else:
            source = _file(number)
            head = "\n".join(source.splitlines()[: 2 + row % 3])
            title = f"The file, version {turn}.{row}"  # a small model copies what it has seen twice
            text = f"{title}:\n\n{source}\n\n{title}:\n\n{source}\n\n{title}:\n\n{head}\n"
            options = {} if case == "a file" else {"temperature": 0.3, "seed": number}
        drawn.append(Prompt(tuple(tokenizer(text)["input_ids"]), tuple(options.items())))
    return drawn


def _file(number: int) -> str:
    """Return a short source file of Python's library."""
    functions = [one for _, one in inspect.getmembers(textwrap, inspect.isroutine) if one.__module__ == "textwrap"]
    methods = [one for _, one in inspect.getmembers(textwrap.TextWrapper, inspect.isfunction)]
    sources = [textwrap.dedent(inspect.getsource(one)) for one in (*functions, *methods)]
    sources = [one[:800] for one in sources if len(one) > 700]
    return sources[number % len(sources)]


Answers = tuple[list[Answer], dict[str, Any]]
"""The answers of all clients, and the engine's figures; none on ranks other than 0."""

CASES = ("a file", "a file, drawn", "a story")
"""Answers: a copy, a copy drawn at a low temperature, and one that copies nothing."""

DRAFTED = ("a story", "a story, greedy")
"""Answers that a draft model guesses."""


def _ranks(request: Request) -> Iterator[Row]:
    logging.disable_progress_bar()
    model = open_model(request.model, "float32", torch.device("cpu"))
    model.generation_config.eos_token_id = None
    draft = None
    if request.draft:
        draft, model = model, grown(model, request.draft)
    mesh = init_mesh("cpu", request.shape, *request.heads) if request.shape.ranks > 1 else None
    if mesh is not None:
        for shared_model in filter(None, (model, draft)):
            hf.share_weights(shared_model, mesh)
    tokenizer = open_tokenizer(request.model)
    for case in DRAFTED if request.draft else CASES:
        for clients in request.clients:
            yield _compared((model, draft), mesh, tokenizer, case, replace(request, clients=(clients,)))


def grown(model: Any, times: int) -> Any:
    """Return a model of so many times the layers with the same outputs: what the others add is zero."""
    larger = copy(model)
    larger._modules = {**model._modules, "model": copy(model.model)}
    layers = [*model.model.layers]
    for number in range(len(layers), times * len(layers)):
        source = model.model.layers[number % len(model.model.layers)]
        layer = deepcopy(source, {id(weight): weight for weight in source.parameters()})
        layer.self_attn.layer_idx = number
        for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
            projection.weight = torch.nn.Parameter(torch.full_like(projection.weight, 0.0), requires_grad=False)
        layers.append(layer)
    larger.config = larger.model.config = deepcopy(model.config)
    larger.config.num_hidden_layers = len(layers)
    if getattr(model.config, "layer_types", None):
        larger.config.layer_types = times * model.config.layer_types
    larger.model._modules = {**model.model._modules, "layers": torch.nn.ModuleList(layers)}
    return larger


def _compared(models: tuple[Any, Any], mesh: DeviceMesh | None, tokenizer: Any, case: str, request: Request) -> Row:
    """Answer in turns; the first turn is not counted."""
    (clients,), rates, same_texts, counts = request.clients, list[tuple[float, float]](), list[bool](), [0.0, 0.0, 0.0]
    for turn in range(request.rounds + 1):
        questions, answers_of = prompts(tokenizer, case, clients, turn), dict[bool, Answers]()
        model, draft = models
        guessing: dict[str, Any] = {"speculate": request.speculate} if draft is None else {"draft": draft}
        for guesses in (False, True) if turn % 2 else (True, False):
            engine = hf.Engine(model, mesh, tokens_end=(), **(guessing if guesses else {}))
            answers_of[guesses] = _answered(engine, questions, request.new)
        (plain, _), (guessed, figures) = answers_of[False], answers_of[True]
        if turn and plain:
            rates.append((rate(plain), rate(guessed)))
            same_texts += [one.text == other.text for one, other in zip(plain, guessed, strict=True)]
            names = ("tokens", "drafted_tokens", "accepted_tokens")
            counts = [count + figures[name] for count, name in zip(counts, names, strict=True)]
    if not rates:  # on other ranks
        return Row(case, clients, 0.0, 0.0, 0.0, 0, 0, 0.0)
    before, after = (round(median(each), 1) for each in zip(*rates, strict=True))
    ratio = round(median(own / other for other, own in rates), 2)
    drafted, accepted = (round(100 * count / counts[0]) for count in counts[1:])
    return Row(case, clients, before, after, ratio, drafted, accepted, sum(same_texts) / len(same_texts))


def _answered(engine: hf.Engine, questions: Sequence[Prompt], new_tokens: int) -> Answers:
    """Return the answers on rank 0, and the engine's figures; the other ranks follow."""
    if dist.get_rank():
        engine.follow()
        return [], {}
    thread = Thread(target=engine.run)
    thread.start()
    try:
        with ThreadPoolExecutor(len(questions)) as pool:
            for stream in [engine.submit(one.ids, max_new_tokens=1) for one in questions]:
                list(stream)  # prompts are kept: else the first answer ends before the last one begins
            streams = [engine.submit(one.ids, max_new_tokens=new_tokens, **dict(one.options)) for one in questions]
            answers = [*pool.map(_read, streams)]
        return answers, engine.metrics()
    finally:
        engine.close()
        thread.join()


def _read(stream: EngineRequest) -> Answer:
    """Return an answer's tokens and their times."""
    asked, times, ids = perf_counter(), list[float](), list[int]()
    for token in stream:
        times.append(perf_counter())
        ids.append(token.id)
    return Answer(asked, tuple(times), " ".join(map(str, ids)))
