"""Record the signatures of serving engines that the package follows, from their published archives.

`python -m tools.engine_signatures vllm-0.33.0.tar.gz` reads the source inside, imports nothing
of it, and writes tests/engines/signatures.json.
"""

import ast
import json
import sys
import tarfile
from pathlib import Path
from zipfile import ZipFile

RECORD = Path(__file__).parents[1] / "tests" / "engines" / "signatures.json"

NAMES = {
    "vllm": {"vllm/v1/attention/ops/dcp.py": ["cp_lse_ag_out_rs", "cp_lse_ag_out_ar", "DCPCombine.__call__"]},
    "sglang": {
        "sglang/srt/layers/dcp/comm.py": ["cp_lse_ag_out_rs_mha", "cp_lse_ag_out_rs_mla", "dcp_a2a_lse_reduce"],
        "sglang/srt/plugins/hook_registry.py": ["HookRegistry.register"],
    },
}
"""Functions by engine and file."""


def read(archive: Path, file: str) -> str:
    """Return the text of a file in a wheel or a source distribution."""
    if archive.suffix == ".whl":
        return ZipFile(archive).read(file).decode()
    with tarfile.open(archive) as opened:
        name = next(name for name in opened.getnames() if name.split("/", 1)[-1] == file)
        member = opened.extractfile(name)
        assert member is not None
        return member.read().decode()


def signature(text: str, name: str) -> str:
    """Return the parameters of a function or a method as its source has them, with annotations and defaults."""
    node: ast.AST = ast.parse(text)
    for part in name.split("."):
        children = ast.walk(node) if isinstance(node, ast.Module) else ast.iter_child_nodes(node)
        node = next(child for child in children if getattr(child, "name", "") == part)
    assert isinstance(node, ast.FunctionDef)
    return ast.unparse(node.args)


def main() -> None:
    """Write the record."""
    record = {}
    for archive in map(Path, sys.argv[1:]):
        engine, version = archive.name.removesuffix(".tar.gz").split("-")[:2]
        files = {file: read(archive, file) for file in NAMES[engine]}
        found = {file: {name: signature(files[file], name) for name in NAMES[engine][file]} for file in files}
        record[engine] = {"version": version, "archive": archive.name, "files": found}
    RECORD.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
