"""What an audit of anybody's encoder says beyond pictures: certificates, members, attributes."""

import json
import math
from typing import Any, cast

import pytest
import torch
from audits.made import attacks_alone, gallery_rate, labelled
from torch import Tensor, nn

from splitveil.attacks.baseline import MeanImage
from splitveil.attacks.linear import Linear
from splitveil.attacks.profiles import LEAK_BUDGETS, PROFILES
from splitveil.audits.own_encoder import UNKNOWN, AuditImages, OwnEncoder, audit_encoder, seeded
from splitveil.data.dataset import Attributes
from splitveil.io import Json

STD = 0.2
MEMBERS = labelled(60, 7)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    attacks = {"mean": MeanImage(), "linear": Linear()}
    monkeypatch.setitem(cast(dict[str, Any], PROFILES), "tiny", attacks)
    monkeypatch.setitem(cast(dict[str, Any], LEAK_BUDGETS), "tiny", LEAK_BUDGETS["smoke"])


class Bounded:
    """A client that shows its encoder, which ends in a sigmoid; `extra` is a fault of its call."""

    def __init__(self, extra: float = 0.0, std: float = STD) -> None:
        with seeded(0):
            convolution = nn.Conv2d(1, 2, 3, stride=2)
        self.encoder = nn.Sequential(convolution, nn.Sigmoid(), nn.Flatten())
        self.extra, self.std = extra, std

    def __call__(self, x: Tensor) -> Tensor:
        z: Tensor = self.encoder(x)
        return (1 + self.extra) * z + self.std * torch.randn_like(z)


class Centred(Bounded):
    """Its encoder takes the mean of the batch away first."""

    def __init__(self) -> None:
        super().__init__()
        inner = self.encoder

        class Mixed(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                z: Tensor = inner(x - x.mean(0))
                return z

        self.encoder = nn.Sequential(Mixed())


class Shared(Bounded):
    """Two numbers of z that are no neighbours get one draw."""

    def __call__(self, x: Tensor) -> Tensor:
        z: Tensor = self.encoder(x)
        noise = torch.randn_like(z)
        noise[:, 7] = noise[:, 2]
        return z + self.std * noise


def audited(client: object, *, known: bool = False, **options: Any) -> Json:  # noqa: ANN401
    material = AuditImages(
        name="made",
        classes=("a", "b", "c", "d"),
        aux=labelled(60, 0),
        scored=labelled(80, 1),
        test=labelled(80, 1),
        knowledge="train",
        hashes={},
        members=MEMBERS if known else None,
        attributes=options.pop("attributes", None),
    )
    own = OwnEncoder(client=client, name="f", **options)
    found: Json = json.loads(audit_encoder(own, material, "tiny")[0].to_json())
    return found


def test_an_open_client_with_declared_noise_has_certificates() -> None:
    client = Bounded()
    found = audited(client, white_box=True, noise_std=STD)["certificates"]
    assert found["capacity"]["nats"] == pytest.approx(9 * math.log(1 + 0.25 / STD**2))  # 18 numbers
    with torch.no_grad():
        z = client.encoder(labelled(80, 1).images)
    rate = gallery_rate(z, STD**2, labelled(80, 1).labels)
    assert found["gallery"]["nats_given_class"] == pytest.approx(rate, rel=1e-5)
    assert found["gallery"]["beaten"] is False
    assert "whose ids are not given" in found["population"]["refused"]
    assert found["diagnostics"]["dfil_per_pixel"] > 0


def test_a_population_is_certified_where_training_data_are_known() -> None:
    found = audited(Bounded(), white_box=True, noise_std=STD, known=True)["certificates"]
    assert found["population"]["nats_given_class"] >= found["population"]["mean"]
    assert found["population"]["images"] == 80


@pytest.mark.parametrize(
    ("client", "options", "said"),
    [
        (Bounded(std=0.0), {}, "the channel is deterministic"),
        (Bounded(), {"white_box": True}, "noise of unknown scale; declare it with --noise"),
        (Bounded(), {"noise_std": STD}, "not known for certain; show its networks"),
        (
            Bounded(0.5),
            {"white_box": True, "noise_std": STD},
            "failed tests: louder, offset",
        ),
        (Bounded(std=0.3), {"white_box": True, "noise_std": STD}, "failed tests: louder"),
        (Shared(), {"white_box": True, "noise_std": STD}, "failed tests: other number"),
        (Centred(), {"white_box": True, "noise_std": STD}, "depends on the other images"),
    ],
    ids=["silent", "undeclared", "closed", "another encoder", "other noise", "shared", "mixed"],
)
def test_what_is_not_known_is_refused_with_its_reason(
    client: Bounded, options: Json, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attacks_alone(monkeypatch)
    for entry in audited(client, **options)["certificates"].values():
        assert entry.keys() == {"refused"}
        assert entry["refused"].startswith("no certificate: ")
        assert said in entry["refused"]


def test_a_module_with_its_noise_inside_has_no_certificate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attacks_alone(monkeypatch)

    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(1) + STD * torch.randn(len(x), 64)

    found = audited(Noisy(), white_box=True, noise_std=STD)["certificates"]
    assert "failed tests: louder" in found["gallery"]["refused"]


def test_membership_is_measured_only_where_members_are_named() -> None:
    alone = audited(Bounded(), server=lambda z: z[:, :4])["leaks"]
    assert alone.keys() == {"attribute", "re-id", "repeats", "refused"}
    assert alone["refused"] == {"membership": UNKNOWN}
    assert alone["re-id"]["wire"]["chance_1"] == 1 / 80
    assert "linear/mse" in alone["re-id"]
    known = audited(Bounded(), known=True, given="torch")["leaks"]
    assert known.keys() == {"attribute", "membership", "re-id", "repeats"}
    assert known["repeats"] == alone["repeats"]  # whoever else is asked, its draws are its own
    assert known["membership"]["strongest"].keys() == {"wire"}  # nobody answers
    assert "outputs" not in known["membership"]
    assert known["membership"]["n"] + known["membership"]["known"] <= 120


def test_attributes_of_a_table_are_read_off_a_strangers_wire() -> None:
    bright = [(d.images[:, 0, 0, 0] > 0.5).long() for d in (labelled(60, 0), labelled(80, 1))]
    given = Attributes({"corner": bright[0]}, {"corner": bright[1]})
    record = audited(lambda x: x.reshape(len(x), -1), attributes=given)
    assert record["leaks"]["attribute"].keys() == {"corner"}
    row = record["leaks"]["attribute"]["corner"]
    assert row["chance"] == pytest.approx(
        float((bright[1] == bright[0].bincount().argmax()).double().mean())
    )
    assert row["accuracy_low"] <= row["accuracy"] <= row["accuracy_high"]
    assert record["audit"]["attributes"] == ["corner"]
