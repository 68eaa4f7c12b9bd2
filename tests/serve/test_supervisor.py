"""Ranks are lost: the front starts others, and open streams go on with the same text."""

import asyncio
import re
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from attnmesh.cli.launch import LaunchError
from attnmesh.errors import ArgumentError, ModelError
from attnmesh.serve import front_socket, supervisor
from attnmesh.serve.chat import EncodedPrompt
from attnmesh.serve.metrics import Metrics, ServerState
from attnmesh.serve.rank_messages import EngineReady, NewPrompt
from attnmesh.serve.rank_socket import message_parts
from attnmesh.serve.refused import Refused
from attnmesh.serve.supervisor import Supervisor
from tests.support.serving.fake_engine import FakeEngine, Stream, ThreadWorld, answer, byte_tokenizer
from tests.support.serving.served import NAME, FakeRanks, Served, chat, served, until

IDS = byte_tokenizer()("Go on")["input_ids"]
NEW = 120


@pytest.fixture
def running() -> Iterator[Served]:
    with served(FakeRanks(), max_restarts=5) as one:
        yield one
        world: Any = one.front.world
    assert world.modes
    assert not any(mode & 0o077 for mode in world.modes)  # other users cannot enter the folder of the socket
    assert not one.children.alive()


def stream(running: Served, into: list[str], **options: Any) -> None:
    with openai.OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        events = client.completions.create(model=NAME, prompt="Go on", max_tokens=NEW, stream=True, **options)
        into.extend(one.choices[0].text for one in events)


def test_a_temporary_folder_of_a_long_name_is_refused_by_its_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with served(ThreadWorld()) as one:
        one.thread.join(30)
    assert "TMPDIR: expected room for an address of 103 bytes, given one of" in str(one.error)
    assert not [*folder.iterdir()]


@pytest.mark.parametrize("first", ["the ranks", "the loop"])
def test_an_event_loop_that_is_cut_short_prints_nothing_of_the_ranks(first: str) -> None:
    """As by a second interrupt, or a hangup, whether the ranks end before it has closed or after."""
    one = Supervisor(ThreadWorld(), max_requests=1, max_restarts=0, metrics=Metrics())
    said: list[Any] = []

    async def serve() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context))
        await one.start()
        while one.state != ServerState.READY:
            await asyncio.sleep(0.01)
        assert one._worlds_task is not None
        assert one._world_thread is not None
        if first == "the ranks":
            one._worlds_task.cancel()
            await asyncio.wait({one._worlds_task})
            one.world.kill()
            while one._world_thread.is_alive():
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.01)

    asyncio.run(serve())
    one.abandon()
    assert said == []


@pytest.mark.parametrize("name", ["long" * 25, "short"])
def test_a_world_that_cannot_be_listened_for_leaves_no_folder(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_socket(*_: Any) -> None:
        raise OSError("no socket")

    with tempfile.TemporaryDirectory() as base:  # `tmp_path` may be long itself
        folder = Path(base, name)
        folder.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        monkeypatch.setattr(asyncio, "start_unix_server", no_socket)
        one = Supervisor(ThreadWorld(), max_requests=1, max_restarts=0, metrics=Metrics())
        asyncio.run(one._live())
        assert isinstance(one.failure, ArgumentError if name != "short" else OSError)
        assert not [*folder.iterdir()]


@pytest.mark.parametrize("lost", [0, 1])
def test_streams_outlive_a_lost_rank(lost: int, running: Served) -> None:
    texts: list[list[str]] = [[], []]
    options: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1, "seed": 3}]
    pairs = zip(texts, options, strict=True)
    threads = [threading.Thread(target=stream, args=(running, into), kwargs=given) for into, given in pairs]
    for thread in threads:
        thread.start()
    until(lambda: all(len(into) > 20 for into in texts))
    said_of_ranks: list[str] = []
    running.front.log = said_of_ranks.append
    running.kill(lost)
    until(lambda: running.front.state == "restarting")
    code, said = running.ask("/v1/chat/completions", chat())
    assert (code, said["error"]["type"]) == (503, "server_error")
    assert running.ask("/health")[0] == 503
    until(lambda: running.front.state == "ready")
    for thread in threads:
        thread.join()
    for into, given in zip(texts, options, strict=True):
        assert "".join(into) == answer(IDS, given, NEW)
    loss, back = said_of_ranks
    assert loss == f"rank {lost} was ended by SIGKILL before it was done; restart 1 of 5, open requests: 2"
    assert re.fullmatch(r"the ranks are back after \d+\.\d s, requests that go on: 2", back)
    assert running.ask("/v1/chat/completions", chat())[0] == 200
    assert running.figure("attnmesh_restarts_total") == 1
    assert running.figure("attnmesh_tokens_total") == 2 * NEW + 20


