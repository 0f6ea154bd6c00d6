"""Every flag has a case that raises it and a sound one that does not."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from audits.made import a_target, an_attempt, labelled
from torch import Generator, Tensor, nn

from splitveil.audits.flags import (
    BESIDE,
    FLAGS,
    fall_per_epoch,
    gradient_masked,
    raise_flags,
    varies,
)
from splitveil.audits.suite import mean_image_mse
from splitveil.audits.target import Attempt, Target
from splitveil.io import Json
from splitveil.nets.channel import Channel
from splitveil.rng import normal_like
from splitveil.threat import Labelled


class Rounds(nn.Module):
    """Sends eighths; the gradient of rounding is 0."""

    def forward(self, x: Tensor) -> Tensor:
        return (8 * x).round() / 8


class Detaches(nn.Module):
    """Cuts the graph."""

    def forward(self, x: Tensor) -> Tensor:
        return 3 * x.detach()


class StraightThrough(nn.Module):
    """Rounds, and hands the gradient on as if it had not."""

    def forward(self, x: Tensor) -> Tensor:
        return x + ((8 * x).round() / 8 - x).detach()


class Constant(nn.Module):
    """Sends the same whatever it sees."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.ones_like(x)


class TrainingNoise(nn.Module):
    """A channel that is noisy while nobody attacks."""

    def forward(self, z: Tensor, generator: Generator | None = None) -> Tensor:
        return z + normal_like(z, generator) if self.training else z


