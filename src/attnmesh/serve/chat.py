"""The tokens of a request's prompt: messages in the model's chat template, or the text of a completion."""

import re
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from inspect import signature
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from attnmesh.hf.serving.step_exchange import can_be_sent
from attnmesh.serve.growing_text import NoMatch, check_json
from attnmesh.serve.images import buffers_of, read_image
from attnmesh.serve.json_reader import MAX_JSON_VALUES, JsonReader
from attnmesh.serve.refused import Refused
from attnmesh.serve.request_fields import is_text, shown, wrong_value
from attnmesh.serve.spelling import OPTIONS
from attnmesh.serve.tool_schemas import check_texts, check_tools

CHAT_ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles of messages. The chat template decides on what a model knows."""

MESSAGE = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
"""Fields of messages."""

ANSWER_FIELDS = ("refusal", "audio", "function_call", "annotations")
"""Fields of answers that a message may repeat if they are empty."""

OF_CLIENTS = ("parsed", "parsed_arguments", "index")
"""Fields that OpenAI's client adds to an answer and its calls: what it has read of their other fields."""

THOUGHT_NAMES = ("reasoning_content", "thinking")
"""Names by which chat templates know what a model thought before an earlier answer."""

RESERVED = {*signature(PreTrainedTokenizerBase.apply_chat_template).parameters, "messages", "reasoning_effort"}
"""Template variables that a request may not set."""

PROMPT_END_CHARACTERS = 64
"""Characters of a prompt's end, in which an answer may have begun."""

Check = Callable[[str], Any]


def _accept(_: str) -> None:
    """Let any text pass."""


class EncodedPrompt(NamedTuple):
    """The tokens of a prompt, and what a processor makes of its images."""

    ids: list[int]
    images: dict[str, Any] | None = None
    end: str = ""
    """The last characters of the prompt of a chat."""

    @property
    def nbytes(self) -> int:
        """Bytes of the images, as they are sent to rank 0."""
        return sum(map(len, buffers_of(self.images or {})))


