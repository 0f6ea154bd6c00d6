"""The picture book of a run: original images and what each attack made of them."""

import base64
import binascii
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splitveil.errors import RunError

Pixels = NDArray[np.uint8]  # (n, c, h, w)


@dataclass(frozen=True, kw_only=True)
class Gallery:
    """Scored images and their reconstructions, uint8 (n, c, h, w), one column per image.

    `labels` and `answers` (the server's) index `classes`; `mse` holds per-image errors (n,).
    """

    indices: tuple[int, ...]
    labels: tuple[int, ...]
    answers: tuple[int, ...]
    classes: tuple[str, ...]
    original: Pixels
    reconstructions: dict[str, Pixels]
    mse: dict[str, tuple[float, ...]]

    def class_name(self, label: int) -> str:
        """The name of a class, or its number when the list of names is too short."""
        return self.classes[label] if 0 <= label < len(self.classes) else str(label)


def parse_gallery(data: Mapping[str, Any], where: str) -> Gallery:
    """A checked gallery from the JSON of file `where`; raises RunError naming what is wrong."""
    try:
        shape = _shape(data["image_shape"])
        indices = _integers(data["indices"], "indices")
        size = (len(indices), *shape)
        gallery = Gallery(
            indices=indices,
            labels=_integers(data["labels"], "labels", len(indices)),
            answers=_integers(data["answers"], "answers", len(indices)),
            classes=tuple(str(name) for name in data.get("classes") or ()),
            original=_pixels(data["original"], size, "original"),
            reconstructions={
                str(name): _pixels(blob, size, f"reconstructions.{name}")
                for name, blob in dict(data["reconstructions"]).items()
            },
            mse={
                str(name): _errors(values, len(indices), f"mse.{name}")
                for name, values in dict(data.get("mse") or {}).items()
            },
        )
    except (KeyError, TypeError, ValueError) as err:
        reason = f"the key {err} is missing" if isinstance(err, KeyError) else str(err)
        raise RunError(
            f"{where} is not a gallery: {reason}; audit the run again to write a fresh one"
        ) from err
    return gallery


def _shape(value: object) -> tuple[int, int, int]:
    """Channels, height and width; grey or RGB."""
    c, h, w = _integers(value, "image_shape", 3)
    if c not in (1, 3) or h < 1 or w < 1:
        raise ValueError(f"image_shape must be [1 or 3, height, width], got {value}")
    return c, h, w


def _integers(value: object, what: str, length: int | None = None) -> tuple[int, ...]:
    """A list of whole numbers, of a given length where one is named."""
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise ValueError(f"{what} must be a list of whole numbers, got {value!r:.60}")
    if not value or length not in (None, len(value)):
        raise ValueError(f"{what} must hold {length or 'at least 1'} entries, got {len(value)}")
    return tuple(value)


def _pixels(blob: object, size: tuple[int, ...], what: str) -> Pixels:
    """Base64 of raw uint8 bytes to an array of the stated size."""
    if not isinstance(blob, str):
        raise ValueError(f"{what} must be base64 text, got {type(blob).__name__}")
    try:
        raw = base64.b64decode(blob, validate=True)
    except binascii.Error as err:
        raise ValueError(f"{what} is not base64 ({err})") from err
    if len(raw) != math.prod(size):
        raise ValueError(f"{what} must be {math.prod(size)} bytes for {size}, got {len(raw)}")
    return np.frombuffer(raw, dtype=np.uint8).reshape(size)


def _errors(value: object, length: int, what: str) -> tuple[float, ...]:
    """Per-image errors, one for each image."""
    if not isinstance(value, list) or len(value) != length:
        raise ValueError(f"{what} must be a list of {length} numbers, got {value!r:.60}")
    return tuple(float(item) for item in value)
