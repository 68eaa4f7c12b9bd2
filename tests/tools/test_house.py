"""Counts of what makes the package hard to hold in mind: none has grown, and each finds what it counts."""

import ast
from functools import cache
from pathlib import Path

import pytest

from tools import house

trees = cache(house.modules)


@pytest.mark.parametrize("title", house.COUNTS)
def test_no_count_of_the_house_exceeds_its_bound(title: str) -> None:
    count, bound = house.COUNTS[title]
    assert len(count(trees())) <= bound, "\n".join(count(trees()))


LONG = f"def long({', '.join(f'x{n}' for n in range(house.MAX_PARAMETERS + 1))}): ..."
STEPS = "def long():\n" + "    pass\n" * house.MAX_FUNCTION
WIDE = "\n".join(f"from attnmesh.core.part{n} import x" for n in range(house.MAX_IMPORTS + 1))
FOUND = {
    "classes": (
        house.shared_classes,
        {"core.one": "class Plan: ...", "comm.two": "class Plan: ..."},
        "Plan: comm.two, core.one",
    ),
    "namesakes": (
        house.shared_functions,
        {f"core.f{n}": "def plan(): ..." for n in range(house.MAX_NAMESAKES + 1)},
        "plan: core.f0, core.f1, core.f2, core.f3, core.f4",
    ),
    "plain functions": (
        house.shared_plain_functions,
        {
            "__init__": "from attnmesh.core.one import plan as plan",
            "core.one": "def plan(): ...\ndef check(): ...\ndef _is_known(): ...",
            "cli.two": "def plan(): ...\nasync def check(): ...\ndef _is_known(): ...",
        },
        "check: cli.two, core.one",
    ),
    "constants": (
        house.shared_constants,
        {
            "core.one": "MOST, LEAST = 4, 1\nPART: int = 2\nSUBJECT = 'one'\nSIZE = 8",
            "comm.two": "MOST = 5\nLEAST = 1\nPART = 2\nSUBJECT = 'two'\nSIZE = tl.constexpr(one.SIZE)",
        },
        "MOST: comm.two, core.one",
    ),
    "files": (house.shared_stems, {"core.plan": "", "comm.plan": ""}, "plan: comm.plan, core.plan"),
    "long files": (house.long_files, {"core.one": "x = 1\n" * (house.MAX_FILE + 1)}, "core.one: 651"),
    "functions": (house.long_functions, {"core.one": STEPS}, "core.one.long: 61"),
    "signatures": (house.long_signatures, {"core.one": LONG}, f"core.one.long: {house.MAX_PARAMETERS + 1}"),
    "imports": (house.wide_imports, {"core.one": WIDE}, f"core.one: {house.MAX_IMPORTS + 1}"),
    "planner": (
        house.engine_on_planner,
        {"comm.one": "from attnmesh.planner.workload_cost import cost"},
        "comm.one: attnmesh.planner.workload_cost",
    ),
    "cycles": (
        house.folder_cycles,
        {
            "hf.model": "from attnmesh.hf.cache.layer import x",
            "hf.cache.layer": "from attnmesh.hf.model import x\nfrom attnmesh.hf.sparse.select import x",
            "hf.sparse.select": "from attnmesh.hf.images.cut import x",
            "hf.images.cut": "from attnmesh.hf.sparse.select import x",
        },
        "hf.images, hf.sparse",
    ),
    "families": (
        house.named_families,
        {"hf.one": "LAYERS = ('a mamba', 'head')\ndef of_mamba2_layers(): ...", "hf.families.two": "x = 'mamba'"},
        "hf.one: of_mamba2_layers",
    ),
    "fields": (
        house.mask_fields_read,
        {
            "core.mask": "class Mask:\n    left: int\n    chunks: int\n    def reach(self):\n        return self.left",
            "hf.one": "def f(self):\n    return self.layer.mask.chunks, self.chunks, mask.reach()",
        },
        "hf.one:2: self.layer.mask.chunks",
    ),
    "collectives": (
        house.unnamed_collectives,
        {
            "comm.one": "@collective_once\ndef agree_on_it(axis): ...\n@collective_once\ndef agreed_hosts(axis): ...",
            "comm.two": "def _make_group(axis):\n    'Return a group. Collective at its first call.'",
        },
        "comm.two: _make_group",
    ),
    "checks": (
        house.misnamed_checks,
        {
            "core.one": "def check_it(x) -> None: ...\ndef checked_it(x) -> int: ...\ndef checksum(x) -> int: ...",
            "core.two": "class A:\n    def _check_it(self) -> int: ...",
        },
        "core.two: _check_it",
    ),
    "checks without a value": (
        house.misnamed_checks,
        {"core.one": "def checked_it(x) -> None: ..."},
        "core.one: checked_it",
    ),
    "tokens": (
        house.uncounted_tokens,
        {
            "core.one": "def f(tokens: int, ids: list[int]): ...\nclass A:\n    tokens: float | None = None",
            "core.two": "def f(self, tokens: int):\n    self.tokens: Tensor = x\n    tokens = x",
        },
        "core.two: tokens: Tensor",
    ),
    "tokens of a parameter": (
        house.uncounted_tokens,
        {"core.one": "class A:\n    def f(self, *, tokens: Sequence[int] = ()): ..."},
        "core.one: tokens: Sequence[int]",
    ),
    "rooms": (
        house.shadowed_rooms,
        {"__init__": "from attnmesh.decode.call import decode as decode", "decode.call": ""},
        "decode",
    ),
}


def test_families_are_found_in_comments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "one.py"
    file.write_text('"""As Mamba."""\n\nx = 1  # of Inkling\'s layers, and of RoBERTa.\n# Llamas\n')
    monkeypatch.setattr(house, "FILES", {"hf.one": file, "core.two": file})
    found = house.commented_families({"hf.one": ast.parse(""), "core.two": ast.parse("")})
    assert found == ["hf.one: Inkling", "hf.one: RoBERTa"]


@pytest.mark.parametrize("name", FOUND)
def test_each_count_finds_what_it_counts(name: str) -> None:
    count, files, found = FOUND[name]
    assert count({file: ast.parse(text) for file, text in files.items()}) == [found]


def test_each_file_can_be_imported_under_another_name() -> None:
    import attnmesh.cache.cache as cache
    import attnmesh.decoding.prepared_step as prepared_step
    import attnmesh.mesh_attention.attention_spec as attention_spec

    assert cache.KVCache.__module__ == "attnmesh.cache.cache"
    assert prepared_step.PreparedStep.__module__ == "attnmesh.decoding.prepared_step"
    assert attention_spec.AttentionSpec.__module__ == "attnmesh.mesh_attention.attention_spec"


def test_code_is_counted_without_blank_lines_comments_and_docstrings() -> None:
    file = '"""A file.\n\nIt has text.\n"""\n\n'
    constant = 'SIZE = 3  # why\n"""A constant."""\n\n'
    function = '# why\ndef f():\n    """Do."""\n    return 1\n'
    assert house.code_lines(file + constant + function) == 3


def test_a_count_over_its_bound_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(house, "COUNTS", {"wide": (lambda trees: ["core.one: 16"], 0)})
    monkeypatch.setattr(house, "sizes", list)
    monkeypatch.setattr(house, "modules", dict)
    with pytest.raises(SystemExit) as ended:
        house.main()
    assert ended.value.code
