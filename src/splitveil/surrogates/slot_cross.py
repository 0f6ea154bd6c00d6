"""Class-conditional entropy over slots: the published gated form, and the honest rate."""

import math
from typing import Literal

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from splitveil.functional import GuardedParameters, plain_layernorm
from splitveil.surrogates.base import (
    Attention,
    BankedSurrogate,
    ClassBatch,
    Moments,
    Number,
    PerClass,
    Statistic,
    SurrogateOutput,
    at_least_one,
    class_moments,
    compare_rates,
    intra_class_mse,
    one_of,
    positive,
    segment_sum,
    uniform_weights,
)
from splitveil.surrogates.gated_attention import check_threshold, log_excess
from splitveil.surrogates.gates import (
    Bounded,
    BoundedScalars,
    DimensionGate,
    class_gate,
    snr_gate,
    soft_threshold,
)
from splitveil.surrogates.shutoff import EarlyShutoff
from splitveil.surrogates.slots import (
    Aggregate,
    GatedCrossAttention,
    Shares,
    SlotAttention,
    Slots,
    responsibilities,
    slot_moments,
)


def slot_entropy(share: Float[Tensor, "c s"]) -> PerClass:
    """H(π) of each class, nats; 0·log 0 = 0, with a finite gradient."""
    return -(share * torch.log(share.clamp_min(torch.finfo(share.dtype).tiny))).sum(1)


def slot_rate(share: Float[Tensor, "c s"], var: Slots, noise_std: float) -> PerClass:
    r"""Rate of each class through its slots, nats per dimension; minimise it.

    .. math:: L_c = \frac1d \Bigl[H(\pi) + \sum_k \pi_k \tfrac12
        \sum_j \log(1 + \sigma_{kj}^2/\sigma^2)\Bigr], \qquad \pi_k = w_k / M_c

    Bounds I(x; z̃ | y = c)/d from above, for hard and soft assignments alike, because H(π) pays
    for the assignment. By concavity L_c ≤ Rate + H(π)/d, and one slot gives the Rate itself.

    >>> round(float(slot_rate(torch.tensor([[0.5, 0.5]]), torch.zeros(1, 2, 1), 1.0)), 6)  # log 2
    0.693147
    """
    within = (share[:, :, None] * torch.log1p(var / noise_std**2)).sum((1, 2))
    return (slot_entropy(share) + 0.5 * within) / var.shape[2]


def slot_weights(share: Float[Tensor, "c s"], power: Number) -> Float[Tensor, "c s"]:
    r"""w̃_k ∝ π_k^γ: heavier slots count for more than their share (R1 eq. 18)."""
    return torch.softmax(power * torch.log(share.clamp_min(torch.finfo(share.dtype).tiny)), 1)


def slot_sample_size(resp: Shares, batch: ClassBatch) -> Number:
    r"""Share of a class's samples behind its slots' statistics, mean over classes with M_c ≥ 2.

    .. math:: \mathrm{ESS}_c = \sum_k \pi_k \frac{1}{M_c \sum_m \alpha_{mk}^2}
        = \sum_k \pi_k \frac{w_k^2}{M_c \sum_m r_{mk}^2}

    1 for uniform responsibilities or one slot, 1/S for S equal hard slots, 1/M_c when every slot
    holds one sample: then the variances say nothing.
    """
    mass = segment_sum(resp, batch.y, batch.num_classes)
    squares = segment_sum(resp.square(), batch.y, batch.num_classes)
    per_slot = mass.square() / squares.clamp_min(torch.finfo(mass.dtype).tiny)
    per_class = (mass * per_slot).sum(1) / batch.count.clamp_min(1).square()
    return batch.plain_mean(per_class)


