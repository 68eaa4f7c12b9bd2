"""The bench of rollouts: contenders draw as many tokens, and the memory of a step is of long completions."""

import pytest
from rich.console import Console

from benchmarks import rollouts, tables
from benchmarks.timing import Timing
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.training.trainers import launched

REQUEST = rollouts.Request(tokens=256, contexts=(24,), completions=2, new=3, ranks=(2, 2), rounds=2)


TIME = Timing(28981.4, 28407.5, 29555.2)


def test_the_tables_fit_a_terminal_of_80() -> None:
    rows = [
        rollouts.Speed(name, 2048, 1024, TIME)
        for name in ("transformers, 2 threads", "on_mesh, share_weights, 2 ranks")
    ]
    console = Console(width=80)
    with console.capture() as captured:
        console.print(tables.rollouts_table(rows), tables.steps_table([rollouts.Memory(4, 12345.6, 12345.6, 100.0)]))
    assert "…" not in captured.get()
    assert "1.00 (1.5)" in captured.get()


@on_each_rank
def measure_speeds() -> list[rollouts.Speed]:
    return list(rollouts._drawn(REQUEST))


@on_each_rank
def measure_step_memories() -> list[rollouts.Memory]:
    with launched():
        return list(rollouts._trained(REQUEST))


def test_each_contender_draws_as_many_tokens(pool: Pool) -> None:
    rows = [*pool.run(1, measure_speeds)[0], *pool.run(2, measure_speeds)[0]]
    assert [row.contender.split(",")[0] for row in rows] == ["transformers", "on_mesh", "on_mesh"]
    assert all(row.tokens == 6 and row.rate == pytest.approx(6e3 / row.timing.median) for row in rows)


@pytest.mark.long
def test_memory_is_that_of_the_rank_that_takes_most(pool: Pool) -> None:
    (row,), (other,) = pool.run(2, measure_step_memories)
    assert (row.ranks, row.before, row.step) == (2, other.before, other.step)
    assert row.step > 2 * 256 * 4 * (5 * 512) / 2 / 1e6  # what a layer keeps of a rank's tokens, at least
