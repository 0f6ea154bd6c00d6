"""Compiled decoders: which attacks have them, and that they attack as well."""

from dataclasses import fields, replace

import pytest
import torch
from torch import nn

from splitveil.attacks.decoder import Decoder, with_decoders
from splitveil.attacks.linear import Linear
from splitveil.attacks.profiles import PROFILES, find_profile
from splitveil.nets.channel import Channel, GaussianNoise
from splitveil.threat import Attack, Labelled, Observation, Victim

WITHOUT = {"mean", "class-mean", "nearest", "linear"}


def decoders(attack: Attack) -> list[Decoder]:
    """The attack itself and what it holds, where they are decoders."""
    held = [getattr(attack, f.name) for f in fields(attack)]  # type: ignore[arg-type]
    return [part for part in (attack, *held) if isinstance(part, Decoder)]


@pytest.mark.parametrize("profile", PROFILES)
def test_compile_fuses_every_decoder_and_changes_nothing_else(profile: str) -> None:
    plain, given = find_profile(profile), find_profile(profile, compile=True)
    assert list(given) == list(plain)
    for name, attack in given.items():
        assert [d.fused for d in decoders(attack)] == [True] * len(decoders(plain[name]))
        assert bool(decoders(attack)) == (name not in WITHOUT)
        assert repr(attack).replace("fused=True", "fused=False") == repr(plain[name])


def test_an_attack_without_decoders_is_left_as_it_is() -> None:
    assert with_decoders(Linear(), fused=True) == Linear()


def test_on_a_cpu_a_fused_decoder_is_the_decoder() -> None:
    torch.manual_seed(0)
    wire = Victim(nn.Conv2d(1, 2, 1), Channel([GaussianNoise(0.1)]))
    aux = Labelled(torch.rand(32, 1, 8, 8), torch.zeros(32, dtype=torch.long))
    attack = Decoder(width=8, blocks=1, epochs=3, batch_size=16)
    plain, given = (
        each.fit(wire.black_box(), aux, torch.Generator().manual_seed(0)).curve
        for each in (attack, replace(attack, fused=True))
    )
    assert given == plain


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # torch 2.11's own import
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_a_fused_decoder_learns_as_well() -> None:
    torch.manual_seed(0)
    wire = Victim(nn.Conv2d(1, 4, 1).cuda(), Channel([GaussianNoise(0.1)]))
    aux = Labelled(torch.rand(64, 1, 8, 8).cuda(), torch.zeros(64, dtype=torch.long).cuda())
    attack = Decoder(width=16, blocks=1, epochs=40, batch_size=32, lr=2e-2)
    errors = []
    for each in (attack, replace(attack, fused=True)):
        draw = torch.Generator("cuda").manual_seed(0)
        fitted = each.fit(wire.black_box(), aux, draw)
        guess = fitted(Observation(wire.send(aux.images, draw), aux.labels))
        errors.append(float((guess - aux.images).square().mean()))
    assert errors[1] == pytest.approx(errors[0], rel=0.2)