class SlotCrossAttentionCEM(BankedSurrogate):
    r"""Class-conditional entropy surrogate over slots; minimise `loss` (R1, R4).

    .. math:: \mathrm{rob} = \sum_c p_c g_c \frac1d \sum_{j,k} \tilde w_k\,
        \mathrm{gate}_{kj}\, \mathrm{hard}_{kj}\, \mathrm{softplus}(\beta(e_{kj} - m))/\beta

    x = LN(z), projected to `slot_dim` if given, feeds slots and cross-attention, whose output x̃
    decides the responsibilities r = softmax_k(β cos(x̃, s_k)), as in R4; with
    `assign_from="layernorm"` x does, as in step 1 of R1 §3.3. `aggregate` is the slot update:
    `"mean"` (the authors' code, the original slot attention) or `"sum"` (R1 eq. 6).
    Statistics are those of x̃, or of z itself (`statistic="raw"`). `penalty="rate"` is Σ_c p_c
    L_c with L_c from `slot_rate`, on raw z unless told otherwise: no gates, no shut-off. On x̃
    (`statistic="layernorm"`) that rate can be lowered by shrinking the projection, which
    protects nothing.

    `attention`: slots, projection and cross-attention lower the loss (`minimise`), raise it while
    everything else lowers it (`maximise`), or r = 1/S (`uniform`: slots still shape x̃; on raw z
    they are not run). Gate MLP and scalars always lower it. The eight scalars are learned within
    the bounds of `Bounded`: factor two for the scales, ±0.25 for snr_thresh, ±0.5 for margin_m,
    ±0.04 for class_gate_b.

    Slot noise in train mode comes from `noise_generator`; None means torch's global stream, which
    checkpoints save, so that a resumed run repeats bit for bit. In eval mode it is fixed.
    With LayerNorm statistics the hard gate sits near .96, above `early_hard_thresh`: the faithful
    form can stay shut off for a whole run, and the `[CEM-GATE]` lines then say so.
    `bank` rows of each class go through slots and statistics with the batch's own.
    """

    skips: Tensor

    def __init__(
        self,
        feature_dim: int,
        num_classes: int,
        *,
        num_slots: int = 8,
        num_iterations: int = 3,
        slot_dim: int | None = None,
        num_heads: int = 4,
        aggregate: Aggregate = "mean",
        assign_from: Literal["enhanced", "layernorm"] = "enhanced",
        attention: Attention = "minimise",
        statistic: Statistic | None = None,
        penalty: Literal["rate"] | None = None,
        noise_std: float | None = None,
        assign_temp: float = 12.0,
        slot_power: float = 2.5,
        class_gate_a: float = 12.0,
        class_gate_b: float = 0.04,
        snr_thresh: float = 0.25,
        snr_sharp: float = 14.0,
        softplus_beta: float = 1.5,
        margin_m: float = 0.05,
        early_shut_steps: int = 100,
        early_hard_thresh: float = 0.5,
        early_gate_thresh: float = 0.6,
        var_threshold: float = 0.125,
        reg_strength: float = 0.025,
        gamma: float = 0.0,
        eps: float = 1e-6,
        bank: int = 0,
    ) -> None:
        super().__init__(feature_dim, num_classes, bank)
        one_of("attention", attention, ("minimise", "maximise", "uniform"))
        one_of("penalty", penalty or "rate", ("rate",))
        one_of("assign_from", assign_from, ("enhanced", "layernorm"))
        if statistic is None:
            statistic = "raw" if penalty == "rate" else "layernorm"
        one_of("statistic", statistic, ("layernorm", "raw"))
        width = feature_dim if slot_dim is None else slot_dim
        at_least_one(slot_dim=width)
        noise = reg_strength if noise_std is None else noise_std
        positive(eps=eps)
        positive(zero=True, noise_std=noise, gamma=gamma)
        positive(zero=True, var_threshold=var_threshold, reg_strength=reg_strength)
        tau = var_threshold * reg_strength**2
        check_threshold(penalty, noise, tau + gamma)
        self.num_slots, self.assign_from = num_slots, assign_from
        self.attention, self.statistic, self.penalty = attention, statistic, penalty
        self.noise_std, self.tau, self.gamma, self.eps = noise, tau, gamma, eps
        self.noise_generator: Generator | None = None
        self.project = None if slot_dim is None else nn.Linear(feature_dim, slot_dim)
        self.slots = SlotAttention(width, num_slots, num_iterations, aggregate=aggregate, eps=eps)
        self.cross = GatedCrossAttention(width, num_heads)
        self.scalars = BoundedScalars(
            assign_temp=Bounded(assign_temp),
            slot_power=Bounded(slot_power),
            snr_thresh=Bounded(snr_thresh, 0.25),
            snr_sharp=Bounded(snr_sharp),
            softplus_beta=Bounded(softplus_beta),
            margin_m=Bounded(margin_m, 0.5),
            class_gate_a=Bounded(class_gate_a),
            class_gate_b=Bounded(class_gate_b, 0.04),
        )
        measured = feature_dim if statistic == "raw" else width
        self.dimension_gate = None if penalty == "rate" else DimensionGate(measured)
        self.shutoff = EarlyShutoff(early_shut_steps, early_hard_thresh, early_gate_thresh)

    def assign(self, batch: ClassBatch, temperature: Number) -> tuple[Float[Tensor, "n w"], Shares]:
        """What is measured (x̃ or z) and the responsibilities of the slots for each sample."""
        uniform = batch.z.new_full((len(batch.z), self.num_slots), 1.0 / self.num_slots)
        if self.attention == "uniform" and self.statistic == "raw":
            return batch.z, uniform
        sign = -1.0 if self.attention == "maximise" else 1.0
        x = plain_layernorm(batch.z)
        if self.project is not None:
            held = GuardedParameters(self.project, sign, self.skips)
            x = F.linear(x, held["weight"], held["bias"])
        noise = self.slots.noise(self.noise_generator)
        slots = self.slots(x, batch.y, batch.num_classes, noise=noise, sign=sign, skips=self.skips)
        enhanced = self.cross(x, slots, batch.y, sign, self.skips)
        if self.attention == "uniform":
            return enhanced, uniform
        asked = enhanced if self.assign_from == "enhanced" else x
        resp = responsibilities(asked, slots, batch.y, temperature, self.eps)
        return (batch.z if self.statistic == "raw" else enhanced), resp

    def gated(
        self,
        moments: Moments,
        share: Float[Tensor, "c s"],
        batch: ClassBatch,
        scalars: dict[str, Tensor],
        gate: DimensionGate,
    ) -> tuple[PerClass, Number, Number]:
        """g_c L̂_c of each class, and the means of the soft and the hard gate."""
        mean = rearrange(moments.mean, "c s d -> (c s) d")
        var = rearrange(moments.var, "c s d -> (c s) d")
        excess = log_excess(var, self.tau, self.eps, self.gamma)
        soft = gate(excess + math.log(self.tau + self.gamma), self.skips)
        hard = snr_gate(mean, var, scalars["snr_thresh"], scalars["snr_sharp"], self.eps)
        base = soft_threshold(excess, scalars["softplus_beta"], scalars["margin_m"])
        psi = rearrange(soft * hard * base, "(c s) d -> c s d", s=self.num_slots).mean(2)
        within = (slot_weights(share, scalars["slot_power"]) * psi).sum(1)
        outer = class_gate(batch.share, scalars["class_gate_a"], scalars["class_gate_b"])
        soft_mean, hard_mean = (
            batch.plain_mean(rearrange(g.detach(), "(c s) d -> c (s d)", c=len(share)).mean(1))
            for g in (soft, hard)
        )
        return outer * within, soft_mean, hard_mean

    def forward(self, z: Tensor, y: Tensor) -> SurrogateOutput:
        """Penalty of the batch z (n, d) or (n, c, h, w) with labels y (n,)."""
        with torch.autocast(z.device.type, enabled=False):
            batch = self.batch_of(z, y)
            scalars = self.scalars(self.skips)
            x, resp = self.assign(batch, scalars["assign_temp"])
            moments = slot_moments(x, resp, batch.y, batch.num_classes)
            mass = segment_sum(resp, batch.y, batch.num_classes)
            share = mass / batch.count.clamp_min(1)[:, None]
            diagnostics = self.diagnose(batch, resp.detach(), share.detach(), moments.var.detach())
            if self.dimension_gate is None:
                loss = batch.average(slot_rate(share, moments.var, self.noise_std))
                shut = torch.zeros_like(loss).detach()
            else:
                per_class, soft, hard = self.gated(
                    moments, share, batch, scalars, self.dimension_gate
                )
                diagnostics |= {"soft_gate": soft, "hard_gate": hard}
                active = batch.counted.any()
                loss, shut = self.shutoff(batch.average(per_class), soft, hard, active)
            plain = class_moments(
                x.detach(), uniform_weights(batch.y, batch.count), batch.y, batch.num_classes
            )
            return SurrogateOutput(
                loss=loss,
                intra_mse=intra_class_mse(x, plain.mean, batch),
                diagnostics=diagnostics | {"shut": shut},
            )

    def report(self) -> None:
        """Write the `[CEM-GATE]` lines that wait on the device; the loop calls this as it logs."""
        self.shutoff.report()

    def diagnose(
        self, batch: ClassBatch, resp: Shares, share: Float[Tensor, "c s"], var: Slots
    ) -> dict[str, Tensor]:
        """Responsibilities, and means over the classes that count; detached."""
        own = batch.average(slot_rate(share, var, self.noise_std))
        return compare_rates(own, batch, self.noise_std) | {
            "attention_weights": resp[: batch.own],
            "effective_sample_size": slot_sample_size(resp, batch),
            "slot_mass_min": batch.plain_mean(share.amin(1)),
            "slot_mass_max": batch.plain_mean(share.amax(1)),
            "slot_entropy": batch.plain_mean(slot_entropy(share)),
        }