def encode_chat(processing_class: Any, fields: dict[str, Any], check: Check = _accept) -> EncodedPrompt:
    """Return the tokens of the messages, with the beginning of the answer.

    `processing_class` is a tokenizer, or the processor of a model of images and text. `check` raises on a text that is
    too long.
    """
    pictures: list[Any] | None = [] if hasattr(processing_class, "image_processor") else None
    messages = [
        template_message(f"messages[{index}]", message, pictures) for index, message in enumerate(fields["messages"])
    ]
    check_tools(fields["tools"] or [])
    check_texts("response_format", fields.get("response_format"))
    tools = offered_tools(fields)
    if not processing_class.chat_template:
        raise Refused(400, "messages: the model has no chat template. Use /v1/completions.", "messages")
    template = template_of(processing_class, tools)
    if tools and not uses_tools(template):
        raise Refused(400, "tools: the model's chat template has no tools. Leave them out.", "tools")
    for index, message in enumerate(messages):
        if (message["role"] == "tool" or "tool_calls" in message) and not uses_tools(template):
            text = "the model's chat template has no tools. Leave out calls and their results."
            raise Refused(400, f"messages[{index}]: {text}", f"messages[{index}]")
    shapes = {
        role: shapes_of(processing_class, template, role, tools) for role in {message["role"] for message in messages}
    }
    for index, message in enumerate(messages):
        if not shapes[message["role"]]:
            text = f"the model's chat template drops messages of role {message['role']}. Use another role."
            raise Refused(400, f"messages[{index}]: {text}", f"messages[{index}]")
        message["content"] = _in_shape(message, shapes[message["role"]])
    _shape_arguments(processing_class, template, messages)
    _name_results(messages)
    for message in messages:
        _name_thought(template, message)
    options = {"chat_template": template, "tools": tools or None, "add_generation_prompt": True}
    options |= _values_of(template, fields)
    try:
        text = processing_class.apply_chat_template(messages, tokenize=False, **options)
    except Exception as error:  # a template raises what it wants, and on types that it does not expect
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        field = "tools" if tools and _renders(processing_class, messages, options | {"tools": None}) else "messages"
        raise Refused(400, f"{field}: the chat template refuses them: {line[:200]}", field) from None
    if not is_text(text):
        raise Refused(400, "messages: expected arguments of calls in UTF-8", "messages")
    check(text)
    if pictures is None:
        return EncodedPrompt(
            _token_ids(processing_class, text, add_special_tokens=False), None, text[-PROMPT_END_CHARACTERS:]
        )
    options |= {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    inputs = dict(processing_class.apply_chat_template(messages, **options))
    ids = inputs.pop("input_ids")[0].tolist()
    _ = inputs.pop("attention_mask", None)
    if others := ", ".join(name for name, value in inputs.items() if not can_be_sent(value)):
        text = f"messages: the model's processor makes {others} of images, which ranks do not take. Leave images out."
        raise Refused(400, text, "messages")
    return EncodedPrompt(ids, inputs if pictures else None, text[-PROMPT_END_CHARACTERS:])


def _values_of(template: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the values that a request gives the chat template, or raise on one that the template does not take."""
    values: dict[str, Any] = {}
    for name, value in (fields.get("chat_template_kwargs") or {}).items():
        field = f"chat_template_kwargs.{name[:60]}"
        if not is_text(name) or name in RESERVED or name not in variables_of(template):
            field = field if is_text(field) else "chat_template_kwargs"
            raise Refused(400, f"{field}: the model's chat template takes no such value. Leave it out.", field)
        values[name] = value
    if (effort := fields.get("reasoning_effort")) is not None:
        if "reasoning_effort" not in variables_of(template):
            text = "reasoning_effort: the model's chat template takes none. Leave it out."
            raise Refused(400, text, "reasoning_effort", "unsupported_parameter")
        values["reasoning_effort"] = effort
    return values


@lru_cache(maxsize=8)
def variables_of(template: str) -> frozenset[str]:
    """Return the names in a chat template's code, those that it sets itself too; none if it is malformed.

    >>> sorted(variables_of("Think. {{ '<think>' }}{% for m in messages if think_long %}{{ m.role }}{% endfor %}"))
    ['endfor', 'for', 'if', 'in', 'm', 'messages', 'think_long']
    """
    from jinja2 import Environment, TemplateSyntaxError

    names = set[str]()
    before = ""
    with suppress(TemplateSyntaxError):
        for _, kind, value in Environment().lex(template):
            if kind == "name" and before != ".":
                names.add(value)
            before = before if kind == "whitespace" else value
    return frozenset(names)


def offered_tools(fields: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return the tools that a model may call; None if there are none."""
    return fields["tools"] or None if fields["tool_choice"] != "none" else None


def has_images(fields: dict[str, Any]) -> bool:
    """Return whether a part of a message is an image."""
    contents = [message.get("content") for message in fields.get("messages") or ()]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, dict) and part.get("type") == "image_url" for part in parts)


def template_of(processing_class: Any, tools: list[dict[str, Any]] | None) -> str:
    """Return the chat template: of several, the one for tools or the default. Raise if it is missing."""
    several = processing_class.chat_template
    if isinstance(several, str):
        return several
    name = "tool_use" if tools and "tool_use" in several else "default"
    if name not in several:
        raise Refused(
            400, f"messages: of the model's chat templates none is named {name}. Use /v1/completions.", "messages"
        )
    return str(several[name])


PROBE_TEXT = "attnmesh-probe"
CONTENT_SHAPES: dict[str, Callable[[str], Any]] = {"text": str, "parts": lambda text: [{"type": "text", "text": text}]}
"""Content of a message in the shapes that templates take."""

