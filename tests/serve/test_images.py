"""Images in messages: the texts of stock transformers, and refusals of what is no image."""

import io
from base64 import b64encode
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from PIL import Image

from attnmesh.hf.serving.engine import Engine
from attnmesh.serve import front_socket, images, supervisor
from attnmesh.serve.chat import encode_chat
from attnmesh.serve.rank_messages import ForgetPrompt, NewPrompt, SubmitRequest, ToRank
from attnmesh.serve.rank_requests import serve_rank_0
from tests.support.images.image_models import build_images, image_case
from tests.support.images.processed_images import TEMPLATE, pictures, processor
from tests.support.serving.fake_engine import ThreadWorld
from tests.support.serving.served import NAME, Served, chat, served, until


class EngineWorld:
    """An engine of one rank in a thread."""

    def run(self, address: str) -> None:
        model = build_images(image_case("llava"), "attnmesh", torch.float32)
        self.engine = Engine(model, None, max_model_len=400, tokens_end=())
        serve_rank_0(self.engine, address, {"max_model_len": 400})

    def kill(self, *, will_restart: bool = False) -> None:
        self.engine.close()


def of_images() -> Any:
    made = processor("left")
    made.chat_template = TEMPLATE
    return made


@pytest.fixture(scope="module")
def running() -> Iterator[Served]:
    encoder = of_images()
    with served(EngineWorld(), tokenizer=encoder.tokenizer, processor=encoder) as one:
        yield one


def url(picture: Any, kind: str = "png") -> str:
    data = io.BytesIO()
    picture.save(data, kind)
    return f"data:image/{kind};base64,{b64encode(data.getvalue()).decode()}"


def shown(*parts: Any) -> list[dict[str, Any]]:
    """Return the parts of a message: text, and pictures."""
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": url(part)}}
        for part in parts
    ]


def stock(*parts: Any) -> str:
    """Return the text of stock transformers."""
    encoder, model = of_images(), build_images(image_case("llava"), "sdpa", torch.float32)
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part} for part in parts
    ]
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
    batch = encoder.apply_chat_template([{"role": "user", "content": content}], **options)
    made = model.generate(**batch, max_new_tokens=8, do_sample=False)
    return str(encoder.tokenizer.decode(made[0, batch["input_ids"].shape[1] :], skip_special_tokens=True))


def test_texts_after_images_are_those_of_transformers(running: Served) -> None:
    first, second = pictures()[:2]
    for parts in ((first, "w4 w5"), ("w4", second, "w6", first, "w7"), ("w4 w5",)):
        code, said = running.ask("/v1/chat/completions", chat(shown(*parts), max_tokens=8, temperature=0))
        assert code == 200, said
        assert said["choices"][0]["message"]["content"].split() == stock(*parts).split()


