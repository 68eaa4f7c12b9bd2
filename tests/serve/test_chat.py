"""Chat templates of many models: each message is shown, as text and never as a Python list, or is refused by name."""

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from attnmesh.serve.chat import encode_chat
from attnmesh.serve.refused import Refused
from tests.support.serving.fake_engine import byte_tokenizer

MODELS = Path(transformers.__file__).parent / "models"
SHIPPED = {
    f"{path.stem} {node.lineno}": node.value
    for path in (MODELS / f"{name}/processing_{name}.py" for name in ("llama4", "qwen2_audio", "smolvlm"))
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and "{%" in node.value
}
"""Templates that transformers has in its source."""


def each(body: str, end: str = "") -> str:
    return f"{{% for m in messages %}}{body}{{% endfor %}}{end}"


def split(body: str, end: str = "") -> str:
    """Return a template that writes the first message apart if it is the system's."""
    system = "{% if messages[0].role == 'system' %}{% set s = messages[0].content %}{% set messages = messages[1:] %}"
    return system + "{% else %}{% set s = '' %}{% endif %}" + each(body, end)


ALTERNATE = (
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
PARTS = "{% for p in m.content %}{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}"
EITHER = "{% if m.content is string %}{{ m.content }}{% else %}" + PARTS + "{% endif %}"
WRITTEN = {
    "ChatML": each("<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n", "<|im_start|>assistant\n"),
    "ChatML by sums": each("{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' }}"),
    "Llama 2": split(
        "{% if m.role == 'user' %}[INST] {% if loop.first and s %}<<SYS>>{{ s }}<</SYS>>{% endif %}"
        "{{ m.content.strip() }} [/INST]{% else %} {{ m.content.strip() }} {% endif %}"
    ),
    "Llama 3": each("<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"),
    "Llama 3.2 Vision": each("<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n" + EITHER + "<|eot_id|>"),
    "Mistral 7B": NO_SYSTEM
    + each(ALTERNATE + "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %}{{ m.content }}{% endif %}"),
    "Mistral v3": split(
        ALTERNATE + "{% if m.role == 'user' %}[INST]{% if loop.last and s %}{{ s + '\n' }}{% endif %}"
        "{{ m.content }}[/INST]{% else %}{{ m.content }}{% endif %}"
    ),
    "Mistral v7": each(
        "{% if m.role == 'system' %}[SYSTEM_PROMPT]{{ m.content }}{% else %}[INST]{{ m.content }}{% endif %}"
    ),
    "Pixtral": each("[INST]" + EITHER + "[/INST]"),
    "Gemma": NO_SYSTEM + each(ALTERNATE + "<start_of_turn>{{ m.role }}\n{{ m.content | trim }}<end_of_turn>\n"),
    "Gemma 3": each("<start_of_turn>{{ m.role }}\n" + EITHER + "<end_of_turn>\n"),
    "Phi 3": each(
        "{% if m.role == 'system' %}<|system|>\n{{ m.content }}{% elif m.role == 'user' %}<|user|>\n{{ m.content }}"
        "{% elif m.role == 'assistant' %}<|assistant|>\n{{ m.content }}{% endif %}<|end|>\n"
    ),
    "Phi 4": each(
        "{% if m.role in ['system', 'user', 'assistant'] %}<|im_start|>{{ m.role }}{{ m.content }}{% endif %}"
    ),
    "Zephyr": each(
        "{% if m.role in ['user', 'system', 'assistant'] %}<|{{ m.role }}|>\n{{ m['content'] + '</s>' }}{% endif %}"
    ),
    "DeepSeek V2": each(
        "{% if m.role == 'user' %}User: {{ m.content }}\n\n{% elif m.role == 'assistant' %}Assistant: {{ m.content }}"
        "{% elif m.role == 'system' %}{{ m.content }}\n\n{% endif %}"
    ),
    "DeepSeek R1": each(
        "{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}<|User|>{{ m.content }}"
        "{% elif m.role == 'assistant' %}<|Assistant|>{{ m.content.split('</think>')[-1] }}{% endif %}"
    ),
    "Qwen with tools": "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    + each(
        "{% if m.role in ['system', 'user', 'assistant'] %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|im_end|>"
        "{% elif m.role == 'tool' %}<tool_response>{{ m.content }}</tool_response>{% endif %}"
    ),
    "Qwen 2 VL": each("<|im_start|>{{ m.role }}\n" + EITHER + "<|im_end|>"),
    "Command R": split(
        "<|START_OF_TURN|>{{ m.role }}{{ m.content.strip() }}<|END_OF_TURN|>", "{% if s %}<|SYSTEM|>{{ s }}{% endif %}"
    ),
    "Command A": each("<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}" + PARTS + "{% endif %}"),
    "Vicuna": split("{% if loop.first %}{{ s }} {% endif %}{{ m.role | upper }}: {{ m.content }} "),
    "Granite": each("<|start_of_role|>{{ m['role'] }}<|end_of_role|>{{ m['content'] }}<|end_of_text|>\n"),
    "GLM 4": "[gMASK]<sop>" + each("<|{{ m.role }}|>\n{{ m.content }}"),
    "GLM 4.5": each(
        "<|{{ m.role }}|>\n{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %}{% endif %}"
    ),
    "Alpaca": each("### {{ 'Instruction' if m.role == 'user' else 'Response' }}:\n{{ m.content }}\n\n"),
    "Idefics 3": each(
        "{{ m.role | capitalize }}{% if m.content[0]['type'] == 'image' %}:{% else %}: {% endif %}" + PARTS + "<end>\n"
    ),
    "LLaVA": each(
        "{{ m.role | upper }}: {% for p in m.content | selectattr('type', 'equalto', 'text') %}{{ p.text }}{% endfor %}"
    ),
    "a list in front of tools": "{% if tools %}{{ messages[0].content }}{% set messages = messages[1:] %}{% endif %}"
    + each(EITHER),
    "Falcon": each("{{ m.role | title }}: {{ m.content | replace('\\r\\n', '\\n') }}\n"),
    "OLMo": each("<|{{ m.role }}|>\n{{ m.content }}\n"),
    "StableLM": each("<|{{ m.role }}|>\n{{ m.content | string }}<|endoftext|>\n"),
    "results in JSON": each(
        "{% if m.role == 'tool' %}{{ {'content': m.content} | tojson }}{% else %}{{ m.content }}{% endif %}"
    ),
}
"""Templates in the style of models, in short."""