SAMPLE_CALL = {"id": "a12345678", "type": "function", "function": {"name": "f", "arguments": {}}}
CALL_MESSAGE: dict[str, Any] = {"role": "assistant", "tool_calls": [SAMPLE_CALL]}
RESULT_FIELDS = {"tool_call_id": SAMPLE_CALL["id"], "name": "f"}
"""A call before a tool's message, and the fields that refer to it. Some templates require ids of nine characters."""

LISTED = re.compile(rf"""['"]text['"]: *['"]{PROBE_TEXT}""")
"""Parts that a template prints as a list."""


def shapes_of(processing_class: Any, template: str, role: str, tools: Any = None) -> tuple[str, ...]:
    """Return the shapes of content that a template shows for a role: none if it drops them, text if it raises."""
    kept = {
        shape: _shows(processing_class, {"chat_template": template, "tools": tools or None}, role, shape)
        for shape in CONTENT_SHAPES
    }
    raises = all(content is None for content in kept.values())
    return ("text",) if raises else tuple(shape for shape in CONTENT_SHAPES if kept[shape])


def _shows(processing_class: Any, options: dict[str, Any], role: str, shape: str) -> bool | None:
    """Return whether a template shows a message beside others, whose content has either shape; None if it raises."""
    raises = True
    for made in dict.fromkeys((CONTENT_SHAPES[shape], *CONTENT_SHAPES.values())):
        user = {"role": "user", "content": made("a")}
        before = {"assistant": [user], "tool": [user, CALL_MESSAGE | {"content": made("")}]}.get(role, [])
        fields = RESULT_FIELDS if role == "tool" else {}
        message = {"role": role, "content": CONTENT_SHAPES[shape](PROBE_TEXT), **fields}
        messages = [*before, message, *([] if role == "user" else [user])]
        text = _renders(processing_class, messages, options)
        if text is not None and PROBE_TEXT in text and not LISTED.search(text):
            return True
        raises = raises and text is None
    return None if raises else False


def _renders(processing_class: Any, messages: list[dict[str, Any]], options: dict[str, Any]) -> str | None:
    """Return what a template makes of messages; None if it raises."""
    try:
        return str(processing_class.apply_chat_template(messages, tokenize=False, **options))
    except Exception:  # a template raises what it wants
        return None


def _shape_arguments(processing_class: Any, template: str, messages: list[dict[str, Any]]) -> None:
    """Give the arguments of calls as objects, or leave them as the text that the model wrote.

    Text stays if the template renders it as it renders the object: the prompt then repeats the answer exactly. It
    stays also if the template raises on objects.
    """
    calls = [call["function"] for message in messages for call in message.get("tool_calls", ())]
    if not calls:
        return
    as_object, as_text = (
        _find_arguments(processing_class, template, arguments)
        for arguments in ({PROBE_TEXT: 1}, f'{{"{PROBE_TEXT}": 1}}')
    )
    if as_text is None or (as_object is not None and as_object != as_text):
        for function in calls:
            with suppress(Refused):  # of sizes that are not read: the template gets text
                function["arguments"] = JsonReader(function["arguments"], MAX_JSON_VALUES).read()


def _name_results(messages: list[dict[str, Any]]) -> None:
    """Give results of tools the name of the tool that their call names, which some templates show."""
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    names = {call["id"]: call["function"]["name"] for call in calls}
    for message in messages:
        if message["role"] == "tool" and "name" not in message and message.get("tool_call_id") in names:
            message["name"] = names[message["tool_call_id"]]


def _name_thought(template: str, message: dict[str, Any]) -> None:
    """Give what a model thought the names that the template knows it by."""
    thought = message.pop("reasoning_content", None)
    for name in THOUGHT_NAMES if thought else ():
        refused = name == "thinking" and message["content"] and "tool_calls" in message  # by the template of gpt-oss
        if re.search(rf"\b{name}\b", template) and not refused:  # a field of messages, which is no variable
            message[name] = thought


