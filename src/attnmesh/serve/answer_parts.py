"""The parts of an answer: what a model thinks, its content and its calls of tools, taken out of text that grows."""

import re
import secrets
import string
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial as partial_of
from types import MappingProxyType
from typing import Any, NamedTuple

from attnmesh.serve.growing_text import GrowingText, NoMatch, Reader, partial_mark_length
from attnmesh.serve.text import SentToken
from attnmesh.serve.tool_formats import (
    FORMATS_BY_NAME,
    ContentText,
    ReasoningText,
    ToolCall,
    ToolFormat,
    Tools,
    find_format,
    read_text,
)
from attnmesh.serve.tool_schemas import properties_of

AnswerPart = ContentText | ReasoningText | ToolCall

RESCANNED = 4096
"""Longest text that turned out to be no call and is still searched for one, in characters."""

ID_SIGNS = string.ascii_letters + string.digits
"""Letters of ids of calls: Mistral's chat templates take no others."""

ID_LENGTH = 9
"""Letters of an id: Mistral's chat templates take no other number."""


class ReasoningMarks(NamedTuple):
    """Marks between which a model thinks, before it answers."""

    begin: str
    end: str


@dataclass
class TrailingSpace:
    """Space at the end of a text that grows, which is held back until more text follows."""

    held_back: str = ""
    has_text: bool = False

    def add(self, text: str, keep: bool) -> str:
        """Return what can be sent; `keep` says whether space at the beginning is part of the text."""
        text = self.held_back + text
        end = len(text.rstrip())
        self.held_back = text[end:]
        sent = text[:end] if keep or self.has_text else text[:end].lstrip()
        self.has_text = self.has_text or bool(sent)
        return sent


REASONING = (
    ReasoningMarks("<think>", "</think>"),
    ReasoningMarks("<seed:think>", "</seed:think>"),
    ReasoningMarks("[THINK]", "[/THINK]"),
    ReasoningMarks("<|START_THINKING|>", "<|END_THINKING|>"),
    ReasoningMarks("<|channel>thought", "<channel|>"),
    ReasoningMarks("\u25c1think\u25b7", "\u25c1/think\u25b7"),
)
"""Marks of models. The second mark stands in the chat template of a model that thinks between both."""


@dataclass(frozen=True)
class AnswerFormats:
    """How a model writes calls and thoughts; None where they stay text."""

    tool_format: ToolFormat | None = None
    reasoning_marks: ReasoningMarks | None = None
    special: Mapping[int, str] = field(default_factory=dict, compare=False)
    """The texts of special tokens, which marks may be."""

    def __str__(self) -> str:
        names = [f"calls as {name}" for name, one in FORMATS_BY_NAME.items() if one is self.tool_format]
        return ", ".join([*names, *([f"thoughts in {self.reasoning_marks.begin}"] if self.reasoning_marks else [])])

    def parts(
        self, tools: list[dict[str, Any]] | None, prompt_end: str, *, either: bool = False
    ) -> "Callable[[], AnswerParts] | None":
        """Return what makes the parts of a choice after a prompt; None if all is content.

        An answer of which a grammar makes `either` calls or content has no calls within content.
        """
        tool_format = self.tool_format if tools or (self.tool_format and self.tool_format.has_thoughts) else None
        if tool_format is None and self.reasoning_marks is None:
            return None
        is_thinking = self.reasoning_marks is not None and prompt_end.rstrip().endswith(self.reasoning_marks.begin)
        options: dict[str, Any] = {"is_thinking": is_thinking, "either": either, "special": self.special}
        return partial_of(AnswerParts, tool_format, properties_of(tools or []), self.reasoning_marks, **options)


def find_formats(tokenizer: Any, tool_format: str = "auto") -> AnswerFormats:
    """Return the formats of a model by its chat templates. That of calls may be named; none leaves all text."""
    if tool_format == "none":
        return AnswerFormats()
    several = tokenizer.chat_template or ""
    template = several if isinstance(several, str) else "".join(several.values())
    calls = find_format(template) if tool_format == "auto" else FORMATS_BY_NAME[tool_format]
    return AnswerFormats(
        calls, next((marks for marks in REASONING if marks.end in template), None), special_tokens(tokenizer)
    )


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Return the texts of special tokens by number; none of a tokenizer that is not of the tokenizers library."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    added = {} if backend is None else backend.get_added_tokens_decoder()
    return {id: one.content for id, one in added.items() if one.special}