SAID = {
    "system": "be brief-7",
    "developer": "be brief-7",
    "user": "question-1",
    "assistant": "answer-2",
    "last": "question-3",
}


class Processor:
    """Stands for the processor of a model of images and text."""

    image_processor = object()

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.chat_template = tokenizer, tokenizer.chat_template

    def apply_chat_template(self, messages: Any, *, tokenize: bool, **options: Any) -> Any:
        for name in ("return_dict", "return_tensors"):
            options.pop(name, None)
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, **options)
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return {"input_ids": torch.tensor([ids])} if tokenize else text


def conversation(*said: str, parts: bool) -> list[dict[str, Any]]:
    return [
        {
            "role": "user" if one == "last" else one,
            "content": [{"type": "text", "text": SAID[one]}] if parts else SAID[one],
        }
        for one in said
    ]


@pytest.mark.parametrize("images", [False, True], ids=["text", "images"])
@pytest.mark.parametrize("name", [*SHIPPED, *WRITTEN])
def test_no_message_is_dropped_and_no_list_is_printed(name: str, images: bool) -> None:
    tokenizer = byte_tokenizer((SHIPPED | WRITTEN)[name])
    encoder = Processor(tokenizer) if images else tokenizer
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}] if "tools" in name else None
    shown = 0
    for said in (
        ("user",),
        ("user", "assistant", "last"),
        ("system", "user", "assistant", "last"),
        ("developer", "user"),
    ):
        for parts in (False, True):
            fields = {"messages": conversation(*said, parts=parts), "tools": tools, "tool_choice": "auto"}
            try:
                text = tokenizer.decode(encode_chat(encoder, fields).ids)
            except Refused as refused:
                if refused.status == 400 and said[0] in ("system", "developer"):
                    continue
                raise
            shown += 1
            assert all(SAID[one] in text for one in said)
            assert "'text'" not in text
            assert '"text"' not in text
    assert shown >= 4


def test_a_role_that_a_template_drops_is_refused_by_name() -> None:
    fields = {"messages": conversation("developer", "user", parts=False), "tools": None, "tool_choice": "auto"}
    with pytest.raises(Refused, match=r"messages\[0\]: the model's chat template drops messages of role developer"):
        encode_chat(byte_tokenizer(WRITTEN["Phi 3"]), fields)
