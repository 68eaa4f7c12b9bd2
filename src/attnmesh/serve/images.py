"""Images of requests: data URLs become pictures, and what a processor makes of them goes to rank 0 as JSON."""

import binascii
import io
import warnings
from base64 import b64decode, b64encode
from typing import Any

import torch
from torch import Tensor

from attnmesh.serve.refused import Refused
from attnmesh.serve.schema import shown

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""Formats of images, as OpenAI takes them. Other decoders of Pillow are not run on what clients send."""

MOST, PIXELS = 32, 1 << 24
"""Images of a request, and pixels of all of them together, at most."""


def read_image(place: str, part: dict[str, Any], before: list[Any]) -> Any:
    """Return the picture of a message's part, after others of the request. No URL is ever fetched."""
    given = part["image_url"] if isinstance(part.get("image_url"), dict) else {}
    url = given.get("url")
    fits = part.keys() == {"type", "image_url"} and given.keys() <= {"url", "detail"}
    if not isinstance(url, str) or not fits or given.get("detail", "auto") != "auto":
        raise Refused(400, f"{place}: expected image_url with a url, and detail auto, given {shown(part)}", place)
    head, found, data = url.partition(";base64,")
    if not found or not head.startswith("data:image/"):
        raise Refused(400, f"{place}: expected a data URL, as data:image/png;base64,..., given {shown(url)}", place)
    if len(before) >= MOST:
        raise Refused(400, f"{place}: expected at most {MOST} images in a request", place)
    left = PIXELS - sum(picture.width * picture.height for picture in before)
    return _opened(place, data, left)


def _opened(place: str, data: str, left: int) -> Any:
    """Return the picture in base64, of so many pixels at most."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the pixels are counted here
            found = Image.open(io.BytesIO(b64decode(data, validate=True)), formats=FORMATS)
            picture = found.convert("RGB") if found.width * found.height <= left else None
    except (OSError, ValueError, SyntaxError, EOFError, binascii.Error, Image.DecompressionBombError) as error:
        said = f"{type(error).__name__}"
        raise Refused(400, f"{place}: expected an image of {', '.join(FORMATS)} in base64: {said}", place) from None
    if picture is None:
        raise Refused(400, f"{place}: expected images of at most {PIXELS:,} pixels together", place)
    return picture


def packed_images(images: dict[str, Any]) -> list[list[Any]]:
    """Return a processor's inputs for images as JSON can spell them.

    >>> packed_images({"pixel_values": torch.zeros(1, 2, dtype=torch.uint8)})
    [['pixel_values', 'uint8', [1, 2], 'AAA=']]
    """
    return [
        [name, str(x.dtype).removeprefix("torch."), [*x.shape], b64encode(_bytes_of(x)).decode()]
        for name, x in images.items()
        if isinstance(x, Tensor)
    ] + [[name, None, None, x] for name, x in images.items() if not isinstance(x, Tensor)]


def _bytes_of(x: Tensor) -> bytes:
    return bytes(x.contiguous().flatten().view(torch.uint8).numpy())


def unpacked_images(packed: list[list[Any]]) -> dict[str, Any]:
    """Return what `packed_images` was given.

    >>> unpacked_images([["pixel_values", "uint8", [1, 2], "AAE="], ["crops", None, None, [3]]])
    {'pixel_values': tensor([[0, 1]], dtype=torch.uint8), 'crops': [3]}
    """
    return {
        name: data if dtype is None else _tensor_of(b64decode(data), getattr(torch, dtype), shape)
        for name, dtype, shape, data in packed
    }


def _tensor_of(data: bytes, dtype: torch.dtype, shape: list[int]) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).view(shape)
