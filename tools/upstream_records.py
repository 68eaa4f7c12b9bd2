"""Compare the records of model families with the installed transformers: fields of configurations, digests of sources.

    python -m tools.upstream_records

Run it for a new version of transformers, after the sweep. It writes `plain.json` anew, and prints what the files of
families have to change. Which classes and functions a record names is written by hand. The table of families in the
documentation is written anew, too.
"""

import json
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from attnmesh.hf import family
from attnmesh.hf.family import CONFIGURATION, MODELING, Family, Pins, families
from attnmesh.hf.pins import ModuleSource

FILE = Path(family.__file__).parent / "families" / "plain.json"

PAGE = Path(__file__).parents[1] / "docs" / "families.md"
BEGIN, END = "<!-- families -->\n", "<!-- end of families -->"

FIELDS = (
    *("attention_chunk_size", "attn_temperature_tuning", "cross_attention_layers", "head_dim", "indexer_types"),
    *("intermediate_size", "kv_lora_rank", "kv_sharing_modes", "layer_types", "max_position_embeddings"),
    *("moe_intermediate_size", "n_routed_experts", "num_attention_heads", "num_experts", "num_experts_per_tok"),
    *("num_hidden_layers", "num_key_value_heads", "num_kv_shared_layers", "num_local_experts"),
    *("number_of_conv_states", "output_router_logits", "ple_layer_ids", "qk_rope_head_dim", "rope_parameters"),
    *("sliding_window", "swa_head_dim", "time_step_limit"),
)
"""Fields of configurations that are read with a default, since some model types lack them."""

SHARED = [one for one in vars(family).values() if isinstance(one, Pins)]
"""What several families need."""


@cache
def configurations() -> dict[str, PreTrainedConfig]:
    """Return a default configuration of each type of language model, and of the text models of models with images."""
    found = {}
    for kind in dict.fromkeys((*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)):
        try:
            config = CONFIG_MAPPING[kind]()
        except Exception:
            continue  # it has no default
        for each in (config, config.get_text_config(decoder=True)):
            found[each.model_type] = each
    return dict(sorted(found.items()))


def fields_of(config: PreTrainedConfig) -> Iterator[str]:
    """Yield those of `FIELDS` that every configuration of a class has: by its class, or set when it is made."""
    kind = type(config)
    own = {each.name for each in fields(kind)} | {*kind.attribute_map}
    code = getattr(kind, "__post_init__").__code__  # noqa: B009
    layer = config.per_layer_config[0] if config.is_heterogeneous else config
    for name in (name for name in FIELDS if hasattr(layer, name)):
        if name in own or hasattr(kind, name) or name in code.co_names:
            yield name


def source_of_type(kind: str) -> ModuleSource:
    """Return the source of the module of a model type."""
    return ModuleSource(type(configurations()[kind]).__module__.replace(CONFIGURATION, MODELING))


def differences() -> Iterator[str]:
    """Yield a line for each field and each digest of a record that is not as the installed transformers has it."""
    for kind, config in configurations().items():
        known, found = {*families().get(kind, Family(kind)).fields.split()}, {*fields_of(config)}
        for name in sorted(known ^ found):
            yield f"{kind}: {name} is {'lost' if name in known else 'new'}"
    for name, one, source in (
        *((one.name, one, ModuleSource(one.module)) for one in SHARED),
        *((kind, one, source_of_type(kind)) for kind, one in families().items() if one.sources),
    ):
        for function, digest in one.sources.items():
            if (now := source.digest(function)) != digest:
                yield f"{name}: {function} has the digest {now}"


def page() -> str:
    """Return the page on families, with the table of their files."""
    lines = ["| file | types | what they have |", "|---|---|---|"]
    for each in iter_modules([str(FILE.parent)]):
        module = import_module(f"{family.FAMILIES_PACKAGE}.{each.name}")
        if hasattr(module, "FAMILIES"):
            kinds = ", ".join(f"`{one.type}`" for one in module.FAMILIES)
            lines.append(f"| `{each.name}.py` | {kinds} | {str(module.__doc__).splitlines()[0]} |")
    plain = len(json.loads(FILE.read_text()))
    lines.append(f"| `plain.json` | {plain} more | Attention alone, as their configurations say. |")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return before + BEGIN + "\n".join(lines) + "\n" + END + rest.partition(END)[2]


def main() -> None:
    """Write the fields of `plain.json` and the table anew, and print what differs in other files."""
    PAGE.write_text(page())
    entries = json.loads(FILE.read_text())
    for kind, config in configurations().items():
        if kind in entries or kind not in families():
            entries[kind] = {**entries.get(kind, {}), "fields": " ".join(fields_of(config))}
    lines = (f" {json.dumps(kind)}: {json.dumps(entry)}" for kind, entry in sorted(entries.items()))
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    families.cache_clear()
    print(*differences(), sep="\n")


if __name__ == "__main__":
    main()
