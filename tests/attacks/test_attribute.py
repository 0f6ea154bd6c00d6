"""Attributes: their thresholds, and the heads that read them off the wire."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from splitveil.attacks.attribute import AttributeHead, Probed, fit_probe, image_attributes
from splitveil.attacks.base import Budget
from splitveil.errors import AuditError
from splitveil.nets.channel import Channel, GaussianNoise
from splitveil.threat import BlackBox, Labelled, Victim

MakeAux = Callable[..., Labelled]
HEAD = AttributeHead(epochs=1, min_steps=150, batch_size=64)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def grey(*levels: float) -> Tensor:
    return torch.tensor(levels).view(-1, 1, 1, 1).expand(-1, 1, 2, 2).contiguous()


def fitted(victim: Victim, aux: Labelled, seed: int = 0) -> Probed:
    targets = image_attributes(aux.images, aux.images)
    return HEAD.fit(victim.black_box(), aux, targets, generator(seed))


def test_thirds_are_those_of_aux_whatever_is_scored() -> None:
    aux = grey(0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
    found = image_attributes(grey(0.9, 0.95, 0.0, 0.25, 0.19), aux)["brightness"]
    assert found.tolist() == [2, 2, 0, 1, 0]


def test_side_ignores_the_middle_column() -> None:
    rows = torch.tensor([[0.0, 1.0, 0.1], [0.3, 0.0, 0.2], [0.5, 0.0, 0.5]])
    found = image_attributes(rows.view(3, 1, 1, 3), rows.view(3, 1, 1, 3))
    assert found["side"].tolist() == [1, 0, 0]
    assert set(found) == {"brightness", "side"}  # one row of pixels has no step down


def test_edges_are_steps_between_neighbours() -> None:
    flat, slope, stripes = torch.zeros(2, 2), torch.zeros(2, 2), torch.zeros(2, 2)
    slope[:, 1], stripes[0, 0], stripes[1, 1] = 0.5, 1.0, 1.0
    images = torch.stack([stripes, flat, slope])[:, None]
    assert image_attributes(images, images)["edges"].tolist() == [2, 0, 1]


def test_the_colour_is_the_channel_above_its_own_mean_on_aux() -> None:
    aux = torch.tensor([0.6, 0.5, 0.1]).view(1, 3, 1, 1).expand(4, 3, 2, 2)
    reddish = torch.tensor([[0.6, 0.5, 0.2], [0.7, 0.5, 0.1], [0.6, 0.6, 0.1]]).view(3, 3, 1, 1)
    assert image_attributes(reddish.expand(3, 3, 2, 2), aux)["colour"].tolist() == [2, 0, 1]
    assert "colour" not in image_attributes(grey(0.5), grey(0.5))


@settings(deadline=None, max_examples=30)
@given(n=st.integers(3, 40), seed=st.integers(0, 2**31))
def test_a_third_of_aux_falls_into_each_third(n: int, seed: int) -> None:
    aux = torch.rand(n, 1, 3, 3, generator=generator(seed))
    found = image_attributes(aux, aux)
    for name in ("brightness", "edges"):
        counts = found[name].bincount(minlength=3)
        assert int(counts.max() - counts.min()) <= 1
    order = aux.mean((1, 2, 3)).argsort()
    assert bool((found["brightness"][order].diff() >= 0).all())


def shaded(n: int, seed: int) -> Tensor:
    """Two halves of different brightness, with a little texture."""
    stream = generator(seed)
    halves = torch.rand(n, 1, 1, 2, generator=stream).repeat_interleave(2, 3)
    return 0.9 * halves + 0.1 * torch.rand(n, 1, 4, 4, generator=stream)


def test_an_identity_client_gives_every_attribute_away() -> None:
    aux, x = Labelled(shaded(600, 0), torch.zeros(600, dtype=torch.long)), shaded(300, 1)
    victim = Victim(nn.Identity(), Channel())
    probed = fitted(victim, aux)
    read = {name: logits.argmax(1) for name, logits in probed(x).items()}
    truth = image_attributes(x, aux.images)
    for name in ("brightness", "side", "edges"):
        assert float((read[name] == truth[name]).double().mean()) > 0.9, name
    assert set(probed.picked) == {"brightness", "side", "edges"}
    assert probed.picked["brightness"] in ("linear", "mlp")


def test_pure_noise_gives_no_attribute_away(make_aux: MakeAux) -> None:
    aux, x = make_aux(600), make_aux(300, seed=1).images
    victim = Victim(nn.Identity(), Channel([GaussianNoise(1000.0)]))
    told = fitted(victim, aux)(victim.send(x, generator(7)))
    read = {name: logits.argmax(1) for name, logits in told.items()}
    truth = image_attributes(x, aux.images)
    for name, chance in {"brightness": 1 / 3, "side": 1 / 2, "edges": 1 / 3}.items():
        assert abs(float((read[name] == truth[name]).double().mean()) - chance) < 0.09  # 3 sd


def test_a_network_counts_where_a_line_cannot_tell() -> None:
    z = torch.rand(1000, 2, generator=generator()) * 2 - 1
    same_sign, positive = (z[:, 0] * z[:, 1] > 0).long(), (z[:, 0] > 0).long()
    targets = {"same": same_sign, "positive": positive}
    budget = Budget(epochs=1, min_steps=300, batch_size=128, lr=1e-2)
    probed = fit_probe(lambda x: x, z, targets, budget=budget, generator=generator())
    assert probed.picked["same"] == "mlp"
    fresh = torch.rand(1000, 2, generator=generator(1)) * 2 - 1
    first, second = (part.argmax(1) for part in probed(fresh).values())
    assert float((first == (fresh[:, 0] * fresh[:, 1] > 0)).double().mean()) > 0.9
    assert float((second == (fresh[:, 0] > 0)).double().mean()) > 0.95
    assert len(probed.held) == 200


def test_one_seed_gives_one_probe_and_noise_is_fresh(make_aux: MakeAux) -> None:
    aux = make_aux(60)
    victim = Victim(nn.Identity(), Channel([GaussianNoise(0.1)]))
    sent: list[Tensor] = []

    def send(x: Tensor, stream: torch.Generator | None = None) -> Tensor:
        sent.append(victim.send(x, stream) - x)
        return victim.send(x, stream)

    targets = {"side": image_attributes(aux.images, aux.images)["side"]}
    box = BlackBox(send, victim.device)
    one, other = (HEAD.fit(box, aux, targets, generator(3)) for _ in range(2))
    another = HEAD.fit(box, aux, targets, generator(4))
    weights = [r.net.linear.weight for r in (one, other, another)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    steps = [s.flatten()[:100] for s in sent if len(s) == 48][:100]
    assert len({float(s[0]) for s in steps}) == len(steps) >= 100


def test_long_inputs_do_not_blow_up() -> None:
    z = torch.randn(200, 20000, generator=generator())
    side = {"side": (z[:, :1000].sum(1) > 0).long()}
    budget = Budget(epochs=1, min_steps=20, batch_size=64)
    probed = fit_probe(lambda x: x, z, side, budget=budget, generator=generator())
    assert float(probed(z)["side"].abs().max()) < 100


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1] * 20, "attribute 'hat' has one value only"),
        ([0.5] * 20, "must be 20 integers"),
        ([0, 1] * 5, r"must be 20 integers, one for each aux image, got \(10,\)"),
        ([0, 300] * 10, "values from 0 to 300; allowed are 0 to 255"),
        ([-1, 1] * 10, "values from -1 to 1"),
    ],
)
def test_an_attribute_that_cannot_be_read_is_refused(
    values: list[float], message: str, make_aux: MakeAux, linear_victim: Victim
) -> None:
    with pytest.raises(AuditError, match=message):
        HEAD.fit(
            linear_victim.black_box(), make_aux(20), {"hat": torch.tensor(values)}, generator()
        )


def test_too_few_images_and_no_attributes_are_refused(
    make_aux: MakeAux, linear_victim: Victim
) -> None:
    box = linear_victim.black_box()
    with pytest.raises(AuditError, match="at least 10 aux images, got 9"):
        HEAD.fit(box, make_aux(9), {"hat": torch.arange(9)}, generator())
    with pytest.raises(AuditError, match="at least one attribute, got none"):
        HEAD.fit(box, make_aux(10), {}, generator())
