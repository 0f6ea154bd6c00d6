"""Gated attention over the samples of a class, and the three published penalties built on it."""

import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from splitveil.errors import ConfigError
from splitveil.functional import GuardedParameters, plain_layernorm
from splitveil.surrogates.base import (
    Attention,
    BankedSurrogate,
    ByClass,
    ClassBatch,
    Moments,
    PerClass,
    PerSample,
    Rows,
    Statistic,
    SurrogateOutput,
    at_least_one,
    check_noise,
    class_moments,
    compare_rates,
    diagonal_rate,
    effective_sample_size,
    intra_class_mse,
    one_of,
    positive,
    segment_softmax,
    uniform_weights,
)
from splitveil.surrogates.gates import DimensionGate, class_gate, snr_gate, soft_threshold

Form = Literal["gated", "hinge", "trace"]


def trace_penalty(var: ByClass, tau: float, eps: float) -> PerClass:
    r"""Form `trace` (R2 §5.2): max(0, log(v_c + ε) − log(τ + ε)), v_c = Σ_j σ²_cj.

    v_c is a sum over d dimensions, so τ is not per dimension here.
    """
    return torch.relu(torch.log(var.sum(1) + eps) - math.log(tau + eps))


def log_excess(var: ByClass, tau: float, eps: float, gamma: float) -> ByClass:
    r"""log(max(σ², ε) + γ) − log(τ + γ): how far a log-variance stands above the threshold."""
    return torch.log(var.clamp_min(eps) + gamma) - math.log(tau + gamma)


def check_threshold(penalty: str | None, noise_std: float, floor: float) -> None:
    """Refuse a rate without channel noise, and a log-variance threshold τ + γ = `floor` of 0."""
    if penalty == "rate":
        check_noise(noise_std)
    elif floor == 0:
        raise ConfigError(
            "the threshold τ + γ must be > 0: var_threshold·reg_strength² + gamma is 0; "
            "raise var_threshold, reg_strength (the channel's noise) or gamma"
        )


