"""A sample of the sweep over all model types: nothing is wrong and nothing crashes; the rest is for `make long`."""

from collections.abc import Iterator

import pytest

from attnmesh.mesh.shapes import Shape
from tests.support.truth.seeds import rotated
from tools.rows import Row
from tools.sweep import IMAGE_MESHES, MESHES, QUICK, Sweep, checks_of, chosen

CASES = {case.name: case for case in chosen(",".join(QUICK), quick=False)}

LONG = {case.name: case for case in chosen(None, quick=False) if case.name not in CASES}

EXPECTED = {
    "falcon": ("refused", "refused"),
    "gemma3n_text": ("right", "right"),
    "minimax": ("refused", "right"),
    "rwkv": ("refused", "refused"),
}
"""How generation and training end, where they are not right."""


REFUSED_ROWS = ("llama+dynamic-crossed",)
"""Types whose rows are refused, because their rope changes with the next token: all keys would be made anew."""


@pytest.fixture(scope="module")
def sweep() -> Iterator[Sweep]:
    swept = Sweep()
    yield swept
    swept.close()


def ended(sweep: Sweep, name: str, check: str) -> Row:
    return sweep.run((CASES | LONG)[name], check)


@pytest.mark.parametrize(("name", "check"), rotated([*CASES], [*MESHES], every=10))
def test_a_type_is_right_or_refused(name: str, check: str, sweep: Sweep) -> None:
    row = ended(sweep, name, check)
    is_refused = check == "rows" and name in REFUSED_ROWS
    expected = "refused" if is_refused else EXPECTED.get(name, ("right", "right"))[check == "training"]
    assert row.status == expected, row


IMAGES = {case.name: case for case in chosen(None, quick=False, images=True)}

QUICK_IMAGES = (
    *("qwen2_5_vl", "glm4v", "gemma3", "gemma4_unified", "paligemma", "llava_onevision", "granite4_vision", "idefics3"),
    "blip-2",
)


EVERY = rotated(QUICK_IMAGES, [*IMAGE_MESHES], every=5)


@pytest.mark.parametrize(("name", "check"), [x for x in EVERY if x.values[1] in checks_of(x.values[0], IMAGE_MESHES)])
def test_a_type_of_images_is_right_or_refused(name: str, check: str, sweep: Sweep) -> None:
    row = sweep.run(IMAGES[name], check)
    is_refused = name == "blip-2" and check != "training-images"
    assert row.status == ("refused" if is_refused else "right"), row


NAMED = (
    *("gemma3", "gemma4", "qwen2_5_vl", "qwen3_vl", "glm4v_moe", "internvl", "llava_onevision", "mistral3", "idefics3"),
    *("paligemma", "kimi_k25"),
)


@pytest.mark.long
@pytest.mark.parametrize("shape", [Shape(1, 1, 3), Shape(1, 2, 2), Shape(2, 1, 2)], ids=str)
@pytest.mark.parametrize("name", NAMED)
def test_types_of_images_are_right_on_three_and_four_ranks(name: str, shape: Shape, sweep: Sweep) -> None:
    """No number of ranks divides the tokens. Latents have one head, which a heads axis cannot share."""
    rows = sweep.run_images(IMAGES[name], shape), sweep.run_image_training(IMAGES[name], shape)
    generation = "refused" if name == "kimi_k25" and shape.heads > 1 else "right"
    assert [row.status for row in rows] == [generation, "right"], rows


@pytest.mark.long
@pytest.mark.parametrize("name", IMAGES)
def test_no_type_of_images_is_wrong_or_crashes(name: str, sweep: Sweep) -> None:
    for check in checks_of(name, IMAGE_MESHES):
        row = sweep.run(IMAGES[name], check)
        assert row.status not in ("wrong", "crashed"), row


@pytest.mark.long
@pytest.mark.parametrize("name", LONG)
def test_no_type_is_wrong_or_crashes(name: str, sweep: Sweep) -> None:
    for check in MESHES:
        row = ended(sweep, name, check)
        assert row.status not in ("wrong", "crashed"), row