def test_a_request_that_leaves_while_ranks_are_lost_keeps_no_other_from_them() -> None:
    async def cancel_between_worlds() -> list[Any]:
        one, sent = Supervisor(ThreadWorld(), max_requests=2, max_restarts=3, metrics=Metrics()), list[Any]()
        one._send = sent.append  # type: ignore[method-assign]
        one._begin({"max_model_len": 9})
        options = {"max_new_tokens": 5}
        leaving, staying = one.submit(EncodedPrompt([1]), [options] * 2, lambda *_: None)
        one._losses = [0.0]
        one._lost()
        one.cancel(leaving)
        sent.clear()
        one._begin({"max_model_len": 9})
        assert staying.number in one.open
        return sent

    prompt, request = asyncio.run(cancel_between_worlds())
    assert (prompt, request.number) == (NewPrompt(0, [1], {}), 2)


def test_images_that_open_requests_leave_no_room_for_may_be_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def statuses() -> list[int]:
        one, found = Supervisor(ThreadWorld(), max_requests=9, max_restarts=3, metrics=Metrics()), list[int]()
        one._begin({"max_model_len": 9})
        for count in (6, 6, 11):
            try:
                prompt = EncodedPrompt([1], {"pixel_values": torch.zeros(count, dtype=torch.uint8)})
                one.submit(prompt, [{"max_new_tokens": 5}], lambda *_: None)
                found.append(200)
            except Refused as error:
                found.append(error.status)
        return found

    monkeypatch.setattr(supervisor, "IMAGE_BYTES", 10)
    assert asyncio.run(statuses()) == [200, 429, 413]


class HeldOpen:
    """A world that is lost while another process keeps its connection open. `connections` are those."""

    def __init__(self) -> None:
        self.connections: list[socket.socket] = []
        self.ends = threading.Event()

    def run(self, address: str) -> None:
        connection = socket.socket(socket.AF_UNIX)
        self.connections.append(connection)
        connection.connect(address)
        connection.sendall(b"".join(map(bytes, message_parts(EngineReady({"max_model_len": 9})))))
        self.ends.wait(30)
        self.ends.clear()
        raise LaunchError("rank 1 was ended by SIGKILL before it was done")

    def kill(self, *, will_restart: bool = False) -> None:
        self.ends.set()


def test_requests_go_on_though_the_connection_of_a_lost_world_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_socket, "LAST_MESSAGES_SECONDS", 0.1)  # which this world never sends

    async def lose() -> tuple[int, int | None]:
        world = HeldOpen()
        one = Supervisor(world, max_requests=2, max_restarts=3, metrics=Metrics())
        await one.start()
        while one.state != "ready":
            await asyncio.sleep(0.01)
        (request,) = one.submit(EncodedPrompt([1]), [{"max_new_tokens": 5}], lambda *_: None)
        world.ends.set()
        while len(world.connections) < 2 or one.state != "ready" or request.tokens_in_world is None:
            await asyncio.sleep(0.01)
        found = request.replays, request.tokens_in_world
        closing = asyncio.create_task(one.close())
        await asyncio.sleep(0)
        world.kill()
        await closing
        for connection in world.connections:
            connection.close()
        return found

    assert asyncio.run(asyncio.wait_for(lose(), 30)) == (1, 0)


