"""Texts of options: each gives its value, or is refused in one line."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnmesh_command.messages import OptionError
from attnmesh_command.option_texts import axes_of, heads_of, latent_of, length_of, recurrent_of


def test_each_length_of_whole_tokens_is_taken() -> None:
    """As floats, 16.1 * 1000 and 1.001 * 1000000 are a little more than integers."""
    for thousandths in range(1, 5000):
        assert length_of(f"{thousandths / 1000:.3f}k") == thousandths
        assert length_of(f"{thousandths / 1000:.3f}M") == 1000 * thousandths
    assert length_of("16.1e3") == 16_100
    assert length_of("0.5Ki") == 512
    for refused in ("0.5", "16.1005k", "0.0k", "0.1Ki", "1.000000000000001"):
        with pytest.raises(OptionError, match="--length: expected tokens"):
            length_of(refused)


@pytest.mark.parametrize("text", ["tp=keys=4,keys=tp=8", "keys=tp=4,tp=keys=8", "keys=tp=4,keys=tp=4"])
def test_an_axis_is_named_once_however_it_is_spelled(text: str) -> None:
    with pytest.raises(OptionError, match=r"--mesh: expected axes by name.*Fix: name tp=keys once"):
        axes_of(text)


@pytest.mark.parametrize(
    "text", ["keys", "keys=0", "keys=-2", "rows=2", "keys=2,keys=3", "1x2x2", "tp=keys=2,queries=2", ""]
)
def test_a_mesh_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="--mesh: expected "):
        axes_of(text)


def test_heads_and_latents_are_pairs_of_which_heads_may_be_one_number() -> None:
    assert (heads_of("32/8"), heads_of("16"), latent_of("512/64")) == ((32, 8), (16, 16), (512, 64))
    for text in ("32/", "/8", "0/8", "a", "32/8/1", "-4"):
        with pytest.raises(OptionError, match="--heads: expected "):
            heads_of(text)
    with pytest.raises(OptionError, match="--latent: expected projected / rotated columns"):
        latent_of("512")


@given(st.permutations(["matrix", "layers=36", "conv=8192x4"]), st.integers(0, 3))
def test_settings_of_recurrent_layers_are_in_any_order_each_once(settings: list[str], count: int) -> None:
    fields = {"matrix": {"transition": "matrix"}, "layers=36": {"layers": 36}}
    fields["conv=8192x4"] = {"conv_channels": 8192, "conv_width": 4}
    expected: dict[str, Any] = {"heads": 32, "key_dim": 128, "value_dim": 64}
    for setting in settings[:count]:
        expected |= fields[setting]
    text = ":".join(["32x128x64", *settings[:count]])
    assert recurrent_of(text) == expected
    for wrong in (f"{text}:{settings[0]}:{settings[0]}", f"{text}:fast", "32x128", f"{text}:"):
        with pytest.raises(OptionError, match="--recurrent: expected "):
            recurrent_of(wrong)