def _find_arguments(processing_class: Any, template: str, arguments: Any) -> str | None:
    """Return what a template makes of a call; None if it raises."""
    call = SAMPLE_CALL | {"function": {"name": "f", "arguments": arguments}}
    texts = [
        _renders(
            processing_class,
            [user, CALL_MESSAGE | {"content": made(""), "tool_calls": [call]}],
            {"chat_template": template},
        )
        for made in CONTENT_SHAPES.values()
        for user in [{"role": "user", "content": made("a")}]
    ]
    return next((text for text in texts if text is not None and PROBE_TEXT in text), None)


def _in_shape(message: dict[str, Any], shapes: tuple[str, ...]) -> Any:
    """Return the content in a shape that the template takes: unchanged where possible."""
    content = message["content"]
    if isinstance(content, str):
        return content if "text" in shapes else [{"type": "text", "text": content}]
    if "parts" in shapes:
        return content
    if any(part["type"] != "text" for part in content):
        raise Refused(400, "messages: the model's chat template takes text alone, and no images.", "messages")
    return "\n".join(part["text"] for part in content)


def uses_tools(template: str) -> bool:
    """Return whether a chat template refers to tools.

    >>> uses_tools("{% if tools %}{{ tools }}{% endif %}"), uses_tools("tools {{ messages }}")
    (True, False)
    """
    return re.search(r"\{[{%][^}]*\btools\b", template) is not None


def template_message(param: str, message: dict[str, Any], pictures: list[Any] | None = None) -> dict[str, Any]:
    """Return a message as templates take it: content as text, or in parts if it came so; arguments of calls as text.

    Pictures of a user are added to `pictures`, those of the request before them; None refuses them.
    """
    for field in message:
        empty = field in ANSWER_FIELDS and message[field] in (None, [])
        if field not in (*MESSAGE, *OF_CLIENTS) and not empty:
            raise Refused(400, f"{param}: unsupported field {shown(field)}. Leave it out.", param)
    role, name = message.get("role"), message.get("name")
    calls = [] if message.get("tool_calls") is None else message["tool_calls"]
    answers = message.get("tool_call_id")
    if role not in CHAT_ROLES:
        raise Refused(400, f"{param}.role: expected one of {', '.join(CHAT_ROLES)}, given {shown(role)}", param)
    if name is not None and (role != "tool" or not is_text(name)):
        raise Refused(400, f"{param}.name: expected a name in messages of role tool alone. Leave it out.", param)
    fits = isinstance(calls, list) and (not calls or role == "assistant")
    if not fits or (answers is not None and not (role == "tool" and is_text(answers))):
        raise Refused(400, f"{param}: expected tool_calls of assistants, and the tool_call_id of tools alone", param)
    thought = message.get("reasoning_content")
    if thought is not None and (role != "assistant" or not is_text(thought)):
        raise Refused(400, f"{param}.reasoning_content: expected text, of assistants alone", param)
    content = message.get("content")
    optional = bool(calls or thought)
    shows = pictures if role == "user" else None
    parts = read_parts(f"{param}.content", content, shows, optional=optional)
    text = "\n".join(part["text"] for part in parts if part["type"] == "text")
    read = {"role": role, "content": parts if isinstance(content, list) else text}
    read |= (
        {"tool_calls": [read_call(f"{param}.tool_calls[{index}]", call) for index, call in enumerate(calls)]}
        if calls
        else {}
    )
    more = {"name": name, "tool_call_id": answers, "reasoning_content": thought}
    return read | {key: value for key, value in more.items() if value is not None}


