"""The map of the code draws the calls of a model and of an engine as they run."""

from threading import Thread

import attnmesh.hf as hf
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.models.families import model, prompt
from tests.support.process.map_trees import callers_in, check_tree
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh


@on_each_rank
def find_callers_of_generate() -> dict[str, set[str]]:
    mesh, llama = named_mesh(Shape(1, 1, 2), AXES), model("llama", "attnmesh")
    return callers_in(lambda: hf.generate(llama, prompt(9), mesh=mesh, max_new_tokens=2))


def test_the_map_draws_a_model(pool: Pool) -> None:
    callers, _ = pool.run(2, find_callers_of_generate)
    check_tree("### A model", 11, callers)


@on_each_rank
def find_callers_of_engine() -> dict[str, set[str]]:
    mesh = named_mesh(Shape(1, 1, 2), AXES)
    engine = hf.Engine(model("llama", "attnmesh"), mesh)
    if mesh.get_rank():
        engine.follow()
        return {}

    def serve() -> None:
        answer = engine.submit(prompt(9)[0].tolist(), max_new_tokens=3)

        def read() -> None:
            assert len([*answer]) == 3
            engine.close()

        Thread(target=read).start()
        engine.run()

    return callers_in(serve)


def test_the_map_draws_a_step_of_an_engine(pool: Pool) -> None:
    callers, _ = pool.run(2, find_callers_of_engine)
    check_tree("### A server", 12, callers)
