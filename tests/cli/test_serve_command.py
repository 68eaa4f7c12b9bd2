"""The command `attnmesh serve` as a process: it starts, drains, and leaves nothing behind."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from transformers import LlamaConfig, Qwen3NextConfig

from attnmesh.cli.serve_command import holding
from attnmesh.errors import ArgumentError
from attnmesh_command import app, show_errors
from attnmesh_command.messages import OptionError
from attnmesh_command.model_options import GenerateOptions, ServeOptions
from attnmesh_command.option_texts import read_prompt
from tests.support.process.command import planned_serve
from tests.support.serving.fake_engine import SERVE, answer, byte_tokenizer, save_tiny
from tests.support.serving.served import until

PROMPT = "Once upon a time"


def shared_memory() -> list[Path]:
    """Return the names of mailboxes, also those of other worlds that are just being made."""
    return [*Path("/dev/shm").glob("attnmesh-*")]


class Command:
    """A running command and what it has printed."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        name, *planned_words = planned_serve(save_tiny(folder / "model"), "local:1x1")
        assert name == "attnmesh"
        words = [
            sys.executable,
            "-c",
            SERVE,
            *planned_words,
            "--mesh",
            "keys=2",
            "--port",
            "0",
            "--served-name",
            "small",
        ]
        environment = {**os.environ, "TMPDIR": str(folder)}
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.process = subprocess.Popen([*words, *options], env=environment, **pipes)
        self.lines: list[str] = []
        self.reading = threading.Thread(target=self._read)
        self.reading.start()
        try:
            until(lambda: any("serving" in line for line in self.lines) or self.process.poll() is not None)
        except AssertionError:
            self.process.kill()
            self.end()
            raise
        text = "".join(self.lines)
        found = re.search(r"serving (\S+) on (http://127.0.0.1:\d+), mesh keys=2", text)
        assert found, text
        self.name, self.url = found.groups()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(iter(self.process.stdout.readline, ""))

    def complete(self, **fields: Any) -> str:
        with self.asked(**fields) as answer:
            return str(json.load(answer)["choices"][0]["text"])

    def asked(self, **fields: Any) -> Any:
        """Return the open response to a request."""
        body = {"model": self.name, "prompt": PROMPT, "temperature": 0, **fields}
        headers = {"content-type": "application/json"}
        return urlopen(Request(f"{self.url}/v1/completions", json.dumps(body).encode(), headers), timeout=60)

    def stream(self, into: list[str], **fields: Any) -> None:
        """Read the pieces of a stream, as long as it lasts."""
        with suppress(HTTPException, ConnectionError), self.asked(stream=True, **fields) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    into.append(json.loads(line[6:])["choices"][0]["text"])

    def children(self) -> list[int]:
        """Processes with this command's folder in their environment, which are all that it has started."""
        mark = f"TMPDIR={self.folder}".encode()
        found = []
        for place in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark in place.read_bytes().split(b"\0"):
                    found.append(int(place.parent.name))
            except OSError:
                pass  # it has ended, or is another user's
        return [pid for pid in found if pid != self.process.pid]

    def end(self) -> int:
        code = self.process.wait(60)
        self.reading.join(30)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder for the command's own files; pytest's has too long a name for a socket."""
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_a_signal_drains_and_leaves_nothing(number: int, folder: Path) -> None:
    command = Command(folder)
    assert command.name == "small"
    steps = ("importing PyTorch", "starting 2 ranks", "serving small")  # without a terminal, too
    assert [line for line in command.lines if line.startswith(steps)] == command.lines
    assert len(command.lines) == 3
    texts: list[str] = []
    thread = threading.Thread(target=lambda: texts.append(command.complete(max_tokens=40)))
    thread.start()
    figures = f"{command.url}/metrics"
    until(lambda: b"attnmesh_prompt_tokens_total 0.0" not in urlopen(figures, timeout=30).read())
    command.process.send_signal(number)
    thread.join(60)
    assert len(texts) == 1  # the accepted request was answered in whole
    code = command.end()
    assert code == (130 if number == signal.SIGINT else 128 + signal.SIGTERM), command.lines
    assert "Traceback" not in "".join(command.lines)
    until(lambda: not command.children())
    assert [*folder.glob("attnmesh-*")] == []


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("times", [1, 20])
def test_a_front_that_is_killed_ends_its_streams_and_ranks(times: int, folder: Path) -> None:
    options: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1, "seed": 3}]
    ids, before = byte_tokenizer()(PROMPT)["input_ids"], {*shared_memory()}
    for turn in range(times):
        place = folder / str(turn)
        place.mkdir()
        command = Command(place)
        assert len(command.children()) >= 2
        assert [*place.glob("attnmesh-serve-*")] == []
        texts: list[list[str]] = [[], []]
        pairs = zip(texts, options, strict=True)
        threads = [
            threading.Thread(target=command.stream, args=(into,), kwargs={"max_tokens": 300, **given})
            for into, given in pairs
        ]
        for thread in threads:
            thread.start()
        until(lambda texts=texts, least=3 + turn: all(len(into) > least for into in texts))
        command.process.kill()
        for thread in threads:
            thread.join(60)
        for into, given in zip(texts, options, strict=True):
            whole = answer(ids, given, 300)
            assert whole.startswith(text := "".join(into))
            assert len(text) < len(whole)
        assert command.end() == -signal.SIGKILL
        until(lambda command=command: not command.children())
        assert [one.name for one in place.iterdir()] == ["model"]
        until(lambda: {*shared_memory()} <= before)


def refusal(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    command = lambda: app(["serve", *options], standalone_mode=False)  # noqa: E731
    assert show_errors(command, verbose=False) == 1
    *steps, error = capsys.readouterr().err.splitlines()
    assert all(step.startswith("importing PyTorch") for step in steps), steps
    return error


TINY = "a small model"

INVALID = {
    ("--model", "nowhere/at/all"): "model: expected a model, given 'nowhere/at/all'",
    ("--model", TINY, "--mesh", "keys=0"): "--mesh: expected axes by name",
    ("--model", TINY, "--mesh", "tp=4,keys=2"): "--mesh: expected a tp that divides the ranks and the heads",
    ("--model", TINY, "--merge", "best"): "--merge: expected one of",
    ("--model", TINY, "--api-key", ""): "--api-key: expected printable ASCII",
    ("--model", TINY, "--api-key", "é"): "--api-key: expected printable ASCII",
    ("--model", TINY, "--api-key", "a", "--api-key", "b c"): "--api-key: expected printable ASCII",
    (
        "--model",
        TINY,
        "--api-key-file",
        "/nowhere",
    ): "--api-key-file: expected a file with a key on each line, given /now",
    ("--model", TINY, "--api-key-file", "/dev/null"): "--api-key-file: expected printable ASCII",
    ("--model", TINY, "--max-model-len", "99999"): "--max-model-len: expected at most 2048, given 99999",
    ("--model", TINY, "--tool-format", "herms"): "write --tool-format hermes",
    ("--model", TINY, "--speculate", "ngram:65"): "--speculate: expected ngram, or ngram:N with N from 1 to 64, given",
    ("--model", TINY, "--speculate", "draft"): "given 'draft'. Fix: write one of these, or leave it out.",
    ("--model", TINY, "--draft", "/nowhere"): "--draft: expected a model, given '/nowhere', where there is none",
    ("--model", TINY, "--draft", "x:99"): "--draft: expected MODEL, or MODEL:N with N from 1 to 64, given 'x:99'",
    ("--model", TINY, "--draft", TINY, "--speculate", "ngram"): "--draft: expected no --speculate beside it, given",
    ("--model", TINY, "--generation-config", "vllm"): "--generation-config: expected one of auto, none",
    ("--model", TINY, "--store-disk", "5"): "--store-disk: expected a --store beside it, given 5.0",
    ("--model", TINY, "--store", "/proc/self/attr"): "store: expected a folder",
    ("--model", TINY, "--host", "192.0.2.1"): "Cannot assign requested address",
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("given", INVALID, ids=lambda given: " ".join(given))
def test_invalid_options_are_one_line(given: tuple[str, ...], tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert INVALID[given] in refusal(capsys, *(tiny if word == TINY else word for word in given))


def test_each_client_has_a_key(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys").write_text("third\n\n fourth \n")
    given: list[Any] = []

    class Stop(Exception):
        """Ends the command when it would serve."""

    def stop(app: Any, *_: Any) -> None:
        given.append(app.limits.api_keys)
        raise Stop

    monkeypatch.setattr("attnmesh.serve.server.run", stop)
    monkeypatch.setenv("ATTNMESH_API_KEY", "first second")
    for options in (["--api-key", "a", "--api-key", "b"], []):
        with pytest.raises(Stop):
            app(["serve", "--model", tiny, "--port", "0", "--api-key-file", str(tmp_path / "keys"), *options])
    assert given == [("a", "b", "third", "fourth"), ("first", "second", "third", "fourth")]


def test_folders_of_prefixes_are_refused_by_name(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--model", tiny, "--store", str(tmp_path / "prefixes")
    with holding(tmp_path / "prefixes"):
        assert f"{tmp_path / 'prefixes'}, which another server uses" in refusal(capsys, *options)
    (tmp_path / "prefixes").chmod(0o707)
    assert f"{tmp_path / 'prefixes'}, which others can write to" in refusal(capsys, *options)


def test_a_draft_of_other_tokens_or_with_states_is_refused_before_weights_are_read(
    tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in (
        ("text", "a model of transformers, given"),
        ("words", "one in which 1 differ, such as"),
        ("states", "a qwen3_next, whose"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        tokenizer = byte_tokenizer()
        if name == "words":
            tokenizer.add_tokens(["another"])
        if name != "text":
            kind: Any = Qwen3NextConfig if name == "states" else LlamaConfig
            kind(vocab_size=len(tokenizer)).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        said = refusal(capsys, "--model", tiny, "--port", "0", "--draft", f"{folder}:4")
        assert "--draft: expected" in said
        assert text in said


def test_a_taken_port_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        said = refusal(capsys, "--model", "smollm2", "--port", str(port))
    assert f"--port: expected a free port, given {port} of 127.0.0.1" in said
    assert f"Fix: name another, as --port {port + 1}, or --port 0 for any free one." in said


def test_a_model_that_is_nowhere_here_is_said_before_the_hub_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("gpt2", "Qwen/Qwen3-4B", "owner/smolm2"):
        GenerateOptions(model=name, prompt="a")
        assert capsys.readouterr().err == f"{name} is no folder or file here: asking the hub for it\n"


def test_gigabytes_without_an_end_are_refused() -> None:
    options: dict[str, Any] = {"model": "smollm2", "store": Path("prefixes")}
    for name in ("cache_memory", "store_memory", "store_disk"):
        with pytest.raises(OptionError, match=f"--{name.replace('_', '-')}: expected a number of GB, given inf"):
            ServeOptions(**options, **{name: float("inf")})


def test_names_that_no_response_can_have_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model\udcff"
    folder.mkdir()
    for names in (None, ["small", "sm\udcff"]):
        with pytest.raises(OptionError, match="--served-name: expected text in UTF-8"):
            ServeOptions(model=str(folder) if names is None else "smollm2", served_name=names)
    with pytest.raises(OptionError, match="--served-name: expected some text, given an empty one"):
        ServeOptions(model="smollm2", served_name=["small", ""])
    ServeOptions(model=str(folder), served_name=["small"])


@contextmanager
def piped(text: str) -> Iterator[Path]:
    """Give the file that a shell has for `<(command)`, which can be read once."""
    reading, writing = os.pipe()
    os.write(writing, text.encode())
    os.close(writing)
    try:
        yield Path(f"/dev/fd/{reading}")
    finally:
        os.close(reading)


def test_what_can_be_read_once_is_read_once() -> None:
    with piped("a long text") as file:
        GenerateOptions(model="smollm2", prompt="Sum it up.", prompt_file=file)
        assert read_prompt("Sum it up.", file) == "a long text\n\nSum it up."
    with piped("secret\n") as file:
        options = ServeOptions(model="smollm2", api_key_file=file)
        assert options.api_keys() == options.api_keys() == ("secret",)


def test_a_misspelt_packaged_model_is_refused_without_asking_the_hub() -> None:
    with pytest.raises(OptionError, match=r"given 'smolm2'\. Fix: write smollm2, which is packaged"):
        GenerateOptions(model="smolm2", prompt="a")


def test_keys_are_stored_as_asked_and_silent_ranks_are_lost_after_a_minute(
    tiny: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(_: int, settings: Any) -> Any:
        raise ArgumentError("storage", "", f"{settings.engine['storage']}, lost after {settings.deadline:g} s", "")

    monkeypatch.setattr("attnmesh.cli.serve_command.LocalRanks", stop)
    assert "given int8, lost after 60 s" in refusal(capsys, "--model", tiny, "--kv", "int8")


def test_a_generation_config_that_is_not_served_is_refused_at_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = save_tiny(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"suppress_tokens": [7], "eos_token_id": 9}')
    assert "suppress_tokens = [7]. Fix: start with --generation-config none" in refusal(capsys, "--model", place)

    def stop(_: int, settings: Any) -> Any:
        raise ArgumentError("ends", "", str(settings.engine["tokens_end"]), "")

    monkeypatch.setattr("attnmesh.cli.serve_command.LocalRanks", stop)
    assert "given (9, 256)" in refusal(capsys, "--model", place, "--generation-config", "none")