def test_images_of_responses_are_those_of_chats(running: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    picture, lanes, run = pictures()[0], list[bool](), running.app._encoders.run

    async def noted(encode: Any, value: Any, is_long: bool, longest: int) -> Any:
        lanes.append(is_long)
        return await run(encode, value, is_long, longest)

    monkeypatch.setattr(running.app._encoders, "run", noted)
    parts = [{"type": "input_image", "image_url": url(picture)}, {"type": "input_text", "text": "w4 w5"}]
    body = {"model": NAME, "input": [{"role": "user", "content": parts}], "max_output_tokens": 8, "temperature": 0}
    code, said = running.ask("/v1/responses", body)
    assert code == 200, said
    assert said["output"][0]["content"][0]["text"].split() == stock(picture, "w4 w5").split()
    assert lanes == [True], "an image takes long, however short its data"


def test_what_ranks_do_not_take_is_refused(running: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that cannot be written would be the last one that rank 0 gets."""
    kind = type(of_images())
    apply = kind.apply_chat_template

    def with_a_set(encoder: Any, *arguments: Any, **options: Any) -> Any:
        made = apply(encoder, *arguments, **options)
        return {**made, "places": {1}} if options.get("return_dict") else made

    with monkeypatch.context() as patch:
        patch.setattr(kind, "apply_chat_template", with_a_set)
        code, answer = running.ask("/v1/chat/completions", chat(shown(pictures()[0], "w4"), max_tokens=2))
    assert (code, answer["error"]["param"]) == (400, "messages")
    assert "makes places of images, which ranks do not take" in answer["error"]["message"]
    assert running.ask("/v1/chat/completions", chat(shown(pictures()[0], "w4"), max_tokens=2))[0] == 200


SMALL = Image.new("RGB", (8, 8))
WRONG: dict[str, tuple[Any, str]] = {
    "a URL": ({"url": "https://example.com/a.png"}, "expected a data URL"),
    "a file": ({"url": "file:///etc/passwd"}, "expected a data URL"),
    "no base64": ({"url": "data:image/png;base64,%%%"}, "in base64: Error"),
    "no image": ({"url": "data:image/png;base64,aGk="}, "in base64: UnidentifiedImageError"),
    "half an image": ({"url": url(pictures()[0])[:200]}, "in base64"),
    "another format": ({"url": url(SMALL, "bmp")}, "in base64: UnidentifiedImageError"),
    "another detail": ({"url": url(SMALL), "detail": "high"}, 'expected detail auto, given "high"'),
    "another field": ({"url": url(SMALL), "size": 3}, "expected image_url with a url"),
    "no object": ("text", "expected image_url with a url"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_image_is_refused(case: str, running: Served) -> None:
    given, said = WRONG[case]
    code, answer = running.ask("/v1/chat/completions", chat([{"type": "image_url", "image_url": given}]))
    assert code == 400
    assert said in answer["error"]["message"], answer


@pytest.mark.parametrize("detail", ["auto", None])
def test_a_detail_of_auto_or_null_is_taken(detail: str | None, running: Served) -> None:
    part = {"type": "image_url", "image_url": {"url": url(SMALL), "detail": detail}}
    code, said = running.ask("/v1/chat/completions", chat([part], max_tokens=1))
    assert code == 200, said


def test_images_are_bounded(running: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "IMAGE_BYTES", 1000)
    code, answer = running.ask("/v1/chat/completions", chat(shown("w4", SMALL)))
    assert (code, answer["error"]["message"]) == (
        413,
        "images: expected at most 1000 bytes as the model reads them. Send fewer.",
    )
    monkeypatch.setattr(images, "MAX_PIXELS", 100)
    code, answer = running.ask("/v1/chat/completions", chat(shown("w4", SMALL, SMALL)))
    assert (code, answer["error"]["message"]) == (
        400,
        "messages[0].content[2]: expected images of at most 100 pixels together",
    )
    monkeypatch.setattr(images, "MAX_IMAGES", 1)
    code, answer = running.ask("/v1/chat/completions", chat(shown("w4", SMALL, SMALL)))
    assert (code, answer["error"]["message"]) == (400, "messages[0].content[2]: expected at most 1 images in a request")


def test_images_are_for_users_and_models_that_read_them(running: Served) -> None:
    system = [{"role": "system", "content": shown(SMALL)}, {"role": "user", "content": "w4"}]
    code, answer = running.ask("/v1/chat/completions", chat(messages=system))
    assert code == 400
    assert "messages[0].content[0]: expected a part of type text" in answer["error"]["message"]
    with served(ThreadWorld()) as text:
        code, answer = text.ask("/v1/chat/completions", chat(shown("Hi", SMALL)))
        assert code == 400
        assert "expected a part of type text, given" in answer["error"]["message"]


def test_images_are_sent_once_for_all_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[type, int]] = []
    whole = front_socket.message_parts

    def noted(message: ToRank) -> Any:
        given = message.images if isinstance(message, NewPrompt) else {}
        sent.append((type(message), sum(map(len, images.buffers_of(given)))))
        return whole(message)

    monkeypatch.setattr(front_socket, "message_parts", noted)
    encoder, picture = of_images(), pictures()[0]
    with served(EngineWorld(), tokenizer=encoder.tokenizer, processor=encoder) as one:
        fields = {"max_tokens": 8, "temperature": 0}
        code, said = one.ask("/v1/chat/completions", chat(shown(picture, "w4 w5"), n=4, **fields))
        assert code == 200
        texts = {choice["message"]["content"] for choice in said["choices"]}
        assert [text.split() for text in texts] == [stock(picture, "w4 w5").split()]
        world: Any = one.front.world
        until(lambda: sent[-1][0] is ForgetPrompt)
    kinds = [kind for kind, _ in sent]
    assert [kinds.count(kind) for kind in (NewPrompt, SubmitRequest, ForgetPrompt)] == [1, 4, 1]
    assert {size > 0 for kind, size in sent if kind is NewPrompt} == {True}
    assert world.engine.error is None


def test_images_of_open_requests_count_once_for_all_choices(running: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = of_images()
    fields = {"messages": [{"role": "user", "content": shown(pictures()[0])}], "tools": None, "tool_choice": None}
    size = encode_chat(encoder, fields).nbytes
    monkeypatch.setattr(supervisor, "IMAGE_BYTES", size)
    assert running.ask("/v1/chat/completions", chat(shown(pictures()[0]), n=4, max_tokens=4))[0] == 200
    monkeypatch.setattr(supervisor, "IMAGE_BYTES", size - 1)
    assert running.ask("/v1/chat/completions", chat(shown(pictures()[0]), n=4, max_tokens=4))[0] == 413
