"""K-means of all classes at once: against scikit-learn, the loop, and the stated distribution."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import kmeans as oracle
from oracles.batches import draw
from sklearn.cluster import KMeans
from torch import Generator, Tensor
from torch.testing import assert_close

from splitveil.surrogates import kmeans as module
from splitveil.surrogates.kmeans import (
    assign,
    cluster_sums,
    drawn_rows,
    fair_quota,
    lloyd,
    lloyd_step,
    plus_plus,
)

ALL = torch.ones(1, 2, dtype=torch.bool)


def seeded(seed: int) -> Generator:
    return Generator().manual_seed(seed)


def features(n: int, d: int, c: int, seed: int) -> tuple[Tensor, Tensor]:
    z, y = draw(n, d, c, seed)
    return z.detach(), y


@pytest.mark.parametrize("seed", range(4))
def test_every_class_ends_where_scikit_learn_ends(seed: int) -> None:
    z, y = features(240, 3, 4, seed)
    start, valid = plus_plus(z, y, 4, 5, seeded(seed))
    ours = lloyd(z, y, start, valid, max_iterations=300)
    for c in range(4):
        theirs = KMeans(5, init=start[c].numpy(), n_init=1, algorithm="lloyd", tol=0).fit(
            z[y == c].numpy()
        )
        assert_close(ours[c], torch.from_numpy(theirs.cluster_centers_), rtol=1e-9, atol=1e-9)
        labels = assign(z[y == c], y[y == c], ours, valid)
        assert labels.tolist() == theirs.labels_.tolist()


def test_iterations_are_limited_and_each_one_is_a_lloyd_step() -> None:
    z, y = features(200, 2, 2, 7)
    start, valid = plus_plus(z, y, 2, 4, seeded(7))
    twice = lloyd_step(z, y, lloyd_step(z, y, start, valid)[0], valid)[0]
    assert_close(lloyd(z, y, start, valid, max_iterations=2), twice)
    assert not torch.equal(lloyd(z, y, start, valid), twice)


def test_small_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    z, y = features(50, 3, 3, 1)
    start, valid = plus_plus(z, y, 3, 4, seeded(1))
    whole = assign(z, y, start, valid), cluster_sums(z, y, start, valid, full=True)
    rows: list[int] = []
    split = torch.split

    def spy(x: Tensor, size: int) -> tuple[Tensor, ...]:
        rows.append(size)
        return split(x, size)

    monkeypatch.setattr(module, "CHUNK_NUMBERS", 7 * 4 * 3)
    monkeypatch.setattr(torch, "split", spy)
    assert torch.equal(assign(z, y, start, valid), whole[0])
    assert set(rows) == {7}
    parts = cluster_sums(z, y, start, valid, full=True)
    assert parts.outer is not None
    assert whole[1].outer is not None
    assert_close(parts.square, whole[1].square)
    assert_close(parts.outer, whole[1].outer)


def test_an_empty_cluster_stays_put() -> None:
    z, y = torch.tensor([[0.0], [1.0]]), torch.tensor([0, 0])
    start = torch.tensor([[[0.0], [50.0]]])
    assert lloyd(z, y, start, ALL).tolist() == [[[0.5], [50.0]]]


def test_an_invalid_cluster_is_never_chosen() -> None:
    z, y = torch.tensor([[0.0], [1.0]]), torch.tensor([0, 0])
    start = torch.tensor([[[9.0], [0.5]]])
    only_first = torch.tensor([[True, False]])
    assert assign(z, y, start, only_first).tolist() == [0, 0]
    nobody = cluster_sums(z, y, start, torch.zeros_like(only_first)).statistics()
    assert nobody.class_count.tolist() == [0]
    assert nobody.weight.tolist() == [[0.0, 0.0]]


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 20), c=st.integers(1, 5), k=st.integers(1, 4), seed=st.integers(0, 999))
def test_seeds_are_distinct_samples_of_the_own_class(n: int, c: int, k: int, seed: int) -> None:
    z, y = features(n, 2, c, seed)
    z = torch.cat([z, z])  # every point twice: as many distinct ones as before
    y = torch.cat([y, y])
    centroids, valid = plus_plus(z, y, c, k, seeded(seed))
    for label in range(c):
        members = {tuple(row) for row in z[y == label].tolist()}
        picked = {tuple(row) for row in centroids[label][valid[label]].tolist()}
        assert len(picked) == min(k, len(members)) == int(valid[label].sum())
        assert picked <= members


def test_seeds_follow_the_squared_distance() -> None:
    """From 0, the points 1, 2 and 4 are drawn with probabilities 1/21, 4/21 and 16/21.

    8000 classes hold the same four points, so one call makes 8000 independent draws; ±4 standard
    errors. In proportion to the distance itself they would be 1/7, 2/7 and 4/7.
    """
    points = torch.tensor([0.0, 1.0, 2.0, 4.0], dtype=torch.float64)
    trials = 8000
    z = points.repeat(trials)[:, None]
    y = torch.arange(trials).repeat_interleave(4)
    centroids, valid = plus_plus(z, y, trials, 2, seeded(0))
    assert bool(valid.all())
    first, second = centroids[:, 0, 0], centroids[:, 1, 0]
    for point in points:
        assert float((first == point).double().mean()) == pytest.approx(0.25, abs=4 * 0.00485)
    from_zero = second[first == 0]
    for point, share in ((1.0, 1 / 21), (2.0, 4 / 21), (4.0, 16 / 21)):
        error = (share * (1 - share) / len(from_zero)) ** 0.5
        assert float((from_zero == point).double().mean()) == pytest.approx(share, abs=4 * error)


def test_no_step_asks_the_device_for_a_value() -> None:
    """Tensors without data refuse every question of the host."""
    z, y = torch.empty(9, 3, device="meta"), torch.empty(9, dtype=torch.long, device="meta")
    start, valid = plus_plus(z, y, 4, 2)
    centroids = lloyd(z, y, start, valid)
    found = cluster_sums(z, y, centroids, valid, full=True).statistics()
    assert centroids.shape == (4, 2, 3)
    assert found.full is not None
    assert found.full.shape == (4, 2, 3, 3)
    with pytest.raises(RuntimeError, match="meta"):
        bool(valid.any())


def test_the_generator_decides_the_seeds() -> None:
    z, y = features(60, 2, 3, 2)
    one, two, other = (plus_plus(z, y, 3, 4, seeded(s))[0] for s in (5, 5, 6))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 25), c=st.integers(1, 5), k=st.integers(1, 4), seed=st.integers(0, 999))
def test_statistics_equal_the_loop_and_add_up(n: int, c: int, k: int, seed: int) -> None:
    z, y = features(n, 3, c, seed)
    centroids, valid = plus_plus(z, y, c, k, seeded(seed))
    sums = cluster_sums(z, y, centroids, valid, full=True)
    found = sums.statistics()
    count, diagonal, cov = oracle.statistics(z, y, centroids, valid)
    assert torch.equal(found.count, count)
    assert found.full is not None
    assert_close(found.diagonal, diagonal, rtol=1e-9, atol=1e-12)
    assert_close(found.full, cov, rtol=1e-9, atol=1e-12)
    assert_close(found.variance, diagonal.mean(2), rtol=1e-9, atol=1e-12)
    assert_close(found.weight.sum(1), (count.sum(1) > 0).to(z))
    cut = n // 2
    halves = [cluster_sums(z[s], y[s], centroids, valid) for s in (slice(cut), slice(cut, n))]
    both = (halves[0] + halves[1]).statistics()
    assert torch.equal(both.count, count)
    assert_close(both.diagonal, diagonal, rtol=1e-9, atol=1e-12)
    assert both.full is None


@settings(max_examples=50, deadline=None)
@given(seen=st.lists(st.integers(0, 30), min_size=1, max_size=6), spare=st.integers(0, 60))
def test_the_quota_is_the_largest_that_fits(seen: list[int], spare: int) -> None:
    capacity = len(seen) + spare
    quota = int(fair_quota(torch.tensor(seen), capacity))
    assert sum(min(n, quota) for n in seen) <= capacity
    assert quota == max(seen) or sum(min(n, quota + 1) for n in seen) > capacity


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(4, 40), size=st.integers(1, 90), seed=st.integers(0, 999))
def test_a_sample_is_fair_and_within_its_budget(rows: int, size: int, seed: int) -> None:
    g = seeded(seed)
    y = torch.randint(4, (size,), generator=g).clamp_max(2) if seed % 2 else torch.arange(size) % 4
    kept = drawn_rows(y, 4, rows, g)
    seen = torch.bincount(y, minlength=4)
    expected = seen.clamp_max(fair_quota(seen, rows))
    assert torch.equal(torch.bincount(y[kept], minlength=4), expected)
    assert int(kept.sum()) <= rows
    assert bool(kept.all()) == (size <= rows)


def test_a_class_is_sampled_uniformly() -> None:
    """Each of 12 samples is kept with probability 1/3, wherever it stands."""
    g, trials, hits = seeded(1), 600, torch.zeros(12)
    for _ in range(trials):
        hits += drawn_rows(torch.zeros(12, dtype=torch.long), 1, 4, g)
    error = (1 / 3 * 2 / 3 / trials) ** 0.5
    assert_close(hits / trials, torch.full((12,), 1 / 3), rtol=0, atol=4 * error)
