"""Names of stored blocks: of equal tokens before their end, and of nothing else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnmesh.store.block_names import BLOCK_GRAIN, BlockNames, StoredBlock

pytestmark = pytest.mark.quick

NUMBERS = st.integers(0, 10**6 - 1)
BLOCKS = st.builds(StoredBlock, st.text("0123456789abcdef", min_size=32, max_size=32), NUMBERS, NUMBERS, st.booleans())


@given(BLOCKS, NUMBERS, NUMBERS)
def test_the_name_of_a_file_says_which_block_it_is(block: StoredBlock, number: int, count: int) -> None:
    whole = block._replace(file_count=count)
    assert StoredBlock.of_file(whole.file(number)) == (whole, number)
    for other in (f"{whole.file(number)}.part", f"x{whole.file(number)}", whole.file(number).upper()):
        assert StoredBlock.of_file(other) is None


IDS = st.lists(st.integers(0, 2), min_size=2 * BLOCK_GRAIN + 5, max_size=2 * BLOCK_GRAIN + 5)


@given(IDS, IDS, st.integers(0, 2 * BLOCK_GRAIN + 5))
def test_names_are_equal_where_all_tokens_before_are(ids: list[int], others: list[int], common: int) -> None:
    others = ids[:common] + others[common:]
    one, other = BlockNames("a model"), BlockNames("a model")
    for stop in range(0, len(ids), BLOCK_GRAIN):
        assert (one.at(ids, stop) == other.at(others, stop)) == (ids[:stop] == others[:stop])
    for stop in range(len(ids) + 1):
        assert (one.state_at(ids, stop) == other.state_at(others, stop)) == (ids[:stop] == others[:stop])


def test_blocks_states_and_sources_have_names_of_their_own() -> None:
    ids = [*range(40)]
    names = BlockNames("a model", 1)
    made = [names.at(ids, 0), names.at(ids, 16), names.at(ids, 32), *(names.state_at(ids, stop) for stop in range(40))]
    made += [BlockNames("a model", "1").at(ids, 32), BlockNames("a model").at(ids, 32), BlockNames().at(ids, 32)]
    assert len({*made}) == len(made)
