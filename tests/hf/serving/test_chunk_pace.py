"""The tokens of a chunk: by what tokens and steps have taken, and by how long rows may wait."""

import pytest

from attnmesh.hf.serving.chunk_pace import ChunkPace
from attnmesh.runtime.world import WORLD


def paced(max_gap: float | None = None, row_seconds: float = 0.1, token_seconds: float = 0.001) -> ChunkPace:
    pace = ChunkPace(max_gap)
    pace.add_rows(row_seconds)
    pace.add_chunk(100, 100 * token_seconds)
    return pace


def test_the_first_chunk_has_a_size_of_its_own() -> None:
    pace = ChunkPace(None)
    assert pace.tokens(0, 1, store_is_busy=False) == 256
    assert pace.tokens(1, 1, store_is_busy=False) == 64
    pace.add_rows(0.1)
    assert pace.tokens(1, 1, store_is_busy=False) == 64


@pytest.mark.parametrize(("waiting", "tokens"), [(1, 200), (3, 600), (50, 2048)])
def test_a_chunk_takes_two_steps_for_each_request_that_waits(waiting: int, tokens: int) -> None:
    assert paced().tokens(4, waiting, store_is_busy=False) == tokens


def test_a_chunk_and_a_step_together_aim_at_the_longest_pause() -> None:
    pace = paced(max_gap=0.5)
    assert pace.spare_seconds == pytest.approx(0.4)
    assert pace.tokens(4, 3, store_is_busy=False) == 400
    assert pace.tokens(4, 3, store_is_busy=True) == 200  # the other half copies blocks
    assert paced(max_gap=0.05).tokens(4, 3, store_is_busy=False) == 1


def test_a_chunk_without_rows_takes_a_quarter_of_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WORLD, "deadline", 4.0)
    assert paced(token_seconds=0.01).tokens(0, 1, store_is_busy=False) == 100
    assert paced(token_seconds=5.0).tokens(0, 1, store_is_busy=False) == 1


def test_seconds_are_moving_means_without_the_last_tokens_of_prompts() -> None:
    pace = paced()
    pace.add_rows(0.2)
    pace.add_chunk(2, 9.0)
    assert (pace.row_seconds, pace.token_seconds) == pytest.approx((0.13, 0.001))
