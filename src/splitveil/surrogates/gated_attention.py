"""Gated attention over the samples of a class, and the three published penalties that use it."""

import math
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from splitveil.errors import ConfigError
from splitveil.surrogates import base
from splitveil.surrogates.base import (
    ByClass,
    ClassBatch,
    GuardedParameters,
    PerClass,
    PerSample,
    Rows,
    plain_layernorm,
)
from splitveil.surrogates.gates import DimensionGate, class_gate, snr_gate, soft_threshold

Form = Literal["gated", "hinge", "trace"]


def trace_penalty(var: ByClass, tau: float, eps: float) -> PerClass:
    r"""Form `trace` (R2 §5.2): max(0, log(v_c + ε) − log(τ + ε)), v_c = Σ_j σ²_cj.

    v_c is the sum over d dimensions, so here τ is not per dimension.
    """
    return torch.relu(torch.log(var.sum(1) + eps) - math.log(tau + eps))


def log_excess(var: ByClass, tau: float, eps: float, gamma: float) -> ByClass:
    r"""log(max(σ², ε) + γ) − log(τ + γ): how far a log-variance stands above the threshold."""
    return torch.log(var.clamp_min(eps) + gamma) - math.log(tau + gamma)


def check_threshold(penalty: str | None, noise_std: float, floor: float) -> None:
    """Reject a rate without channel noise, and a log-variance threshold τ + γ = `floor` of 0."""
    if penalty == "rate":
        base.require_noise(noise_std)
    elif floor == 0:
        raise ConfigError(
            "the threshold τ + γ must be > 0, but var_threshold·reg_strength² + gamma is 0; "
            "raise var_threshold, reg_strength (the channel's noise) or gamma"
        )


