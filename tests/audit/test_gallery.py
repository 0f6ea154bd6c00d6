"""The pictures of the report are the very pixels, to the byte."""

import base64
import json
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from splitveil.audit import Attempt, Case, gallery
from splitveil.audit.gallery import one_per_class
from splitveil.types import Json, Labelled

MakeCase = Callable[..., Case]
MakeAttempt = Callable[..., Attempt]


def unpack(text: str, shape: list[int]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), np.uint8).reshape(-1, *shape)


def built(make_case: MakeCase, make_attempt: MakeAttempt) -> tuple[Tensor, Tensor, Json]:
    levels = torch.arange(5 * 2 * 3 * 4, dtype=torch.uint8).view(5, 2, 3, 4)
    images = levels / 255
    labels = torch.tensor([2, 0, 2, 1, 0])
    case = make_case(scored=Labelled(images, labels))
    attempts = {
        "flat": make_attempt([0.1, 0.2, 0.3, 0.4, 0.5], guess=torch.full_like(images, 0.5)),
        "copy": make_attempt([0.0] * 5, guess=images),
    }
    answers = torch.tensor([2, 0, 1, 1, 1])
    return levels, labels, gallery(case, attempts, answers, ["a", "b", "c"])


def test_every_byte_comes_back(make_case: MakeCase, make_attempt: MakeAttempt) -> None:
    levels, _, made = built(make_case, make_attempt)
    rows = [1, 3, 0]  # the first image of each class, in class order
    assert made["indices"] == rows
    assert made["image_shape"] == [2, 3, 4]
    expected = levels[rows].numpy()
    assert np.array_equal(unpack(made["original"], made["image_shape"]), expected)
    assert np.array_equal(unpack(made["reconstructions"]["copy"], made["image_shape"]), expected)
    flat = unpack(made["reconstructions"]["flat"], made["image_shape"])
    assert np.array_equal(flat, np.full((3, 2, 3, 4), 128))


def test_labels_answers_and_errors_belong_to_the_pictures(
    make_case: MakeCase, make_attempt: MakeAttempt
) -> None:
    _, _, made = built(make_case, make_attempt)
    assert made["labels"] == [0, 1, 2]
    assert made["answers"] == [0, 1, 2]
    assert made["classes"] == ["a", "b", "c"]
    np.testing.assert_allclose(made["mse"]["flat"], [0.2, 0.4, 0.1], rtol=1e-6)
    assert made["mse"]["copy"] == [0.0] * 3


def test_it_survives_json(make_case: MakeCase, make_attempt: MakeAttempt) -> None:
    _, _, made = built(make_case, make_attempt)
    assert json.loads(json.dumps(made, allow_nan=False)) == made


def test_one_image_per_class_up_to_the_limit() -> None:
    labels = torch.tensor([5, 3, 3, 5, 0])
    assert one_per_class(labels, limit=10).tolist() == [4, 1, 0]
    assert one_per_class(labels, limit=2).tolist() == [4, 1]
