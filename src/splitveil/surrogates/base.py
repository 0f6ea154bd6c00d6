"""What surrogates share: their output, statistics per class, and a memory bank.

All statistics are segment operations: the same few kernels for any number of classes, no Python
loop over classes, no host sync. Symbols: n samples, d features, c classes, k rows of the bank per
class; `y` holds the class of each sample; M_c samples of class c in the batch, N_c in the bank.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, cast, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from splitveil.cuda import tensor_cores
from splitveil.errors import ConfigError, DataError, Range
from splitveil.functional import Context, guard_together, scale_gradient

Attention = Literal["minimise", "maximise", "uniform"]
Statistic = Literal["layernorm", "raw"]

# Shapes, in the symbols above.
Rows = Float[Tensor, "n d"]
Kinds = Int[Tensor, " n"]
Number = Float[Tensor, ""]
PerClass = Float[Tensor, " c"]
ByClass = Float[Tensor, "c d"]
PerSample = Float[Tensor, " n"]


def class_count(y: Kinds, num_classes: int, like: Tensor) -> PerClass:
    """Number of samples of each class, M_c, in the float type of `like`.

    >>> class_count(torch.tensor([0, 2, 2]), 3, torch.empty(0))
    tensor([1., 0., 2.])
    """
    zeros = torch.zeros(num_classes, dtype=like.dtype, device=y.device)
    return zeros.scatter_add_(0, y, torch.ones_like(y, dtype=like.dtype))


def segment_sum(x: Rows, y: Kinds, num_classes: int) -> ByClass:
    """Sum of the rows of each class; 0 for a class without samples."""
    return x.new_zeros(num_classes, x.shape[1]).index_add(0, y, x)


def segment_softmax(logits: PerSample, y: Kinds, num_classes: int) -> PerSample:
    r"""Softmax over the samples of the same class.

    .. math:: \alpha_i = e^{a_i} / \sum_{j : y_j = y_i} e^{a_j}

    The class maximum is detached: it cancels in value, and in the gradient.

    >>> segment_softmax(torch.zeros(3), torch.tensor([0, 1, 1]), 2)
    tensor([1.0000, 0.5000, 0.5000])
    """
    floor = logits.new_full((num_classes,), -torch.inf)
    top = floor.scatter_reduce(0, y, logits.detach(), "amax")
    e = torch.exp(logits - top[y])
    total = torch.zeros_like(top).index_add(0, y, e)
    # index_select, not total[y]: only the latter sorts in its backward pass.
    return e / total.index_select(0, y)


class Moments(NamedTuple):
    """Weighted mean and variance per class and dimension, (c, d), or per class and slot, (c, s, d).

    `mean` and `var` have the same shape.
    """

    mean: Float[Tensor, "*cells d"]
    var: Float[Tensor, "*cells d"]


class _ClassMoments(torch.autograd.Function):
    """Moments with a hand-written gradient, which needs no scatter in the backward pass.

    The weights of a class sum to 1, so Σ_i α_i (x_i − μ_c) = 0 and the variance has no gradient
    through the mean.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - autograd's context object has no public type
        x: Tensor,
        weight: Tensor,
        y: Tensor,
        num_classes: int,
    ) -> tuple[Tensor, Tensor]:
        mean = segment_sum(weight[:, None] * x, y, num_classes)  # (c, d)
        spread = (x - mean[y]).square_().mul_(weight[:, None])
        ctx.save_for_backward(x, weight, y, mean)
        ctx.set_materialize_grads(False)
        return mean, segment_sum(spread, y, num_classes)

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401 - autograd's context object has no public type
        grad_mean: Tensor | None,
        grad_var: Tensor | None,
    ) -> tuple[Tensor, Tensor, None, None]:
        x, weight, y, mean = ctx.saved_tensors
        pull, push = torch.zeros_like(mean[:1]), torch.zeros_like(weight)
        if grad_mean is not None:
            pull = grad_mean[y]
            push = (pull * x).sum(1) if ctx.needs_input_grad[1] else push
        if grad_var is not None:
            off = x - mean[y]
            drawn = grad_var[y] * off
            pull = pull + 2.0 * drawn
            push = push + (drawn * off).sum(1) if ctx.needs_input_grad[1] else push
        return weight[:, None] * pull, push, None, None