class NanWhenDark(nn.Module):
    """Sends NaN for some images."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x[:, :1, :1, :1] < 0.5, torch.nan, x)


def conv() -> nn.Module:
    layer = nn.Conv2d(1, 4, 3, padding=1)
    nn.init.normal_(layer.weight, generator=Generator().manual_seed(0))
    return nn.Sequential(layer, nn.BatchNorm2d(4), nn.ReLU())


def flat_batchnorm() -> nn.Module:
    """In train mode it takes no single image."""
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64))


OPEN = a_target(noise_std=0.0)
FLOOR = mean_image_mse(OPEN.aux, OPEN.scored)


Given = dict[str, Any]  # the arguments of raise_flags


def flat(mse: float, **facts: object) -> Attempt:
    """The same error on 12 images."""
    return replace(an_attempt([mse] * 12), **facts)  # type: ignore[arg-type]


def inside(mse: float) -> Attempt:
    """A white-box attack on three of the 12 images."""
    return an_attempt([mse] * 3, rows=[2, 5, 7], scored=12, access="white-box")


def evidence(case: Target = OPEN, attempts: Mapping[str, Attempt] | None = None) -> Given:
    made = attempts or {"decoder": flat(0.05)}
    return {"target": case, "attempts": made, "certificates": {}, "leaks": {}, "wire": {}}


def adding(points: float, high: float) -> Given:
    """A server that adds so much, at most `high`, to a head on what is sent."""
    head = {"accuracy": 0.9, "low": 0.89, "high": 0.91}
    adds = {"gain": points, "low": 2 * points - high, "high": high}
    return evidence() | {"probe": {"sent": head, "server_adds": adds}}


def telling(bits: float, p: float) -> Given:
    """An exit whose bit tells so much about the label."""
    found = {"bits": bits, "p": p, "share_sent": {}}
    return evidence() | {"leaks": {"exit": {"label": found}}}


def known(**facts: Any) -> Given:  # noqa: ANN401 - fields of a Target
    """What is given of a target of which more is known."""
    return evidence(replace(OPEN, **facts))


def certified(*, beaten: bool) -> Given:
    """A gallery of which a matcher finds 90 %, where a certificate allows 30 %."""
    gallery = {"beaten": beaten, "matcher_error": 0.1, "identification_error": {"at_least": 0.7}}
    return evidence() | {"certificates": {"gallery": gallery | {"images": 40}}}


def identified(share: float, n: int = 40) -> Given:
    """Someone finds this share of n images; a certificate allows 30 % of a gallery of 40."""
    told = {"re-id": {"wire": {"rank_1": share, "n": n, "gallery": n}}}
    return certified(beaten=False) | {"leaks": told}


def names(given: Given) -> set[str]:
    return {flag.name for flag in raise_flags(**given)}


# The black-box attack is bad except on the three images of the white-box one.
UNEVEN = an_attempt([0.1 if i in (2, 5, 7) else 0.9 for i in range(12)])
K_QUERY = flat(0.01, repeats=4, access="repeats")
SETTLED = (1.0, 0.5, *[0.25] * 8)

Build = Callable[[], Given]


def arithmetic(p: float) -> Json:
    """A leak by arithmetic with this p-value."""
    return {"arithmetic": {"p": p, "n": 60, "rank_1": 0.63, "distance": 0.13}}


def members(bits: float, p: float) -> Given:
    """Evidence of an exit whose bit tells this much of who was trained on."""
    told = {"bits": bits, "p": p, "share_sent": {"0": 0.4, "1": 0.2}}
    return evidence() | {"leaks": {"exit": {"membership": told}}}


def sending(not_allowed: int) -> Given:
    """Evidence of a capture with this many rows that the exit rule does not send."""
    rule = {"images": 100, "allowed": 30, "sent": 30 + not_allowed, "not_allowed": not_allowed}
    return evidence() | {"wire": {"rule": rule}}


RAISED: Mapping[str, list[Build]] = {
    "exit tells the members": [lambda: members(0.05, 0.001)],
    "sent more than the rule allows": [lambda: sending(1)],
    "server not needed": [lambda: adding(0.001, 0.004), lambda: adding(-0.02, 0.0)],
    "exit tells the class": [lambda: telling(0.05, 0.001)],
    # A third of the images is of each class: always guessing one is right for a third.
    "accuracy at chance": [
        lambda: evidence() | {"accuracy": 0.1},
        lambda: evidence() | {"accuracy": 0.39},
    ],
    "white-box weaker than black-box": [
        lambda: evidence(attempts={"decoder": UNEVEN, "rmle": inside(0.11)}),
        lambda: evidence(attempts={"a": flat(0.9), "decoder": UNEVEN, "rmle": inside(0.5)}),
    ],
    "decoder not converged": [
        lambda: evidence(attempts={"decoder": flat(0.05, curve=(1.0, 0.97, 0.94))}),
        lambda: evidence(attempts={"a": flat(0.05), "b": flat(0.05, curve=(0.5,))}),
        lambda: evidence(attempts={"decoder": flat(0.05), "decoder-large": flat(0.0521)}),
    ],
    "gradients masked": [
        lambda: evidence(a_target(Rounds(), noise_std=0.0)),
        lambda: evidence(a_target(Detaches(), noise_std=0.0)),
        lambda: evidence(a_target(nn.Sequential(conv(), Rounds()), noise_std=0.0)),
        lambda: evidence(a_target(nn.Sequential(NanWhenDark(), Detaches()), noise_std=0.0)),
    ],
    "one draw of a random channel": [
        lambda: evidence(a_target(noise_std=0.1)),
        lambda: evidence(a_target(noise_std=1e-4), {"decoder": flat(0.05), "mean": flat(0.1)}),
    ],
    "noise only in training": [
        lambda: evidence(a_target(channel=TrainingNoise())),
        lambda: evidence(a_target(nn.Sequential(conv(), nn.Dropout(0.1)), noise_std=0.0)),
        lambda: evidence(a_target(nn.Dropout(0.5), scored=labelled(1, 0), channel=Channel())),
    ],
    "linearly invertible": [
        lambda: evidence(attempts={"linear": flat(0.04 * FLOOR)}),
        lambda: evidence(attempts={"linear": flat(0.0)}),
    ],
    "attack overfitted": [
        lambda: evidence(attempts={"linear": flat(0.05, aux_mse=0.03)}),
        lambda: evidence(attempts={"a": flat(0.01), "b": flat(0.06, aux_mse=0.0)}),
    ],
    "certificate beaten": [lambda: certified(beaten=True), lambda: identified(0.9)],
    "noise undone by arithmetic": [lambda: evidence() | {"leaks": arithmetic(1e-9)}],
    "values not finite": [
        lambda: evidence(a_target(NanWhenDark())),
    ],
    "training unfinished": [lambda: known(unfinished="130 of 300 steps")],
    "attacks left out": [lambda: evidence() | {"left_out": ("rmle",)}],
    "validation images scored": [lambda: known(knowledge="val")],
    "scored images known before": [
        lambda: known(own_data=True, members=OPEN.scored),
        lambda: known(own_data=True, aux=OPEN.scored),
    ],
}
SOUND: Mapping[str, list[Build]] = {
    "exit tells the members": [
        lambda: members(0.009, 0.001),
        lambda: members(0.05, 0.02),
        lambda: telling(0.05, 0.001),
    ],
    "sent more than the rule allows": [lambda: sending(0), evidence],
    "server not needed": [lambda: adding(0.001, 0.006), evidence],
    "exit tells the class": [
        lambda: telling(0.009, 0.001),
        lambda: telling(0.05, 0.02),
        lambda: members(0.05, 0.001),
    ],
    "accuracy at chance": [lambda: evidence() | {"accuracy": 0.41}, evidence],
    "white-box weaker than black-box": [
        lambda: evidence(attempts={"decoder": UNEVEN, "rmle": inside(0.104)}),
        lambda: evidence(attempts={"rmle": inside(0.5), "mean": flat(0.1, access="none")}),
        lambda: evidence(attempts={"k": replace(K_QUERY, access="black-box"), "r": inside(0.5)}),
    ],
    "decoder not converged": [
        lambda: evidence(attempts={"decoder": flat(0.05, curve=SETTLED)}),
        lambda: evidence(attempts={"decoder": flat(0.05, curve=(0.5, 0.6))}),
        lambda: evidence(attempts={"decoder": flat(0.05), "decoder-large": flat(0.0509)}),
        lambda: evidence(attempts={"linear": flat(0.05)}),
    ],
    "gradients masked": [
        lambda: evidence(a_target(conv(), noise_std=0.0)),
        lambda: evidence(a_target(nn.Sequential(conv(), nn.Sigmoid()))),
        lambda: evidence(a_target(StraightThrough())),
        lambda: evidence(a_target(Constant())),
        lambda: evidence(a_target(NanWhenDark())),
    ],
    "one draw of a random channel": [
        lambda: evidence(a_target(noise_std=0.0)),
        lambda: evidence(a_target(noise_std=0.1), {"decoder": flat(0.05), "k-query": K_QUERY}),
        lambda: evidence(a_target(NanWhenDark(), noise_std=0.0)),
    ],
    "noise only in training": [
        lambda: evidence(a_target(conv(), noise_std=0.0)),
        lambda: evidence(a_target(conv(), noise_std=0.1)),
        lambda: evidence(a_target(NanWhenDark(), noise_std=0.0)),
        lambda: evidence(a_target(flat_batchnorm(), scored=labelled(1, 0), noise_std=0.0)),
    ],
    "linearly invertible": [
        lambda: evidence(attempts={"linear": flat(0.06 * FLOOR)}),
        lambda: evidence(attempts={"decoder": flat(0.0)}),
    ],
    "attack overfitted": [
        lambda: evidence(attempts={"linear": flat(0.05, aux_mse=0.036)}),
        lambda: evidence(attempts={"a": flat(0.05, aux_mse=0.0, keeps_aux=True)}),
        lambda: evidence(attempts={"mean": flat(0.05)}),
    ],
    "certificate beaten": [
        evidence,
        lambda: certified(beaten=False),
        lambda: identified(0.35),
        lambda: identified(0.9, n=20),  # of other images
        lambda: evidence() | {"certificates": {"gallery": {"refused": "no noise"}}},
    ],
    "noise undone by arithmetic": [evidence, lambda: evidence() | {"leaks": arithmetic(0.02)}],
    "values not finite": [evidence],
    "training unfinished": [evidence],
    "attacks left out": [evidence],
    "validation images scored": [evidence, lambda: known(knowledge="test90")],
    "scored images known before": [
        evidence,
        lambda: known(own_data=True),
        lambda: known(members=OPEN.scored),  # published images are counted by nobody
    ],
}


def test_every_flag_is_planted_and_has_a_sound_case() -> None:
    assert RAISED.keys() == SOUND.keys() == {n for n in FLAGS if "wire" not in n} - {*BESIDE}


@pytest.mark.parametrize(("flag", "at"), [(f, i) for f in RAISED for i in range(len(RAISED[f]))])
def test_a_planted_fault_raises_its_flag(flag: str, at: int) -> None:
    assert flag in names(RAISED[flag][at]())


@pytest.mark.parametrize(("flag", "at"), [(f, i) for f in SOUND for i in range(len(SOUND[f]))])
def test_a_sound_case_does_not(flag: str, at: int) -> None:
    assert flag not in names(SOUND[flag][at]())


def test_a_flag_says_what_was_seen_and_what_to_do() -> None:
    (flag,) = raise_flags(**evidence(attempts={"decoder": UNEVEN, "rmle": inside(0.5)}))
    assert flag.seen == "rmle has MSE 0.5000 where decoder has 0.1000"
    assert flag.advice == FLAGS[flag.name]
    broken = next(
        f for f in raise_flags(**evidence(a_target(NanWhenDark()))) if f.name == "values not finite"
    )
    count = int((a_target().scored.images[:, 0, 0, 0] < 0.5).sum())
    assert (broken.seen or "").startswith(f"{count} of 12 scored images: ")


def test_of_many_broken_images_the_first_eight_are_named() -> None:
    dark = Labelled(torch.zeros(20, 1, 8, 8), torch.zeros(20, dtype=torch.long))
    given = evidence(a_target(NanWhenDark(), scored=dark), {"a": an_attempt([0.1] * 20)})
    seen = next(f.seen for f in raise_flags(**given) if f.name == "values not finite")
    assert seen == "20 of 20 scored images: 0, 1, 2, 3, 4, 5, 6, 7, …"


@pytest.mark.parametrize("fall", [0.01, 0.05, -0.03])
@pytest.mark.parametrize("epochs", [2, 16, 35, 100])
def test_the_fall_of_an_exponential_is_its_rate(fall: float, epochs: int) -> None:
    curve = tuple((1 - fall) ** i for i in range(epochs))
    assert fall_per_epoch(curve) == pytest.approx(fall, rel=1e-6)


def test_one_noisy_epoch_at_the_end_of_many_decides_nothing() -> None:
    calm = [0.5, *[0.1] * 59]
    assert abs(fall_per_epoch((*calm[:-1], 0.09))) < 0.02
    assert fall_per_epoch(()) == fall_per_epoch((0.5,)) == fall_per_epoch((0.0, 0.0)) == 0.0


def test_looking_for_flags_leaves_victim_and_random_state_alone() -> None:
    case = a_target(nn.Sequential(conv(), nn.Dropout(0.5)))
    held = {k: v.clone() for k, v in case.victim.encoder.state_dict().items()}
    state, sent = torch.get_rng_state(), case.sent.z
    first = raise_flags(**evidence(case))
    assert torch.equal(torch.get_rng_state(), state)
    after = case.victim.encoder.state_dict()
    assert all(torch.equal(after[k], v) for k, v in held.items())
    assert torch.equal(replace(case).sent.z, sent)
    assert raise_flags(**evidence(case)) == first
    assert varies(case, training=True)


def test_the_gradient_probe_measures_both_sides() -> None:
    class Faint(nn.Module):
        """Rounds, with a gradient a millionth of its size."""

        def forward(self, x: Tensor) -> Tensor:
            return (8 * x).round() / 8 + 1e-6 * x

    seen = gradient_masked(a_target(Faint(), noise_std=0.0))
    assert seen is not None
    assert "the gradient says" in seen
    assert "says 0" not in seen
