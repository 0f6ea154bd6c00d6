"""Slow, obvious versions of k-means CEM: loops over classes and clusters, from the formulas."""

import math

import torch
from torch import Tensor

from splitveil.surrogates.kmeans_cem import KMeansCEM


def nearest(module: KMeansCEM, z: Tensor, c: int) -> int | None:
    """Cluster of one sample of class c among those with mass; None if there is none."""
    best, found = math.inf, None
    for k in range(module.clusters):
        far = float(((z.detach() - module.centroids[c, k]) ** 2).sum())
        if float(module.weights[c, k]) > 0 and far < best:
            best, found = far, k
    return found


def groups(module: KMeansCEM, z: Tensor, y: Tensor) -> dict[tuple[int, int], list[Tensor]]:
    """Deviations from the stored centroid of the batch's samples, by (class, cluster)."""
    found: dict[tuple[int, int], list[Tensor]] = {}
    for row, label in zip(z, y.tolist(), strict=True):
        k = nearest(module, row, label)
        if k is not None:
            found.setdefault((label, k), []).append(row - module.centroids[label, k])
    return found


def hinge(module: KMeansCEM, z: Tensor, y: Tensor) -> Tensor:
    total = z.sum() * 0
    for (c, k), rows in groups(module, z, y).items():
        w, big_n = float(module.weights[c, k]), int(module.class_counts[c])
        a = min(10 * len(rows) / (w * big_n), 0.99)
        vb = sum((r**2).mean() for r in rows) / len(rows)
        v = a * vb + (1 - a) * module.variances[c, k]
        tau = module.var_threshold * module.noise_std**2
        if module.log_entropy:
            each = torch.relu(torch.log(v + module.gamma) - math.log(tau + module.gamma))
        else:
            each = v + 0.001
        total = total + w * each
    return total / max(len(set(y.tolist())), 1)


def logdet(module: KMeansCEM, z: Tensor, y: Tensor) -> Tensor:
    total = z.sum() * 0
    assert module.covariances is not None
    big_n, members = int(module.class_counts.sum()), groups(module, z, y)
    eye = torch.eye(module.feature_dim, dtype=z.dtype)
    for c in range(module.num_classes):
        for k in range(module.clusters):
            pi = float(module.class_counts[c]) / big_n * float(module.weights[c, k])
            if pi == 0:
                continue
            cov = module.covariances[c, k]
            cov = torch.diag(cov) if cov.ndim == 1 else cov
            rows = members.get((c, k), [])
            if rows:
                a = min(len(rows) / (pi * big_n), 1.0)
                batch = sum(torch.outer(r, r) for r in rows) / len(rows)
                if module.covariance == "diagonal":
                    batch = batch * eye
                cov = (1 - a) * cov + a * batch
            noise = module.noise_std**2 * eye
            rate = 0.5 * (torch.logdet(cov + noise) - torch.logdet(noise))
            total = total + pi * (rate - math.log(pi))
    return total


def statistics(
    z: Tensor, y: Tensor, centroids: Tensor, valid: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Counts (c, k), variances (c, k, d) and covariances (c, k, d, d) about the centroids."""
    classes, clusters, d = centroids.shape
    count = torch.zeros(classes, clusters, dtype=torch.long)
    cov = torch.zeros(classes, clusters, d, d, dtype=z.dtype)
    for row, c in zip(z, y.tolist(), strict=True):
        far = [float(((row - m) ** 2).sum()) for m in centroids[c]]
        allowed = [k for k in range(clusters) if bool(valid[c, k])]
        if allowed:
            k = min(allowed, key=lambda i: far[i])
            count[c, k] += 1
            cov[c, k] += torch.outer(row - centroids[c, k], row - centroids[c, k])
    cov = cov / count.clamp_min(1)[..., None, None]
    return count, cov.diagonal(dim1=2, dim2=3), cov