class GatedAttentionPooling(nn.Module):
    r"""Gated attention weights (Ilse et al. 2018) of the samples of one class.

    .. math:: a_i = w \cdot (\tanh(W_V x_i) \odot \mathrm{sigmoid}(W_U x_i)), \qquad
        \alpha = \mathrm{softmax}(a)

    The layers `value`, `gate` and `score` are W_V, W_U and w.

    Args:
        feature_dim: Features per sample, d ≥ 1.
        hidden_dim: Hidden width h ≥ 1; default min(512, max(64, d/4)).
        bias: Whether the three layers have biases; R2's worked example has none.

    >>> pool = GatedAttentionPooling(2, hidden_dim=2, bias=False)
    >>> with torch.no_grad():  # W_V = I, W_U = I/2, w = (1, 1): R2's worked example
    ...     for layer, weight in ((pool.value, torch.eye(2)), (pool.gate, torch.eye(2) / 2)):
    ...         _ = layer.weight.copy_(weight)
    ...     _ = pool.score.weight.fill_(1.0)
    >>> pool(torch.tensor([[0.0, 0.0], [0.2, 0.1], [-0.1, 0.05]])).detach()[:, 0]
    tensor([0.3180, 0.3712, 0.3107])
    """

    def __init__(self, feature_dim: int, hidden_dim: int | None = None, bias: bool = True) -> None:
        super().__init__()
        hidden = min(512, max(64, feature_dim // 4)) if hidden_dim is None else hidden_dim
        base.at_least_one(feature_dim=feature_dim, hidden_dim=hidden)
        self.value = nn.Linear(feature_dim, hidden, bias=bias)
        self.gate = nn.Linear(feature_dim, hidden, bias=bias)
        self.score = nn.Linear(hidden, 1, bias=bias)

    def logits(self, x: Rows, sign: float = 1.0, skips: Tensor | None = None) -> PerSample:
        """Logits a (n,) of x (n, d); with `sign` −1 the parameters ascend the loss."""
        held = GuardedParameters(self, sign, skips)
        value = torch.tanh(held.linear("value", x))
        gate = torch.sigmoid(held.linear("gate", x))
        return held.linear("score", value * gate).squeeze(1)

    def forward(self, x: Float[Tensor, "m d"]) -> Float[Tensor, "m 1"]:
        """Weights α (m, 1) of m samples of one class (m, d), without LayerNorm; they sum to 1."""
        return torch.softmax(self.logits(x), 0)[:, None]


class GatedAttentionCEM(base.BankedSurrogate):
    r"""Surrogate of H(Z|Y) with gated attention over the samples of a class; minimise its `loss`.

    .. math:: \mathrm{rob} = \sum_c p_c R_c, \qquad p_c = M_c / B, \qquad
        \sigma_{cj}^2 = \sum_i \alpha_i (z_{ij} - \mu_{cj})^2

    with τ = var_threshold·reg_strength² and R_c one of

    .. math::
        \text{trace (R2)} \quad & \max(0, \log(\textstyle\sum_j \sigma_{cj}^2 + \varepsilon)
            - \log(\tau + \varepsilon)) \\
        \text{hinge (R0)} \quad & \tfrac1d \textstyle\sum_j \max(0, e_{cj}), \qquad
            e_{cj} = \log(\max(\sigma_{cj}^2, \varepsilon) + \gamma) - \log(\tau + \gamma) \\
        \text{gated (R3)} \quad & g_c \tfrac1d \textstyle\sum_j
            \mathrm{gate}_{cj}\, \mathrm{hard}_{cj}\, \mathrm{softplus}(\beta(e_{cj} - m))/\beta \\
        \text{penalty "rate"} \quad & \tfrac1{2d} \textstyle\sum_j
            \log(1 + \sigma_{cj}^2/\sigma^2)

    The rate is measured in nats per dimension against the channel's noise σ. Classes with one
    sample add 0.

    Args:
        feature_dim: Features per sample after flattening, d ≥ 1.
        num_classes: Number of classes, ≥ 1; labels are 0..num_classes − 1.
        form: `gated`, `hinge` or `trace`; unused with `penalty="rate"`.
        attention: What the weights α are trained for. `minimise`: to lower the loss, as in the
            reference documents; the attention can then collapse (docs/reference/maths.md).
            `maximise`: to raise it, that is to find the samples that leak most, while everything
            else lowers it in the same backward pass. `uniform`: α = 1/M_c, nothing is trained.
        statistic: What is measured, `layernorm` for LayerNorm(z) or `raw` for z itself. Default:
            `raw` for `trace` and the rate, else `layernorm`.
        penalty: `"rate"`, or None for the form's own penalty.
        noise_std: σ of the channel, ≥ 0, and > 0 for the rate; default `reg_strength`.
        hidden_dim: Hidden width of the attention; default min(512, max(64, d/4)).
        bias: Whether the attention's layers have biases.
        attention_norm: Whether the attention reads LayerNorm(z) instead of z.
        var_threshold: τ in units of reg_strength², ≥ 0.
        reg_strength: Unit of the threshold, ≥ 0; the documents use the channel's σ.
        gamma: γ ≥ 0, added to both sides of the threshold.
        eps: ε > 0, keeps logarithms finite.
        class_gate_a: Steepness of the class gate g_c = sigmoid(a(p_c − b)).
        class_gate_b: Share of a class at which its gate is 1/2.
        snr_thresh: σ²/μ² at which the hard gate is 1/2.
        snr_sharp: Steepness of the hard gate.
        softplus_beta: β > 0 of the softplus.
        margin_m: m, how far the log-variance may exceed the threshold.
        slot_power: Kept for the documents' configurations. It has no effect: with a single pool the
            normalised slot weight is 1.
        bank: Rows kept of each class, ≥ 0; they join the batch in every statistic.

    >>> z, y = torch.tensor([[-1.0], [1.0]]), torch.tensor([0, 0])  # one class, variance 1
    >>> cem = GatedAttentionCEM(1, 2, form="trace", attention="uniform",
    ...                         var_threshold=1.0, reg_strength=0.5)
    >>> round(cem(z, y).loss.item(), 4)  # log(1 / 0.25)
    1.3863
    """

    skips: Tensor

    def __init__(
        self,
        feature_dim: int,
        num_classes: int,
        *,
        form: Form = "gated",
        attention: base.Attention = "minimise",
        statistic: base.Statistic | None = None,
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
        base.one_of("form", form, get_args(Form))
        base.one_of("attention", attention, get_args(base.Attention))
        base.one_of("penalty", penalty or "rate", ("rate",))
        noise = reg_strength if noise_std is None else noise_std
        if statistic is None:
            # The rate compares z with the noise; LayerNorm would hide the scale of z.
            statistic = "raw" if form == "trace" or penalty == "rate" else "layernorm"
        base.one_of("statistic", statistic, get_args(base.Statistic))
        base.positive(eps=eps, softplus_beta=softplus_beta, slot_power=slot_power)
        base.positive(zero=True, noise_std=noise, gamma=gamma)
        base.positive(zero=True, var_threshold=var_threshold, reg_strength=reg_strength)
        tau = var_threshold * reg_strength**2
        # The logarithms of `trace` contain ε, so only there τ may be 0.
        if penalty == "rate" or form != "trace":
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
        """Weight α (n,) of each sample within its class."""
        if self.attention == "uniform":
            return base.uniform_weights(batch.y, batch.count)
        x = plain_layernorm(batch.z) if self.attention_norm else batch.z
        # The sign flips at the attention's parameters, not at α: the encoder's gradient through α
        # must keep its direction.
        sign = -1.0 if self.attention == "maximise" else 1.0
        logits = self.pooling.logits(x, sign, self.skips)
        return base.segment_softmax(logits, batch.y, batch.num_classes)

    def penalties(
        self, moments: base.Moments, batch: ClassBatch, diagnostics: dict[str, Tensor]
    ) -> PerClass:
        """R_c (c,); adds the means of the gates to `diagnostics`."""
        if self.penalty == "rate":
            return base.diagonal_rate(moments.var, self.noise_std)
        if self.form == "trace":
            return trace_penalty(moments.var, self.tau, self.eps)
        excess = log_excess(moments.var, self.tau, self.eps, self.gamma)
        if self.dimension_gate is None:
            return torch.relu(excess).mean(1)
        # Without the threshold's part again: the gate reads log(max(σ², ε) + γ).
        log_var = excess + math.log(self.tau + self.gamma)
        soft: Tensor = self.dimension_gate(log_var, self.skips)
        hard = snr_gate(moments.mean, moments.var, self.snr_thresh, self.snr_sharp, self.eps)
        above = soft_threshold(excess, self.softplus_beta, self.margin_m)
        for name, gate in (("soft_gate", soft), ("hard_gate", hard)):
            diagnostics[name] = batch.plain_mean(gate.detach().mean(1))
        outer = class_gate(batch.share, self.class_gate_a, self.class_gate_b)
        return outer * (soft * hard * above).mean(1)

    def forward(self, z: Tensor, y: Tensor) -> base.SurrogateOutput:
        """Penalty of the batch z (n, d) or (n, c, h, w) with labels y (n,)."""
        with torch.autocast(z.device.type, enabled=False):
            batch = self.batch_of(z, y)
            x = plain_layernorm(batch.z) if self.statistic == "layernorm" else batch.z
            weight = self.weights(batch)
            moments = base.class_moments(x, weight, batch.y, batch.num_classes)
            own = batch.average(base.diagonal_rate(moments.var.detach(), self.noise_std))
            diagnostics = {
                "attention_weights": weight.detach()[: batch.own],
                "effective_sample_size": base.effective_sample_size(weight.detach(), batch),
            } | base.compare_rates(own, batch, self.noise_std)
            return base.SurrogateOutput(
                loss=batch.average(self.penalties(moments, batch, diagnostics)),
                intra_mse=base.intra_class_mse(x, moments.mean.detach(), batch),
                diagnostics=diagnostics,
            )
