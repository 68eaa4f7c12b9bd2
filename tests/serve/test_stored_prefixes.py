"""A server with a store: what it has computed outlives all of its processes, on other numbers of ranks too."""

import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from attnmesh.cli.generate_prompt import ModelOnMesh, find_model
from attnmesh.cli.mesh_option import MeshOptions
from attnmesh.cli.output import Status
from attnmesh.cli.serve_command import LocalRanks
from attnmesh.cli.serve_worker import ServeSettings
from attnmesh.hf.load import PACKAGED
from attnmesh.hf.serving.prefix_store import PrefixStore
from tests.support.process.needs import needs_smollm2
from tests.support.serving.fake_engine import save_tiny
from tests.support.serving.served import NAME, Served, served, until

TOKENS, OTHER, NEW = 8000, 600, 8


def model_and_settings(place: str, ranks: int, folder: Path) -> tuple[ModelOnMesh, ServeSettings]:
    found = find_model(place, ranks, MeshOptions(f"keys={ranks}"), Status(""))
    engine: dict[str, Any] = {"max_rows": 4, "max_queue": 16, "max_model_len": TOKENS + 100}
    return found, ServeSettings(found.for_ranks, "auto", "auto", 60.0, engine | {"store": PrefixStore(folder)})


class Completion(NamedTuple):
    """A completion of a prompt, some of whose tokens were stored."""

    text: str
    stored_tokens: int
    first_token_seconds: float


def completion(running: Served, prompt: list[int], new: int = NEW) -> Completion:
    body = {"model": NAME, "prompt": prompt, "temperature": 0}
    start = time.monotonic()
    status, first = running.ask("/v1/completions", {**body, "max_tokens": 1})
    seconds = time.monotonic() - start
    assert status == 200, first
    stored = first["usage"]["prompt_tokens_details"]["cached_tokens"]
    _, whole = running.ask("/v1/completions", {**body, "max_tokens": new})
    return Completion(whole["choices"][0]["text"], stored, seconds)


def first_token_seconds(place: str, folder: Path) -> tuple[float, float]:
    """Kill four ranks that have stored a prompt. Return the seconds before on them, and after on three ranks."""
    prompt = [5 + (7 * n + n // 50) % 80 for n in range(TOKENS)]
    found, settings = model_and_settings(place, 4, folder)
    with served(LocalRanks(4, settings), tokenizer=found.tokenizer) as running:
        completion(running, prompt[::-1][:OTHER], 1)  # not the first prompt of these ranks
        before = completion(running, prompt)
        assert before.stored_tokens == 0
        until(lambda: running.figure("attnmesh_engine_store_disk_bytes") > 0)
        written = lambda: running.figure("attnmesh_engine_store_blocks_written_total")  # noqa: E731
        until(lambda: written() >= OTHER // 16 + -(-TOKENS // 128))
        for process in running.children.alive():
            process.kill()
        assert [process.exitcode for process in running.children.alive() if process.exitcode] in ([], [-signal.SIGKILL])
    found, settings = model_and_settings(place, 3, folder)
    with served(LocalRanks(3, settings), tokenizer=found.tokenizer) as running:
        other = completion(running, prompt[::-1][:OTHER], 1)
        after = completion(running, prompt)
        assert after.text == before.text
        assert after.stored_tokens == TOKENS - 1
        stored = other.stored_tokens + after.stored_tokens
        name = "attnmesh_engine_store_disk_tokens_total"
        until(lambda: f"\n{name} " in running.ask("/metrics")[1])  # ranks that have just begun have sent no figures
        until(lambda: running.figure(name) == stored)
        assert running.figure("attnmesh_engine_store_blocks_damaged_total") == 0
    return before.first_token_seconds, after.first_token_seconds


@pytest.mark.long
def test_a_prompt_outlives_ranks_that_are_killed(tmp_path: Path) -> None:
    place = save_tiny(tmp_path / "model", max_position_embeddings=2 * TOKENS)
    cold, warm = first_token_seconds(place, tmp_path / "store")
    assert warm < cold


@pytest.mark.long
@needs_smollm2
def test_the_first_token_comes_in_a_tenth_of_the_time(tmp_path: Path) -> None:
    cold, warm = first_token_seconds(PACKAGED, tmp_path / "store")
    assert warm < 0.1 * cold
