"""Images of requests: data URLs become pictures, and what a processor makes of them goes to rank 0."""

import binascii
import io
import warnings
from base64 import b64decode
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attnmesh.hf.serving.step_exchange import value_codes_of
from attnmesh.serve.refused import Refused
from attnmesh.serve.request_fields import shown

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""Formats of images, as OpenAI takes them. Other decoders of Pillow are not run on what clients send."""

MAX_IMAGES = 32
"""Images of a request at most."""

MAX_PIXELS = 1 << 24
"""Pixels of all images of a request at most."""


def read_image(param: str, part: dict[str, Any], before: list[Any]) -> Any:
    """Return the picture of a message's part, after others of the request. No URL is ever fetched."""
    given = part["image_url"] if isinstance(part.get("image_url"), dict) else {}
    url = given.get("url")
    fits = part.keys() == {"type", "image_url"} and given.keys() <= {"url", "detail"}
    if not isinstance(url, str) or not fits:
        raise Refused(400, f"{param}: expected image_url with a url, given {shown(part)}", param)
    detail = given.get("detail")
    if detail not in ("auto", None):
        raise Refused(400, f"{param}: expected detail auto, given {shown(detail)}", param)
    head, separator, data = url.partition(";base64,")
    if not separator or not head.startswith("data:image/"):
        raise Refused(400, f"{param}: expected a data URL, as data:image/png;base64,..., given {shown(url)}", param)
    if len(before) >= MAX_IMAGES:
        raise Refused(400, f"{param}: expected at most {MAX_IMAGES} images in a request", param)
    left = MAX_PIXELS - sum(picture.width * picture.height for picture in before)
    return _open_image(param, data, left)


def _open_image(param: str, base64_text: str, left: int) -> Any:
    """Return the picture in a base64 text. Raise if it has more than `left` pixels."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the pixels are counted here
            image = Image.open(io.BytesIO(b64decode(base64_text, validate=True)), formats=IMAGE_FORMATS)
            picture = image.convert("RGB") if image.width * image.height <= left else None
    except (OSError, ValueError, SyntaxError, EOFError, binascii.Error, Image.DecompressionBombError) as error:
        name = type(error).__name__
        raise Refused(
            400, f"{param}: expected an image of {', '.join(IMAGE_FORMATS)} in base64: {name}", param
        ) from None
    if picture is None:
        raise Refused(400, f"{param}: expected images of at most {MAX_PIXELS:,} pixels together", param)
    return picture


def describe_images(images: Mapping[str, Any]) -> list[list[Any]]:
    """Return a processor's inputs for images as JSON can spell them, tensors by dtype, shape and bytes.

    >>> describe_images({"pixel_values": torch.zeros(1, 2, dtype=torch.uint8), "crops": [3]})
    [['pixel_values', 'uint8', [1, 2], 2], ['crops', None, [3], 0]]
    """
    return [
        [*spec, x.nbytes if isinstance(x, Tensor) else 0]
        for spec, x in zip(value_codes_of(images), images.values(), strict=True)
    ]


def buffers_of(images: Mapping[str, Any]) -> list[memoryview]:
    """Return the bytes of the tensors, without a copy."""
    tensors = [x for x in images.values() if isinstance(x, Tensor)]
    return [x.contiguous().flatten().view(torch.uint8).numpy().data for x in tensors]


def images_of(descriptions: list[list[Any]], buffer: bytes) -> dict[str, Any]:
    """Return the inputs that were described, with the bytes of all tensors.

    >>> images_of([["pixel_values", "uint8", [1, 2], 2], ["crops", None, [3], 0]], b"ab")
    {'pixel_values': tensor([[97, 98]], dtype=torch.uint8), 'crops': [3]}
    """
    images = {}
    offset = 0
    for name, dtype, value, size in descriptions:
        part = (
            torch.frombuffer(bytearray(buffer[offset : offset + size]), dtype=torch.uint8)
            if size
            else torch.empty(0, dtype=torch.uint8, device="cpu")
        )
        images[name] = value if dtype is None else part.view(getattr(torch, dtype)).view(value)
        offset += size
    return images
