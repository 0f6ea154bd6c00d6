"""Running attacks against a victim and measuring what they got: the only place that does."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from splitveil.attacks import class_means
from splitveil.audit import metrics
from splitveil.errors import AuditError
from splitveil.rng import stream
from splitveil.types import (
    Attack,
    Json,
    Labelled,
    Observation,
    Progress,
    Scores,
    Victim,
    check_images,
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is audited: a deployed client, the server's half, aux, and the scored images."""

    victim: Victim
    head: nn.Module
    num_classes: int
    aux: Labelled
    scored: Labelled


@dataclass(frozen=True)
class Attempt:
    """One attack's reconstructions of the scored images, and their per-image metrics."""

    guess: Tensor
    mse: Tensor
    psnr: Tensor
    ssim: Tensor | None
    ssim_zeropad: Tensor
    ssim_valid: Tensor | None
    access: str
    seconds: float

    def scores(self) -> Scores:
        """Means over the scored images; `psnr_pooled` is −10 log10 of the mean MSE."""
        pooled = -10.0 * torch.log10(self.mse.mean().clamp_min(metrics.MSE_FLOOR))
        return Scores(
            mse=float(self.mse.mean()),
            psnr=float(self.psnr.mean()),
            psnr_pooled=float(pooled),
            ssim=None if self.ssim is None else float(self.ssim.mean()),
            ssim_zeropad=float(self.ssim_zeropad.mean()),
            ssim_valid=None if self.ssim_valid is None else float(self.ssim_valid.mean()),
        )


@torch.no_grad()
def answer(head: nn.Module, z: Tensor) -> Tensor:
    """The server's predicted classes (n,) for smashed data z."""
    return torch.cat([head(part).argmax(1) for part in torch.split(z, 1000)])


def send(victim: Victim, x: Tensor, seed: int, name: str) -> Tensor:
    """Smashed data of many images, one fresh draw each, from a named stream."""
    generator = stream(seed, name, victim.device)
    return torch.cat([victim.send(part, generator) for part in torch.split(x, 1000)])


def accuracy(case: Case, seed: int, draws: int) -> float:
    """Share of correct answers on the scored images through the channel, mean over draws."""
    labels = case.scored.labels
    shares = [
        (answer(case.head, send(case.victim, case.scored.images, seed, f"accuracy/{i}")) == labels)
        .double()
        .mean()
        for i in range(draws)
    ]
    return float(torch.stack(shares).mean())


def attempt(case: Case, name: str, attack: Attack, seen: Observation, seed: int) -> Attempt:
    """Fit one attack and score it; the attack sees neither the scored images nor its score."""
    started = time.perf_counter()
    generator = stream(seed, f"attack/{name}", case.victim.device)
    guess = attack.fit(case.victim.black_box(), case.aux, generator)(seen)
    x = case.scored.images
    if guess.shape != x.shape:
        raise AuditError(
            f"attack '{name}' returned images of shape {tuple(guess.shape)}, "
            f"expected {tuple(x.shape)}"
        )
    check_images(guess, f"reconstructions of attack '{name}'")
    guess = guess.to(x)
    return Attempt(
        guess=guess,
        mse=metrics.mse(x, guess),
        psnr=metrics.psnr(x, guess),
        ssim=metrics.ssim(x, guess),
        ssim_zeropad=metrics.ssim_zeropad(x, guess),
        ssim_valid=metrics.ssim_valid(x, guess),
        access=str(attack.access),
        seconds=round(time.perf_counter() - started, 3),
    )


def run_attacks(
    case: Case, attacks: Mapping[str, Attack], seed: int, progress: Progress
) -> dict[str, Attempt]:
    """Every attack on the same scored images and the same draw of the channel."""
    if not attacks:
        raise AuditError("an audit needs at least one attack, got none")
    if len(case.scored) == 0:
        raise AuditError("there are no images to score; the test split is empty")
    z = send(case.victim, case.scored.images, seed, "wire")
    if not bool(torch.isfinite(z).all()):
        bad = int((~torch.isfinite(z).flatten(1).all(1)).sum())
        raise AuditError(f"the victim sent values that are not finite for {bad} of {len(z)} images")
    seen = Observation(z, answer(case.head, z))
    attempts: dict[str, Attempt] = {}
    for done, (name, attack) in enumerate(attacks.items()):
        progress(done, len(attacks), f"attack {name}")
        attempts[name] = attempt(case, name, attack, seen, seed)
    progress(len(attacks), len(attacks), "attacks done")
    return attempts


def ceiling_mse(case: Case) -> float:
    """MSE of the aux class mean of the *true* label: what knowing the answer alone gives."""
    means = class_means(case.aux, case.num_classes)
    return float(metrics.mse(case.scored.images, means[case.scored.labels].clamp(0, 1)).mean())


def floor_mse(case: Case) -> float:
    """MSE of the aux mean image: what knowing nothing gives."""
    mean = case.aux.images.mean(0, keepdim=True).expand_as(case.scored.images)
    return float(metrics.mse(case.scored.images, mean.clamp(0, 1)).mean())


def strongest(attempts: Mapping[str, Attempt]) -> Json:
    """Per metric the attack with the best mean, and which one it was: the headline."""
    scores = {name: a.scores() for name, a in attempts.items()}
    best: Json = {}
    for metric, sign in (("mse", -1), ("psnr", 1), ("psnr_pooled", 1), ("ssim", 1),
                         ("ssim_zeropad", 1), ("ssim_valid", 1)):  # fmt: skip
        values = {n: getattr(s, metric) for n, s in scores.items()}
        known = {n: v for n, v in values.items() if v is not None}
        name = max(known, key=lambda n: sign * known[n], default=None)
        best[metric] = None if name is None else known[name]
        best[f"{metric}_by"] = name
    return best


def worst_case(attempts: Mapping[str, Attempt]) -> Json:
    """Per image the best over attacks, then mean and tails: an oracle's bound."""
    every = list(attempts.values())
    mse = torch.stack([a.mse for a in every]).amin(0)
    psnr = torch.stack([a.psnr for a in every]).amax(0)
    ssims = [a.ssim for a in every if a.ssim is not None]
    tails = torch.quantile(
        mse.double(), torch.tensor([0.01, 0.05], dtype=torch.float64).to(mse.device)
    )
    return {
        "mse": float(mse.mean()),
        "psnr": float(psnr.mean()),
        "ssim": float(torch.stack(ssims).amax(0).mean()) if ssims else None,
        "mse_q01": float(tails[0]),
        "mse_q05": float(tails[1]),
    }
