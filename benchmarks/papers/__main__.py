"""Both papers: python -m benchmarks.papers [--json] [--out FILE]."""

import typer

from attnmesh_command.shared_options import AsJson, OutFile
from benchmarks.papers import attention2d, tree_attention
from benchmarks.papers.report import published


def main(as_json: AsJson = False, out: OutFile = None) -> None:
    """Print what Tree Attention and ATTENTION2D published beside what the model predicts."""
    published("python -m benchmarks.papers", [tree_attention.report(), attention2d.report()], as_json, out)


if __name__ == "__main__":
    typer.run(main)