def class_moments(x: Rows, weight: PerSample, y: Kinds, num_classes: int) -> Moments:
    r"""Weighted mean and variance of each class and dimension, in two passes.

    .. math:: \mu_c = \sum_i \alpha_i x_i, \qquad \sigma_c^2 = \sum_i \alpha_i (x_i - \mu_c)^2

    The backward pass keeps x, α and the means: n·d numbers that exist anyway and c·d new ones.

    Args:
        x: Features (n, d).
        weight: α (n,); must sum to 1 within each class.
        y: Class of each sample (n,), in 0..num_classes − 1.
        num_classes: Number of rows of the result.

    >>> x = torch.tensor([[-1.0], [1.0]])
    >>> class_moments(x, torch.tensor([0.5, 0.5]), torch.tensor([0, 0]), 1).var
    tensor([[1.]])
    """
    moments = _ClassMoments.apply(x, weight, y, num_classes)  # type: ignore[no-untyped-call]
    return Moments(*cast(tuple[Tensor, Tensor], moments))


def uniform_weights(y: Kinds, count: PerClass) -> PerSample:
    """1/M_c for every sample of class c."""
    return 1.0 / count[y]


@dataclass(frozen=True)
class ClassBatch:
    """A checked batch, with what statistics per class need.

    Args:
        z: Features (n, d) in float32 or float64.
        y: Labels (n,).
        count: M_c (c,); with a bank M_c + N_c.
        share: p_c = M_c / n (c,).
        counted: 1 for classes with a spread, M_c ≥ 2, else 0 (c,).
        own: With a bank, the number of rows that are the batch's; the bank's follow. Else None.
    """

    z: Rows
    y: Kinds
    count: PerClass
    share: PerClass
    counted: PerClass
    own: int | None = None

    @property
    def num_classes(self) -> int:
        """Number of classes, present or not."""
        return len(self.count)

    @property
    def own_count(self) -> PerClass:
        """M_c of the batch alone, without the bank's rows."""
        if self.own is None:
            return self.count
        return class_count(self.y[: self.own], self.num_classes, self.z)

    def compact(self) -> "ClassBatch":
        """The same batch, its classes renumbered so that at most ⌊n/2⌋ + 1 remain.

        With many classes, most have no sample or one and no spread. At most ⌊n/2⌋ classes of a
        batch of n have two. All others share the last number, which is not counted. The number of
        classes depends on shapes alone, so the host need not wait for the device.
        """
        rows = len(self.y) // 2 + 1
        if self.num_classes <= rows:
            return self
        kept = self.counted.long()
        row = torch.where(kept > 0, kept.cumsum(0) - 1, rows - 1)  # (c,)
        y = row[self.y]
        count = class_count(y, rows, self.z)
        counted = (torch.arange(rows, device=y.device) < kept.sum()).to(count.dtype)
        return ClassBatch(self.z, y, count, count / max(len(y), 1), counted)

    def average(self, per_class: PerClass) -> Number:
        """Σ_c p_c v_c over the counted classes.

        p_c = M_c/B over all samples; it is not renormalised when classes are skipped.
        """
        # `where`, not a product with 0: a NaN of a skipped class would survive the product.
        kept = torch.where(self.counted > 0, per_class, torch.zeros_like(per_class))
        return (self.share * kept).sum()

    def plain_mean(self, per_class: PerClass) -> Number:
        """Unweighted mean of v_c over the counted classes; 0 if there is none."""
        return (per_class * self.counted).sum() / self.counted.sum().clamp_min(1)


