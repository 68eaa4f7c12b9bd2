"""A server of scripted answers with tools, and OpenAI's client of it. Files with other servers name their own."""

from collections.abc import Iterator

import openai
import pytest

from tests.support.serving import fake_engine
from tests.support.serving.fake_engine import HERMES, ThreadWorld, byte_tokenizer
from tests.support.serving.served import Served, served


@pytest.fixture(scope="module")
def world() -> Iterator[ThreadWorld]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fake_engine, "LONGEST", 4000)
        yield ThreadWorld({"max_model_len": 4000}, pause=0)


@pytest.fixture(scope="module")
def running(world: ThreadWorld) -> Iterator[Served]:
    with served(world, tokenizer=byte_tokenizer(HERMES)) as one:
        yield one


@pytest.fixture(scope="module")
def client(running: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0, timeout=60) as one:
        yield one
