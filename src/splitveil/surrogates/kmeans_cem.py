"""`KMeansCEM`: the surrogate of CEM (CVPR 2025), the spread of each class within its clusters."""

import math
from functools import reduce
from itertools import starmap
from operator import add
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Generator, Tensor, nn

from splitveil.errors import ConfigError, DataError
from splitveil.functional import scale_gradient
from splitveil.surrogates import base
from splitveil.surrogates.base import FeatureBatches, Kinds, Rows, segment_sum
from splitveil.surrogates.kmeans import (
    Centroids,
    ClusterStatistics,
    Valid,
    assign,
    cell_covariance,
    cluster_sums,
    drawn_rows,
    lloyd,
    plus_plus,
)
from splitveil.surrogates.rate import Covariance

Form = Literal["hinge", "logdet"]
BATCH_GAIN = 10.0  # the published code weighs the batch ten times its share; not in the paper
UNCHECKED = base.FirstCallCheck(over=True)  # `refit` checks the values; before it the loss is 0
MIX_LIMIT = 0.99
LINEAR_OFFSET = 0.001  # of the published variant without the logarithm


def hinge_penalty(
    var: Float[Tensor, " j"], threshold: float, gamma: float, *, log_entropy: bool = True
) -> Float[Tensor, " j"]:
    r"""ReLU(log(v + γ) − log(t + γ)) of each cluster's variance v; v + .001 without `log_entropy`.

    >>> hinge_penalty(torch.tensor([0.0, 0.09]), 0.0, 0.01)  # log ten
    tensor([0.0000, 2.3026])
    """
    if not log_entropy:
        return var + LINEAR_OFFSET
    floor = threshold + gamma
    # The clamp is the ReLU; a ReLU behind the logarithm would multiply log(0)'s gradient by 0: NaN.
    return torch.log((var + gamma).clamp_min(floor)) - math.log(floor)


def full_logdet(cov: Float[Tensor, "j d d"], noise_std: float) -> Float[Tensor, " j"]:
    r"""½ log|Σ_j + σ²I|/|σ²I| (j,) of covariances (j, d, d), nats, by Cholesky in float64."""
    # Rounding Σ at precision ε moves no eigenvalue of Σ/σ² by more than 4ε‖Σ‖/σ². Below ½ that
    # cannot make Σ/σ² + I indefinite; what exceeds ½ is added to the diagonal.
    scaled = cov.double() / noise_std**2
    moved = 4 * torch.finfo(cov.dtype).eps * scaled.detach().flatten(1).norm(dim=1)  # (j,)
    ridge = 1.0 + (moved - 0.5).clamp_min(0)
    eye = torch.eye(cov.shape[1], dtype=scaled.dtype, device=scaled.device)
    factor = torch.linalg.cholesky_ex(scaled + ridge[:, None, None] * eye).L
    return torch.log(factor.diagonal(dim1=1, dim2=2)).sum(1).to(cov)


