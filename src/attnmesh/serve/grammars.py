"""The grammar of an answer from the fields of its request: its content's format, calls that must be, or strict ones."""

import asyncio
import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, dataclass
from threading import Thread
from typing import Any, TypeVar

from attnmesh.errors import GrammarError
from attnmesh.hf.serving.grammar_masks import INSTALL, Grammar, GrammarTokens, has_grammars
from attnmesh.serve.answer_parts import AnswerFormats, ReasoningMarks
from attnmesh.serve.refused import Refused
from attnmesh.serve.schema_limits import DIVISORS, checked_divisors
from attnmesh.serve.tool_formats import FORMATS_BY_NAME
from attnmesh.serve.tool_grammars import CallShape, Rules, find_shape
from attnmesh.serve.tool_schemas import check_schema, inner_schemas

T = TypeVar("T")

GRAMMAR_TIMEOUT = 10.0
"""Time in which a grammar is made, and time that a grammar waits for its turn."""

GRAMMAR_THREADS = 2
"""Grammars that are made at the same time."""

MAX_PROPERTIES = 1000
"""Names of members in all schemas of a grammar."""

MAX_CHARACTERS = 1 << 17
"""Characters of all schemas of a grammar."""

CHANNELS = ReasoningMarks("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")
"""Marks of what a model thinks in harmony's channels. A prompt ends as a thought does."""

OBJECT = {"type": "object"}


@dataclass(frozen=True)
class AskedGrammar:
    """Form that a request asks of its answer."""

    tools: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    """The field and the function of each tool whose calls the grammar holds."""
    must_call: bool = False
    several: bool = False
    content: Any = None
    """The schema of the content; None for any text."""
    field: str = ""
    """The field that asks for a grammar; empty if none does."""

    @staticmethod
    def of(fields: Mapping[str, Any]) -> "AskedGrammar":
        """Return what the fields of a chat ask for, or raise if they contradict each other."""
        choice = fields["tool_choice"]
        tools = fields["tools"] or []
        named = choice["function"]["name"] if isinstance(choice, dict) else None
        functions = tuple((f"tools[{index}].function", tool["function"]) for index, tool in enumerate(tools))
        allowed = tuple((field, function) for field, function in functions if named in (None, function["name"]))
        must_call = named is not None or choice == "required"
        if must_call and not allowed:
            given = "none" if named is None else f"none named {named}"
            raise Refused(400, f"tool_choice: expected a tool of tools, given {given}", "tool_choice")
        if must_call:
            several = named is None and fields["parallel_tool_calls"]
            return AskedGrammar(allowed, True, several, None, "tool_choice")
        strict = (
            next((field for field, function in functions if function.get("strict")), None) if choice != "none" else None
        )
        content = content_format(fields)
        field = f"{strict}.strict" if strict else "" if content is None else "response_format"
        offered = functions if field and choice != "none" else ()
        return AskedGrammar(offered, False, fields["parallel_tool_calls"], content, field)


