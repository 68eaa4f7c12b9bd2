"""Names that options take, which are read before the library is imported: those of the library."""

from attnmesh.comm import failures, merges
from attnmesh.core import partial
from attnmesh.core.storage import STORAGES
from attnmesh.cost.cluster import PRESETS
from attnmesh.hf import load
from attnmesh.hf.serving import engine_request, speculation
from attnmesh.mesh.shapes import AXES
from attnmesh.planner.recurrent import TRANSITIONS
from attnmesh.planner.training import LOSSES
from attnmesh.planner.workload import PHASES
from attnmesh.planner.workload_presets import WORKLOADS
from attnmesh_command import choices


def test_the_names_of_options_are_those_of_the_library() -> None:
    assert choices.DTYPE_NAMES == partial.DTYPE_NAMES
    assert (*STORAGES,) == choices.STORAGE_NAMES
    assert ("auto", *merges.MERGES) == choices.MERGE_CHOICES
    trees = [name for name, merge in merges.MERGES.items() if merge.is_canonical]
    assert ("auto", *trees) == choices.TREES
    found = choices.AXES, choices.PHASES, choices.TRANSITIONS, choices.LOSSES
    assert found == (AXES, PHASES, TRANSITIONS, LOSSES)
    assert {name: (one.hosts, one.ranks) for name, one in PRESETS.items() if name != "local"} == choices.CLUSTER_SIZES
    assert (*WORKLOADS,) == choices.WORKLOAD_NAMES
    assert (choices.COLDEST, choices.HOTTEST) == (engine_request.COLDEST, engine_request.HOTTEST)
    assert choices.MAX_GUESSES == speculation.MAX_GUESSES
    assert (choices.PACKAGED, choices.MAX_DEADLINE) == (load.PACKAGED, failures.MAX_DEADLINE)


def test_records_of_merges_may_name_their_fields() -> None:
    fields = "class Merge(NamedTuple):\n    name: str\n    run: object\n    is_canonical: bool = False\n"
    records = 'Merge("a", f, True), Merge(run=f, name="b"), Merge("c", f, is_canonical=True), Merge("d", f, False)'
    expected = {"a": True, "b": False, "c": True, "d": False}
    assert choices.canonical_by_merge(fields + records) == expected
