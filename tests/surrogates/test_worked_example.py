"""Reference document R2 §6 to 1e-6 in float64, through the public names."""

import pytest
import torch
from torch import Tensor

import splitveil as sv

Z = [[0, 0], [0.2, 0.1], [-0.1, 0.05], [1, 1], [0.9, 1.1], [1.2, 0.8]]
Y = [0, 0, 0, 1, 1, 1]


@pytest.fixture
def example() -> sv.surrogates.GatedAttentionCEM:
    cem = sv.surrogates.GatedAttentionCEM(
        2,
        2,
        form="trace",
        hidden_dim=2,
        bias=False,
        attention_norm=False,
        var_threshold=0.02,
        reg_strength=1.0,
        gamma=0.0,
    ).double()
    with torch.no_grad():
        cem.pooling.value.weight.copy_(torch.eye(2))
        cem.pooling.gate.weight.copy_(torch.eye(2) / 2)
        cem.pooling.score.weight.fill_(1.0)
    return cem


def batch() -> tuple[Tensor, Tensor]:
    return torch.tensor(Z, dtype=torch.float64), torch.tensor(Y)


def test_loss(example: sv.surrogates.GatedAttentionCEM) -> None:
    assert example(*batch()).loss.item() == pytest.approx(0.2192096392, abs=1e-9)


def test_attention_weights(example: sv.surrogates.GatedAttentionCEM) -> None:
    z, _ = batch()
    first, second = example.pooling(z[:3]), example.pooling(z[3:])
    assert first.shape == (3, 1)
    assert first[:, 0].tolist() == pytest.approx([0.3180381262, 0.3712474392, 0.3107144346])
    assert second[:, 0].tolist() == pytest.approx([0.3350460586, 0.3340096003, 0.3309443411])


def test_class_one_alone_is_under_the_threshold(example: sv.surrogates.GatedAttentionCEM) -> None:
    z, y = batch()
    assert example(z[:3], y[:3]).loss.item() == 0.0
    assert example(z[3:], y[3:]).loss.item() == pytest.approx(0.4384192784, abs=1e-9)


def test_moments(example: sv.surrogates.GatedAttentionCEM) -> None:
    z, _ = batch()
    for rows, mean, spread in (
        (z[:3], [0.0431780444, 0.0526604656], 0.0178088342),
        (z[3:], [1.0327879082, 0.9672120918], 0.0310056454),
    ):
        alpha = example.pooling(rows)
        centre = (alpha * rows).sum(0)
        assert centre.tolist() == pytest.approx(mean, abs=1e-9)
        assert (alpha * (rows - centre) ** 2).sum().item() == pytest.approx(spread, abs=1e-9)