class KMeansCEM(nn.Module):
    r"""Spread of each class within its k-means clusters (CEM, CVPR 2025); minimise its `loss`.

    It has no parameters. `form="hinge"` is what the published code optimises. The n_ck samples of
    the batch nearest to cluster k of their class have the variance v_b about its stored centroid,
    which refreshes the stored variance V:

    .. math:: L = \operatorname*{mean}_{c \in \text{batch}} \sum_{k \in \text{batch}} w_{ck}
        \mathrm{ReLU}(\log(\tilde v_{ck} + \gamma) - \log(\tau\sigma^2 + \gamma)), \quad
        \tilde v = a\, v_b + (1-a) V, \quad a = \min(10 n_{ck} / (w_{ck} N_c), .99)

    `form="logdet"` is the paper's L_C, in total nats over all clusters j = (c, k) with
    π_j = N_c/N · w_ck:

    .. math:: L = \sum_j \pi_j (-\log \pi_j + \tfrac12 \log |\Sigma_j + \sigma^2 I|/|\sigma^2 I|),
        \quad \Sigma_j \leftarrow \Sigma_j + \tfrac{n_j}{\pi_j N} (\Sigma_{batch} - \Sigma_j)

    w_ck is the share of cluster k in its class, N_c the number of training samples of class c.
    Call `refit` at the end of each epoch; before the first refit the loss is 0. The diagnostic
    `surrogate_to_true` compares the rate within clusters to that of the whole class: the surrogate
    does not see what lies between its clusters.

    Args:
        feature_dim: Features per sample after flattening, d ≥ 1.
        num_classes: Number of classes, ≥ 1; labels are 0..num_classes − 1.
        clusters: Clusters per class, K ≥ 1; a class with fewer distinct samples uses fewer.
        form: `hinge` or `logdet`.
        noise_std: σ of the channel, ≥ 0, and > 0 for `logdet`.
        var_threshold: τ ≥ 0 in units of σ²; for `hinge`.
        gamma: γ ≥ 0, added to both sides of the threshold; for `hinge`.
        covariance: `diagonal` or `full` Σ_j; for `logdet`.
        log_entropy: False replaces the hinge by ṽ + .001, as an option of the published code.

    >>> z, y = torch.tensor([[-1.0], [1.0]]), torch.tensor([0, 0])  # one class, variance 1
    >>> cem = KMeansCEM(1, 2, clusters=1, noise_std=1.0, var_threshold=0.25, gamma=0.0)
    >>> cem(z, y).loss.item()
    0.0
    >>> cem.refit(z, y)
    >>> round(cem(z, y).loss.item(), 4)  # log(1 / 0.25)
    1.3863
    """

    centroids: Tensor
    variances: Tensor
    weights: Tensor
    class_counts: Tensor
    seeded: Tensor
    fitted: Tensor
    skips: Tensor
    covariances: Tensor | None
    logdets: Tensor | None

    def __init__(
        self,
        feature_dim: int,
        num_classes: int,
        *,
        clusters: int = 5,
        form: Form = "hinge",
        noise_std: float = 0.025,
        var_threshold: float = 0.125,
        gamma: float = 0.01,
        covariance: Covariance = "diagonal",
        log_entropy: bool = True,
    ) -> None:
        super().__init__()
        base.one_of("form", form, get_args(Form))
        base.one_of("covariance", covariance, get_args(Covariance))
        base.at_least_one(clusters=clusters, feature_dim=feature_dim, num_classes=num_classes)
        base.positive(zero=True, noise_std=noise_std, var_threshold=var_threshold, gamma=gamma)
        if form == "logdet":
            base.require_noise(noise_std)
        elif log_entropy and var_threshold * noise_std**2 + gamma == 0:
            raise ConfigError(
                "the threshold τσ² + γ must be > 0, but var_threshold·noise_std² + gamma is 0; "
                "raise var_threshold, noise_std or gamma"
            )
        self.feature_dim, self.num_classes, self.clusters = feature_dim, num_classes, clusters
        self.form, self.noise_std, self.covariance = form, noise_std, covariance
        self.var_threshold, self.gamma, self.log_entropy = var_threshold, gamma, log_entropy
        cells = (num_classes, clusters)
        self.register_buffer("centroids", torch.zeros(*cells, feature_dim))
        self.register_buffer("variances", torch.zeros(cells))
        self.register_buffer("weights", torch.zeros(cells))
        self.register_buffer("class_counts", torch.zeros(num_classes, dtype=torch.long))
        self.register_buffer("seeded", torch.zeros(cells, dtype=torch.bool))
        self.register_buffer("fitted", torch.zeros((), dtype=torch.bool))
        self.register_buffer("skips", torch.zeros((), dtype=torch.long))
        full = form == "logdet" and covariance == "full"
        width = (feature_dim, feature_dim) if full else (feature_dim,)
        wide = torch.zeros(*cells, *width) if form == "logdet" else None
        self.register_buffer("covariances", wide)
        self.register_buffer("logdets", torch.zeros(cells) if full else None)

    def forward(self, z: Tensor, y: Tensor) -> base.SurrogateOutput:
        """Penalty of the batch z (n, d) or (n, c, h, w) with labels y (n,)."""
        with torch.autocast(z.device.type, enabled=False):
            batch = base.class_batch(z, y, self.feature_dim, self.num_classes, UNCHECKED)
            x = torch.where(self.fitted, batch.z, torch.zeros_like(batch.z))
            x = scale_gradient(x, 1.0, self.skips)
            nearest = assign(x.detach(), batch.y, self.centroids.to(x), self.weights > 0)
            cell = batch.y * self.clusters + nearest
            # About the stored centroid, not the batch's mean: a cluster has few samples in a batch,
            # and a single one about its own mean would have no spread and no gradient.
            centred = x - self.centroids.to(x).flatten(0, 1)[cell]  # (n, d)
            count = base.class_count(cell, self.num_classes * self.clusters, x)  # (j,)
            each = self._hinge if self.form == "hinge" else self._logdet
            parts = (batch.count > 0).sum().clamp_min(1) if self.form == "hinge" else 1
            loss, rate = each(centred, cell, count)
            own = (count / max(len(cell), 1) * rate.detach()).sum()
            own = torch.where(self.fitted, own, torch.nan)
            weight = base.uniform_weights(batch.y, batch.count)
            mean = base.class_moments(batch.z.detach(), weight, batch.y, self.num_classes).mean
            mass = torch.where(self.weights > 0, self.weights, 1.0)
            return base.SurrogateOutput(
                loss=loss.sum() / parts,
                intra_mse=base.intra_class_mse(batch.z, mean, batch),
                diagnostics={
                    "attention_weights": weight,
                    "effective_sample_size": torch.ones_like(batch.share.sum()),
                    "cluster_mass_min": torch.where(self.fitted, mass.amin(), 0.0),
                    "cluster_mass_max": self.weights.amax(),
                }
                | base.compare_rates(own, batch, self.noise_std),
            )

    def _hinge(
        self, centred: Rows, cell: Kinds, count: Float[Tensor, " j"]
    ) -> tuple[Float[Tensor, " j"], Float[Tensor, " j"]]:
        """Penalty (j,) of each cluster in the batch, before the mean over classes; and its rate."""
        weight, stored = (v.to(centred).flatten() for v in (self.weights, self.variances))
        size = weight * self.class_counts.to(centred).repeat_interleave(self.clusters)  # w N_c
        mix = (BATCH_GAIN * count / size.clamp_min(1)).clamp_max(MIX_LIMIT)
        total = segment_sum(centred.square().mean(1, keepdim=True), cell, len(count))[:, 0]
        var = mix * (total / count.clamp_min(1)) + (1 - mix) * stored
        threshold = self.var_threshold * self.noise_std**2
        each = hinge_penalty(var, threshold, self.gamma, log_entropy=self.log_entropy)
        rate = 0.5 * torch.log1p(var / self.noise_std**2)
        return torch.where((count > 0) & (weight > 0), weight * each, 0.0), rate

    def _logdet(
        self, centred: Rows, cell: Kinds, count: Float[Tensor, " j"]
    ) -> tuple[Float[Tensor, " j"], Float[Tensor, " j"]]:
        """Penalty (j,) of each cluster, in the batch or not; and its rate, nats per dimension."""
        assert self.covariances is not None  # noqa: S101 - the constructor made it for this form
        sizes = self.class_counts.to(centred)
        total = sizes.sum().clamp_min(1)
        pi = ((sizes / total)[:, None] * self.weights.to(centred)).flatten()
        mix = (count / (pi * total).clamp_min(1)).clamp_max(1.0)
        stored = self.covariances.to(centred).flatten(0, 1)
        per = mix / count.clamp_min(1)  # each sample's part of the refreshed covariance
        if self.logdets is None:
            fresh = segment_sum(centred.square(), cell, len(count))
            var = (1 - mix)[:, None] * stored + per[:, None] * fresh
            each = 0.5 * torch.log1p(var / self.noise_std**2).sum(1)
        else:
            # At most n clusters have samples in the batch. Only the n largest are factored, so the
            # host need not read which ones are empty.
            some = count.topk(min(len(count), len(cell))).indices
            member = (some[:, None] == cell).to(centred)  # (p, n)
            cov = (1 - mix[some])[:, None, None] * stored[some]
            cov = cov + per[some][:, None, None] * cell_covariance(centred, member)
            each = self.logdets.to(centred).flatten()
            each = each.index_copy(0, some, full_logdet(cov, self.noise_std))
        part = torch.where(pi > 0, pi * each - torch.xlogy(pi, pi), 0.0)
        return part, each / centred.shape[1]

    @torch.no_grad()
    def refit(self, z: Tensor, y: Tensor, generator: Generator | None = None) -> None:
        """Fit the clusters to all features z (n, …) with labels y (n,).

        The first refit of a class starts with k-means++, later ones from its present centroids. A
        cluster that ends empty keeps its centroid with weight 0, so it adds nothing to the loss; a
        later refit may fill it again.
        """
        flat, y = self._checked(z, y)
        if len(flat) == 0:
            raise DataError("refit needs features, got none; pass those of the training images")
        centroids, seeded = self._clustered(flat, y, generator)
        sums = cluster_sums(flat, y, centroids, seeded, full=self.logdets is not None)
        self._keep(centroids, seeded, sums.statistics())

    @torch.no_grad()
    def refit_stream(
        self, batches: FeatureBatches, generator: Generator, memory_budget: int = 2**30
    ) -> None:
        """`refit` for features that need not fit into memory.

        If all features fit into the budget, the result is that of `refit`, after one pass.
        Otherwise R = memory_budget // (4·d) samples are drawn, fairly between classes. The second
        pass fetches them for k-means; the third takes counts, weights and variances of all samples
        about the centroids. At most, in float32, it needs memory_budget + 48·n bytes for labels and
        the draw + R·9·clusters for distances + 32 MiB + one batch + the statistics.

        Args:
            batches: Each call starts a pass over all (features, labels), in the same order.
            generator: Draws the seeds of k-means++ and the samples.
            memory_budget: Bytes for features; at least one sample of each class must fit.
        """
        store, labels, held = None, [], 0
        for flat, y in starmap(self._checked, batches()):
            if store is None:
                store = self._room(flat, memory_budget)
            room = store[held : held + len(flat)]
            room.copy_(flat[: len(room)])
            held += len(flat)
            labels.append(y)
        if store is None:
            raise DataError("refit_stream needs features, got none; batches() must yield (z, y)")
        every = torch.cat(labels)
        if held <= len(store):
            self.refit(store[:held], every, generator)
            return
        kept = drawn_rows(every, self.num_classes, len(store), generator)
        sample = self._fetched(store, kept, batches)
        centroids, seeded = self._clustered(sample, every[kept], generator)
        del store, sample
        full = self.logdets is not None
        parts = (
            cluster_sums(z, y, centroids, seeded, full=full)
            for z, y in starmap(self._checked, batches())
        )
        self._keep(centroids, seeded, reduce(add, parts).statistics())

    def _fetched(
        self, store: Float[Tensor, "r d"], kept: Bool[Tensor, " n"], batches: FeatureBatches
    ) -> Float[Tensor, "m d"]:
        """The kept rows of a second pass, in order, written into the memory of `store`."""
        read = filled = 0
        for flat, _ in starmap(self._checked, batches()):
            rows = flat[kept[read : read + len(flat)]]
            store[filled : filled + len(rows)] = rows
            read, filled = read + len(flat), filled + len(rows)
        if read != len(kept):
            raise DataError(
                f"the second pass had {read} samples, the first {len(kept)}; batches() must start "
                "a new pass at each call, not return the same iterator twice"
            )
        return store[:filled]

    def _room(self, like: Rows, budget: int) -> Float[Tensor, "r d"]:
        """Memory for as many rows as the budget allows."""
        row = like.element_size() * self.feature_dim
        if budget < self.num_classes * row:
            raise ConfigError(
                f"memory_budget must hold one sample of each of {self.num_classes} classes, "
                f"{self.num_classes * row} bytes, got {budget}; raise it"
            )
        return like.new_empty(budget // row, self.feature_dim)

    def _checked(self, z: Tensor, y: Tensor) -> tuple[Rows, Kinds]:
        """Flat features in float32 or better and labels, all values checked."""
        batch = base.class_batch(
            z.detach(), y.cpu(), self.feature_dim, self.num_classes, base.FirstCallCheck()
        )
        return batch.z, batch.y.to(z.device)

    def _clustered(self, z: Rows, y: Kinds, generator: Generator | None) -> tuple[Centroids, Valid]:
        """Seed new classes, then run Lloyd: centroids, and which clusters are in use."""
        start, seeded, known = self.centroids.to(z), self.seeded, self.seeded.any(1)
        if not bool(known[y].all()):
            drawn, valid = plus_plus(z, y, self.num_classes, self.clusters, generator)
            start = torch.where(known[:, None, None], start, drawn)
            seeded = torch.where(known[:, None], seeded, valid)
        return lloyd(z, y, start, seeded), seeded

    def _keep(self, centroids: Centroids, seeded: Valid, found: ClusterStatistics) -> None:
        """Store the fit in the buffers."""
        self.centroids.copy_(centroids)
        self.seeded.copy_(seeded)
        self.variances.copy_(found.variance)
        self.weights.copy_(found.weight)
        self.class_counts.copy_(found.class_count)
        if self.covariances is not None:
            self.covariances.copy_(found.diagonal if found.full is None else found.full)
        if self.logdets is not None and found.full is not None:
            logdet = full_logdet(found.full.flatten(0, 1), self.noise_std)
            self.logdets.copy_(logdet.view_as(self.logdets))
        self.fitted.fill_(value=True)
