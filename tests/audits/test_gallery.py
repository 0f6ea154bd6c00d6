"""The pictures of the report are the very pixels, to the byte."""

import base64
import json
from dataclasses import replace

import numpy as np
import torch
from audits.made import a_target, an_attempt
from torch import Tensor, nn
from torch.nn import functional as F

from splitveil.audits.target import gallery, gallery_rows
from splitveil.io import Json
from splitveil.threat import Labelled

LEVELS = torch.arange(5 * 2 * 3 * 4, dtype=torch.uint8).view(5, 2, 3, 4)
LABELS = torch.tensor([2, 0, 2, 1, 0])
ROWS = [1, 3, 0]  # the first image of each class, in class order


def unpack(text: str, shape: list[int]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), np.uint8).reshape(-1, *shape)


class FirstNumber(nn.Module):
    """Answers by the first pixel: 2, 0, 1, 1, 1 for the five images."""

    def forward(self, z: Tensor) -> Tensor:
        first = (z[:, 0, 0, 0] * 255 / 24).round().long()
        return F.one_hot(torch.tensor([2, 0, 1, 1, 1])[first], 3).float()


def built(*, answered: bool = True) -> Json:
    grey = torch.full((3, 2, 3, 4), 128, dtype=torch.uint8)
    attempts = {
        "flat": an_attempt([0.1, 0.2, 0.3, 0.4, 0.5], images=grey[[0] * 5]),
        "copy": an_attempt([0.0] * 5, images=LEVELS),
        "some": an_attempt([0.6, 0.7, 0.8, 0.9], rows=[*ROWS, 4], scored=5, images=grey[[0] * 4]),
        "few": an_attempt([0.6, 0.7], rows=ROWS[:2], scored=5, images=grey[:2]),
    }
    scored = Labelled(LEVELS / 255, LABELS)
    head = FirstNumber() if answered else None
    target = replace(a_target(scored=scored, noise_std=0.0, head=head), classes=["a", "b", "c"])
    return gallery(target if answered else replace(target, head=None), attempts)


def test_every_byte_comes_back() -> None:
    made = built()
    assert made["indices"] == ROWS
    assert made["image_shape"] == [2, 3, 4]
    expected = LEVELS[ROWS].numpy()
    assert np.array_equal(unpack(made["original"], made["image_shape"]), expected)
    assert np.array_equal(unpack(made["reconstructions"]["copy"], made["image_shape"]), expected)
    flat = unpack(made["reconstructions"]["flat"], made["image_shape"])
    assert np.array_equal(flat, np.full((3, 2, 3, 4), 128))


def test_labels_answers_and_errors_belong_to_the_pictures() -> None:
    made = built()
    assert made["labels"] == [0, 1, 2]
    assert made["answers"] == [0, 1, 2]
    assert made["classes"] == ["a", "b", "c"]
    np.testing.assert_allclose(made["mse"]["flat"], [0.2, 0.4, 0.1], rtol=1e-6)
    assert made["mse"]["copy"] == [0.0] * 3


def test_a_subset_is_shown_and_one_too_small_is_left_out() -> None:
    made = built()
    np.testing.assert_allclose(made["mse"]["some"], [0.6, 0.7, 0.8], rtol=1e-6)
    assert list(made["mse"]) == list(made["reconstructions"]) == ["flat", "copy", "some"]


def test_where_nobody_answers_a_class_of_its_own_says_so() -> None:
    made = built(answered=False)
    assert made["classes"] == ["a", "b", "c", "–"]
    assert made["answers"] == [3, 3, 3]


def test_it_survives_json() -> None:
    made = built()
    assert json.loads(json.dumps(made, allow_nan=False)) == made


def test_one_image_per_class_up_to_the_limit() -> None:
    labels = torch.tensor([5, 3, 3, 5, 0])
    assert gallery_rows(labels, limit=10).tolist() == [4, 1, 0]
    assert gallery_rows(labels, limit=2).tolist() == [4, 1]
    assert len(gallery_rows(torch.arange(50))) == 10
