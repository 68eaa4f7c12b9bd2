"""Fill in the records of model types from the installed transformers: fields of configurations, and digests.

    python -m tools.upstream_records

Which classes and functions a record names is written by hand. Run it for a new version of transformers, after the
sweep, and read what changed.
"""

import json
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from attnmesh.hf.families import record
from attnmesh.hf.families.record import CONFIGURATION, FIELDS, MODELING, RECORDS, Code

FILE = Path(record.__file__).with_name("records.json")


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


def code_of_type(kind: str) -> Code:
    """Return the code of a model type."""
    return Code(type(configurations()[kind]).__module__.replace(CONFIGURATION, MODELING))


def filled() -> dict[str, Any]:
    """Return all records as the installed transformers has them."""
    entries = {name: {**one._asdict()} for name, one in RECORDS.items() if one.code}
    for kind, config in configurations().items():
        one = RECORDS.get(kind, record.Record())
        entries[kind] = {**one._asdict(), "fields": " ".join(fields_of(config))}
    for name, entry in entries.items():
        code = Code(entry["code"]) if entry["code"] else code_of_type(name)
        entry["sources"] = {each: code.digest(each) for each in entry["sources"]}
    return {name: {key: value for key, value in entry.items() if value} for name, entry in entries.items()}


def main() -> None:
    """Write the records anew."""
    FILE.write_text(json.dumps(filled(), indent=1) + "\n")


if __name__ == "__main__":
    main()