class AnswerParts:
    """Takes the text of one choice apart, as it comes. Without a part that is a call or a thought, all is content."""

    def __init__(
        self,
        tool_format: ToolFormat | None,
        tools: Tools,
        marks: ReasoningMarks | None = None,
        *,
        is_thinking: bool = False,
        either: bool = False,
        special: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self.format = tool_format
        self.tools = tools
        self.either = either
        self.special = special
        self.text = GrowingText(special.values())
        self.call_count = 0
        self.has_thought = False
        self.ids = list[str]()
        self.text.is_thought = is_thinking
        self.content = TrailingSpace()
        self.thought = TrailingSpace()
        self._start: Reader[None] | None = None if marks is None else self._think(marks, is_thinking)
        """Reads a thought at the beginning of the answer."""
        self._reader: Reader[None] | None = self._start

    @property
    def is_thinking(self) -> bool:
        """True while what comes is what the model thinks."""
        return self.text.is_thought

    def add(self, text: str, sent_tokens: Iterable[tuple[int, SentToken]] = ()) -> list[AnswerPart]:
        """Return the parts that more text makes certain. `sent_tokens` begin in it, each at its place in all text."""
        self.text.add(text, [place for place, token in sent_tokens if token.id in self.special])
        return [*self._with_edges(self._parts())]

    def end(self) -> list[AnswerPart]:
        """Return the rest, after all text."""
        self.text.ended = True
        parts = self.add("")
        held_back = "" if self.call_count or self.has_thought else self.content.held_back
        return [*parts, ContentText(held_back)] if held_back else parts

    def _think(self, marks: ReasoningMarks, is_thinking: bool) -> Reader[None]:
        if not is_thinking:
            yield from self.text.space()
            yield from self.text.expect(marks.begin)
        yield from read_text(self.text, True, marks.end)

    def _parts(self) -> Iterator[AnswerPart]:
        while self._reader is not None or (yield from self._find()):
            try:
                assert self._reader is not None
                part = next(self._reader)
            except StopIteration:
                self.text.cut(self.text.at)
                self._reader = None
            except NoMatch:
                yield from self._give_up()
            else:
                if part is None:
                    return
                self.text.cut(self.text.at)
                yield part

    def _find(self) -> Reader[bool]:
        """Yield content up to where a call may begin. Return whether one may."""
        text = self.text.text
        marks = self.format.begins if self.format else ()
        places = [place for mark in marks if (place := self.text.find(mark)) >= 0]
        if self.either:
            places = [place for place in places if not self.content.has_text and not text[:place].strip()]
        if self.format and self.format.is_bare and not self.content.has_text:
            first = re.match(r"\s*(?=\{)", text)
            places += [first.end()] if first else []
        content = self.text.cut(
            min(places) if places else len(text) - (0 if self.text.ended else partial_mark_length(text, marks))
        )
        if content:
            yield ContentText(content)
        if places and self.format:
            self._reader = self.format.read(self.text, self.tools)
        return bool(places)

    def _give_up(self) -> Iterator[AnswerPart]:
        """Yield as content what turned out to be no call, or its first character if a call may begin after it."""
        is_start = self._reader is self._start
        read = self.text.at
        self._reader = None
        self.text.at = 0
        if not is_start and self.format is not None:
            yield ContentText(self.text.cut(1 if self.format.rescans and read <= RESCANNED else max(1, read)))

    def _with_edges(self, parts: Iterator[AnswerPart]) -> Iterator[AnswerPart]:
        """Yield parts without the space between thoughts, content and calls, and calls with their numbers and ids."""
        for part in parts:
            match part:
                case ToolCall():
                    id = part.id if part.id not in ("", *self.ids) else new_id()
                    self.ids.append(id)
                    yield replace(part, index=self.call_count, id=id)
                    self.call_count += 1
                case ReasoningText():
                    self.has_thought = True
                    if text := self.thought.add(part.text, keep=False):
                        yield ReasoningText(text)
                case ContentText():
                    if text := self.content.add(part.text, keep=not (self.call_count or self.has_thought)):
                        yield ContentText(text)


def new_id() -> str:
    """Return an id of a call.

    >>> len(new_id())
    9
    """
    return "".join(secrets.choice(ID_SIGNS) for _ in range(ID_LENGTH))