class Grammars:
    """Makes the grammars of one model's answers, in threads of its own."""

    def __init__(self, tokenizer: Any, formats: AnswerFormats) -> None:
        self.formats = formats
        several = tokenizer.chat_template or ""
        self.template = several if isinstance(several, str) else "".join(several.values())
        self.thought = (
            CHANNELS
            if formats.tool_format is not None and formats.tool_format.has_thoughts
            else formats.reasoning_marks
        )
        self._tokenizer = tokenizer
        self._room = asyncio.Semaphore(GRAMMAR_THREADS)
        self._grammar_tokens: Future[GrammarTokens] | None = None

    def start(self) -> None:
        """Begin to read the tokenizer, a copy of which no other thread uses."""
        if has_grammars():
            self._tokenizer = deepcopy(self._tokenizer)
            self._grammar_tokens = in_thread(lambda: GrammarTokens(self._tokenizer))

    def close(self) -> None:
        """End the threads that make masks."""
        if self._grammar_tokens is not None:
            self._grammar_tokens.add_done_callback(lambda made: None if made.exception() else made.result().close())

    async def of(self, fields: Mapping[str, Any], prompt_end: str) -> dict[str, Any] | None:
        """Return the grammar of an answer after a prompt as JSON has it, or raise; None if no field asks for one."""
        asked = AskedGrammar.of(fields)
        if not asked.field:
            return None
        if self._grammar_tokens is None:
            text = f"{asked.field}: expected none: grammars need a package: {INSTALL}, and start the server again."
            raise Refused(400, text, asked.field, "unsupported_parameter")
        try:
            async with asyncio.timeout(GRAMMAR_TIMEOUT):
                grammar_tokens = await asyncio.shield(asyncio.wrap_future(self._grammar_tokens))
                await self._room.acquire()
        except TimeoutError:
            raise Refused(503, "The server makes the grammars of other requests. Ask again later.") from None
        except GrammarError as error:
            raise Refused(400, str(error), error.args[0]) from None
        made = in_thread(
            lambda: self._make_grammar(grammar_tokens, asked, prompt_end), self._leave(asyncio.get_running_loop())
        )
        try:
            async with asyncio.timeout(GRAMMAR_TIMEOUT):
                grammar = await asyncio.wrap_future(made)
                return asdict(grammar)
        except TimeoutError:
            text = f"{asked.field}: expected a grammar that is made within {GRAMMAR_TIMEOUT:.0f} s. Simplify it."
            raise Refused(400, text, asked.field) from None
        except GrammarError as error:
            raise Refused(400, str(error), error.args[0]) from None

    def _leave(self, loop: asyncio.AbstractEventLoop) -> Callable[[], None]:
        """Return a function by which a thread makes room for another grammar."""

        def leave() -> None:
            with suppress(RuntimeError):  # of a loop that has ended
                loop.call_soon_threadsafe(self._room.release)

        return leave

    def _make_grammar(self, grammar_tokens: GrammarTokens, asked: AskedGrammar, prompt_end: str) -> Grammar:
        """Return the grammar, whose first mask can be made, or raise with the field at fault."""
        check_schema_size(asked)
        special = self._special(grammar_tokens)
        for field, schema in schemas_of(asked):  # alone, so that errors name the field
            check_grammar(grammar_tokens, Grammar(Rules(special).alone(schema), field))
        grammar = self._grammar(asked, special, prompt_end)
        check_grammar(grammar_tokens, grammar)
        return grammar

    def _special(self, grammar_tokens: GrammarTokens) -> dict[str, int]:
        added = self._tokenizer.get_added_vocab()
        return {name: token for name, token in added.items() if grammar_tokens.tokenizer.is_special_token(token)}

    def _grammar(self, asked: AskedGrammar, special: Mapping[str, int], prompt_end: str) -> Grammar:
        rules = Rules(special)
        shape = self._shape(asked)
        content = None if asked.content is None else rules.json(asked.content)
        message = content and (rules.fill(shape.content, content=content) if shape else content)
        if not asked.tools or shape is None:
            start = message or ""
        elif asked.must_call or message:
            calls = rules.calls(shape, asked.tools, several=asked.several)
            start = f"({calls} | {message})" if message else calls
        else:
            assert self.formats.tool_format is not None
            start = rules.calls_in_text(shape, asked.tools, self.formats.tool_format.begins, several=asked.several)
        is_thinking, may_think = self._thoughts(prompt_end)
        begin, end = map(self._ids, self.thought or ("", ""))
        start = f"/\\n{{1,2}}/? {start}" if (is_thinking or may_think) and self.thought is not CHANNELS else start
        return Grammar(rules.write(start), asked.field, begin if may_think else (), end, is_thinking)

    def _shape(self, asked: AskedGrammar) -> CallShape | None:
        """Return how calls are written, or raise if they cannot be forced and are needed."""
        name = next((name for name, one in FORMATS_BY_NAME.items() if one is self.formats.tool_format), "")
        shape = find_shape(name, self.template)
        if (
            asked.tools
            and asked.content is not None
            and self.formats.tool_format is not None
            and self.formats.tool_format.is_bare
        ):
            why = "calls of this model are objects of JSON, as such content is"
            text = f"response_format: expected none beside tools: {why}. Set tool_choice to none or required."
            raise Refused(400, text, "response_format", "unsupported_parameter")
        if shape is None and asked.tools:
            why = f"written as {name}, which no grammar has" if name else "of no known format"
            fix = "Leave it out." if name else "Start the server with --tool-format."
            raise Refused(400, f"{asked.field}: calls of this model are {why}. {fix}", asked.field)
        return shape

    def _thoughts(self, prompt_end: str) -> tuple[bool, bool]:
        """Return whether a prompt has begun a thought, and whether the answer may begin one."""
        if self.thought is None:
            return False, False
        end = prompt_end.rstrip()
        is_thinking = end.endswith(self.thought.begin)
        is_over = self.thought is not CHANNELS and end.endswith(self.thought.end)
        return is_thinking, not is_thinking and not is_over

    def _ids(self, mark: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(mark, add_special_tokens=False)["input_ids"]) if mark else ()