def read_parts(param: str, content: Any, pictures: list[Any] | None, *, optional: bool) -> list[dict[str, Any]]:
    """Return the parts of a message's content: text, and pictures where they may be."""
    if content is None and optional:
        return []
    if not isinstance(content, list) or not content:
        if not is_text(content):
            raise wrong_value(param, "text in UTF-8", content)
        return [{"type": "text", "text": content}]
    expected = "a part of type text" if pictures is None else "a part of type text or image_url"
    read: list[dict[str, Any]] = []
    for index, part in enumerate(content):
        place = f"{param}[{index}]"
        if pictures is not None and isinstance(part, dict) and part.get("type") == "image_url":
            pictures.append(read_image(place, part, pictures))
            read.append({"type": "image", "image": pictures[-1]})
            continue
        if not isinstance(part, dict) or part.keys() != {"type", "text"} or part["type"] != "text":
            raise wrong_value(place, expected, part)
        if not is_text(part["text"]):
            raise wrong_value(f"{place}.text", "text in UTF-8", part["text"])
        read.append(part)
    return read


def read_call(param: str, call: Any) -> dict[str, Any]:
    """Return a tool call of an earlier answer, its arguments as text of an object."""
    call = call if isinstance(call, dict) else {}
    function = call.get("function") if isinstance(call.get("function"), dict) else {}
    known = call.get("type") == "function" and is_text(function.get("name")) and is_text(call.get("id", ""))
    if not known or call.keys() - {"id", "type", "function", *OF_CLIENTS}:
        raise Refused(400, f"{param}: expected id, type function, and function with name and arguments", param)
    text = "{}" if function.get("arguments") in (None, "") else function["arguments"]
    try:
        check_json(text if is_text(text) else "0")
    except NoMatch:
        raise wrong_value(f"{param}.function.arguments", "JSON", text) from None
    if function.keys() - {"name", "arguments", *OF_CLIENTS}:
        raise wrong_value(f"{param}.function", "a name and arguments alone", sorted(function))
    if not is_text(text) or text.lstrip()[0] != "{":
        raise wrong_value(f"{param}.function.arguments", "the text of a JSON object", text)
    return {"id": call.get("id"), "type": "function", "function": {"name": function["name"], "arguments": text}}


def encode_text(processing_class: Any, fields: dict[str, Any], check: Check = _accept) -> EncodedPrompt:
    """Return the tokens of a completion's prompt: those given, or those of its text."""
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    prompt = fields["prompt"]
    prompt = prompt[0] if isinstance(prompt, list) and not isinstance(prompt[0], int) else prompt
    if isinstance(prompt, str):
        check(prompt)
        ids = _token_ids(tokenizer, prompt)
        mark = tokenizer.bos_token_id
        return EncodedPrompt(
            ids[1:] if mark is not None and ids[:2] == [mark, mark] else ids
        )  # the text brings its own
    if not all(0 <= token < len(tokenizer) for token in prompt):
        raise Refused(400, f"prompt: expected token ids of 0 to {len(tokenizer) - 1}", "prompt")
    return EncodedPrompt([*prompt])


def encode_either(
    processing_class: Any, fields: dict[str, Any], check: Check = _accept
) -> tuple[list[int], list[str] | None]:
    """Return the tokens of messages or of a text, and what the vocabulary has for each if that is asked for."""
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    if fields["messages"] is not None:
        ids = encode_chat(processing_class, fields, check).ids
    else:
        check(fields["prompt"])
        ids = _token_ids(tokenizer, fields["prompt"], add_special_tokens=fields["add_special_tokens"])
    return ids, [*tokenizer.convert_ids_to_tokens(ids)] if fields["return_token_strs"] else None


def decode_tokens(processing_class: Any, fields: dict[str, Any], _: Check = _accept) -> str:
    """Return the text of tokens, with special ones, or raise on ids outside the vocabulary."""
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    if not all(0 <= token < len(tokenizer) for token in fields["tokens"]):
        raise Refused(400, f"tokens: expected token ids of 0 to {len(tokenizer) - 1}", "tokens")
    return str(tokenizer.decode(fields["tokens"], **OPTIONS))


def _token_ids(tokenizer: Any, text: str, **options: Any) -> list[int]:
    """Return the tokens of a text. Masks are left out: other threads would wait while they are made."""
    return [*tokenizer(text, return_attention_mask=False, return_token_type_ids=False, **options)["input_ids"]]
