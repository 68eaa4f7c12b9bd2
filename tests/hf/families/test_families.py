"""A family whose part of transformers has another name or another rule is refused alone, and by name."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

import attnmesh.hf as hf
import attnmesh.hf.families as room
from attnmesh import errors
from attnmesh.core.mask import FULL
from attnmesh.hf import models, pins
from attnmesh.hf import transformers_names as upstream
from attnmesh.hf.families import llama4
from attnmesh.hf.family import (
    LENGTH_DEPENDENT_ROPES,
    RECURRENT_STATES,
    Family,
    families,
    family_of_class,
    family_of_layer,
    known_subclassed,
    recurrences,
)
from attnmesh.hf.pins import ModuleSource, check_family
from attnmesh.hf.recurrent.prepare_recurrent import RecurrentLayer
from attnmesh.runtime.upstream import OPT_IN
from tests.support.models.families import SIZES
from tests.support.models.tiny_models import Case, tiny_config
from tools.rooms import FILES
from tools.upstream_records import FIELDS, PAGE, configurations, differences, page, source_of_type
from tools.versions import ROOT

INSTALLED, REQUIREMENT = upstream.TRANSFORMERS.installed, upstream.TRANSFORMERS.requirement
STORED = [
    (kind, part, name)
    for kind, one in families().items()
    for part, names in one.stores.items()
    for name in names.split()
]
FOLLOWED = [kind for kind, one in families().items() if one.sources]

OPTIONAL = {
    "of this package": "begin_entries select sequence join_earlier FAMILIES",
    "of classes of configurations, and of layers without one": "model_type",
    "of PyTorch": "_orig_mod module num_embeddings shape __code__",
    "of a model, which is refused without it": "ALL_ATTENTION_FUNCTIONS forward kv_b_proj image_processor",
    "of a model that has been quantized, dispatched or adapted": "hf_device_map hf_quantizer peft_config",
    "checked with the names of its package": "is_prompt_learning alora_invocation_tokens peft_type",
    "of accelerate, whose versions are few": "fsdp_plugin parallelism_config",
    "of some trainers of TRL, whose versions are few": "rollout_func environment_factories tools generation_kwargs",
    "of a caller's value": "mesh sequences to_dict generation_config",
    "of modules whose mask says the same": "is_causal",
    "of all modules of attention but those of towers": "config",
    "of some outputs and heads": "router_logits score out_features",
    "of some tokenizers and processors": "backend_tokenizer chat_template",
    "of some errors of the system": "errno",
    "of loaders of data, which may be of any class": "worker_init_fn base_dataloader",
    "of hooks, which may be of any class": "__name__",
    "of experts, which each rank computes without it": "_is_expert_parallel",
}
"""Names that are read with a default beside those of records, and why a default is right."""


def test_the_temperature_of_llama4_does_not_depend_on_the_default_dtype() -> None:
    layer = SimpleNamespace(attn_temperature_tuning=True, use_rope=False, floor_scale=8192, attn_scale=0.1)
    tokens = torch.arange(8180, 8200)
    sequence: Any = SimpleNamespace(positions=lambda: tokens, documents=FULL, start=0)
    expected = llama4.temperature(layer, sequence)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        found = llama4.temperature(layer, sequence)
    finally:
        torch.set_default_dtype(before)
    assert expected is not None
    assert found is not None
    assert torch.equal(found, expected)
    assert len(expected.unique()) == 2


@pytest.fixture(autouse=True)
def _unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins, "CHECKED", set())
    monkeypatch.delenv(OPT_IN, raising=False)


def refusal(config: PreTrainedConfig) -> str:
    """Return the error about a configuration."""
    with pytest.raises(errors.VersionError) as caught:
        check_family(config)
    return str(caught.value)


def renamed_in(kind: str, old: str, new: str, folder: Path, patch: pytest.MonkeyPatch, *, run: bool = False) -> None:
    """Let the code of a model type be that of a release in which a text is another one."""
    name = source_of_type(kind).module
    stock: Any = __import__(name, fromlist=["_"])
    text = Path(stock.__file__).read_text()
    assert re.search(old, text)
    file = folder / "modeling.py"
    file.write_text(re.sub(old, new, text))
    spec: Any = spec_from_file_location(name, file)
    module = module_from_spec(spec)
    patch.setitem(sys.modules, name, module)
    if run:
        spec.loader.exec_module(module)


def test_records_are_those_of_the_installed_version() -> None:
    assert not [*differences()], "read what changed: python -m tools.upstream_records"


def test_records_name_all_that_is_written_again() -> None:
    for kind, one in families().items():
        followed = {f"{name}.forward" for name in (*one.recurrences, *one.subclassed)}
        followed |= {
            name for layer in one.recurrences.values() for name, given in layer.functions.items() if given is not None
        }
        assert followed <= one.sources.keys(), kind
        assert not one.sources or {*one.recurrences, *one.subclassed} <= source_of_type(kind).parts.keys()
        assert (RECURRENT_STATES in one.uses) == bool(one.recurrences)


def defaults() -> Iterator[tuple[str, str]]:
    """Yield the files of the room, each with a name that it reads with a default."""
    for file in (file for file in FILES if file.startswith("hf.")):
        for call in (node for node in ast.walk(ast.parse(FILES[file].read_text())) if isinstance(node, ast.Call)):
            function = call.func.id if isinstance(call.func, ast.Name) else ""
            if function == "hasattr" or (function == "getattr" and len(call.args) == 3):
                yield from ((file, str(name.value)) for name in call.args[1:2] if isinstance(name, ast.Constant))


def test_each_name_that_is_read_with_a_default_is_in_a_record_or_has_a_reason() -> None:
    stored = {name for _, _, name in STORED}
    reasons, read = {*" ".join(OPTIONAL.values()).split()}, [*defaults()]
    assert not [(file, name) for file, name in read if name not in {*FIELDS, *stored, *reasons}]
    assert not reasons - {name for _, name in read}


def lacking(config: Any, lost: str) -> Any:
    """Return a configuration as a release would make it that has renamed a field."""
    stock = type(config)

    def read(self: Any, name: str) -> Any:
        if name == lost:
            raise AttributeError(name)
        return stock.__getattribute__(self, name)

    made = object.__new__(type(stock.__name__, (stock,), {"__getattribute__": read}))
    vars(made).update(vars(config))
    return made


@pytest.mark.parametrize("name", FIELDS)
def test_a_renamed_field_of_a_configuration_is_refused(name: str) -> None:
    kinds = (kind for kind, one in families().items() if name in one.fields.split())
    kind = next(kind for kind in kinds if not configurations()[kind].is_heterogeneous)
    config = configurations()[kind]
    needs_it = {  # fields that are made of it come first
        other for other in families()[kind].fields.split() if not hasattr(lacking(config, name), other)
    }
    found = re.match(f"attnmesh.hf {kind}: .* with {type(config).__name__}.(.*), given", refusal(lacking(config, name)))
    assert found is not None
    assert found[1] in needs_it
    check_family(configurations()["gpt2"])


@pytest.mark.parametrize(
    ("kind", "part", "name"),
    [
        pytest.param(*one, marks=[pytest.mark.long] if one[2] == "rope_deltas" and one[0] != "qwen2_vl" else [])
        for one in STORED
    ],
)
def test_a_renamed_attribute_is_refused(
    kind: str, part: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(OPT_IN, "1")  # which allows no lost name
    renamed_in(kind, rf"\bself\.{name}\b", "self.renamed", tmp_path, monkeypatch)
    assert refusal(configurations()[kind]) == (
        f"attnmesh.hf {kind}: expected {REQUIREMENT} with {part}.{name}, given {INSTALLED} without it. "
        f'Fix: run pip install "{REQUIREMENT}".'
    )
    check_family(LlamaConfig())


@pytest.mark.parametrize("kind", FOLLOWED)
def test_another_rule_is_refused_unless_it_is_allowed(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = list(families()[kind].sources)[-1].split(".")[-1]
    first = next(name for name in families()[kind].sources if name.split(".")[-1] == changed)
    renamed_in(kind, rf"(?m)^( *)(def {changed}\()", r"\1@changed\n\1\2", tmp_path, monkeypatch)
    assert refusal(configurations()[kind]) == (
        f"attnmesh.hf {kind}: expected {REQUIREMENT} with the {first} that attnmesh follows, given {INSTALLED} with "
        f'another one. Fix: run pip install "{REQUIREMENT}"; to run it untested, set {OPT_IN}=1.'
    )
    if kind == FOLLOWED[0]:
        monkeypatch.setenv(OPT_IN, "1")
        with pytest.warns(UserWarning, match=f"attnmesh.hf {kind}: tested with .* that attnmesh follows"):
            check_family(configurations()[kind])


def test_a_digest_of_code_ignores_comments(tmp_path: Path) -> None:
    digests = set()
    for text in ("x", '"""Say it."""\n    # why\n\n    x'):
        (tmp_path / "rule.py").write_text(f"def rule(x):\n    {text}\n    return x\n")
        source = ModuleSource("json")
        source.lines = (tmp_path / "rule.py").read_text().splitlines()
        digests.add(source.digest("rule"))
    assert len(digests) == 1
    assert source.digest("other") is None


def test_a_model_of_a_renamed_field_never_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    renamed_in("llama4_text", r"self\.attn_temperature_tuning", "self.tuning", tmp_path, monkeypatch, run=True)
    module: Any = sys.modules[source_of_type("llama4_text").module]
    config = tiny_config(Case("llama4_text", "llama4_text"))
    config._attn_implementation = "attnmesh"
    model = module.Llama4ForCausalLM(config).eval()
    ids = torch.arange(1, 9)[None]
    calls = (
        lambda: hf.generate(model, ids, mesh=None, max_new_tokens=2),
        lambda: hf.ShardedCache(model.config),
        lambda: hf.decode_rows(model, [1], []),
        lambda: model(**hf.shard_batch({"input_ids": ids, "labels": ids}, None)),
    )
    for call in calls:
        with pytest.raises(errors.VersionError, match=r"llama4_text: .* with Llama4TextAttention.attn_temperature_tun"):
            call()


ROPE = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}


def generate(config: PreTrainedConfig, renamed: bool) -> None:
    """Generate a token. The model may keep the length of its rope in a field of another name."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation="attnmesh").eval()
    rotary: Any = model.get_decoder().rotary_emb
    if renamed:
        rotary.longest = vars(rotary).pop("max_seq_len_cached")
    hf.prefill(model, torch.arange(1, 5)[None], hf.ShardedCache(model.config))


