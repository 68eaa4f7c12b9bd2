"""`python -m benchmarks serve`: what clients see of a server is what it sends."""

import os

from benchmarks import serve
from benchmarks.timing import Timing
from tests.support.serving.fake_engine import ThreadWorld, answer, byte_tokenizer
from tests.support.serving.served import NAME, served


def test_clients_read_whole_answers_and_when_each_token_came() -> None:
    prompts = ["Go on", "And on"]
    with served(ThreadWorld(pause=0.01)) as one:
        answers = serve.ask(one.port, NAME, prompts, 40)
    ids = [byte_tokenizer()(prompt)["input_ids"] for prompt in prompts]
    assert [one.text for one in answers] == [answer(own, {"temperature": 0}, 40) for own in ids]
    assert all(one.asked < one.times[0] and list(one.times) == sorted(one.times) for one in answers)
    assert all(20 < len(one.times) <= 40 for one in answers)  # letters of several tokens come as one piece


def test_a_rate_is_that_of_the_time_in_which_all_clients_are_answered() -> None:
    early, late = serve.Answer(0.0, (1.0, 2.0, 3.0, 4.0), "abcd"), serve.Answer(0.0, (2.0, 2.5, 3.0, 5.0), "abcd")
    assert serve.rate([early, late]) == 4 / 2  # after 2.0 and until 4.0: two tokens of each
    row = serve.summary("attnmesh", 384, 2, [([early, late], 5e6)], ["abcd", "abce"])
    assert (row.tokens_a_second, row.longest_gap, row.same_texts, row.megabytes) == (2.0, 2000.0, 0.5, 5e6)
    assert row.first == Timing(1500.0, 1250.0, 1750.0)
    one_after_the_other = [early, serve.Answer(0.0, (5.0, 6.0), "ab")]
    assert serve.rate(one_after_the_other) == 6 / 6


def test_no_prompt_begins_as_another() -> None:
    begins = [
        prompt[:14]
        for turn in range(3)
        for context in (384, 4000)
        for clients in (1, 2, 4, 8, 16)
        for prompt in serve.prompts_of("x" * 40_000, context, clients, turn)
    ]
    assert len({*begins}) == len(begins) == 3 * 2 * 31


def test_memory_is_that_of_a_process_and_its_children() -> None:
    assert serve.family(os.getpid())[0] == os.getpid()
    assert serve.proportional(os.getpid()) > 50e6
    assert serve.proportional(2**22 + 1) == 0
