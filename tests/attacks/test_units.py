"""Scale and offset of what a client sends are no defence."""

import pytest
import torch
from torch import Tensor, nn

from splitveil.attacks.base import Units, fit_units
from splitveil.attacks.baseline import Nearest
from splitveil.attacks.decoder import Decoder
from splitveil.attacks.linear import Linear
from splitveil.attacks.wgan import Wgan
from splitveil.nets.channel import Channel, GaussianNoise
from splitveil.threat import Attack, Labelled, Observation, Victim

SMALL = Decoder(width=8, blocks=1, epochs=25, batch_size=20, lr=1e-2)
ATTACKS: dict[str, Attack] = {
    "nearest": Nearest(),
    "linear": Linear(),
    "decoder": SMALL,
    "gan": Wgan(start=SMALL, width=4, epochs=0, min_steps=10, batch_size=20),
}


class Rescaled(nn.Module):
    """Every third pixel, in other units."""

    def __init__(self, scale: float, offset: float = 0.0) -> None:
        super().__init__()
        self.scale, self.offset = scale, offset

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)[:, ::3] * self.scale + self.offset


def images(n: int = 60) -> Labelled:
    """Smooth images: a few waves each."""
    g = torch.Generator().manual_seed(0)
    phase = torch.rand(n, 1, 1, 1, generator=g) * 6.28
    place = torch.arange(8.0)
    waves = torch.sin(phase + place[:, None] * 0.5 + place * 0.3)
    return Labelled(waves * 0.4 + 0.5, torch.zeros(n, dtype=torch.long))


def error(attack: Attack, scale: float, offset: float = 0.0) -> float:
    aux = images()
    victim = Victim(Rescaled(scale, offset), Channel([GaussianNoise(0.01 * scale)]))
    g = torch.Generator().manual_seed(1)
    fitted = attack.fit(victim.black_box(), aux, g)
    guess = fitted(Observation(victim.send(aux.images, g), aux.labels))
    return float((guess - aux.images).square().mean())


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("scale", [1e-25, 1e-6, 1e15])
def test_a_scale_hides_nothing(name: str, scale: float) -> None:
    honest = error(ATTACKS[name], 1.0)
    assert error(ATTACKS[name], scale) == pytest.approx(honest, rel=0.05)
    assert honest < 0.5 * float(images().images.var())


@pytest.mark.parametrize("name", ATTACKS)
def test_an_offset_hides_nothing(name: str) -> None:
    assert error(ATTACKS[name], 1.0, 1000.0) == pytest.approx(error(ATTACKS[name], 1.0), rel=0.1)


def test_units_ignore_values_that_are_not_finite() -> None:
    class Holes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            z = x.flatten(1).clone()
            z[0] = torch.nan
            return z

    aux = images(5)
    found = fit_units(
        Victim(Holes(), Channel()).black_box(), aux.images, torch.Generator().manual_seed(0)
    )
    rest = aux.images[1:].flatten().double()
    assert float(found.mean) == pytest.approx(float(rest.mean()))
    assert float(found.std) == pytest.approx(float(rest.std(correction=0)))


def test_constant_z_stays_finite() -> None:
    victim = Victim(Rescaled(0.0), Channel())
    units = fit_units(victim.black_box(), images().images, torch.Generator().manual_seed(0))
    assert units(torch.zeros(2)).tolist() == [0.0, 0.0]


def test_units_are_measured_with_draws_of_their_own() -> None:
    g = torch.Generator().manual_seed(3)
    before = g.get_state()
    victim = Victim(Rescaled(1.0), Channel([GaussianNoise(0.1)]))
    found = fit_units(victim.black_box(), images().images, g)
    assert isinstance(found, Units)
    assert torch.equal(g.get_state(), before)
