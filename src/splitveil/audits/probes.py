"""Was the server needed? Linear heads on what was sent, and what they answer without it."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional as F

from splitveil.audits.target import Target, send
from splitveil.io import Json
from splitveil.record.statistics import wilson
from splitveil.rng import derive_seed, seeded_globals
from splitveil.threat import Labelled, chunk_for, without_nan

FITTED_ON = 10_000  # aux images at most
STEPS = 60  # of L-BFGS
DECAY = 1e-4  # on the weights of the head


def probe(
    features: Float[Tensor, "a d"],
    labels: Int64[Tensor, " a"],
    unseen: Float[Tensor, "n d"],
    num_classes: int,
) -> Int64[Tensor, " n"]:
    """Classes (n,) that a logistic head answers, fitted on aux features and labels.

    Args:
        features: What the head is fitted on, standardised here.
        labels: Classes of these rows.
        unseen: Features of the images that it answers.
        num_classes: Number of classes.

    >>> x = torch.tensor([[0.0], [1.0]])
    >>> probe(x, torch.tensor([0, 1]), x, 2).tolist()
    [0, 1]
    """
    mean, spread = features.mean(0), features.std(0).clamp_min(1e-6)
    x, new = (features - mean) / spread, (unseen - mean) / spread
    weight = x.new_zeros(num_classes, x.shape[1], requires_grad=True)
    bias = x.new_zeros(num_classes, requires_grad=True)
    optimiser = torch.optim.LBFGS(
        [weight, bias], max_iter=STEPS, line_search_fn="strong_wolfe", tolerance_change=1e-7
    )

    def loss() -> Tensor:
        optimiser.zero_grad()
        value = F.cross_entropy(F.linear(x, weight, bias), labels)
        value = value + DECAY * weight.square().sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    with torch.enable_grad():
        optimiser.step(loss)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        return F.linear(new, weight, bias).argmax(1)


def probe_answers(target: Target) -> dict[str, Tensor]:
    """Classes that heads answer for the scored images: `sent` from z̃, `clean` from clean z.

    `own` is the client's own head, if it has one. Clean z needs the client's network; a function of
    a user's own has only `sent`.
    """
    rows = torch.arange(min(FITTED_ON, len(target.aux)), device=target.aux.labels.device)
    aux = Labelled(target.aux.images[rows], target.aux.labels[rows])
    labels = aux.labels.to(target.device)
    found = {}
    with seeded_globals(derive_seed(target.seed, "probe")):
        sent = without_nan(send(target.victim, aux.images, target.seed, "probe")).flatten(1).float()
        seen = target.sent.z.flatten(1).float()
        found["sent"] = probe(sent, labels, seen, target.num_classes)
        encoder = getattr(target.victim, "encoder", None)
        if encoder is not None:
            clean = [_clean(target, encoder, x) for x in (aux.images, target.scored.images)]
            found["clean"] = probe(clean[0], labels, clean[1], target.num_classes)
    if target.exit is not None and target.exit.own is not None:
        found["own"] = target.exit.own
    return found


@torch.no_grad()
def _clean(target: Target, encoder: torch.nn.Module, images: Tensor) -> Tensor:
    parts = torch.split(images.to(target.device), chunk_for(images))
    return without_nan(torch.cat([encoder(x) for x in parts]).flatten(1).float())


def server_need(target: Target, answers: dict[str, Tensor]) -> Json:
    """Accuracy of each probe on the scored images, of the server there, and the difference.

    `server_adds` is server − best probe with its 95 % limits over images, None without a server.
    """
    truth = target.scored.labels
    said: Json = {}
    for name, answered in answers.items():
        right = answered.to(truth.device) == truth
        low, high = wilson(int(right.sum()), len(truth))
        said[name] = {"accuracy": float(right.double().mean()), "low": low, "high": high}
    if target.head is None or not said:
        return said
    best = max(said, key=lambda name: said[name]["accuracy"])
    served = (target.sent.answer == truth).double()
    gained = served - (answers[best].to(truth.device) == truth).double()
    half = 1.96 * float(gained.std()) / len(truth) ** 0.5 if len(truth) > 1 else 1.0
    mean = float(gained.mean())
    return said | {"server_adds": {"gain": mean, "low": mean - half, "high": mean + half}}
