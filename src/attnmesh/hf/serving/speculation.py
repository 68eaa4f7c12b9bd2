"""The way in which an engine guesses the next tokens of answers, settled once at its start."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from attnmesh.errors import ArgumentError, InputError, KernelError, check_count
from attnmesh.hf.models import check_can_decode_rows, unwrap
from attnmesh.hf.serving.draft_guesses import DraftGuesser
from attnmesh.hf.serving.guesses import Guesser
from attnmesh.hf.serving.ngram_guesses import NgramGuesser
from attnmesh.hf.serving.operations import Draft, Operation, StepResults
from attnmesh.hf.serving.rank_worker import RankWorker

SPECULATE, DRAFT = "hf.Engine speculate", "hf.Engine draft"

DEFAULT_GUESSES = 8
"""Most guesses of a row in a step, if no other number is given."""

MAX_GUESSES = 64
"""Largest number of guesses that may be given: each makes a step longer, and few answers accept as many."""

VOCABULARY_PADDING = 128
"""Tokens by which the vocabularies of a model and its draft may differ: matrices are padded to multiples of it."""

OF_DRAFT = ("merge", "kernel", "exchange", "checked", "copies", "storage", "shares")
"""Options that caches of a draft model take over from those of the model."""


@dataclass(frozen=True)
class Speculation:
    """Settings of guesses, at most `most` of each row in a step: by a draft model, or by look-up without one."""

    subject: str
    most: int = DEFAULT_GUESSES
    draft_model: PreTrainedModel | None = None

    @staticmethod
    def of(model: PreTrainedModel, speculate: object, draft: Any, draft_tokens: object) -> "Speculation | None":
        """Return the settings by the arguments of an engine; None if these ask for no guesses. Raise on wrong ones."""
        if draft is not None and speculate is not None:
            raise ArgumentError(DRAFT, "no speculate= beside it", "both", "leave one of them out")
        if draft is not None:
            return _of_draft(model, unwrap(draft), draft_tokens)
        if draft_tokens is not None:
            fix = "pass one, or leave this out"
            raise ArgumentError(f"{DRAFT}_tokens", "a draft= beside it", repr(draft_tokens), fix)
        if speculate is None:
            return None
        match = re.fullmatch("ngram(?::([1-9][0-9]?))?", speculate) if isinstance(speculate, str) else None
        most = DEFAULT_GUESSES if match is None or match[1] is None else int(match[1])
        if match is None or most > MAX_GUESSES:
            expected = f"ngram, or ngram:N with N from 1 to {MAX_GUESSES}"
            raise ArgumentError(SPECULATE, expected, repr(speculate), "write one of these, or leave it out")
        return Speculation(SPECULATE, most)

    def begin(self, worker: RankWorker, run: Callable[[list[Operation]], StepResults]) -> Guesser:
        """Return the guesser for the rows of a worker. Raise unless caches of its model take tokens back.

        `run` runs operations on all ranks.
        """
        if worker.template.reproducible:
            expected = "no reproducible=True beside it: products of several tokens are rounded in another way"
            raise KernelError(self.subject, expected, "True", "leave one of them out")
        _check_caches(self.subject, worker)
        if self.draft_model is None:
            return NgramGuesser(self.most)
        options = {name: value for name, value in worker.options.items() if name in OF_DRAFT}
        worker.draft_worker = RankWorker(self.draft_model, worker.device_mesh, {**options, "keep": self.most})
        _check_caches(self.subject, worker.draft_worker)
        vocab_size = worker.model.config.get_text_config(decoder=True).vocab_size

        def run_draft(operations: Sequence[Operation]) -> StepResults:
            results = run([Draft(operations)]).draft
            assert results is not None
            return results

        return DraftGuesser(worker.draft_worker, self.most, vocab_size, run_draft)


def _of_draft(model: PreTrainedModel, draft: Any, most: Any) -> Speculation:
    try:
        check_can_decode_rows(DRAFT, draft)
    except InputError as error:
        raise type(error)(DRAFT, *error.args[1:]) from None
    sizes = [x.config.get_text_config(decoder=True).vocab_size for x in (model, draft)]
    if abs(sizes[0] - sizes[1]) > VOCABULARY_PADDING:
        fix = "use a model with the same tokenizer"
        raise ArgumentError(DRAFT, f"a model of the same {sizes[0]} tokens", f"one of {sizes[1]}", fix)
    most = DEFAULT_GUESSES if most is None else most
    check_count(f"{DRAFT}_tokens", most, "pass a positive int")
    if most > MAX_GUESSES:
        raise ArgumentError(f"{DRAFT}_tokens", f"at most {MAX_GUESSES}", str(most), "pass a smaller number")
    return Speculation(DRAFT, int(most), draft)


def _check_caches(subject: str, worker: RankWorker) -> None:
    """Raise unless caches of the worker's model take tokens back. An empty one shows whether they do."""
    if worker.template.irreversible_layers:
        expected = "a model whose caches take tokens back"
        raise KernelError(subject, expected, "one with recurrent layers or others with a state", "leave it out")
    if not worker.is_causal:
        raise KernelError(subject, "a causal model", "one in which several tokens see each other", "leave it out")
