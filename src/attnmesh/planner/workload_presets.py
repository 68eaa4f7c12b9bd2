"""Workloads of known video and image transformers: the attention over all tokens in one denoising step."""

from dataclasses import dataclass
from typing import Any

from attnmesh.core.mask import Full
from attnmesh.errors import check_choice
from attnmesh.planner.workload import Workload


@dataclass(frozen=True)
class DiffusionWorkload:
    """Attention layers of a diffusion transformer at one size of image or video.

    Args:
        heads: Query heads, and as many key heads.
        head_dim: Width of a head.
        layers: Layers that attend over all tokens.
        grid: Tokens along frames, height and width.
        text_tokens: Text tokens in the same sequence; 0 where text is attended by other layers.
        source: Where the numbers are from.
    """

    heads: int
    head_dim: int
    layers: int
    grid: tuple[int, int, int]
    text_tokens: int
    source: str

    @property
    def length(self) -> int:
        """Tokens of the sequence."""
        frames, height, width = self.grid
        return frames * height * width + self.text_tokens

    def record(self, length: int) -> dict[str, str]:
        """Return how `length` tokens come about, and the source of the numbers, as a JSON object."""
        text = f"and {self.text_tokens} of text" if self.text_tokens else "without text"
        how = f"{' x '.join(map(str, self.grid))} {text}" if length == self.length else "given by --length"
        return {"tokens": how, "source": self.source}


def _grid(frames: int, height: int, width: int, time: int, space: int) -> tuple[int, int, int]:
    """Return the tokens of a video whose first frame stands alone, at `time` frames and `space` pixels a token."""
    return (frames - 1) // time + 1, height // space, width // space


_CLASS = "defaults of diffusers 0.42"
_WAN = "VAE 4x8x8, patch 1x2x2; text is in cross-attention"

WORKLOADS = {
    "wan-14b-720p": DiffusionWorkload(
        40, 128, 40, _grid(81, 720, 1280, 4, 16), 0, f"WanTransformer3DModel, {_CLASS}; 81 frames of 1280x720, {_WAN}"
    ),
    "wan-14b-480p": DiffusionWorkload(
        40, 128, 40, _grid(81, 480, 832, 4, 16), 0, f"WanTransformer3DModel, {_CLASS}; 81 frames of 832x480, {_WAN}"
    ),
    "wan-5b-720p": DiffusionWorkload(
        24,
        128,
        30,
        _grid(121, 704, 1280, 4, 32),
        0,
        "WanTransformer3DModel, config.json of Wan2.2-TI2V-5B, not a default of diffusers; 121 frames of 1280x704, "
        "VAE 4x16x16, patch 1x2x2; text is in cross-attention",
    ),
    "hunyuanvideo-720p": DiffusionWorkload(
        24,
        128,
        60,
        _grid(129, 720, 1280, 4, 16),
        256,
        f"HunyuanVideoTransformer3DModel, {_CLASS}: 20 double and 40 single layers; 129 frames of 1280x720, "
        "VAE 4x8x8, patch 1x2x2; the most text of the pipeline",
    ),
    "hunyuanvideo-1.5-720p": DiffusionWorkload(
        16,
        128,
        54,
        _grid(121, 720, 1280, 4, 16),
        0,
        f"HunyuanVideo15Transformer3DModel, {_CLASS}; 121 frames of 1280x720, the size of target_size=960, "
        "VAE 4x16x16, patch 1; without the text, at most 1,256 tokens",
    ),
    "flux-1024": DiffusionWorkload(
        24,
        128,
        57,
        _grid(1, 1024, 1024, 1, 16),
        512,
        f"FluxTransformer2DModel, {_CLASS}: 19 double and 38 single layers; 1024x1024, VAE 8x8, patch 2x2",
    ),
    "flux-2048": DiffusionWorkload(
        24,
        128,
        57,
        _grid(1, 2048, 2048, 1, 16),
        512,
        f"FluxTransformer2DModel, {_CLASS}: 19 double and 38 single layers; 2048x2048, twice the default of the "
        "pipeline on a side, VAE 8x8, patch 2x2",
    ),
    "qwen-image-1328": DiffusionWorkload(
        24,
        128,
        60,
        _grid(1, 1328, 1328, 1, 16),
        512,
        f"QwenImageTransformer2DModel, {_CLASS}; 1328x1328, a size of the examples of Qwen-Image, not of diffusers, "
        "VAE 8x8, patch 2x2; the most text of the pipeline by default",
    ),
    "ltx-video": DiffusionWorkload(
        32,
        64,
        28,
        _grid(161, 512, 704, 8, 32),
        0,
        f"LTXVideoTransformer3DModel, {_CLASS}; 161 frames of 704x512, VAE 8x32x32, patch 1; text is in "
        "cross-attention",
    ),
}
"""Presets by name. `source` says which sizes are not of diffusers."""


def workload_preset(name: str, **changes: Any) -> Workload:
    """Return a preset: the layers of one denoising step, in bfloat16.

    Args:
        name: A key of `WORKLOADS`.
        changes: Fields of `Workload` to set, such as `length` or `phase="training"`.

    Raises:
        KernelError: The name is unknown.
        InputError: A change is invalid.

    >>> workload_preset("wan-14b-720p").length
    75600
    """
    check_choice("workload", name, tuple(WORKLOADS), f"pass {next(iter(WORKLOADS))!r}")
    preset = WORKLOADS[name]
    sizes = {"layers": preset.layers, "length": preset.length, "phase": "prefill", "mask": Full()}
    return Workload(preset.heads, preset.heads, preset.head_dim, **{**sizes, **changes})