def effective_sample_size(weight: PerSample, batch: ClassBatch) -> Number:
    r"""Share of a class's samples that the weights effectively use, mean over counted classes.

    .. math:: \mathrm{ESS}_c = 1 / (M_c \sum_i \alpha_i^2) \in [1/M_c, 1]

    1 for uniform weights; near 1/M_c when the attention has collapsed onto one sample.
    """
    squares = torch.zeros_like(batch.count).index_add(0, batch.y, weight.square())
    return batch.plain_mean(1.0 / (batch.count * squares).clamp_min(1e-30))


@dataclass
class FirstCallCheck:
    """Checks labels, and features where `finite` is set, on the first call only.

    On an accelerator, reading values stalls the stream, so later calls are not checked. A
    surrogate in training does not check its features: a loss that is not finite is counted,
    warned of and left out at the first step as at any other.
    """

    over: bool = False
    finite: bool = True

    def check(self, z: Rows, y: Kinds, num_classes: int) -> None:
        """Reject features that are not finite, and labels outside 0..num_classes − 1."""
        if len(y) and not (self.over and y.device.type != "cpu"):
            low, high = (int(v) for v in torch.aminmax(y))
            if not 0 <= low <= high < num_classes:
                raise DataError(
                    f"labels must lie in 0..{num_classes - 1} (num_classes={num_classes}), "
                    f"got {low}..{high}"
                )
        if self.finite and not self.over and not bool(torch.isfinite(z).all()):
            bad = int((~torch.isfinite(z)).any(1).sum())
            raise DataError(
                f"z must be finite, got NaN or infinity in {bad} of {len(z)} samples; "
                "the encoder has diverged: inspect its output, or lower its learning rate"
            )
        self.over = True


def class_batch(
    z: Tensor, y: Tensor, feature_dim: int, num_classes: int, first: FirstCallCheck
) -> ClassBatch:
    """Flatten z (n, …) to (n, d), check shapes and types, and count the classes.

    Half-precision features become float32, because variances of nearly equal numbers need the
    bits. Values are checked on the first call; labels on a CPU on every call, where it costs
    nothing.
    """
    flat = z.flatten(1) if z.ndim > 1 else z
    if flat.ndim != 2 or flat.shape[1] != feature_dim:  # noqa: PLR2004
        raise ConfigError(
            f"z must be (n, …) with {feature_dim} features per sample (feature_dim), "
            f"got shape {tuple(z.shape)}; build the surrogate with the wire size of your cut"
        )
    if not flat.is_floating_point():
        raise ConfigError(f"z must be floating point, got {z.dtype}")
    if y.shape != (len(flat),) or y.is_floating_point() or y.dtype == torch.bool:
        raise DataError(
            f"labels must be {len(flat)} integers in one dimension, "
            f"got {y.dtype} of shape {tuple(y.shape)}"
        )
    y = y.long()
    first.check(flat.detach(), y, num_classes)
    if flat.dtype in (torch.float16, torch.bfloat16):
        flat = flat.float()
    count = class_count(y, num_classes, flat)
    counted = (count >= 2).to(flat.dtype)  # noqa: PLR2004 - one sample has no spread
    return ClassBatch(flat, y, count, count / max(len(y), 1), counted)


def one_of(name: str, got: str, allowed: tuple[str, ...]) -> None:
    """Reject a word that is not one of the allowed ones."""
    if got not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}; got '{got}'")


def at_least_one(**sizes: int) -> None:
    """Reject sizes below 1."""
    for name, got in sizes.items():
        Range(1).check(name, got)


def positive(*, zero: bool = False, **numbers: float) -> None:
    """Reject numbers that are not finite and positive; `zero=True` allows 0."""
    for name, got in numbers.items():
        Range(0, above=not zero).check(name, float(got))


