"""What the answers are held against: labels, smoothed labels, a teacher's answers."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from splitveil.train.step import LABELS, TaskLoss, divergence


def logits(seed: int, n: int = 5, k: int = 4, spread: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn(n, k, dtype=torch.float64, generator=generator)


def softmax(row: list[float], temperature: float) -> list[float]:
    powers = [math.exp(v / temperature) for v in row]
    return [p / sum(powers) for p in powers]


def slow_divergence(own: Tensor, taught: Tensor, temperature: float) -> float:
    total = 0.0
    for mine, theirs in zip(own.tolist(), taught.tolist(), strict=True):
        q, p = softmax(mine, temperature), softmax(theirs, temperature)
        total += sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    return temperature**2 * total / len(own)


def slow_smoothed(own: Tensor, y: Tensor, share: float) -> float:
    total, classes = 0.0, own.shape[1]
    for row, label in zip(own.tolist(), y.tolist(), strict=True):
        for at, p in enumerate(softmax(row, 1.0)):
            wanted = share / classes + (1 - share) * (at == label)
            total -= wanted * math.log(p)
    return total / len(own)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0, 8.0])
def test_the_divergence_is_the_slow_one(temperature: float) -> None:
    own, taught = logits(0), logits(1)
    expected = slow_divergence(own, taught, temperature)
    assert float(divergence(own, taught, temperature)) == pytest.approx(expected, rel=1e-12)


@given(seed=st.integers(0, 99), shift=st.floats(-50, 50), temperature=st.floats(0.3, 20))
def test_divergence_is_nonnegative_and_0_for_equal_answers(
    seed: int, shift: float, temperature: float
) -> None:
    own, taught = logits(seed), logits(seed + 100)
    assert float(divergence(own, taught, temperature)) >= 0
    assert float(divergence(taught + shift, taught, temperature)) == pytest.approx(0, abs=1e-9)


def test_when_hot_it_compares_the_logits_themselves() -> None:
    own, taught = logits(2), logits(3)
    apart = own - taught
    expected = (apart - apart.mean(1, keepdim=True)).square().mean(1).mean() / 2
    assert float(divergence(own, taught, 1e4)) == pytest.approx(float(expected), rel=1e-3)


def test_gradient_of_the_divergence() -> None:
    own, taught = logits(4).requires_grad_(), logits(5)
    assert torch.autograd.gradcheck(lambda v: divergence(v, taught, 3.0), own)


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e3, 1e6])
def test_sure_answers_have_finite_losses_and_gradients(size: float) -> None:
    own = (size * logits(6)).float().requires_grad_()
    taught = (size * logits(7)).float()
    task = TaskLoss(smoothing=0.1, share=0.7, temperature=1.0)
    loss = task.loss(own, torch.tensor([0, 1, 2, 3, 0]), taught)
    torch.autograd.backward(loss)
    assert own.grad is not None
    assert bool(torch.isfinite(loss))
    assert bool(torch.isfinite(own.grad).all())


def test_half_precision_is_widened() -> None:
    own, taught = logits(8), logits(8) + 1e-2 * logits(9)
    narrow = divergence(own.bfloat16(), taught.bfloat16(), 2.0)
    assert narrow.dtype == torch.float32
    expected = divergence(own.bfloat16().double(), taught.bfloat16().double(), 2.0)
    assert float(narrow) == pytest.approx(float(expected), rel=1e-2)


def test_labels_alone_are_the_cross_entropy_bit_for_bit() -> None:
    own, y = logits(10).float(), torch.tensor([0, 1, 2, 3, 0])
    assert torch.equal(LABELS.loss(own, y, LABELS.taught(own)), F.cross_entropy(own, y))


@pytest.mark.parametrize("share", [0.0, 0.1, 0.9])
def test_smoothed_labels_are_the_slow_ones(share: float) -> None:
    own, y = logits(11), torch.tensor([0, 1, 2, 3, 0])
    expected = slow_smoothed(own, y, share)
    assert float(TaskLoss(smoothing=share).loss(own, y, None)) == pytest.approx(expected, rel=1e-12)


def test_the_teachers_share_is_taken_from_the_labels() -> None:
    own, taught, y = logits(12), logits(13), torch.tensor([0, 1, 2, 3, 0])
    task = TaskLoss(smoothing=0.2, teacher=lambda _: taught, share=0.3, temperature=2.0)
    found = task.loss(own, y, task.taught(torch.zeros(5, 1, 2, 2)))
    expected = 0.7 * slow_smoothed(own, y, 0.2) + 0.3 * slow_divergence(own, taught, 2.0)
    assert float(found) == pytest.approx(expected, rel=1e-12)


def test_a_teacher_gets_no_gradient() -> None:
    net = torch.nn.Linear(3, 2)
    answers = TaskLoss(teacher=net).taught(torch.ones(1, 3))
    assert answers is not None
    assert not answers.requires_grad
