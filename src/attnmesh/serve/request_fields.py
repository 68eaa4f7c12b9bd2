"""The fields of requests: each is served, or accepted at a value that changes nothing, or refused with 400."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import Any

from attnmesh.serve.refused import Refused

MAX_CHOICES, MAX_STOPS, MAX_STOP = 16, 4, 256
"""Choices a request, its stop strings, and the characters of one."""

MAX_BIASES = 1024
"""Tokens whose logits a request biases."""

MAX_IDENTIFIER, MAX_USER = 64, 512
"""Characters of an identifier of a client, as OpenAI has them, and of `user`, for which it names no limit."""

MAX_DESCRIPTION = 1 << 16
"""Characters of the description of a format, which nothing reads."""

NEW_TOKENS_EXPECTED = "1 to what the context leaves beside the prompt"
"""Limit of new tokens, which depends on the model and the prompt."""

SALT = "requests of another salt share no prefix; not a field of OpenAI's"
"""Note of the salt, which vLLM has, too."""

SHOWN = 60
"""Characters of a value that an error shows."""

CHARACTERS_AT_ONCE = 1 << 20
"""Characters of a text that are checked at once: other threads wait so long."""


@dataclass(frozen=True)
class ServedField:
    """A field that the server acts on: `fits` tests a value; None or no value gives the default."""

    fits: Callable[[Any], bool]
    expected: str
    default: Any = None
    note: str = ""
    """What the table of `docs/serving.md` adds."""

    def read(self, name: str, value: Any) -> Any:
        """Return the value, or the default, or raise."""
        if value is None:
            if self.default is REQUIRED:
                raise Refused(400, f"{name}: expected {self.expected}, given none", name)
            return self.default
        if not self.fits(value):
            raise wrong_value(name, self.expected, value)
        return value


@dataclass(frozen=True)
class NeutralField:
    """A field that is refused, unless its value asks for nothing."""

    neutral: tuple[Any, ...] = ()

    def read(self, name: str, value: Any) -> Any:
        """Return the value, or raise."""
        if value is not None and not any(type(value) is type(neutral) and value == neutral for neutral in self.neutral):
            known = " or ".join(json.dumps(neutral) for neutral in (None, *self.neutral))
            fix = "Leave it out."
            raise Refused(400, f"{name}: expected {known}, given {shown(value)}. {fix}", name, "unsupported_parameter")
        return value


REQUIRED = object()
"""Default of a field that a request must have."""

RequestFields = Mapping[str, ServedField | NeutralField]


def shown(value: Any) -> str:
    """Return the beginning of a value as JSON.

    >>> shown([1] * 100)
    '[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1...'
    """
    text = json.dumps(_beginning(value))
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


def wrong_value(field: str, expected: str, given: Any) -> Refused:
    """Return the refusal of a value.

    >>> str(wrong_value("n", "1 to 16", 0))
    'n: expected 1 to 16, given 0'
    """
    return Refused(400, f"{field}: expected {expected}, given {shown(given)}", field)


def _beginning(value: Any) -> Any:
    """Return a value without most of what is long in it."""
    if isinstance(value, dict):
        return {name[:SHOWN]: _beginning(inner) for name, inner in islice(value.items(), SHOWN)}
    if isinstance(value, list):
        return [*map(_beginning, value[:SHOWN])]
    return value[:SHOWN] if isinstance(value, str) else value


def whole_number_in(low: int, high: int) -> Callable[[Any], bool]:
    """Return a test of whole numbers in a range."""
    return lambda value: type(value) is int and low <= value <= high


def is_number(low: float, high: float) -> Callable[[Any], bool]:
    """Return a test of numbers in a range."""
    return lambda value: type(value) in (int, float) and low <= value <= high


def is_flag(value: Any) -> bool:
    """Return whether a value is true or false."""
    return isinstance(value, bool)


def is_list_of(kind: type, least: int = 1) -> Callable[[Any], bool]:
    """Return a test of lists whose items are of one type."""
    return lambda value: isinstance(value, list) and len(value) >= least and all(type(item) is kind for item in value)


def is_text(value: Any) -> bool:
    """Return whether a value is text in UTF-8: JSON can also spell halves of characters."""
    if not isinstance(value, str):
        return False
    try:
        for first in range(0, 0 if value.isascii() else len(value), CHARACTERS_AT_ONCE):
            value[first : first + CHARACTERS_AT_ONCE].encode()
    except UnicodeEncodeError:
        return False
    return True


def is_text_up_to(most: int) -> Callable[[Any], bool]:
    """Return a test of texts of at most so many characters."""
    return lambda value: isinstance(value, str) and len(value) <= most and is_text(value)


def is_name(value: Any) -> bool:
    """Return whether a value is text of one character or more."""
    return is_text(value) and value != ""


def is_stop(value: Any) -> bool:
    """Return whether a value is a stop string, or a list of them."""
    stops = value if isinstance(value, list) else [value]
    return len(stops) <= MAX_STOPS and all(is_text(stop) and 0 < len(stop) <= MAX_STOP for stop in stops)


def is_prompt(value: Any) -> bool:
    """Return whether a value is a prompt of a completion: text or token ids, or a list of one of them."""
    prompt = value[0] if isinstance(value, list) and len(value) == 1 and not isinstance(value[0], int) else value
    return (is_text(prompt) and prompt != "") or is_list_of(int)(prompt)


def is_bias(value: Any) -> bool:
    """Return whether a value is an object of token ids, each once, and numbers.

    >>> is_bias({"50256": -100}), is_bias({"the": 1}), is_bias({"1": 2, "01": 3})
    (True, False, False)
    """
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        return False
    fits = is_number(-100, 100)
    are_ids = all(name.isascii() and name.isdecimal() and len(name) < 10 for name in value)
    return are_ids and len({*map(int, value)}) == len(value) and all(map(fits, value.values()))


def is_stream_options(value: Any) -> bool:
    """Return whether a value is an object of stream options; obfuscation is not served."""
    known = isinstance(value, dict) and value.keys() <= {"include_usage", "include_obfuscation"}
    return known and all(is_flag(flag) for flag in value.values()) and value.get("include_obfuscation") is not True


def is_tool_choice(value: Any) -> bool:
    """Return whether a value says which tools are called."""
    if not isinstance(value, dict):
        return value in ("auto", "none", "required")
    named = value.get("function")
    is_named = isinstance(named, dict) and named.keys() == {"name"} and is_name(named["name"])
    return is_named and value.keys() == {"type", "function"} and value["type"] == "function"


def is_response_format(value: Any) -> bool:
    """Return whether a value says what the content of an answer has to be.

    >>> is_response_format({"type": "json_schema", "json_schema": {"name": "f", "schema": {}}})
    True
    """
    if not isinstance(value, dict) or value.get("type") != "json_schema":
        return value in ({"type": "text"}, {"type": "json_object"})
    inner = value.get("json_schema")
    if value.keys() != {"type", "json_schema"} or not isinstance(inner, dict):
        return False
    known = inner.keys() <= {"name", "description", "schema", "strict"}
    texts = inner.get("name") != "" and is_text_up_to(MAX_IDENTIFIER)(inner.get("name"))
    texts = texts and (inner.get("description") is None or is_text_up_to(MAX_DESCRIPTION)(inner["description"]))
    return known and texts and isinstance(inner.get("schema"), dict) and isinstance(inner.get("strict"), bool | None)


FORMAT_PARTS = (
    f"a schema, a name of at most {MAX_IDENTIFIER} characters, and a description of at most {MAX_DESCRIPTION}"
)
"""What a schema of a response format has."""

FORMAT_EXPECTED = f'type "text" or "json_object", or "json_schema" with json_schema of {FORMAT_PARTS}'
"""Types of a response format."""

IDENTIFIER_EXPECTED = f"text of at most {MAX_IDENTIFIER} characters"
"""Words for an identifier of a client."""

TOOL_CHOICE_EXPECTED = '"auto", "none", "required", or {type: "function", function: {name}}'
"""Words for a choice of tools."""

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
"""How long a model may think."""

NOT_OPENAI = "not a field of OpenAI's"

SAMPLING: RequestFields = {
    "model": ServedField(is_text, "the name that the server gives its model", REQUIRED),
    "temperature": ServedField(is_number(0, 2), "0 to 2", 1.0, "0 is greedy"),
    "top_p": ServedField(is_number(0, 1), "0 to 1", 1.0, "0 is greedy"),
    "top_k": ServedField(whole_number_in(0, 1 << 31), "a whole number", 0, f"0 is all; {NOT_OPENAI}"),
    "min_p": ServedField(is_number(0, 1), "0 to 1", 0.0, f"share of the likeliest token's probability; {NOT_OPENAI}"),
    "repetition_penalty": ServedField(is_number(0.01, 100), "0.01 to 100", 1.0, f"1 is none; {NOT_OPENAI}"),
    "seed": ServedField(
        whole_number_in(-(1 << 63), (1 << 63) - 1), "-2^63 to 2^63 - 1", None, "choice i draws by seed + i, modulo 2^63"
    ),
    "n": ServedField(whole_number_in(1, MAX_CHOICES), f"1 to {MAX_CHOICES}", 1),
    "stop": ServedField(is_stop, f"a string of 1 to {MAX_STOP} characters, or up to {MAX_STOPS} of them", None),
    "stream": ServedField(is_flag, "true or false", False),
    "stream_options": ServedField(is_stream_options, "{include_usage: true or false}", None, "with stream alone"),
    "cache_salt": ServedField(is_name, "text of one character or more", None, SALT),
    "user": ServedField(
        is_text_up_to(MAX_USER), f"text of at most {MAX_USER} characters", None, "has no effect, by its definition"
    ),
    "frequency_penalty": ServedField(is_number(-2, 2), "-2 to 2", 0.0, "for each time that a token is in the answer"),
    "presence_penalty": ServedField(is_number(-2, 2), "-2 to 2", 0.0, "for tokens of the answer"),
    "logit_bias": ServedField(
        is_bias,
        f"an object of up to {MAX_BIASES} token ids, each once, with numbers from -100 to 100",
        None,
        "added before penalties",
    ),
}
"""Fields that both kinds of requests have."""

REFUSED_CHAT_FIELDS = (
    "audio",
    "function_call",
    "functions",
    "moderation",
    "prediction",
    "prompt_cache_options",
    "prompt_cache_retention",
    "verbosity",
    "web_search_options",
)
"""Fields of chat completions that are refused whatever their value."""

CHAT: RequestFields = {
    "messages": ServedField(
        is_list_of(dict),
        "a list of one message or more",
        REQUIRED,
        "content is text, or parts of type text and image_url",
    ),
    **SAMPLING,
    "max_completion_tokens": ServedField(
        whole_number_in(1, 1 << 31), NEW_TOKENS_EXPECTED, None, "by default 2048, or what is left"
    ),
    "max_tokens": ServedField(
        whole_number_in(1, 1 << 31), NEW_TOKENS_EXPECTED, None, "an older name of max_completion_tokens"
    ),
    "logprobs": ServedField(is_flag, "true or false", False),
    "top_logprobs": ServedField(whole_number_in(0, 20), "0 to 20", None, "with logprobs alone"),
    "tools": ServedField(
        is_list_of(dict, 0), "a list of functions", None, "the chat template shows them; calls come as tool_calls"
    ),
    "tool_choice": ServedField(
        is_tool_choice, TOOL_CHOICE_EXPECTED, None, "none leaves tools out; a grammar forces calls"
    ),
    "reasoning_effort": ServedField(
        lambda value: value in EFFORTS, " or ".join(EFFORTS), None, "where the chat template takes it"
    ),
    "chat_template_kwargs": ServedField(
        lambda value: isinstance(value, dict), "an object", None, f"values that the chat template takes; {NOT_OPENAI}"
    ),
    "response_format": ServedField(is_response_format, FORMAT_EXPECTED, None, "a grammar holds the content to it"),
    "modalities": NeutralField((["text"],)),
    "parallel_tool_calls": ServedField(is_flag, "true or false", True, "with false the first call ends the answer"),
    "service_tier": NeutralField(("auto", "default")),
    "store": NeutralField((False,)),
    "metadata": NeutralField(({},)),
    "safety_identifier": ServedField(
        is_text_up_to(MAX_IDENTIFIER), IDENTIFIER_EXPECTED, None, "has no effect, by its definition"
    ),
    "prompt_cache_key": ServedField(
        is_text_up_to(MAX_IDENTIFIER), IDENTIFIER_EXPECTED, None, "has no effect: prefixes are found by comparison"
    ),
    **dict.fromkeys(REFUSED_CHAT_FIELDS, NeutralField()),
}
"""Fields of /v1/chat/completions."""

COMPLETION: RequestFields = {
    "prompt": ServedField(is_prompt, "text, or a list of token ids, or a list of one such prompt", REQUIRED),
    **SAMPLING,
    "max_tokens": ServedField(whole_number_in(1, 1 << 31), NEW_TOKENS_EXPECTED, None, "by default 16, or what is left"),
    "logprobs": ServedField(whole_number_in(0, 5), "0 to 5", None),
    "best_of": NeutralField((1,)),
    "echo": NeutralField((False,)),
    "suffix": NeutralField(("",)),
}
"""Fields of /v1/completions."""


MODEL_FIELD = ServedField(is_text, "the name that the server gives its model", None)

OF_MESSAGES = ("tools", "tool_choice", "reasoning_effort", "chat_template_kwargs")
"""Fields of chats that say how messages become tokens."""

TOKENIZE: RequestFields = {
    "model": MODEL_FIELD,
    "prompt": ServedField(is_text, "text", None, "it or messages"),
    "messages": ServedField(is_list_of(dict), "a list of one message or more", None, "in the model's chat template"),
    "add_special_tokens": ServedField(
        is_flag, "true or false", True, "of a prompt; those of messages are the template's"
    ),
    "return_token_strs": ServedField(is_flag, "true or false", False),
    "add_generation_prompt": NeutralField((True,)),
    "continue_final_message": NeutralField((False,)),
    **{name: CHAT[name] for name in OF_MESSAGES},
}
"""Fields of /tokenize."""

DETOKENIZE: RequestFields = {
    "model": MODEL_FIELD,
    "tokens": ServedField(is_list_of(int, 0), "a list of token ids", REQUIRED),
}
"""Fields of /detokenize."""


def read_fields(
    body: Any, known_fields: RequestFields, defaults: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Return the value of each known field, or raise on a field that is unknown or refused.

    `defaults` are those of the model, for fields that the body leaves out.
    """
    if not isinstance(body, dict):
        raise Refused(400, f"body: expected a JSON object, given {shown(body)}")
    for name in body:
        if name not in known_fields:
            raise Refused(400, f"body: unknown field {shown(name)}. Leave it out.", name[:SHOWN], "unknown_parameter")
    given = {**defaults, **{name: value for name, value in body.items() if value is not None}}
    fields = {name: field.read(name, given.get(name)) for name, field in known_fields.items()}
    _check_together(fields)
    return fields


def _check_together(fields: dict[str, Any]) -> None:
    """Raise on fields that need another one, or exclude it."""
    if "prompt" in fields and "messages" in fields and (fields["prompt"] is None) == (fields["messages"] is None):
        raise Refused(400, "prompt: expected it or messages, given both or none", "prompt")
    for name in OF_MESSAGES if fields.get("prompt") is not None else ():
        if fields.get(name):
            raise Refused(400, f"{name}: expected messages beside it, and no prompt", name)
    if fields.get("stream_options") is not None and not fields["stream"]:
        raise Refused(400, "stream_options: expected stream true beside it", "stream_options")
    if fields.get("top_logprobs") is not None and not fields["logprobs"]:
        raise Refused(400, "top_logprobs: expected logprobs true beside it", "top_logprobs")
    if None not in (fields.get("max_tokens"), fields.get("max_completion_tokens")):
        raise Refused(400, "max_tokens: expected it or max_completion_tokens, given both", "max_tokens")
