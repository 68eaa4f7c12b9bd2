"""The page in a real browser: type, stream, stop, go on, lose a rank."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from attnmesh.serve.access import Limits
from tests.support.serving.browser import Browser
from tests.support.serving.fake_engine import ThreadWorld, answer, byte_tokenizer
from tests.support.serving.served import FakeRanks, Served, served, until

CONTROLS = """
const targets = [...document.querySelectorAll("button, textarea")].map(one => one.getBoundingClientRect().height);
return [document.documentElement.scrollWidth, Math.min(...targets)];
"""


def text(browser: Browser, selector: str) -> Any:
    return browser.run(f"return [...document.querySelectorAll({selector!r})].map(one => one.textContent)")


def say(browser: Browser, message: str) -> None:
    browser.run(f"document.getElementById('text').value = {message!r}; document.getElementById('send').click()")


def answers_of(browser: Browser) -> Any:
    return text(browser, "#said .assistant")


def is_idle(browser: Browser) -> bool:
    return bool(browser.run("return document.getElementById('stop').disabled"))


def open_page(browser: Browser, running: Served) -> None:
    browser.call("POST", "/url", {"url": running.url})
    until(lambda: text(browser, "#state") == ["ready"])


@pytest.fixture(scope="module")
def running() -> Iterator[Served]:
    with served(FakeRanks(rest=1.5), max_restarts=5, drain=0.1) as one:  # the last answer is not waited for
        yield one


def test_a_chat_streams_stops_goes_on_and_outlives_a_rank(browser: Browser, running: Served) -> None:
    open_page(browser, running)
    say(browser, "Hi")
    until(lambda: any(len(one) > 20 for one in answers_of(browser)))
    browser.run("document.getElementById('stop').click()")
    until(lambda: is_idle(browser))
    (first,) = answers_of(browser)
    assert 20 < len(first) < 300
    until(lambda: not running.front.open)
    say(browser, "More")
    until(lambda: any(len(one) > 10 for one in answers_of(browser)[1:]))
    (request,) = running.front.open.values()
    prompt = byte_tokenizer().decode(request.prompt.ids)
    assert prompt == f"<user>Hi<assistant>{first}<user>More<assistant>"
    running.kill(1)
    until(lambda: text(browser, "#state") == ["restarting"])
    until(lambda: text(browser, "#state") == ["ready"])
    until(lambda: is_idle(browser))
    second = answers_of(browser)[1]
    assert second == answer(request.prompt.ids, request.options, request.options["max_new_tokens"])
    assert text(browser, "#said .error") == []
    until(lambda: text(browser, "[data-name=Restarts]") == ["1"])
    assert text(browser, "#ranks .bar span:last-child") == ["10", "12"]
    assert [one for one in browser.call("POST", "/se/log", {"type": "browser"}) if "503" not in one["message"]] == []


def test_the_page_asks_for_a_key_and_shows_errors(browser: Browser) -> None:
    with served(ThreadWorld(pause=0.001), limits=Limits(api_keys=("secret",))) as one:
        browser.call("POST", "/url", {"url": one.url})
        until(lambda: not browser.run("return document.getElementById('key-row').hidden"))
        until(lambda: "expected Bearer" in text(browser, "#state")[0])
        browser.run("document.getElementById('key').value = 'secret'")
        until(lambda: text(browser, "#state") == ["ready"])
        say(browser, "x" * 500)
        until(lambda: text(browser, "#said .error"))
        assert "The prompt has" in text(browser, "#said .error")[0]
        assert answers_of(browser) == []


def test_what_a_model_says_is_no_markup_and_the_page_fits_a_phone(browser: Browser, running: Served) -> None:
    browser.resize(360)
    open_page(browser, running)
    say(browser, "<img src=x onerror=document.title=1>")
    until(lambda: text(browser, "#said .user"))
    assert browser.run("return document.querySelectorAll('#said img').length") == 0
    time.sleep(0.1)
    assert browser.run("return document.title") == "attnmesh serve"
    width, target = browser.run(CONTROLS)
    assert width <= 360
    assert target >= 40


def test_the_page_needs_nothing_from_elsewhere(running: Served) -> None:
    page = running.ask("/")[1]
    for foreign in ("src=", "@import", "url(", "<link", "http"):
        assert foreign not in page
