"""Random problems of a mesh, as strategies of hypothesis: any mask, shape, layouts and lengths."""

from itertools import pairwise

from hypothesis import strategies as st

import attnmesh as am
from attnmesh.core.layout import Layout
from attnmesh.mesh.schedule import Problem
from attnmesh.mesh.shapes import Shape

shapes = st.builds(Shape, st.integers(1, 3), st.integers(1, 5), st.integers(1, 5))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    length, key_length = draw(st.integers(0, 60)), draw(st.integers(0, 60))
    mask = am.Full()
    if draw(st.booleans()):
        mask = mask & am.Window(draw(st.integers(0, 30)), draw(st.sampled_from((0, 0, 4))))
    if draw(st.booleans()):
        mask = mask & am.Causal()
    if draw(st.booleans()) and length:
        key_length = length
        cuts = sorted(draw(st.lists(st.integers(0, length), max_size=4)))
        mask = mask & am.Documents([b - a for a, b in zip((0, *cuts), (*cuts, length), strict=True)])
    shape = draw(shapes)
    layouts = [draw(layouts_of(tokens, shape)) for tokens in (length, key_length)]
    problem = Problem(mask, shape, layouts[0], layouts[1], length, key_length)
    assert Problem.from_code(shape, problem.to_code()) == problem
    return problem


@st.composite
def layouts_of(draw: st.DrawFn, length: int, shape: Shape) -> Layout:
    if draw(st.booleans()):
        return draw(st.sampled_from((am.Contiguous(), am.Zigzag(), am.Striped(), am.Striped(3))))
    is_packed = draw(st.booleans())
    parts = draw(st.integers(1, 9)) if is_packed else shape.ranks
    cuts = sorted(draw(st.lists(st.integers(0, length), min_size=parts - 1, max_size=parts - 1)))
    sizes = tuple(stop - start for start, stop in pairwise((0, *cuts, length)))
    return am.Packed(sizes, shape) if is_packed else am.Split(sizes)
