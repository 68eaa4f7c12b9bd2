"""Graphs of a model's steps that are asked for, on a GPU or an emulated one, with all of their captures."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from attnmesh.hf.step_graph import StepGraph


class NotedGraph(StepGraph):
    """A graph that counts all of its captures. `captures` counts those in a row that have saved no time."""

    all_captures = 0

    def _capture(self, inputs: dict[str, Any]) -> bool:
        self.all_captures += 1
        return super()._capture(inputs)


@contextmanager
def noted_graphs() -> Iterator[list[NotedGraph]]:
    """Note the graphs that are asked for in this block."""
    made = list[NotedGraph]()

    def note(*arguments: Any) -> NotedGraph:
        made.append(NotedGraph(*arguments))
        return made[-1]

    with patch("attnmesh.hf.step_graph.StepGraph", note):
        yield made