class GatedAttentionPooling(nn.Module):
    r"""Gated attention (Ilse et al. 2018) over the samples of one class.

    .. math:: a_i = w \cdot (\tanh(W_V x_i) \odot \mathrm{sigmoid}(W_U x_i)), \qquad
        \alpha = \mathrm{softmax}(a)

    `value`, `gate`, `score` are W_V, W_U, w. Hidden width min(512, max(64, d/4)) unless given.
    """

    def __init__(self, feature_dim: int, hidden_dim: int | None = None, bias: bool = True) -> None:
        super().__init__()
        hidden = min(512, max(64, feature_dim // 4)) if hidden_dim is None else hidden_dim
        at_least_one(feature_dim=feature_dim, hidden_dim=hidden)
        self.value = nn.Linear(feature_dim, hidden, bias=bias)
        self.gate = nn.Linear(feature_dim, hidden, bias=bias)
        self.score = nn.Linear(hidden, 1, bias=bias)

    def logits(self, x: Rows, sign: float = 1.0, skips: Tensor | None = None) -> PerSample:
        """Attention logits; `sign` = −1 turns the parameters into an adversary."""
        held = GuardedParameters(self, sign, skips)
        value = torch.tanh(held.linear("value", x))
        gate = torch.sigmoid(held.linear("gate", x))
        return held.linear("score", value * gate).squeeze(1)

    def forward(self, x: Float[Tensor, "m d"]) -> Float[Tensor, "m 1"]:
        """Weights of m samples of one class; they sum to 1."""
        return torch.softmax(self.logits(x), 0)[:, None]


class GatedAttentionCEM(BankedSurrogate):
    r"""Class-conditional entropy surrogate weighted by gated attention; minimise `loss`.

    .. math:: \mathrm{rob} = \sum_c p_c R_c, \qquad p_c = M_c / B

    R_c by `form`, with τ = var_threshold·reg_strength²: `trace` (R2) and `hinge` (R0) threshold the
    log-variance, `gated` (R3) multiplies a softplus threshold by dimension, SNR and class gates.
    `penalty="rate"` replaces them by the rate (1/2d) Σ_j log(1 + σ²_cj/noise_std²); form, τ and
    gates are then unused.

    `attention` says what the weights are trained for: to lower the loss as the reference documents
    R0–R4 do (`minimise`: it can collapse: docs/reference/maths.md), to find the leakiest samples
    (`maximise`: only the attention's parameters ascend, in the same backward pass), or nothing
    (`uniform`). `statistic` says what is measured: LayerNorm(z), or z itself (`raw`).
    `slot_power` is kept for the documents' configurations: with a single pool the normalised slot
    weight is 1, so it has no effect.
    `bank` rows of each class join the batch's in every statistic and under the attention.
    """

    skips: Tensor

    def __init__(
        self,
        feature_dim: int,
        num_classes: int,
        *,
        form: Form = "gated",
        attention: Attention = "minimise",
        statistic: Statistic | None = None,
        penalty: Literal["rate"] | None = None,
        noise_std: float | None = None,
        hidden_dim: int | None = None,
        bias: bool = True,
        attention_norm: bool = True,
        var_threshold: float = 0.125,
        reg_strength: float = 0.025,
        gamma: float = 0.0,
        eps: float = 1e-6,
        class_gate_a: float = 10.0,
        class_gate_b: float = 0.05,
        snr_thresh: float = 0.3,
        snr_sharp: float = 10.0,
        softplus_beta: float = 1.0,
        margin_m: float = 0.1,
        slot_power: float = 2.0,
        bank: int = 0,
    ) -> None:
        super().__init__(feature_dim, num_classes, bank)
        one_of("form", form, ("gated", "hinge", "trace"))
        one_of("attention", attention, ("minimise", "maximise", "uniform"))
        one_of("penalty", penalty or "rate", ("rate",))
        noise = reg_strength if noise_std is None else noise_std
        if statistic is None:
            statistic = "raw" if form == "trace" or penalty == "rate" else "layernorm"
        one_of("statistic", statistic, ("layernorm", "raw"))
        positive(eps=eps, softplus_beta=softplus_beta, slot_power=slot_power)
        positive(zero=True, noise_std=noise, gamma=gamma)
        positive(zero=True, var_threshold=var_threshold, reg_strength=reg_strength)
        tau = var_threshold * reg_strength**2
        if penalty == "rate" or form != "trace":  # whose logarithms have ε: τ may be 0
            check_threshold(penalty, noise, tau + gamma)
        self.form, self.attention, self.statistic = form, attention, statistic
        self.penalty, self.noise_std, self.tau = penalty, noise, tau
        self.attention_norm, self.gamma, self.eps = attention_norm, gamma, eps
        self.class_gate_a, self.class_gate_b = class_gate_a, class_gate_b
        self.snr_thresh, self.snr_sharp = snr_thresh, snr_sharp
        self.softplus_beta, self.margin_m, self.slot_power = softplus_beta, margin_m, slot_power
        self.pooling = GatedAttentionPooling(feature_dim, hidden_dim, bias)
        gates = form == "gated" and penalty is None
        self.dimension_gate = DimensionGate(feature_dim) if gates else None

    def weights(self, batch: ClassBatch) -> PerSample:
        """Attention weight of each sample within its class."""
        if self.attention == "uniform":
            return uniform_weights(batch.y, batch.count)
        x = plain_layernorm(batch.z) if self.attention_norm else batch.z
        sign = -1.0 if self.attention == "maximise" else 1.0
        logits = self.pooling.logits(x, sign, self.skips)
        return segment_softmax(logits, batch.y, batch.num_classes)

    def penalties(
        self, moments: Moments, batch: ClassBatch, diagnostics: dict[str, Tensor]
    ) -> PerClass:
        """R_c of each class; adds the gates' means to `diagnostics`."""
        if self.penalty == "rate":
            return diagonal_rate(moments.var, self.noise_std)
        if self.form == "trace":
            return trace_penalty(moments.var, self.tau, self.eps)
        excess = log_excess(moments.var, self.tau, self.eps, self.gamma)
        if self.dimension_gate is None:
            return torch.relu(excess).mean(1)
        log_var = excess + math.log(self.tau + self.gamma)
        soft: Tensor = self.dimension_gate(log_var, self.skips)
        hard = snr_gate(moments.mean, moments.var, self.snr_thresh, self.snr_sharp, self.eps)
        base = soft_threshold(excess, self.softplus_beta, self.margin_m)
        for name, gate in (("soft_gate", soft), ("hard_gate", hard)):
            diagnostics[name] = batch.plain_mean(gate.detach().mean(1))
        outer = class_gate(batch.share, self.class_gate_a, self.class_gate_b)
        return outer * (soft * hard * base).mean(1)

    def forward(self, z: Tensor, y: Tensor) -> SurrogateOutput:
        """Penalty of the batch z (n, d) or (n, c, h, w) with labels y (n,)."""
        with torch.autocast(z.device.type, enabled=False):
            batch = self.batch_of(z, y)
            x = plain_layernorm(batch.z) if self.statistic == "layernorm" else batch.z
            weight = self.weights(batch)
            moments = class_moments(x, weight, batch.y, batch.num_classes)
            own = batch.average(diagonal_rate(moments.var.detach(), self.noise_std))
            diagnostics = {
                "attention_weights": weight.detach()[: batch.own],
                "effective_sample_size": effective_sample_size(weight.detach(), batch),
            } | compare_rates(own, batch, self.noise_std)
            return SurrogateOutput(
                loss=batch.average(self.penalties(moments, batch, diagnostics)),
                intra_mse=intra_class_mse(x, moments.mean.detach(), batch),
                diagnostics=diagnostics,
            )
