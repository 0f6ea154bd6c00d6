"""What one attack made of the scored images, measured; and its form on disk."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from splitveil.audits import similarity as metrics
from splitveil.types import Json, Scores

PER_IMAGE = ("mse", "psnr", "ssim", "ssim_zeropad", "ssim_valid", "lpips")
META = ("access", "scored", "repeats", "curve", "aux_mse", "seconds")


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One attack's per-image metrics (m,) on the images at `rows` of the `scored` ones.

    `answer` is what the server says when the reconstructions are sent instead, `pictures` the
    reconstructions of the gallery's images as bytes, `curve` the training loss of each epoch,
    `aux_mse` the error on images the attack was fitted on, `repeats` how often each was sent.
    """

    access: str
    rows: Tensor
    scored: int
    mse: Tensor
    psnr: Tensor
    ssim: Tensor | None
    ssim_zeropad: Tensor
    ssim_valid: Tensor | None
    right: Tensor
    pictures: Tensor
    lpips: Tensor | None = None
    repeats: int = 1
    curve: tuple[float, ...] = ()
    aux_mse: float | None = None
    seconds: float = 0.0

    @property
    def whole(self) -> bool:
        """Whether every scored image was attacked, not a subset."""
        return len(self.rows) == self.scored

    def scores(self) -> Scores:
        """Means over its images; `psnr_pooled` is −10 log10 of the mean MSE."""
        return scores_of(self, torch.arange(len(self.rows), device=self.mse.device))

    def scores_at(self, rows: Tensor) -> Scores:
        """Means over the images at `rows` of the scored ones; every one must be among its own."""
        return scores_of(self, self.place(rows))

    def at(self, rows: Tensor, metric: str) -> Tensor:
        """One metric of the images at `rows` of the scored ones."""
        value: Tensor = getattr(self, metric)
        return value[self.place(rows)]

    def place(self, rows: Tensor) -> Tensor:
        """Where in its own list the images at `rows` of the scored ones stand."""
        place = torch.full((self.scored,), -1, device=self.rows.device)
        place[self.rows] = torch.arange(len(self.rows), device=self.rows.device)
        return place[rows]

    def to_json(self) -> Json:
        """Its part of a record."""
        said: Json = asdict(self.scores()) | {"access": self.access, "images": len(self.rows)}
        if not self.whole:
            said["subset"] = f"fixed-{len(self.rows)}"
        if self.repeats > 1:
            said["repeats"] = self.repeats
        if self.curve:
            said["curve"] = list(self.curve)
        if self.aux_mse is not None:
            said["aux_mse"] = self.aux_mse
        return said | {"seconds": self.seconds}


def scores_of(attempt: Attempt, at: Tensor) -> Scores:
    """Means of an attempt's per-image values at positions `at` of its own list."""
    means = {
        name: None if (value := getattr(attempt, name)) is None else float(value[at].mean())
        for name in PER_IMAGE
    }
    pooled = -10.0 * torch.log10(attempt.mse[at].mean().clamp_min(metrics.MSE_FLOOR))
    right = float(attempt.right[at].double().mean())
    return Scores(**means, psnr_pooled=float(pooled), accuracy=right)  # type: ignore[arg-type]


def to_bytes(attempt: Attempt) -> bytes:
    """The attempt as a safetensors file with its plain facts in the header."""
    tensors = {
        f.name: value.cpu().contiguous()
        for f in fields(attempt)
        if isinstance(value := getattr(attempt, f.name), Tensor)
    }
    meta = json.dumps({name: getattr(attempt, name) for name in META})
    return save(tensors, {"attempt": meta, "sha256": _digest(tensors, meta)})


def _digest(tensors: Mapping[str, Tensor], meta: str) -> str:
    """Content hash: safetensors notices a broken header, not a broken number."""
    digest = hashlib.sha256(meta.encode())
    for name in sorted(tensors):
        value = tensors[name]
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.numpy().tobytes())
    return digest.hexdigest()


def from_bytes(blob: bytes, device: torch.device) -> Attempt | None:
    """Read back what `to_bytes` wrote; None for anything else."""
    try:
        tensors = load(blob)
        size = int.from_bytes(blob[:8], "little")
        said = json.loads(blob[8 : 8 + size])["__metadata__"]
        if said["sha256"] != _digest(tensors, said["attempt"]):
            return None
        meta = json.loads(said["attempt"])
        meta["curve"] = tuple(meta["curve"])
        absent: Mapping[str, None] = {"ssim": None, "ssim_valid": None}
        return Attempt(**{**absent, **meta, **{k: v.to(device) for k, v in tensors.items()}})
    except (SafetensorError, ValueError, KeyError, TypeError):
        return None
