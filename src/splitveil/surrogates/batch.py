"""What every surrogate does first: flatten, check, leave autocast, count classes."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from splitveil.errors import ConfigError, DataError
from splitveil.surrogates.segments import class_count

Attention = Literal["minimise", "maximise", "uniform"]
Statistic = Literal["layernorm", "raw"]


@dataclass(frozen=True)
class ClassBatch:
    """A batch ready for class-wise statistics: z (n, d) in float32 or better, labels, counts.

    `count` is M_c, `share` p_c, `counted` 1 for the classes that have a spread (M_c ≥ 2), else 0.
    With a bank (see `bank.join`) its rows follow the batch's `own` ones, and `count` is M_c + N_c.
    """

    z: Float[Tensor, "n d"]
    y: Int[Tensor, " n"]
    count: Float[Tensor, " c"]
    share: Float[Tensor, " c"]
    counted: Float[Tensor, " c"]
    own: int | None = None

    @property
    def num_classes(self) -> int:
        """Number of classes, present or not."""
        return len(self.count)

    @property
    def own_count(self) -> Float[Tensor, " c"]:
        """M_c of the batch alone."""
        if self.own is None:
            return self.count
        return class_count(self.y[: self.own], self.num_classes, self.z)

    def compact(self) -> "ClassBatch":
        """The same batch with only the classes that count, in at most ⌊n/2⌋ + 1 rows.

        With many classes most are absent or have one sample; statistics need rows only for the
        others, of which a batch of n holds at most ⌊n/2⌋. The last row takes everything else and
        does not count. The number of rows follows from shapes, so nothing waits for the device.
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

    def average(self, per_class: Float[Tensor, " c"]) -> Float[Tensor, ""]:
        """Σ_c p_c v_c over the classes that count.

        p_c = M_c/B over all samples, not renormalised after the skip; `where` before the product
        keeps what a skipped class holds out of value and gradient.
        """
        kept = torch.where(self.counted > 0, per_class, torch.zeros_like(per_class))
        return (self.share * kept).sum()


@dataclass
class FirstCall:
    """Remembers whether a surrogate has seen a batch: values are checked on its first call.

    On an accelerator looking at values stalls the stream, so later calls do without.
    """

    over: bool = False

    def check(self, z: Float[Tensor, "n d"], y: Int[Tensor, " n"], num_classes: int) -> None:
        """Refuse features that are not finite and labels out of range."""
        if len(y) and not (self.over and y.device.type != "cpu"):
            low, high = (int(v) for v in torch.aminmax(y))
            if not 0 <= low <= high < num_classes:
                raise DataError(
                    f"labels must lie in 0..{num_classes - 1} (num_classes={num_classes}), "
                    f"got {low}..{high}"
                )
        if not self.over and not bool(torch.isfinite(z).all()):
            bad = int((~torch.isfinite(z)).any(1).sum())
            raise DataError(
                f"z must be finite, got NaN or infinity in {bad} of {len(z)} samples; "
                "look at the encoder's output before adding a penalty"
            )
        self.over = True


def class_batch(
    z: Tensor, y: Tensor, feature_dim: int, num_classes: int, first: FirstCall
) -> ClassBatch:
    """Flatten z (n, …) to (n, d), check shapes and types, and count the classes.

    Half-precision features become float32: variances of nearly equal numbers need the bits.
    Values are looked at on the first call; the label range on every call on a CPU, where that
    costs nothing.
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
    """Refuse a word that is not one of the allowed ones."""
    if got not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}; got '{got}'")


def positive(name: str, got: float, *, zero: bool = False) -> None:
    """Refuse a number that is not finite and positive (or zero, where that is allowed)."""
    low_ok = got >= 0 if zero else got > 0
    if not (low_ok and got < float("inf")):
        bound = "≥ 0" if zero else "> 0"
        raise ConfigError(f"{name} must be a finite number {bound}, got {got}")