class Failing:
    """A world that is lost whenever it has sent a few tokens."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.started = error, 0

    def run(self, address: str) -> None:
        self.started += 1
        if self.error is not None:
            raise self.error
        world = ThreadWorld()
        thread = threading.Thread(target=world.run, args=(address,))
        thread.start()
        until(lambda: world.engine.tokens > 5 or world.engine.closed)
        world.kill()
        thread.join()
        raise LaunchError("rank 1 was ended by SIGKILL before it was done")

    def kill(self, *, will_restart: bool = False) -> None:
        """It ends when it is asked to."""


def test_a_request_that_loses_each_world_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "MAX_REPLAYS", 1)
    monkeypatch.setattr(supervisor, "LONGEST_PAUSE_SECONDS", 0.0)
    with served(Failing(), max_restarts=9) as one:
        code, said = one.ask("/v1/chat/completions", chat(max_tokens=200))
        assert (code, said["error"]["message"]) == (500, "Ranks were lost 2 times during this request.")
        assert not one.front.open
        until(lambda: one.front.state == "ready")


class Poisoned(ThreadWorld):
    """A world that is lost by one request, at one of its tokens. Later worlds have a smaller queue."""

    def __init__(self, place: int) -> None:
        super().__init__(rows=8, waiting=8)
        self.place = place

    def advance(self, engine: FakeEngine, stream: Stream) -> None:
        if stream.options["seed"] == 666 and len(stream.given) == self.place:
            raise RuntimeError("poison")
        FakeEngine.advance(engine, stream)

    def made(self) -> FakeEngine:
        engine = super().made()
        self.options |= {"waiting": 0, "rows": 4}
        engine.advance = lambda stream: self.advance(engine, stream)  # type: ignore[method-assign]
        return engine


@pytest.mark.parametrize("place", [0, 9])
def test_a_request_that_loses_ranks_ends_alone(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "LONGEST_PAUSE_SECONDS", 0.0)
    options: list[dict[str, Any]] = [{"temperature": 1, "seed": 3 + row} for row in range(5)]
    with served(Poisoned(place), max_restarts=3, max_requests=12) as one:
        texts: list[list[str]] = [[] for _ in options]
        pairs = zip(texts, options, strict=True)
        threads = [threading.Thread(target=stream, args=(one, into), kwargs=given) for into, given in pairs]
        for thread in threads:
            thread.start()
        until(lambda: all(len(into) > 5 for into in texts))
        body = chat(temperature=1, seed=666, max_tokens=NEW)
        code, said = one.ask("/v1/chat/completions", body)
        assert (code, said["error"]["message"]) == (500, "Ranks were lost 3 times during this request.")
        for thread in threads:
            thread.join()
        assert ["".join(into) for into in texts] == [answer(IDS, given, NEW) for given in options]
        assert one.front.state == "ready"


@pytest.mark.parametrize(("times", "state"), [((2.4, 4.8, 9.2, 17.7), "stopping"), ((1.0, 1.5, 2.0, 2.5), "failed")])
def test_losses_count_within_a_window(times: tuple[float, ...], state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "LOSS_WINDOW_SECONDS", 3.0)
    monkeypatch.setattr(supervisor, "LONGEST_PAUSE_SECONDS", 0.0)
    one = Supervisor(ThreadWorld(), max_requests=1, max_restarts=3, metrics=Metrics())
    one.engine_sizes, losses = {"max_model_len": 9}, iter(times)
    loop = asyncio.new_event_loop()

    async def lose() -> LaunchError:
        time = next(losses, None)
        if time is None:
            one.state = ServerState.STOPPING
        else:
            monkeypatch.setattr(loop, "time", lambda: time)
        return LaunchError("rank 1 was ended by SIGKILL before it was done")

    monkeypatch.setattr(one, "_run_world", lose)
    loop.run_until_complete(one._live())
    loop.close()
    assert one.state == state


def test_too_many_losses_end_the_server_with_their_error() -> None:
    with served(Failing(), max_restarts=1) as one:
        code, said = one.ask("/v1/chat/completions", chat(max_tokens=200))
        assert (code, said["error"]["message"]) == (503, "Ranks were lost, and the server ends.")
        one.thread.join(30)
        assert isinstance(one.error, LaunchError)


def test_a_world_that_cannot_start_is_not_tried_again() -> None:
    world = Failing(ModelError("model", "a model", "none", "name one"))
    with served(world, max_restarts=5) as one:
        one.thread.join(30)
        assert one.error is world.error
    assert world.started == 1


@pytest.mark.long
def test_streams_outlive_twenty_losses_of_each_rank(running: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "LOSS_WINDOW_SECONDS", 0.0)  # each loss is the first one
    options: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1, "seed": 3}]
    for lost in (0, 1) * 20:
        texts: list[list[str]] = [[], []]
        pairs = zip(texts, options, strict=True)
        threads = [threading.Thread(target=stream, args=(running, into), kwargs=given) for into, given in pairs]
        for thread in threads:
            thread.start()
        until(lambda texts=texts: all(len(into) > 5 for into in texts))
        running.kill(lost)
        for thread in threads:
            thread.join()
        assert ["".join(into) for into in texts] == [answer(IDS, given, NEW) for given in options]
    assert running.figure("attnmesh_restarts_total") == 40
    assert not running.front.open
