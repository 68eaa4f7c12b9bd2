"""The input of /v1/responses: items, as messages of a chat. What is not served of an item is refused by its name."""

from collections.abc import Iterable
from typing import Any

from attnmesh.serve.refused import Refused
from attnmesh.serve.request_fields import is_name, is_text, shown, wrong_value

ITEM_ROLES = ("system", "developer", "user", "assistant")
"""Roles of messages."""

ITEM_FIELDS: dict[str, tuple[str, ...]] = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": ("content", "summary"),
    "input_text": ("text",),
    "output_text": ("text",),
    "text": ("text",),
    "reasoning_text": ("text",),
    "summary_text": ("text",),
    "input_image": ("image_url", "detail"),
}
"""Fields of items and of their parts, by type."""

PASSED = ("type", "id", "status")
"""Further fields, which say nothing to a model."""

EMPTY_ITEM_FIELDS = (
    "annotations",
    "async",
    "async_",
    "caller",
    "encrypted_content",
    "file_id",
    "logprobs",
    "name",
    "namespace",
    "phase",
)
"""Fields that items and parts of answers have elsewhere, and which hold nothing here."""

ITEMS = ("message", "function_call", "function_call_output", "reasoning")
PARTS = ("input_text", "output_text", "text", "input_image")
THOUGHT_PARTS = ("reasoning_text", "summary_text", "text")

ORDER = ("reasoning_content", "content", "tool_calls")
"""Fields of an answer's message, in the order in which templates show it."""


class InputMessages:
    """Messages of a chat. `names` has the field of the request that each of their fields came from."""

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        """Messages of which `reasoning_content` is a list of texts, which are joined once."""
        self.names: dict[str, str] = {}

    def messages(self) -> list[dict[str, Any]]:
        """Return the messages that were added."""
        for message in self._messages:
            if "reasoning_content" in message:
                message["reasoning_content"] = "".join(message["reasoning_content"])
        return self._messages

    def add_items(self, items: Iterable[dict[str, Any]]) -> None:
        """Add the messages of items, or raise on one that is not served."""
        for index, item in enumerate(items):
            self._add_item(f"input[{index}]", item)

    def add(self, role: str, content: Any, field: str, place: str = "") -> None:
        """Add a message whose content stands at a place of a field."""
        self._add_part(field, {"role": role, "content": content}, "content", place)

    def _add_item(self, field: str, item: dict[str, Any]) -> None:
        kind = "message" if item.get("type") is None else item["type"]
        if kind not in ITEMS:
            raise wrong_value(f"{field}.type", f"{', '.join(ITEMS[:-1])} or {ITEMS[-1]}", kind)
        check_fields(field, item, kind)
        match kind:
            case "message":
                if item.get("role") not in ITEM_ROLES:
                    raise wrong_value(f"{field}.role", f"one of {', '.join(ITEM_ROLES)}", item.get("role"))
                self.add(item["role"], content_of(f"{field}.content", item.get("content")), field, ".content")
            case "function_call":
                self._add_call(field, item)
            case "function_call_output":
                call = text_of(f"{field}.call_id", item.get("call_id"))
                output = content_of(f"{field}.output", item.get("output"))
                self._add_part(field, {"role": "tool", "tool_call_id": call, "content": output}, "content", ".output")
            case _:
                place = "summary" if item.get("content") in (None, []) else "content"
                if thought := thought_of(f"{field}.{place}", item.get(place)):
                    message = {"role": "assistant", "content": None, "reasoning_content": [thought]}
                    self._add_part(field, message, "reasoning_content", f".{place}")

    def _add_call(self, field: str, item: dict[str, Any]) -> None:
        function = {name: text_of(f"{field}.{name}", item.get(name)) for name in ("name", "arguments")}
        call = {"id": text_of(f"{field}.call_id", item.get("call_id")), "type": "function", "function": function}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        place = self._add_part(field, message, "tool_calls", "")
        place += f"[{len(self._messages[-1]['tool_calls']) - 1}]"
        self.names |= {place: field, f"{place}.function": field}

    def _add_part(self, field: str, message: dict[str, Any], kind: str, place: str) -> str:
        """Add a message, or what it holds to the last one. Return the field of the chat that holds it."""
        if self._messages and _continues(self._messages[-1], message, kind):
            _join(self._messages[-1], message, kind)
        else:
            self._messages.append(message)
            self.names[f"messages[{len(self._messages) - 1}]"] = field
        chat_field = f"messages[{len(self._messages) - 1}].{kind}"
        self.names.setdefault(chat_field, field + place)
        return chat_field


def _continues(last: dict[str, Any], message: dict[str, Any], kind: str) -> bool:
    """Return whether a part of an answer is shown after all that its message has, if it is added to it."""
    if not last["role"] == message["role"] == "assistant":
        return False
    shown = [ORDER.index(name) for name in ORDER if last.get(name)]
    return max(shown, default=0) < ORDER.index(kind) + (kind != "content")


def _join(last: dict[str, Any], message: dict[str, Any], kind: str) -> None:
    """Add a part of an answer to its message, which has no content yet if the part is content."""
    if kind in last and kind != "content":
        last[kind].extend(message[kind])
    else:
        last[kind] = message[kind]


def check_fields(field: str, value: dict[str, Any], kind: str) -> None:
    """Raise on a field that items or parts of a type do not have."""
    for name, one in value.items():
        if name in (*ITEM_FIELDS[kind], *PASSED) or (name in EMPTY_ITEM_FIELDS and one in (None, [])):
            continue
        place = f"{field}.{name[:60]}" if is_text(name) else field
        known = ", ".join(ITEM_FIELDS[kind])
        text = f"{place}: expected {known} of type {kind}, given {shown(name)}. Leave it out."
        raise Refused(400, text, place, "unknown_parameter")


def text_of(field: str, value: Any) -> str:
    """Return a text of one character or more, or raise."""
    if not is_name(value):
        raise wrong_value(field, "text of one character or more", value)
    return str(value)


def content_of(field: str, content: Any) -> Any:
    """Return the content of a message as chats have it, or raise."""
    if is_text(content):
        return content
    if not isinstance(content, list) or not content:
        raise wrong_value(field, "text, or a list of parts", content)
    parts = [part_of(f"{field}[{index}]", one, PARTS) for index, one in enumerate(content)]
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def thought_of(field: str, parts: Any) -> str:
    """Return what a model thought, or raise."""
    if not isinstance(parts, list | None):
        raise wrong_value(field, "a list of parts", parts)
    return "".join(part_of(f"{field}[{index}]", one, THOUGHT_PARTS)["text"] for index, one in enumerate(parts or ()))


def part_of(field: str, part: Any, kinds: tuple[str, ...]) -> dict[str, Any]:
    """Return a part as chats have it, or raise on one of another type."""
    if not isinstance(part, dict):
        raise wrong_value(field, f"a part of type {', '.join(kinds[:-1])} or {kinds[-1]}", part)
    kind = part.get("type")
    if kind not in kinds:
        raise wrong_value(f"{field}.type", f"{', '.join(kinds[:-1])} or {kinds[-1]}", kind)
    check_fields(field, part, kind)
    if kind == "input_image":
        detail = {"detail": part["detail"]} if part.get("detail") is not None else {}
        url = text_of(f"{field}.image_url", part.get("image_url"))
        return {"type": "image_url", "image_url": {"url": url} | detail}
    if not is_text(part.get("text")):
        raise wrong_value(f"{field}.text", "text in UTF-8", part.get("text"))
    return {"type": "text", "text": part["text"]}
