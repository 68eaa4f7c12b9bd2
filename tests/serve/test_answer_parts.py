"""What a model thinks: taken out of the text wherever it is cut, counted, and given back to the chat template."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from attnmesh.serve.answer_parts import REASONING, AnswerParts, ReasoningMarks, find_formats
from attnmesh.serve.chat import encode_chat
from attnmesh.serve.refused import Refused
from attnmesh.serve.request_fields import CHAT, read_fields
from attnmesh.serve.tool_formats import FORMATS_BY_NAME, ContentText, ReasoningText, ToolCall
from tests.support.serving.fake_engine import ThreadWorld, byte_tokenizer
from tests.support.serving.served import NAME, Served, chat, served

THINKS = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}{% endfor %}"
    "<|assistant|>{% if enable_thinking is defined and enable_thinking %}<think>\n{% endif %}"
)
EFFORT = "{{ messages[0].content }} {{ reasoning_effort }}"
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


def parts_of(pieces: list[str], marks: ReasoningMarks, *, is_thinking: bool = False, calls: bool = True) -> Any:
    """Return thought, content and calls of an answer in pieces."""
    split = AnswerParts(FORMATS_BY_NAME["hermes"] if calls else None, {"f": {}}, marks, is_thinking=is_thinking)
    found = [part for piece in pieces for part in split.add(piece)] + split.end()
    texts = ["".join(part.text for part in found if isinstance(part, kind)) for kind in (ReasoningText, ContentText)]
    return (*texts, [part.name for part in found if isinstance(part, ToolCall)])


THINK = REASONING[0]
SAID: dict[str, tuple[str, bool, tuple[str, str, list[str]]]] = {
    "before an answer": ("<think>\nHm,\n\né. \n</think>\n\nYes.\n", False, ("Hm,\n\né.", "Yes.", [])),
    "begun in the prompt": ("\nHm <b></think>Yes.", True, ("Hm <b>", "Yes.", [])),
    "never": (" Yes.\n", False, ("", " Yes.\n", [])),
    "not ended": ("<think>Hm </thin", False, ("Hm </thin", "", [])),
    "not begun": ("<thin", False, ("", "<thin", [])),
    "no thought": ("<think>\n\n</think>\n\nYes.", False, ("", "Yes.", [])),
    "a mark within the answer": ("A <think> is a mark.", False, ("", "A <think> is a mark.", [])),
    "before a call": (f"<think>I call {CALL}.</think>\n\n{CALL}", False, (f"I call {CALL}.", "", ["f"])),
    "before both": (f"<think>Hm</think>\n\nI look.\n{CALL}\n", False, ("Hm", "I look.", ["f"])),
    "a call alone": (CALL, False, ("", "", ["f"])),
    "a call after space": (f"\n{CALL}", False, ("", "", ["f"])),
}


@pytest.mark.parametrize("name", SAID)
def test_thoughts_are_read_wherever_the_stream_is_cut(name: str) -> None:
    text, is_thinking, expected = SAID[name]
    for place in range(len(text) + 1):
        found = parts_of([text[:place], text[place:]], THINK, is_thinking=is_thinking)
        assert found == expected, place
    assert parts_of([*text], THINK, is_thinking=is_thinking)[0] == expected[0]
    if not expected[2]:
        assert parts_of([*text], THINK, is_thinking=is_thinking, calls=False) == expected


@pytest.mark.parametrize("marks", REASONING, ids=lambda marks: marks.begin)
def test_each_kind_of_marks_is_read_and_found(marks: ReasoningMarks) -> None:
    text = f"{marks.begin}\nHm{marks.end}\nYes."
    assert parts_of([text], marks) == parts_of([*text], marks) == ("Hm", "Yes.", [])
    assert find_formats(byte_tokenizer(f"{{{{ messages }}}}{marks.begin}{marks.end}")).reasoning_marks == marks


def test_none_leaves_thoughts_in_the_text() -> None:
    assert find_formats(byte_tokenizer(THINKS), "none").reasoning_marks is None
    assert find_formats(byte_tokenizer(THINKS), "hermes").reasoning_marks == THINK
    assert str(find_formats(byte_tokenizer(THINKS), "hermes")) == "calls as hermes, thoughts in <think>"
    assert find_formats(byte_tokenizer("{{ messages }}")).reasoning_marks is None


@pytest.fixture(scope="module")
def world() -> ThreadWorld:
    return ThreadWorld(pause=0)


@pytest.fixture(scope="module")
def running(world: ThreadWorld) -> Iterator[Served]:
    with served(world, tokenizer=byte_tokenizer(THINKS)) as one:
        yield one


@pytest.mark.parametrize("begun", [False, True])
def test_the_client_gets_thoughts_beside_content(begun: bool, world: ThreadWorld, running: Served) -> None:
    text = ("" if begun else "<think>") + "Hm, é.</think>\n\nYes."
    fields: Any = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}} if begun else {}
    with openai.OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        for stream in (False, True):
            world.engine.scripts.append(text)
            fields |= {"stream": stream, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 100}
            fields |= {"stream_options": {"include_usage": True}} if stream else {}
            said: Any = client.chat.completions.create(model=NAME, **fields)
            chunks = [*said] if stream else []
            deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices] or [said.choices[0].message]
            assert "".join(delta.content or "" for delta in deltas) == "Yes."
            assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Hm, é."
            usage = chunks[-1].usage if stream else said.usage
            thought = len(text.split("\n")[0].encode())
            assert usage.completion_tokens == len(text.encode())
            assert usage.completion_tokens_details.reasoning_tokens == thought - (0 if begun else len("<think"))


def test_a_thought_goes_back_to_the_template() -> None:
    tokenizer = byte_tokenizer(THINKS)
    thought: dict[str, Any] = {
        "role": "assistant",
        "content": "Yes.",
        "reasoning_content": "Hm",
        "refusal": None,
        "annotations": [],
    }
    messages = [{"role": "user", "content": "Hi"}, thought]
    found = encode_chat(tokenizer, read_fields(chat() | {"messages": messages}, CHAT))
    assert tokenizer.decode(found.ids) == "<|user|>Hi<|assistant|><think>\nHm\n</think>\n\nYes.<|assistant|>"
    for bad in ({"role": "user", "content": "Hi", "reasoning_content": "x"}, thought | {"reasoning_content": "\ud800"}):
        with pytest.raises(Refused, match=r"messages\[0\].reasoning_content: expected text, of assistants alone"):
            encode_chat(tokenizer, read_fields(chat() | {"messages": [bad]}, CHAT))
    with pytest.raises(Refused, match="unsupported field"):
        encode_chat(tokenizer, read_fields(chat() | {"messages": [thought | {"annotations": [1]}]}, CHAT))


def test_effort_and_values_reach_templates_that_take_them() -> None:
    tokenizer = byte_tokenizer(EFFORT)
    found = encode_chat(tokenizer, read_fields(chat(reasoning_effort="low"), CHAT))
    assert tokenizer.decode(found.ids) == "Hi low"
    for values, field in (
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"other": 1}}, "chat_template_kwargs.other"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"think": False}}, "chat_template_kwargs.think"),
        ({"chat_template_kwargs": {"role": 1}}, "chat_template_kwargs.role"),
        ({"chat_template_kwargs": {"m.role": 1}}, "chat_template_kwargs.m.role"),
        ({"chat_template_kwargs": {"\ud800": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
    ):
        with pytest.raises(Refused, match=f"^{field}: the model's chat template takes no") as raised:
            encode_chat(byte_tokenizer(THINKS), read_fields(chat(**values), CHAT))
        assert (raised.value.status, raised.value.param) == (400, field)
    assert encode_chat(byte_tokenizer(THINKS), read_fields(chat(), CHAT)).end == "<|user|>Hi<|assistant|>"