def test_a_dynamic_rope_that_counts_in_another_field_is_refused() -> None:
    generate(LlamaConfig(**SIZES), renamed=True)
    generate(LlamaConfig(**SIZES, rope_parameters=ROPE), renamed=False)
    with pytest.raises(errors.VersionError, match=r"attnmesh.hf llama: .* with max_seq_len_cached of dynamic ropes"):
        generate(LlamaConfig(**SIZES, rope_parameters=ROPE), renamed=True)


def test_another_rule_of_dynamic_ropes_is_refused_where_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = LENGTH_DEPENDENT_ROPES._replace(sources={"dynamic_rope_update": "another"})
    monkeypatch.setattr(models, "LENGTH_DEPENDENT_ROPES", changed)
    generate(LlamaConfig(**SIZES), renamed=False)
    with pytest.raises(errors.VersionError, match=r"llama: .* with the dynamic_rope_update that attnmesh follows"):
        generate(LlamaConfig(**SIZES, rope_parameters=ROPE), renamed=False)


WITHOUT = """
import transformers.modeling_utils
import transformers.distributed.tensor_parallel as tensor_parallel
dummy = transformers.cache_utils.DummyLayer
del transformers.Cache.get_conv_state, transformers.cache_utils.DummyLayer, tensor_parallel.apply_tensor_parallelism
import torch
import attnmesh.hf as hf
transformers.cache_utils.DummyLayer = dummy  # which transformers reads by this name
from attnmesh.errors import VersionError
from attnmesh.hf.tensor_parallel import rank_weights
from tests.support.models.tiny_models import Case, build

def attempt(call):
    try:
        call()
        print("works")
    except VersionError as error:
        print(error)

llama, recurrent = (build(Case(kind, kind), "attnmesh", torch.float32) for kind in ("llama", "qwen3_next"))
for model in (llama, recurrent):
    attempt(lambda: hf.generate(model, torch.arange(1, 5)[None], mesh=None, max_new_tokens=2))
attempt(lambda: rank_weights(llama, 2))
"""


