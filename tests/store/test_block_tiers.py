"""Blocks: a tier forgets what was used least recently, and a prefix is found as far as its blocks lead."""

from collections import OrderedDict
from pathlib import Path
from random import Random

import pytest
import torch

from attnmesh.errors import StoreError
from attnmesh.store.block_folder import BlockFolder
from attnmesh.store.block_names import BLOCK_GRAIN, BlockNames, StoredBlock
from attnmesh.store.block_tiers import BlockTiers, TierEntry


def test_a_tier_finds_what_an_ideal_one_finds() -> None:
    random, room, found, ideal = Random(0), 150, 0, 0
    tiers, held = BlockTiers(1, room), OrderedDict[str, None]()
    for number in range(1000):
        prefix = min(int(random.expovariate(0.12)), 49)
        text = [1000 + prefix] * 10 * BLOCK_GRAIN + [2000 + number] * BLOCK_GRAIN
        names = BlockNames("a model")
        stored = tiers.prefix_blocks(names, text, len(text))
        found += len(stored)
        blocks = [names.at(text, BLOCK_GRAIN * (n + 1)) for n in range(len(text) // BLOCK_GRAIN)]
        ideal += next(n for n, name in enumerate(blocks) if name not in held)
        for n, name in enumerate(blocks[len(stored) :], len(stored)):
            block = StoredBlock(name, BLOCK_GRAIN * n, BLOCK_GRAIN * (n + 1))
            tiers.pin(stored)
            assert tiers.make_room(tiers.disk, 1)
            tiers.add(tiers.disk, block, TierEntry(1))
            stored.append(block)
        tiers.touch(stored)
        for name in blocks[::-1]:
            held[name] = None
            held.move_to_end(name)
        while len(held) > room:
            held.popitem(last=False)
    assert ideal > 3000
    assert abs(found - ideal) <= 0.05 * ideal
    assert len(tiers.disk.blocks) == tiers.disk.nbytes == room == sum(map(len, tiers.blocks_by_name.values()))


def test_blocks_of_other_sizes_lead_on() -> None:
    text, names, tiers = [*range(200)], BlockNames("a model"), BlockTiers(100, 100)
    for start, stop in ((0, 16), (16, 48), (0, 128), (48, 96), (112, 144)):
        tiers.add(tiers.disk, StoredBlock(names.at(text, stop), start, stop), TierEntry(1))
    tiers.add(tiers.memory, StoredBlock(names.at(text, 160), 128, 160), TierEntry(1, run_tokens=16))
    found = lambda most, layout: [block.stop for block in tiers.prefix_blocks(names, text, most, layout)]  # noqa: E731
    assert found(200, 16) == [128, 160]
    assert found(200, 128) == [128]  # ranks that hold 128 tokens in a row have others in memory
    assert found(150, 16) == [128]  # none of the blocks ends at 112, where one begins
    assert found(127, 16) == [16, 48, 96]
    assert found(40, 16) == [16]
    assert tiers.prefix_blocks(BlockNames("a model"), [7, *text], 200) == []


def test_blocks_on_their_way_to_the_folder_stay_in_memory_and_take_room_there() -> None:
    first, second, third = (StoredBlock(str(number), 0, 16) for number in range(3))
    tiers = BlockTiers(memory=10, disk=10)
    assert tiers.admit(first, TierEntry(4)) is True
    assert tiers.admit(second, TierEntry(6)) is True
    assert tiers.admit(third, TierEntry(1)) is None  # no room in memory yet
    assert tiers.pop_written() == (first, True)
    tiers.pin([first])
    assert tiers.admit(third, TierEntry(1)) is None
    tiers.pin(())
    tiers.add(tiers.disk, first, TierEntry(4))
    assert tiers.admit(third, TierEntry(1)) is True
    assert tiers.pop_gone() == ([first], [first])  # the folder has room for those on their way alone
    assert tiers.pop_gone() == ([], [])


def test_a_block_in_memory_and_in_the_folder_counts_once_in_each() -> None:
    ids, names, tiers = [*range(40)], BlockNames("a model"), BlockTiers(100, 100)
    state = StoredBlock(names.state_at(ids, 37), 32, 37, is_state=True)
    for tier in (tiers.memory, tiers.disk):
        for _ in range(2):
            tiers.add(tier, state, TierEntry(6, run_tokens=16))
        assert tier.nbytes == 6
    for tier in (tiers.disk, tiers.memory):
        assert [*tiers.states(names, ids, 40, 16)] == [state]
        assert not [*tiers.states(names, ids, 36, 16)]
        tiers.drop(tier, state)
    assert not [*tiers.states(names, ids, 40, 16)]
    assert not tiers.blocks_by_name
    assert not tiers.states_by_stop


def test_a_state_in_memory_serves_ranks_that_hold_the_same_tokens() -> None:
    ids, names, tiers = [*range(40)], BlockNames("a model"), BlockTiers(100, 100)
    state = StoredBlock(names.state_at(ids, 37), 32, 37, is_state=True)
    tiers.add(tiers.memory, state, TierEntry(6, run_tokens=16))
    assert not [*tiers.states(names, ids, 40, 32)]
    tiers.add(tiers.disk, state, TierEntry(6))
    assert [*tiers.states(names, ids, 40, 32)] == [state]


def test_a_file_says_whose_block_it_is(tmp_path: Path) -> None:
    folder, names = BlockFolder(tmp_path), ("0" * 32, "1" * 32)
    one, other = (StoredBlock(name, 0, 16) for name in names)
    folder.write(one, 0, {"keys 0": torch.arange(5)})
    assert folder.read(one, 0)["keys 0"].tolist() == [0, 1, 2, 3, 4]
    (tmp_path / one.file(0)).rename(tmp_path / other.file(0))
    with pytest.raises(StoreError, match="expected a file of 1111"):
        folder.read(other, 0)
    assert folder.scan() == {other: folder.size(other)}
    folder.remove(other)
    assert folder.scan() == {}
