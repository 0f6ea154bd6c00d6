"""`KMeansCEM` across epochs: warm starts, emptied clusters, checkpoints, streams."""

from typing import Any

import pytest
import torch
from oracles import kmeans as oracle
from oracles.kmeans_cases import VARIANTS, build, features, in_batches, seeded
from torch import Tensor
from torch.testing import assert_close

from splitveil.surrogates import kmeans_cem
from splitveil.surrogates.kmeans import lloyd
from splitveil.surrogates.kmeans_cem import KMeansCEM


def test_a_warm_start_keeps_each_clusters_number() -> None:
    """Three far groups drift a little: cluster k stays with its group."""
    centres = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0]], dtype=torch.float64)
    noise = torch.randn(60, 2, generator=seeded(1), dtype=torch.float64) * 0.1
    z, y = centres.repeat(20, 1) + noise, torch.zeros(60, dtype=torch.long)
    cem = KMeansCEM(2, 1, clusters=3).double()
    cem.refit(z, y, seeded(2))
    before = cem.centroids.clone()
    cem.refit(z + 1.0, y, seeded(99))
    assert_close(cem.centroids, before + 1.0)
    assert sorted(before[0].round().tolist()) == sorted(centres.tolist())


def test_an_empty_cluster_keeps_its_centroid_with_weight_0() -> None:
    cem = KMeansCEM(1, 1, clusters=2, log_entropy=False).double()
    y = torch.zeros(4, dtype=torch.long)
    groups = torch.tensor([[0.0], [0.0], [10.0], [10.0]], dtype=torch.float64)
    cem.refit(groups, y, seeded())
    far = int(cem.centroids[0, :, 0].argmax())
    cem.refit(groups.clamp_max(1.0), y)
    assert cem.centroids[0, far].item() == 10.0
    assert cem.weights[0].tolist() == [0.0 if k == far else 1.0 for k in range(2)]
    loss = cem(torch.tensor([[10.0]], dtype=torch.float64), torch.tensor([0])).loss
    assert loss.item() == pytest.approx(0.99 * 9.5**2 + 0.01 * 0.25 + 0.001)
    cem.refit(groups, y)
    assert cem.weights[0].tolist() == [0.5, 0.5]


def test_a_class_met_later_is_seeded_then() -> None:
    cem = KMeansCEM(2, 2, clusters=2).double()
    z, y = features(20, 2, 2, 3)
    cem.refit(z[y == 0], y[y == 0], seeded())
    first = cem.centroids[0].clone()
    assert cem.weights[1].tolist() == [0.0, 0.0]
    cem.refit(z, y, seeded(1))
    assert_close(cem.centroids[0], first)
    assert float(cem.weights[1].sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_state_dict_round_trip(variant: dict[str, Any]) -> None:
    cem, z, y = build(3, 3, **variant), *features(10, 3, 3, 4)
    other = KMeansCEM(3, 3, clusters=3, noise_std=0.5, **variant).double()
    assert other(z, y).loss.item() == 0.0
    other.load_state_dict(cem.state_dict())
    assert other(z, y).loss.item() == cem(z, y).loss.item() > 0.0
    fit = features(40, 3, 3, 8)
    for one in (cem, other):
        one.refit(*fit)
    assert torch.equal(cem.centroids, other.centroids)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("spare", [0, 1000])
def test_streaming_is_refit_when_the_budget_suffices(variant: dict[str, Any], spare: int) -> None:
    z, y = features(50, 3, 4, 5)
    whole, streamed = (KMeansCEM(3, 4, clusters=3, **variant) for _ in range(2))
    for _ in range(2):
        whole.refit(z.float(), y, seeded(1))
        streamed.refit_stream(in_batches(z.float(), y, 7), seeded(1), 50 * 3 * 4 + spare)
        for name, value in whole.state_dict().items():
            assert torch.equal(value, streamed.state_dict()[name]), name


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_a_streamed_refit_counts_all_samples(
    covariance: Any,  # noqa: ANN401
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clustered: list[Tensor] = []

    def watched(z: Tensor, y: Tensor, centroids: Tensor, valid: Tensor) -> Tensor:
        clustered.append(z)
        return lloyd(z, y, centroids, valid)

    monkeypatch.setattr(kmeans_cem, "lloyd", watched)
    z, y = features(90, 3, 3, 6)
    cem = KMeansCEM(3, 3, clusters=3, form="logdet", covariance=covariance).double()
    cem.refit_stream(in_batches(z, y, 8), seeded(2), 40 * 3 * 8)
    (held,) = clustered
    assert 38 <= len(held) <= 40
    places = [(z == row).all(1).nonzero().item() for row in held]
    assert places == sorted(set(places))
    count, diagonal, full = oracle.statistics(z, y, cem.centroids, cem.seeded)
    assert cem.class_counts.tolist() == torch.bincount(y).tolist()
    assert_close(cem.weights, count / count.sum(1, keepdim=True).double())
    assert_close(cem.variances, diagonal.mean(2), rtol=1e-9, atol=1e-12)
    assert_close(cem.covariances, diagonal if covariance == "diagonal" else full)
    whole = KMeansCEM(3, 3, clusters=3).double()
    whole.refit(z, y, seeded(2))
    assert not torch.allclose(whole.centroids, cem.centroids)
