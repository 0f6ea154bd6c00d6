"""Class-conditional entropy over slots: the published gated form, and the honest rate."""

import math
from typing import Literal, get_args

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from splitveil.surrogates import base
from splitveil.surrogates.base import (
    ClassBatch,
    GuardedParameters,
    Number,
    PerClass,
    plain_layernorm,
    segment_sum,
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

AssignFrom = Literal["enhanced", "layernorm"]


def slot_entropy(share: Float[Tensor, "c s"]) -> PerClass:
    """H(π) (c,) of the slot shares π (c, s) of each class, nats; 0·log 0 = 0, gradient finite."""
    return -(share * torch.log(share.clamp_min(torch.finfo(share.dtype).tiny))).sum(1)


def slot_rate(share: Float[Tensor, "c s"], var: Slots, noise_std: float) -> PerClass:
    r"""Rate (c,) of each class through its slots, nats per dimension; minimise it.

    .. math:: L_c = \frac1d \Bigl[H(\pi) + \sum_k \pi_k \tfrac12
        \sum_j \log(1 + \sigma_{kj}^2/\sigma^2)\Bigr], \qquad \pi_k = w_k / M_c

    An upper bound on I(x; z̃ | y = c)/d for hard and soft assignments alike, because H(π) pays for
    what the assignment tells. By concavity L_c ≤ Rate + H(π)/d; one slot gives the Rate itself.

    Args:
        share: π (c, s), sums to 1 over the slots of a class.
        var: σ² of each slot about its own mean (c, s, d), from raw z.
        noise_std: σ of the channel, > 0.

    >>> round(float(slot_rate(torch.tensor([[0.5, 0.5]]), torch.zeros(1, 2, 1), 1.0)), 6)  # log 2
    0.693147
    """
    within = (share[:, :, None] * torch.log1p(var / noise_std**2)).sum((1, 2))
    return (slot_entropy(share) + 0.5 * within) / var.shape[2]


def slot_weights(share: Float[Tensor, "c s"], power: Number) -> Float[Tensor, "c s"]:
    r"""w̃_k ∝ π_k^γ: with γ > 1, heavier slots count for more than their share (R1 eq. 18)."""
    return torch.softmax(power * torch.log(share.clamp_min(torch.finfo(share.dtype).tiny)), 1)


def slot_sample_size(resp: Shares, batch: ClassBatch) -> Number:
    r"""Share of a class's samples that its slots' statistics use, mean over classes with M_c ≥ 2.

    .. math:: \mathrm{ESS}_c = \sum_k \pi_k \frac{1}{M_c \sum_m \alpha_{mk}^2}
        = \sum_k \pi_k \frac{w_k^2}{M_c \sum_m r_{mk}^2}

    1 for uniform responsibilities or one slot, 1/S for S equal hard slots, and 1/M_c when every
    slot holds one sample, so that the variances mean nothing.
    """
    mass = segment_sum(resp, batch.y, batch.num_classes)
    squares = segment_sum(resp.square(), batch.y, batch.num_classes)
    per_slot = mass.square() / squares.clamp_min(torch.finfo(mass.dtype).tiny)
    per_class = (mass * per_slot).sum(1) / batch.count.clamp_min(1).square()
    return batch.plain_mean(per_class)


class SlotCrossAttentionCEM(base.BankedSurrogate):
    r"""Surrogate of H(Z|Y) over the slots of each class (R1, R4); minimise its `loss`.

    .. math:: \mathrm{rob} = \sum_c p_c g_c \frac1d \sum_{j,k} \tilde w_k\,
        \mathrm{gate}_{kj}\, \mathrm{hard}_{kj}\, \mathrm{softplus}(\beta(e_{kj} - m))/\beta

    x = LN(z), projected to `slot_dim` if given, feeds `SlotAttention` and `GatedCrossAttention`.
    Their output x̃ gives the responsibilities r = softmax_k(β_assign cos(x̃, s_k)), as in R4, and r
    the mean, variance and weight of each slot. Gates and e as in `GatedAttentionCEM`, per slot. The
    eight scalars from `assign_temp` to `margin_m` are learned within bounds about their start: a
    factor of two for scales, ±0.25 for `snr_thresh`, ±0.5 for `margin_m`, ±0.04 for `class_gate_b`.

    `penalty="rate"` is Σ_c p_c L_c with L_c from `slot_rate`, in nats per dimension, without gates
    and shut-off. Measured on x̃ (`statistic="layernorm"`) this rate falls when the projection
    shrinks, which protects nothing; so its default is raw z.

    In train mode the slots' noise comes from `noise_generator`; None means torch's global stream,
    which checkpoints save, so that a resumed run repeats bit for bit. In eval mode it is fixed.

    Args:
        feature_dim: Features per sample after flattening, d ≥ 1.
        num_classes: Number of classes, ≥ 1; labels are 0..num_classes − 1.
        num_slots: Slots per class, ≥ 1.
        num_iterations: Rounds of slot attention, ≥ 1.
        slot_dim: Width of slots and x̃; default d. Without it the module has over 50 M parameters
            at d = 2048.
        num_heads: Heads of the cross-attention; must divide the slots' width.
        aggregate: Slot update, `mean` as in the authors' code or `sum` as in R1 eq. 6.
        assign_from: What gives the responsibilities: `enhanced` for x̃ (R4), or `layernorm` for x
            (R1 §3.3, step 1).
        attention: `minimise`: slots, projection and cross-attention lower the loss. `maximise`:
            they raise it, while everything else lowers it. `uniform`: r = 1/S; the slots still
            shape x̃, and on raw z they are not run. Gates and scalars lower the loss in any case.
        statistic: What is measured, `layernorm` for x̃ or `raw` for z. Default: `raw` for the rate,
            else `layernorm`.
        penalty: `"rate"`, or None for the gated penalty.
        noise_std: σ of the channel, ≥ 0, and > 0 for the rate; default `reg_strength`.
        assign_temp: Start of β_assign > 0.
        slot_power: Start of γ > 0 in the slot weights w̃_k ∝ (w_k/M)^γ.
        class_gate_a: Start of the class gate's steepness, > 0.
        class_gate_b: Start of the share of a class at which its gate is 1/2.
        snr_thresh: Start of the σ²/μ² at which the hard gate is 1/2.
        snr_sharp: Start of the hard gate's steepness, > 0.
        softplus_beta: Start of β > 0 of the softplus.
        margin_m: Start of m, how far the log-variance may exceed the threshold.
        early_shut_steps: Calls with a loss of 0 at the start, ≥ 0.
        early_hard_thresh: Mean of the hard gate, in [0, 1], above which the loss is 0. With
            LayerNorm statistics the gate is near .96, so the published form can stay shut off for
            a whole run; the `[CEM-GATE]` log lines then say so. 1 never shuts.
        early_gate_thresh: The same for the soft gate.
        var_threshold: τ in units of reg_strength², ≥ 0.
        reg_strength: Unit of the threshold, ≥ 0; the documents use the channel's σ.
        gamma: γ ≥ 0, added to both sides of the threshold.
        eps: ε > 0, keeps logarithms and divisions finite.
        bank: Rows kept of each class, ≥ 0; they pass slots and statistics with the batch.

    >>> z, y = torch.tensor([-1.0, 1.0]).repeat(4, 1).T, torch.tensor([0, 0])  # variance 1
    >>> one_slot = SlotCrossAttentionCEM(4, 2, penalty="rate", num_slots=1, noise_std=0.5)
    >>> round(one_slot(z, y).loss.item(), 4)  # one slot is the rate: ½ log(1 + 1/0.25)
    0.8047
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
        assign_from: AssignFrom = "enhanced",
        attention: base.Attention = "minimise",
        statistic: base.Statistic | None = None,
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
        base.one_of("attention", attention, get_args(base.Attention))
        base.one_of("penalty", penalty or "rate", ("rate",))
        base.one_of("assign_from", assign_from, get_args(AssignFrom))
        if statistic is None:
            # The rate of x̃ would fall when the projection shrinks, and leave z as it is.
            statistic = "raw" if penalty == "rate" else "layernorm"
        base.one_of("statistic", statistic, get_args(base.Statistic))
        width = feature_dim if slot_dim is None else slot_dim
        base.at_least_one(slot_dim=width)
        noise = reg_strength if noise_std is None else noise_std
        base.positive(eps=eps)
        base.positive(zero=True, noise_std=noise, gamma=gamma)
        base.positive(zero=True, var_threshold=var_threshold, reg_strength=reg_strength)
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
        """What is measured (x̃ or z), and the responsibilities (n, s) of the slots."""
        uniform = batch.z.new_full((len(batch.z), self.num_slots), 1.0 / self.num_slots)
        if self.attention == "uniform" and self.statistic == "raw":
            return batch.z, uniform  # nothing downstream reads the slots
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
        moments: base.Moments,
        share: Float[Tensor, "c s"],
        batch: ClassBatch,
        scalars: dict[str, Tensor],
        gate: DimensionGate,
    ) -> tuple[PerClass, Number, Number]:
        """g_c L̂_c (c,), and the means of the soft and the hard gate."""
        mean = rearrange(moments.mean, "c s d -> (c s) d")
        var = rearrange(moments.var, "c s d -> (c s) d")
        excess = log_excess(var, self.tau, self.eps, self.gamma)
        soft = gate(excess + math.log(self.tau + self.gamma), self.skips)
        hard = snr_gate(mean, var, scalars["snr_thresh"], scalars["snr_sharp"], self.eps)
        above = soft_threshold(excess, scalars["softplus_beta"], scalars["margin_m"])
        psi = rearrange(soft * hard * above, "(c s) d -> c s d", s=self.num_slots).mean(2)
        within = (slot_weights(share, scalars["slot_power"]) * psi).sum(1)
        outer = class_gate(batch.share, scalars["class_gate_a"], scalars["class_gate_b"])
        soft_mean, hard_mean = (
            batch.plain_mean(rearrange(g.detach(), "(c s) d -> c (s d)", c=len(share)).mean(1))
            for g in (soft, hard)
        )
        return outer * within, soft_mean, hard_mean

    def forward(self, z: Tensor, y: Tensor) -> base.SurrogateOutput:
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
            # intra_mse is about the plain mean of the class, not about the slots'.
            equal = base.uniform_weights(batch.y, batch.count)
            plain = base.class_moments(x.detach(), equal, batch.y, batch.num_classes)
            return base.SurrogateOutput(
                loss=loss,
                intra_mse=base.intra_class_mse(x, plain.mean, batch),
                diagnostics=diagnostics | {"shut": shut},
            )

    @torch.no_grad()
    def report(self) -> dict[str, float]:
        """Write the `[CEM-GATE]` lines that wait on the device; returns the learned scalars.

        These are the eight bounded ones and tanh of the two gates of the cross-attention. The
        training loop calls this at its logging cadence, because reading makes the host wait.
        """
        self.shutoff.report()
        gates = {
            key: torch.tanh(getattr(self.cross, key)) for key in ("attention_gate", "ffn_gate")
        }
        return {name: float(value) for name, value in (self.scalars() | gates).items()}

    def diagnose(
        self, batch: ClassBatch, resp: Shares, share: Float[Tensor, "c s"], var: Slots
    ) -> dict[str, Tensor]:
        """Responsibilities, and means over the counted classes; detached."""
        own = batch.average(slot_rate(share, var, self.noise_std))
        return base.compare_rates(own, batch, self.noise_std) | {
            "attention_weights": resp[: batch.own],
            "effective_sample_size": slot_sample_size(resp, batch),
            "slot_mass_min": batch.plain_mean(share.amin(1)),
            "slot_mass_max": batch.plain_mean(share.amax(1)),
            "slot_entropy": batch.plain_mean(slot_entropy(share)),
        }