def test_names_of_few_families_turn_off_no_other(tmp_path: Path) -> None:
    (tmp_path / "without.py").write_text(WITHOUT)
    words = [sys.executable, str(tmp_path / "without.py")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ["PYTHONPATH"]))}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    assert not done.returncode, done.stderr
    llama, recurrent, sharing = done.stdout.splitlines()
    assert llama == "works"
    assert recurrent.startswith(
        f"attnmesh.hf qwen3_next: expected {REQUIREMENT} with transformers:Cache.get_conv_state"
    )
    assert "tensor_parallel:apply_tensor_parallelism, given transformers" in sharing


def test_a_layer_without_a_cache_needs_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(transformers.cache_utils, "DummyLayer")
    assert "attnmesh.hf nemotron_h: " in refusal(configurations()["nemotron_h"])
    for kind in ("bamba", "llama"):
        check_family(configurations()[kind])


def test_the_table_of_the_documentation_is_that_of_the_records() -> None:
    assert PAGE.read_text() == page(), "write it anew: python -m tools.upstream_records"


@pytest.fixture
def made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Add a model type to transformers, and the file of its family from the documentation. Return its model class."""
    folder, stock = tmp_path / "made_up", import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    folder.mkdir()
    for name in ("modeling", "configuration"):
        text = Path(str(stock.__file__)).with_name(f"{name}_qwen3_next.py").read_text()
        text = text.replace("qwen3_next", "made_up").replace("Qwen3Next", "MadeUp")
        (folder / f"{name}_made_up.py").write_text(text)
    (folder / "__init__.py").write_text("")
    records = tmp_path / "records"
    records.mkdir()
    (records / "made_up.py").write_text(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0])
    known, loaded = (families, recurrences, known_subclassed, family_of_class), {*sys.modules}
    with monkeypatch.context() as patch:
        patch.setattr(transformers.models, "__path__", [*transformers.models.__path__, str(tmp_path)])
        patch.setattr(room, "__path__", [*room.__path__, str(records)])
        for each in known:
            each.cache_clear()
        yield import_module("transformers.models.made_up.modeling_made_up").MadeUpForCausalLM
    for name in {*sys.modules} - loaded:
        if "made_up" in name:
            del sys.modules[name]
    for each in known:
        each.cache_clear()


def test_the_page_of_families_names_each_field() -> None:
    text = PAGE.read_text()
    missing = [one.name for one in fields(Family) if not re.search(rf"`{one.name}`|\b{one.name}=", text)]
    assert missing == ["type", "fields"]  # with which each record begins


def test_a_family_is_one_file(made_up: Any) -> None:
    sizes = tiny_config(Case("qwen3_next", "qwen3_next")).to_dict()
    config = made_up.config_class(**{name: value for name, value in sizes.items() if name != "model_type"})
    config._experts_implementation, config._attn_implementation = "eager", "attnmesh"
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = made_up(config).double().eval()
    model.generation_config.eos_token_id = None
    ids = torch.arange(5, 45)[None]
    tokens = hf.generate(model, ids, mesh=None, max_new_tokens=4)
    loss = model(**hf.shard_batch({"input_ids": ids, "labels": ids}, None)).loss
    assert any(isinstance(layer, RecurrentLayer) for layer in model.modules())
    model.set_attn_implementation("sdpa")
    assert torch.equal(tokens, model.generate(ids, max_new_tokens=4, do_sample=False))
    torch.testing.assert_close(loss, model(ids, labels=ids).loss)


def test_a_graph_calls_functions_of_families() -> None:
    """The graph of a model with an indexer, or with a bias of its own, is one with the calls of its family."""

    def select(x: torch.Tensor) -> torch.Tensor:
        parts = (family_of_layer(layer).read_selection(layer, x, None).indices for layer in layers)
        return torch.stack([*parts])

    layers = [SimpleNamespace(config=LlamaConfig()), SimpleNamespace(config=transformers.MistralConfig())]
    indices = torch.arange(6).view(1, 2, 3)
    selected = torch.compile(select, backend="eager", fullgraph=True)(indices)
    assert torch.equal(selected, indices[:, None].expand(2, 1, 1, 2, 3))
