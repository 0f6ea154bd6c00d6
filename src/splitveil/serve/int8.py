"""The client in eight bits: weights per channel, activations ranged by calibration images."""

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from splitveil.serve.faults import ExportError
from splitveil.serve.manifest import CLIENT, CLIENT_INT8, IMAGE, SERVER, Json
from splitveil.serve.session import open_half

Images = NDArray[np.float32]

BATCH = 64


class Reader:
    """Gives calibration images to onnxruntime, batch by batch."""

    def __init__(self, images: Images) -> None:
        self._batches: Iterator[Images] = (
            images[i : i + BATCH] for i in range(0, len(images), BATCH)
        )

    def get_next(self) -> dict[str, Images] | None:
        """The next batch by input name; None at the end."""
        batch = next(self._batches, None)
        return None if batch is None else {IMAGE: batch}


def quantise_client(source: Path, target: Path, images: Images) -> None:
    """Static int8 quantisation of a client, calibrated on images (n, c, h, w) in [0, 1]."""
    if not len(images):
        raise ExportError("an int8 client needs images to calibrate on, got none")
    from onnxruntime.quantization import (  # type: ignore[import-untyped]
        CalibrationDataReader,
        QuantType,
        quantize_static,
    )

    CalibrationDataReader.register(Reader)
    logger = logging.getLogger()
    before = logger.level
    logger.setLevel(logging.ERROR)  # it advises a preprocessing that changes nothing here
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            quantize_static(
                source,
                target,
                Reader(images),
                per_channel=True,
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
            )
    finally:
        logger.setLevel(before)


def compare(place: Path, images: Images) -> Json:
    """How far the int8 client is from the float one, before the channel."""
    full, small, head = (
        open_half((place / f).read_bytes(), 1) for f in (CLIENT, CLIENT_INT8, SERVER)
    )
    z, rough = full(images), small(images)
    same = head(z).argmax(1) == head(rough).argmax(1)
    return {
        "int8_images": len(images),
        "int8_z_max_abs_diff": float(np.abs(z - rough).max()),
        "int8_same_answer": float(same.mean()),
    }