class _FastLinear(torch.autograd.Function):
    """A linear map whose products run on a GPU's tensor cores, in both directions."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.biased = bias is not None
        with tensor_cores():
            return F.linear(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        with tensor_cores():
            return grad @ weight, grad.T @ x, grad.sum(0) if ctx.biased else None


class GuardedParameters(dict[str, Tensor]):
    """The parameters of a module by name, all behind one `guard_together`.

    They receive `sign` times their gradient, or 0 if any of it is not finite. The sign flips at the
    parameters only: with −1 they ascend the loss, while the gradient of the inputs is untouched.
    """

    def __init__(self, module: nn.Module, sign: float = 1.0, skips: Tensor | None = None) -> None:
        names, parameters = zip(*module.named_parameters(), strict=True)
        super().__init__(zip(names, guard_together(parameters, sign, skips), strict=True))

    def linear(self, name: str, x: Float[Tensor, "n i"]) -> Float[Tensor, "n o"]:
        """The module's linear layer `name` applied to x.

        On a GPU its products are rounded to TF32, which attention tolerates. Never send statistics
        of z through here: the rounding would exceed small variances.
        """
        weight, bias = self[f"{name}.weight"], self.get(f"{name}.bias")
        make = _FastLinear.apply if x.is_cuda else F.linear
        made: Tensor = make(x, weight, bias)
        return made


def plain_layernorm(x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    """LayerNorm over features, without affine parameters."""
    return F.layer_norm(x, x.shape[1:])


class ClassBank(nn.Module):
    """The last `capacity` smashed data of each class, in one ring buffer per class.

    `held` is the number of valid rows of each class, `head` the position of its next one. Rows and
    both counters are buffers, so a checkpoint keeps them: c·(k·d·4 + 16) bytes in float32.

    >>> bank = ClassBank(num_classes=2, capacity=2, feature_dim=1)
    >>> bank.push(torch.tensor([[1.0], [2.0], [3.0], [4.0]]), torch.tensor([0, 1, 0, 0]))
    >>> bank.rows[0, :, 0].tolist(), bank.held.tolist(), bank.head.tolist()
    ([4.0, 3.0], [2, 1], [1, 1])
    """

    rows: Tensor
    held: Tensor
    head: Tensor

    def __init__(self, num_classes: int, capacity: int, feature_dim: int) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(num_classes, capacity, feature_dim))
        self.register_buffer("held", torch.zeros(num_classes, dtype=torch.long))
        self.register_buffer("head", torch.zeros(num_classes, dtype=torch.long))

    @torch.no_grad()
    def push(self, z: Rows, y: Kinds) -> None:
        """Store the finite samples in order; the oldest rows are overwritten.

        Shapes and operations depend on n alone, and the host reads nothing. When several samples
        fall on one position, all write the value of the last one, and a class without finite
        samples writes back its old rows: so the scatter is deterministic.
        """
        if len(y) == 0:
            return
        capacity = self.rows.shape[1]
        value = z.to(self.rows.dtype)
        bad = ~torch.isfinite(value).all(1)  # after the cast, which can overflow
        order = torch.argsort(2 * y + bad, stable=True)  # by class, its finite samples first
        kind = y[order]
        count = torch.zeros_like(self.held).scatter_add_(0, y, torch.ones_like(y))
        finite = torch.zeros_like(self.held).scatter_add_(0, y, (~bad).long())
        start = count.cumsum(0) - count  # (c,), where a class begins in `order`
        last = (finite[kind] - 1).clamp_min(0)
        rank = torch.minimum(torch.arange(len(y), device=y.device) - start[kind], last)
        position = (self.head[kind] + rank) % capacity
        winner = rank + (last - rank) // capacity * capacity  # the last one at this position
        source = value[order[start[kind] + winner]]  # (n, d)
        some = finite[kind] > 0
        self.rows[kind, position] = torch.where(some[:, None], source, self.rows[kind, position])
        self.head.copy_((self.head + finite) % capacity)
        self.held.copy_((self.held + finite).clamp_max(capacity))


def with_bank(
    batch: ClassBatch, bank: ClassBank | None, *, push: bool, skips: Tensor | None
) -> ClassBatch:
    r"""Batch ∪ bank: the batch's own rows, then k rows for each of p = min(n, c) classes.

    The p classes are all c, or the at most n classes of the batch. An extra class p collects the
    bank's unfilled rows and is never counted. p_c = M_c/n is the batch's own; a class is counted if
    M_c ≥ 1 and M_c + N_c ≥ 2. Rows of the bank get no gradient, rows of the batch get

    .. math:: \frac{M_c + N_c}{M_c} \, \partial L / \partial z_i

    because otherwise a longer bank would weaken the penalty.

    Args:
        batch: The batch.
        bank: Its bank; None returns `batch.compact()`.
        push: Whether to store the batch in the bank afterwards.
        skips: Counts the gradients that were not finite and became 0.
    """
    if bank is None:
        return batch.compact()
    size, y = len(batch.y), batch.y
    p = min(size, batch.num_classes)
    rows = torch.arange(p, device=y.device)
    chosen = rows
    if p < batch.num_classes:
        present = (batch.count > 0).to(torch.uint8)
        chosen = torch.argsort(present, descending=True, stable=True)[:p]
        y = torch.zeros_like(bank.held).scatter_(0, chosen, rows)[y]
    valid = torch.arange(bank.rows.shape[1], device=y.device) < bank.held[chosen][:, None]
    spare = torch.where(valid, rows[:, None], p).flatten()  # (p·k,)
    count, own = (class_count(v, p + 1, batch.z) for v in (torch.cat([y, spare]), y))
    gain = (count / own.clamp_min(1))[y][:, None]  # (n, 1)
    stored = bank.rows[chosen].to(batch.z.dtype).flatten(0, 1)
    joined = ClassBatch(
        z=torch.cat([scale_gradient(batch.z, gain, skips), stored]),
        y=torch.cat([y, spare]),
        count=count,
        share=own / max(size, 1),
        counted=((own >= 1) & (count >= 2)).to(count.dtype),  # noqa: PLR2004 - one has no spread
        own=size,
    )
    if push:
        bank.push(batch.z.detach(), batch.y)
    return joined


class BankedSurrogate(nn.Module):
    """Base of surrogates with an optional memory bank of `bank` rows per class.

    `skips` counts the gradients that were not finite and became 0.
    """

    skips: Tensor | None

    def __init__(self, feature_dim: int, num_classes: int, bank: int) -> None:
        super().__init__()
        at_least_one(feature_dim=feature_dim, num_classes=num_classes)
        Range(0, hint="rows kept of each class, 0 means no bank").check("bank", bank)
        self.feature_dim, self.num_classes = feature_dim, num_classes
        self.bank = ClassBank(num_classes, bank, feature_dim) if bank else None
        self.register_buffer("skips", torch.zeros((), dtype=torch.long))
        self._first = FirstCallCheck(finite=False)

    def batch_of(self, z: Tensor, y: Tensor) -> ClassBatch:
        """Batch z (n, …), y (n,) joined with the bank, which stores it in train mode."""
        batch = class_batch(z, y, self.feature_dim, self.num_classes, self._first)
        return with_bank(batch, self.bank, push=self.training, skips=self.skips)

    def remember(self, z: Tensor, y: Tensor) -> None:
        """Store a batch in the bank without measuring it; without a bank do nothing."""
        if self.bank is not None:
            batch = class_batch(z.detach(), y, self.feature_dim, self.num_classes, self._first)
            self.bank.push(batch.z, batch.y)


@dataclass(frozen=True, kw_only=True)
class SurrogateOutput:
    """What a surrogate computes for one batch.

    Args:
        loss: The penalty rob_loss, a scalar to minimise.
        intra_mse: Mean square distance to the class means, detached; for logs only.
        diagnostics: Detached tensors by name. Always there: `true_rate` (nats per dimension, from
            raw z with uniform weights; NaN without noise), `effective_sample_size` (share of M_c
            that the weights use, in (0, 1]) and `attention_weights` (n,), or (n, slots).
    """

    loss: Tensor
    intra_mse: Tensor
    diagnostics: dict[str, Tensor]


@runtime_checkable
class Surrogate(Protocol):
    """Estimates H(Z|Y) of a batch: z (n, d) or (n, c, h, w), integer labels y (n,)."""

    def __call__(self, z: Tensor, y: Tensor) -> SurrogateOutput:
        """Penalty and diagnostics of this batch."""
        ...


FeatureBatches = Callable[[], Iterable[tuple[Tensor, Tensor]]]


@runtime_checkable
class RefitsEachEpoch(Protocol):
    """A surrogate that is refitted to all training features after every epoch."""

    def refit_stream(self, batches: FeatureBatches, generator: Generator) -> None:
        """Refit; each call of `batches()` starts a pass over clean features and labels."""
        ...


@runtime_checkable
class HasBank(Protocol):
    """A surrogate with a memory that fills before its penalty becomes active."""

    def remember(self, z: Tensor, y: Tensor) -> None:
        """Store what it needs from a batch, without measuring it."""
        ...


@runtime_checkable
class Reports(Protocol):
    """A surrogate that writes log lines of its own and has learned values to show."""

    def report(self) -> dict[str, float]:
        """Write the log lines gathered since the last call; returns what it has learned so far."""
        ...


def diagonal_rate(var: ByClass, noise_std: float) -> PerClass:
    r"""Rate of each class from its variances, nats per dimension; minimise it.

    .. math:: R_c = \frac{1}{2d} \sum_j \log(1 + \sigma_{cj}^2/\sigma^2)

    >>> round(float(diagonal_rate(torch.tensor([[1.0]]), 1.0)), 6)  # half log two
    0.346574
    """
    return 0.5 * torch.log1p(var / noise_std**2).mean(1)


def true_rate(batch: ClassBatch, noise_std: float) -> Number:
    """Diagonal rate of the raw batch under uniform weights, nats per dimension; NaN if σ = 0."""
    if noise_std == 0:
        return batch.z.new_full((), torch.nan)
    with torch.no_grad():
        weight = uniform_weights(batch.y, batch.count)
        var = class_moments(batch.z, weight, batch.y, batch.num_classes).var
        return batch.average(diagonal_rate(var, noise_std))


def compare_rates(
    own: Number, batch: ClassBatch, noise_std: float, true: Number | None = None
) -> dict[str, Tensor]:
    """Diagnostics `true_rate`, `surrogate_to_true` and, with a bank, `bank_rows` per class.

    `surrogate_to_true` = own / true is 1 for an honest estimator and near 0 for one that has
    learned to lower its own estimate. It is 1 if no class has a spread, NaN without noise.

    Args:
        own: The surrogate's own rate, nats per dimension.
        batch: The batch it was measured on.
        noise_std: σ of the channel's noise.
        true: The true rate, if the caller has it; None computes it.
    """
    true = true_rate(batch, noise_std) if true is None else true
    ratio = torch.where(true == 0, 1.0, own / true)
    found = {"true_rate": true, "surrogate_to_true": ratio}
    if batch.own is not None:
        found["bank_rows"] = batch.plain_mean(batch.count - batch.own_count)
    return found


def intra_class_mse(x: Rows, mean: ByClass, batch: ClassBatch) -> Number:
    r"""Σ_c p_c mean_ij (x_ij − μ_cj)² of the batch's own samples, detached; for logs only."""
    with torch.no_grad():
        y = batch.y[: batch.own]
        error = (x[: batch.own] - mean[y]).square().mean(1)  # (n,)
        per_class = torch.zeros_like(batch.count).index_add(0, y, error)
        return batch.average(per_class / batch.own_count.clamp_min(1))


def require_noise(noise_std: float) -> None:
    """Reject a rate penalty without channel noise, which would be infinite."""
    positive(zero=True, noise_std=noise_std)
    if noise_std == 0:
        raise ConfigError(
            "a rate penalty needs channel noise: noise_std must be > 0, got 0. "
            "Without noise the rate is infinite; set noise_std, for example 0.025"
        )