def content_format(fields: Mapping[str, Any]) -> Any:
    """Return the schema that the content of an answer follows; None if it may be any text.

    >>> content_format({"response_format": {"type": "json_object"}}), content_format({"response_format": None})
    ({'type': 'object'}, None)
    """
    match fields["response_format"]:
        case {"type": "json_object"}:
            return OBJECT
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            return schema
    return None


def in_thread(work: Callable[[], T], leave: Callable[[], None] = lambda: None) -> Future[T]:
    """Run `work` in a thread and return its future result. `leave` is called before. The process may end meanwhile."""
    made = Future[T]()
    made.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            leave()
            made.set_exception(error)
        else:
            leave()
            made.set_result(result)

    Thread(target=run, name="grammar", daemon=True).start()
    return made


def schemas_of(asked: AskedGrammar) -> list[tuple[str, Any]]:
    """Return the schemas of a grammar with their fields."""
    tools = [(f"{field}.parameters", OBJECT | (function.get("parameters") or {})) for field, function in asked.tools]
    return [*tools, *([] if asked.content is None else [("response_format.json_schema.schema", asked.content)])]


def check_grammar(grammar_tokens: GrammarTokens, grammar: Grammar) -> None:
    """Raise unless a grammar is possible, and its first mask can be made."""
    grammar_tokens.begin(grammar, ()).mask()


def check_schema_size(asked: AskedGrammar) -> None:
    """Raise on schemas that are none, or too large."""
    properties = 0
    characters = 0
    divisors = 0
    for field, schema in schemas_of(asked):
        check_schema(field, schema)
        properties, characters = properties + count_properties(schema), characters + len(json.dumps(schema))
        if properties > MAX_PROPERTIES or characters > MAX_CHARACTERS:
            most = f"{MAX_PROPERTIES:,} names of properties and {MAX_CHARACTERS:,} characters"
            raise Refused(400, f"{field}: expected at most {most} in all schemas of a grammar", field)
        divisors += checked_divisors(field, schema)
        if divisors > DIVISORS:
            text = f"{field}: expected multipleOf of at most {DIVISORS:,} together in all schemas of a grammar"
            raise Refused(400, text, field)


def count_properties(schema: Any) -> int:
    """Return the names of members that all objects within a schema have, may have or must have.

    >>> count_properties({"properties": {"a": {"items": {"properties": {"b": {}}}}, "c": {}}, "required": ["c", "d"]})
    4
    >>> count_properties({"enum": [{"a": [{"b": 1}]}, "c"]})
    2
    """
    if not isinstance(schema, dict):
        return 0
    names = {*(schema.get("properties") or ()), *(schema.get("required") or ())}
    own = len(names) + _count_members([schema.get("const"), schema.get("enum")])
    return own + sum(count_properties(inner) for _, inner in inner_schemas("", schema))


def _count_members(value: Any) -> int:
    """Return the members of all objects within a value."""
    if isinstance(value, list):
        return sum(map(_count_members, value))
    return len(value) + sum(map(_count_members, value.values())) if isinstance(value, dict) else 0
