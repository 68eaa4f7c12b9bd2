"""Every trainer of transformers and of TRL is served or refused by name: a new one is refused until it is compared."""

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import transformers
import trl

import attnmesh.hf as hf
from attnmesh import errors
from attnmesh.hf.training.trainer import SERVED, package_of

COMPARED = {
    "Trainer": "test_trainer",
    "Seq2SeqTrainer": "test_trainer",
    "SFTTrainer": "test_trainer",
    "RewardTrainer": "test_trainer",
    "DPOTrainer": "test_trainer",
    "KTOTrainer": "test_preferences",
    "GRPOTrainer": "test_rollouts",
    "RLOOTrainer": "test_rollouts",
    "DistillationTrainer": "test_distillation",
    "OnlineDPOTrainer": "test_online_dpo",
    "GKDTrainer": "test_gkd",
}
"""The file beside this one that compares a trainer with stock."""


def exported() -> Iterator[type]:
    """Yield each trainer that users can import, experimental and old names included."""
    yield from (getattr(transformers, name) for name in dir(transformers) if name.endswith("Trainer"))
    folder = Path(trl.__file__).parent
    for file in sorted(folder.rglob("*.py")):
        names = re.findall(r"^class (\w+Trainer)\(", file.read_text(), re.MULTILINE)
        if names:
            path = file.relative_to(folder).with_suffix("")
            module = import_module(".".join(("trl", *path.parts)).removesuffix(".__init__"))
            yield from (getattr(module, name) for name in names)


def test_each_trainer_is_served_or_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    assert COMPARED.keys() == {name for names in SERVED.values() for name in names}
    stable = {name for name in trl._import_structure["trainer"] if name.endswith("Trainer")}
    assert stable < COMPARED.keys(), "compare the new ones with stock, or refuse them here"
    served, refused = set(), set()
    for kind in exported():
        package, name = package_of(kind), kind.__name__
        if name in SERVED[package]:
            assert issubclass(hf.on_mesh(kind, None), kind)
            served.add(name)
        else:
            with pytest.raises(errors.KernelError, match=f"or a subclass of one of them, given {package}.{name}. Fix"):
                hf.on_mesh(kind, None)
            refused.add(kind)
    assert served == COMPARED.keys()
    assert len(refused) > 15
    names = {each.__name__ for each in refused}
    assert names & served == {"DPOTrainer", "DistillationTrainer", "KTOTrainer"}, "experimental ones of the same names"
    assert not [file for file in COMPARED.values() if not Path(__file__).with_name(f"{file}.py").exists()]
